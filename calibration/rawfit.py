"""`fit_raw`: a profile from raw samples of a machine that is elsewhere, or gone. Nothing is measured here.

The samples are those of cells, as JSON lines: dispatch of small ops, kernels, whole models in eager, launches that a
profiler saw (`rawfiles` says which lines). Half of the whole models, relatives kept together, tell what dispatch costs
inside a network; the other half judges the profile; models that are held out for tests of finished profiles do
neither. A folder with the journal of latpred's own calibration is fitted as `calibrate` does.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from latpred.calibration import judging, rawclocks, rawdispatch, rawfiles, rawjournal, rawkernels, rawmodels
from latpred.calibration.clocks import Clocks
from latpred.calibration.dispatchfit import NetworkRun
from latpred.calibration.kernelfit import fit_kernels
from latpred.calibration.rawclocks import Busy
from latpred.calibration.rawdispatch import Alone
from latpred.calibration.rawfiles import Environment, Folder, ModelRow, OpRow
from latpred.errors import CalibrationError, MissingPackageError, TraceError, UnknownModelError
from latpred.graph import ModelGraph
from latpred.profile import (
    SCHEMA_VERSION,
    Acceptance,
    DeviceInfo,
    DeviceProfile,
    KernelFit,
    Machine,
    Sample,
)
from latpred.units import US_PER_S

STABLE_SPREAD = 0.05  # half interquartile range over median up to which a sample counts as stable
CHAIN_OP = "add_scalar"  # the op that chains are made of
ALIKE = 1.25  # host times of a model at batch 1 that exceed its best by more were held up by something


class Walked(NamedTuple):
    """An eager forward pass of a whole model that may be looked at, with its walk."""

    row: ModelRow
    graph: ModelGraph

    @property
    def run(self) -> NetworkRun:
        """As a run with its latency."""
        return NetworkRun(self.graph, self.row.batch, self.row.single.median * US_PER_S)


def fit_raw(folder: str | os.PathLike[str], *, name: str | None = None) -> DeviceProfile:
    """Fit a profile to a folder of raw samples.

    Parameters
    ----------
    folder : path
        Holds env.json, dispatch.jsonl, kernels.jsonl and models.jsonl, and launches.jsonl where there is a profiler;
        lines may be gzipped. Or holds a calibration's journal.jsonl or last.jsonl.
    name : str, optional
        Of the profile; default: the device's, as in "nvidia-h200".

    Returns
    -------
    DeviceProfile
        Not saved yet; `protocol["left out"]` says what could not be used.

    Raises
    ------
    CalibrationError
        When there is no such folder, or what it holds does not amount to a profile.

    Examples
    --------
    >>> profile = fit_raw("samples-of-the-gpu-server")  # doctest: +SKIP
    """
    place = Path(folder)
    if not place.is_dir():
        raise CalibrationError(f"there is no folder {place}. Name the one that holds the raw samples.")
    journal = rawjournal.find(place)
    try:
        return rawjournal.fit(journal, name) if journal else _fit_samples(rawfiles.read(place), name)
    except (ValueError, ArithmeticError) as error:
        raise CalibrationError(
            f"the samples in {place} could not be fitted ({error}). Sample the machine again, when it is idle."
        ) from error


def _fit_samples(folder: Folder, name: str | None) -> DeviceProfile:
    info = device_of(folder.environment)
    cells = rawdispatch.alone(folder.ops, folder.left_out)
    walked = _walked(folder)
    if info.asynchronous:
        clocks = _clocks(folder, walked, cells)
        teachers, judges = halves(walked)
        loops = rawdispatch.fit_alone(cells, clocks.sync_us)
        dispatch, info = rawdispatch.in_networks(loops, _issued(teachers), folder.left_out), clocks.into(info)
        samples = rawkernels.replayed(folder.kernels, clocks, info.cache_bytes, folder.left_out)
    else:
        # Where ops return when they are done, no model says what dispatch alone takes in it.
        dispatch, judges = rawdispatch.fit_alone(cells), walked
        samples = rawkernels.called(folder.kernels, dispatch, info.cache_bytes, folder.left_out)
    profile = DeviceProfile(
        name=name or info.name,
        schema=SCHEMA_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        provenance="measured",
        machine=machine_of(folder.environment),
        device=msgspec.structs.replace(info, bandwidth_bytes_per_us=rawkernels.bandwidth(samples)),
        protocol=_protocol(folder.left_out),
        runtimes={"eager": dispatch},
        kernels=_kernel_fits(samples, info.multiprocessors),
        samples=tuple(_samples(folder)),
        acceptance=Acceptance(False, {}, ()),
        seconds=0.0,
    )
    return _judged(profile, judges)


def _kernel_fits(samples: rawkernels.Samples, multiprocessors: int) -> dict[str, dict[str, KernelFit]]:
    fitted = {precision: fit_kernels(found, multiprocessors) for precision, found in samples.items()}
    kernels = {precision: fits for precision, fits in fitted.items() if fits}
    if not kernels:
        raise CalibrationError("kernels.jsonl holds too few kernels of any family. Sample more of them.")
    return kernels


def _judged(profile: DeviceProfile, judges: Iterable[Walked]) -> DeviceProfile:
    """The profile with the spread and the verdict of models that no fit saw."""
    known = {one.row.cell: one.run for one in judges if one.row.precision in profile.kernels}
    found = judging.verdicts(profile, known)
    runtimes = {
        name: msgspec.structs.replace(fit, spread=judging.network_spread(found))
        for name, fit in profile.runtimes.items()
    }
    steady = [sample.spread_us <= STABLE_SPREAD * sample.median_us for sample in profile.samples]
    acceptance = judging.accepted(found, (), judging.RunQuality(sum(steady) / len(steady)))
    return msgspec.structs.replace(profile, runtimes=runtimes, acceptance=acceptance)


def device_of(environment: Environment) -> DeviceInfo:
    """The device that was sampled; its clock constants are left at zero."""
    if not environment.gpu:
        return DeviceInfo("cpu", "cpu", asynchronous=False, memory_bytes=environment.memory, queue=0)
    return DeviceInfo(
        re.sub(r"[^a-z0-9]+", "-", environment.gpu.lower()).strip("-"),
        "cuda",
        asynchronous=True,
        memory_bytes=environment.memory,
        multiprocessors=environment.sms,
        queue=0,
        cache_bytes=environment.l2 or 0,
    )


def machine_of(environment: Environment) -> Machine:
    """The machine that was sampled; what its tools did not say is empty."""
    facts = dict(re.findall(r"^([^:\n]+?):\s*(.*?)\s*$", environment.cpu, re.MULTILINE))
    processor = re.search(r"x86_64|aarch64|arm64|AMD64|ppc64le", environment.platform)
    driver = re.search(r"\n[^,]*,\s*([\d.]+)", environment.nvidia_smi)
    stack = {package: getattr(environment, package) for package in ("python", "torch", "transformers", "numpy")}
    return Machine(
        hostname_hash="",
        cpu=" ".join(facts.get("Model name", "").split()),
        cores=int(facts.get("CPU(s)", "0")),
        memory_bytes=0,
        system=" ".join((environment.platform.partition("-")[0], processor[0] if processor else "")).strip(),
        accelerator=environment.gpu,
        driver=driver[1] if driver else "",
        stack={package: version for package, version in stack.items() if version and not version.startswith("absent")},
        threads=environment.threads,
    )


def _walked(folder: Folder) -> list[Walked]:
    """Eager models with their walks; those held out are not even walked."""
    found = []
    for row in folder.models:
        if row.runtime != "eager":
            continue
        if rawmodels.held_out(row.model):
            folder.left_out["cells of models held out for tests"] += 1
            continue
        try:
            found.append(Walked(row, rawmodels.graph(row.model, row.precision)))
        except (UnknownModelError, MissingPackageError, TraceError) as error:
            reason = "is not known" if isinstance(error, UnknownModelError) else "cannot be walked here"
            folder.left_out[f"cells of {row.model}, which {reason}"] += 1
    return found


def halves(walked: Iterable[Walked]) -> tuple[list[Walked], list[Walked]]:
    """Models that a fit may see, and models that judge it; relatives are on one side."""
    by_relatives: dict[str, list[Walked]] = {}
    for one in walked:
        by_relatives.setdefault(rawmodels.recipe(one.row.model).relatives, []).append(one)
    ordered = [by_relatives[name] for name in sorted(by_relatives)]
    return [one for group in ordered[::2] for one in group], [one for group in ordered[1::2] for one in group]


def _issued(teachers: Iterable[Walked]) -> list[NetworkRun]:
    """Models at batch 1 with the host's own time for a forward pass, where nothing held the host up."""
    usable: dict[str, list[Walked]] = {}
    for one in teachers:
        kernels = one.graph.launches(1)
        if one.row.batch == 1 and not one.graph.syncs(1) and not rawclocks.held_back(one.row, kernels):
            usable.setdefault(one.row.model, []).append(one)
    found = []
    for same in usable.values():
        best = min(one.row.host_issue for one in same)
        found += [one for one in same if one.row.host_issue <= ALIKE * best]
    # Sizes of one architecture share the name that was walked; the folder tells them apart.
    return [
        NetworkRun(msgspec.structs.replace(one.graph, model=one.row.model), 1, one.row.host_issue * US_PER_S)
        for one in found
    ]


def _clocks(folder: Folder, walked: Iterable[Walked], cells: Mapping[str, Alone]) -> Clocks:
    if CHAIN_OP not in cells:
        raise CalibrationError(
            f"dispatch.jsonl lacks the op {CHAIN_OP}, which the clock's chains are made of. Sample the machine's "
            "dispatch part again."
        )
    own = [one for one in walked if not one.graph.syncs(one.row.batch)]
    paces = rawclocks.host_pace([one.row for one in own])
    busy = [
        Busy(one.row, one.graph.launches(one.row.batch), paces[one.row.model])
        for one in own
        if rawclocks.goes_by_the_device(one.row, paces[one.row.model])
    ]
    usable = {one.row.model for one in own}
    seen = folder._replace(
        models=tuple(row for row in folder.models if row.model in usable),
        launches=tuple(row for row in folder.launches if row.model in usable),
    )
    return rawclocks.constants(seen, busy, cells[CHAIN_OP].us)


def _samples(folder: Folder) -> Iterable[Sample]:
    """What the profile was fitted to and judged by; held-out models are in no profile."""
    ops: tuple[OpRow, ...] = (*folder.ops, *folder.kernels)
    models = [row for row in folder.models if row.runtime == "eager" and not rawmodels.held_out(row.model)]
    timed = [(row.cell, row.stats) for row in ops]
    timed += [(row.cell, row.single) for row in (*folder.chains, *models)]
    for cell, stats in timed:
        yield Sample(cell, round(stats.median * US_PER_S, 3), round(stats.spread * US_PER_S, 3), stats.n)


def _protocol(left_out: Counter[str]) -> dict[str, str]:
    return {
        "latency": "single: synchronised after each forward pass",
        "mode": "torch.inference_mode, evaluation mode, inputs on the device, caches warm",
        "statistic": "median, with half the interquartile range as spread, from deciles",
        "source": "fitted to raw samples",
        "left out": rawfiles.told(left_out),
    }
