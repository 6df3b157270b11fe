"""Journal rows to a `DeviceProfile`: dispatch, kernels, and how far off networks were that no fit saw.

One path for every device: where rows hold calls timed in place, those give the kernels, else kernel cells do. Nothing
is measured here, so a profile can be fitted again from any journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from math import exp, log
from types import MappingProxyType

import msgspec
import numpy as np

from latpred.calibration.devices import constants
from latpred.calibration.fitting import acceptance
from latpred.calibration.fitting.acceptance import FEWEST, HoldoutError, holdout_errors
from latpred.calibration.fitting.dispatch_fit import (
    TimedNetwork,
    call_costs,
    class_costs,
    fit_in_place,
    fit_issued,
    loop_costs,
    of_classes,
)
from latpred.calibration.fitting.kernel_fit import KernelSample, fit_kernels, kernel_samples, row_of, with_cold
from latpred.calibration.schedules import cell_graph, network_spec
from latpred.calibration.session import Row
from latpred.calibration.timing import visits
from latpred.calibration.timing.reference_speed import FULL, RunSpeed
from latpred.calibration.workloads import single_ops
from latpred.errors import CalibrationError
from latpred.graph.features import finer_family, layout
from latpred.host import SAME, Slowdown
from latpred.prediction.kernel_times import resident_share
from latpred.prediction.predictor import Predictor
from latpred.profile import datasheet, gpus, store
from latpred.profile.document import (
    SCHEMA_VERSION,
    Acceptance,
    DeviceInfo,
    DeviceProfile,
    DispatchFit,
    KernelFit,
    Machine,
    Sample,
)
from latpred.query import HALVES
from latpred.units import MS_PER_S, US_PER_S

EAGER = "eager"
FEWEST_NETWORKS = 4
FEWEST_HALVES = 4  # networks in half precision below which all of them judge
_PROTOCOL = {
    "latency": "single: synchronised after each forward pass",
    "mode": "torch.inference_mode, evaluation mode, inputs on the device, caches warm",
    "statistic": "median, with half the interquartile range as spread",
}
_PLAIN: Mapping[str, str] = MappingProxyType({})


def fit_profile(
    rows: Sequence[Row], machine: Machine, info: DeviceInfo, name: str, protocol: Mapping[str, str] = _PLAIN
) -> tuple[DeviceProfile, list[HoldoutError]]:
    """The profile of a journal's rows of eager, and how it did on the networks that were kept out of its fits.

    `protocol` says how they were measured, beside what is the same of all. Too few rows to fit anything are a
    CalibrationError.
    """
    eager = visits.against_fastest(row for row in rows if row.cell.runtime == EAGER)
    speed = visits.speed_of(eager)
    good = visits.undisturbed(row for row in eager if not row.error)
    asynchronous = info.asynchronous
    good = [row if _mixed(row) else visits.brought_to_full_speed(row, speed, asynchronous=asynchronous) for row in good]
    info = constants.described(info, good)
    in_networks = _timed_in_place(good, info, speed)
    more = acceptance.more_time(sum(row.seconds for row in good))
    advice = f"{visits.most_failed(eager)}Give the calibration more time, as with --budget {more}."
    dispatch, in_place = host_costs(good, info, advice, list(chain.from_iterable(in_networks.values())))
    profile = DeviceProfile(
        name=name,
        schema=SCHEMA_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        provenance="measured",
        machine=machine,
        device=info,
        protocol={**_PROTOCOL, **protocol},
        runtimes={EAGER: dispatch},
        kernels=_kernels(good, in_networks, dispatch, in_place, info, machine),
        samples=tuple(sample_of(row) for row in good),
        acceptance=Acceptance(False, {}, ()),
        seconds=round(sum(row.seconds for row in eager), 3),
        speed=dict(speed.full_us),
        usual=_usual(good, info, speed),
        disturbed=round(sum(map(visits.is_disturbed, eager)) / len(eager), 4),
        slowed=round(sum(map(visits.is_slowed, eager)) / len(eager), 4),
        failures=visits.failures(eager),
    )
    if info.asynchronous:
        half = msgspec.structs.replace(dispatch, half_scale=_half_scale(profile, good, speed))
        profile = msgspec.structs.replace(profile, runtimes={EAGER: half})
    return _checked(profile, good, eager, speed)


def _usual(rows: Iterable[Row], info: DeviceInfo, speed: RunSpeed) -> dict[str, float]:
    """The median slowdown, by kind of work, around networks and models that found a moment at full speed."""
    fast = _fast([row for row in rows if _mixed(row)])
    slow = [visits.slowdown(row, speed, asynchronous=info.asynchronous) for row in fast]
    if not speed.full_us or not slow:
        return {}
    return dict(zip(Slowdown._fields, np.round(np.median(slow, axis=0), 3).tolist(), strict=True))


def host_costs(
    rows: Sequence[Row], info: DeviceInfo, advice: str, runs: Sequence[TimedNetwork] = ()
) -> tuple[DispatchFit, DispatchFit]:
    """Host costs as a forward pass has them, and as a clock around each call has them, which is a little longer.

    Calls of larger `runs` tell what cold caches add. Where too few networks were timed, the error gives the `advice`.
    """
    tiny = [timed_network(row, info) for row in _networks(rows) if network_spec(row.cell).tiny]
    chains = [timed_network(row, info) for row in rows if row.cell.kind == "network" and network_spec(row.cell).chain]
    if len(tiny) < FEWEST_NETWORKS or not chains:
        busy = 2 * sum(map(visits.is_disturbed, rows)) > len(rows)
        raise CalibrationError(
            f"{len(tiny)} tiny networks and {len(chains)} chains of calls were timed, too few to price dispatch. "
            + ("Other work had the processors meanwhile; stop it, or wait until it is done. " if busy else "")
            + advice
        )
    called = call_costs(chains)
    if info.asynchronous:
        cells = [issued_in_loop(row, info.sync_us) for row in rows if row.cell.kind == "dispatch"]
        issued = fit_issued(loop_costs(cells), tiny, called)
        return issued, issued
    in_place = of_classes(class_costs(tiny))
    return with_cold(fit_in_place(tiny, called), in_place, runs), in_place


def issued_in_loop(row: Row, sync_us: float) -> tuple[list[str], float]:
    """Dispatch classes of an op issued in a loop, and its host microseconds without what it waits for the device."""
    graph, batch = single_ops.graph(row.cell)
    ops = [op for op in graph.at(batch) if op.name != "python::return"]
    waited_us = sync_us * sum(op.syncs for op in ops)
    return [op.host_class for op in ops], row.timings["issue"].median_s * US_PER_S - waited_us


def _kernels(
    rows: Sequence[Row],
    in_networks: Mapping[str, Sequence[TimedNetwork]],
    dispatch: DispatchFit,
    in_place: DispatchFit,
    info: DeviceInfo,
    machine: Machine,
) -> dict[str, dict[str, KernelFit]]:
    """Kernel fits by precision, from kernels timed in queues and from those timed in their networks."""
    samples: dict[str, list[KernelSample]] = {}
    spec = gpus.find(machine.accelerator) if machine.accelerator else None
    priors = {} if spec is None else datasheet.profile_of(spec).kernels
    for row in rows:
        if row.cell.kind == "kernel":
            precision = row.cell.precision
            found = queued_sample(row, info.gap_us, priors.get(precision, ()))
            samples.setdefault(precision, []).extend(found)
    sized = {precision: runs for precision, runs in in_networks.items() if not all(run.tiny for run in runs)}
    # Tiny ones are in fp32 whatever was asked for: beside sized ones of other precisions alone they tell of dispatch.
    for precision, runs in (sized or in_networks).items():
        samples.setdefault(precision, []).extend(kernel_samples(runs, dispatch, in_place))
    if "tf32" in samples:
        # TF32 is a way to multiply: all else is what it is in fp32. Convolutions and RNNs use it in fp32, too, but in
        # journals of earlier versions they do not, so each precision is fitted to its own.
        samples["tf32"] += [sample for sample in samples.get("fp32", ()) if layout(sample.family).product is None]
    fits = {}
    for precision, timed in samples.items():
        # A CPU computes some convolutions without a library, which it does in float32 only.
        native_threads = machine.threads if info.kind == "cpu" and precision == "fp32" else 0
        prior = priors.get(precision, {})
        fits[precision] = fit_kernels(timed, info.multiprocessors, native_threads=native_threads, prior=prior)
    return {precision: families for precision, families in fits.items() if families}


def _half_scale(profile: DeviceProfile, rows: Sequence[Row], speed: RunSpeed) -> float:
    """How many times longer the host takes for networks in half precision, drawn to 1 where few tell."""
    predictor, logs = Predictor(profile), []
    for row in _priced(_learned_from(rows), profile):
        run = timed_network(row, profile.device, speed)
        told = predictor.at(run.slowdown).predict(run.graph, run.batch)
        host_ms = run.total_us * MS_PER_S / US_PER_S - (told.latency_ms - told.overhead_ms)
        if told.overhead_ms > told.compute_ms and host_ms > 0:
            logs.append(log(host_ms / told.overhead_ms))
    return round(exp(float(np.median(logs)) * len(logs) / (len(logs) + 1)), 4) if logs else 1.0


def _learned_from(rows: Iterable[Row]) -> list[Row]:
    """Every second network in half precision, which tells what the host takes longer in it; the others judge."""
    halves = [row for row in _networks(rows) if row.cell.precision in HALVES]
    return halves[::2] if len(halves) >= FEWEST_HALVES else []


def queued_sample(row: Row, gap_us: float, kinds: Container[str]) -> Iterator[KernelSample]:
    """A kernel timed in a queue: its period less the gap to its predecessor. Its kind counts if it is of `kinds`."""
    graph, batch = single_ops.graph(row.cell)
    launching = [op for op in graph.at(batch) if op.launches]
    us = row.timings["queued"].median_s * US_PER_S - gap_us
    if len(launching) == 1 and launching[0].launches == 1 and us > 0:
        op = launching[0]
        finer = finer_family(op.family, op.dims)
        yield KernelSample(finer if finer in kinds else op.family, row_of(op, batch), us)


def networks_seen(rows: Iterable[Row]) -> int:
    """How many sized networks a fit of kernels rests on that nothing disturbed, in the precision that has most."""
    timed = (row for row in rows if row.calls_us and not (visits.is_disturbed(row) or visits.is_apart(row)))
    specs = ((row.cell.precision, network_spec(row.cell)) for row in timed)
    return max(Counter(name for name, spec in specs if not (spec.tiny or spec.holdout)).values(), default=0)


def _timed_in_place(rows: Iterable[Row], info: DeviceInfo, speed: RunSpeed) -> dict[str, list[TimedNetwork]]:
    """Networks with the times of their calls, without the holdout ones, by precision."""
    runs: dict[str, list[TimedNetwork]] = {}
    for row in rows:
        if row.calls_us and not network_spec(row.cell).holdout:
            runs.setdefault(row.cell.precision, []).append(timed_network(row, info, speed))
    return runs


def _checked(
    profile: DeviceProfile, rows: Sequence[Row], every: Sequence[Row], speed: RunSpeed
) -> tuple[DeviceProfile, list[HoldoutError]]:
    """The profile with the spread and the verdict of the networks that were kept out of its fits."""
    learned = {row.cell.key for row in _learned_from(rows)} if profile.device.asynchronous else set()
    unseen = [row for row in _networks(rows) if row.cell.key not in learned]
    holdouts = _fast(_priced(_judges(unseen, _networks(every)), profile))
    models = _fast(_priced([row for row in rows if row.cell.kind == "model"], profile))
    if len(holdouts) >= FEWEST and any(map(visits.is_slowed, models)) and not any(map(visits.is_slowed, holdouts)):
        models = []  # too few met a fast moment: the slow ones say less than networks timed at full speed
    every_error, of_every_model = (
        holdout_errors(profile, {row.cell.key: timed_network(row, profile.device, speed) for row in several})
        for several in (holdouts, models)
    )
    errors, of_models = (acceptance.averaged(rows, several) for several in (every_error, of_every_model))
    spread = acceptance.network_spread(of_models if len(of_models) >= FEWEST else errors)
    runtimes = {name: msgspec.structs.replace(fit, spread=spread) for name, fit in profile.runtimes.items()}
    timings = [timing for row in rows for timing in row.timings.values()]
    verdict = acceptance.accepted(
        errors,
        of_models,
        stable=sum(timing.stable for timing in timings) / len(timings),
        disturbed=profile.disturbed,
        apart=sum(map(visits.is_apart, every)) / len(every),
        spoilt=visits.spoilt(rows),
        shifts=acceptance.shift(rows, (*every_error, *of_every_model)),
        missing=acceptance.missing(every),
        seen=None if profile.device.asynchronous else networks_seen(every),
        seconds=profile.seconds,
        command=store.calibration(profile),
    )
    return msgspec.structs.replace(profile, runtimes=runtimes, acceptance=verdict), errors


def _priced(rows: Iterable[Row], profile: DeviceProfile) -> list[Row]:
    """Those whose precision the profile has kernels of, which a short budget may have left none."""
    return [row for row in rows if row.cell.precision in profile.kernels]


def _mixed(row: Row) -> bool:
    """Whether a row is of dispatch and kernels together."""
    return row.cell.kind == "model" or (row.cell.kind == "network" and not network_spec(row.cell).tiny)


def _judges(rows: Iterable[Row], every: Iterable[Row]) -> list[Row]:
    """Holdout networks; those of processors apart too, where nothing else tells how exact a profile is."""
    calm = [row for row in rows if network_spec(row.cell).holdout]
    apart = (row for row in every if visits.is_apart(row) and not row.error and network_spec(row.cell).holdout)
    return calm if len(calm) >= FEWEST else list({row.cell.key: row for row in (*calm, *apart)}.values())


def _fast(rows: Sequence[Row]) -> Sequence[Row]:
    """Rows that were timed at full speed, which alone say how exact a profile is; all where those are too few."""
    fast = [row for row in rows if not visits.is_slowed(row)]
    return fast if len(fast) >= FEWEST else rows


def _networks(rows: Iterable[Row]) -> list[Row]:
    """Rows of networks that issue ops."""
    return [row for row in rows if row.cell.kind == "network" and not network_spec(row.cell).chain]


def timed_network(row: Row, info: DeviceInfo, speed: RunSpeed = FULL) -> TimedNetwork:
    """The row of a network or model as fits take it; `speed` is the run's, where the row is not at it yet."""
    cell = row.cell
    single, issue, queued = row.timings["single"], row.timings.get("issue"), row.timings.get("queued")
    graph, batch = cell_graph(cell, info.kind)
    tiny = cell.kind == "network" and network_spec(cell).tiny
    return TimedNetwork(
        graph=graph,
        batch=batch,
        total_us=single.median_s * US_PER_S,
        calls_us=row.calls_us,
        resident=resident_share(graph.parameter_bytes, graph.bytes(batch), info),
        issue_us=None if issue is None else issue.median_s * US_PER_S,
        queued_us=None if queued is None else queued.median_s * US_PER_S,
        sigma=1.86 * single.spread_s / single.median_s / single.n**0.5 if single.n > 1 else 0.1,
        tiny=tiny,
        slowdown=SAME if tiny else visits.slowdown(row, speed, asynchronous=info.asynchronous),
    )


def sample_of(row: Row) -> Sample:
    """What a profile keeps of a row."""
    timing = next(iter(row.timings.values()))
    return Sample(row.cell.key, round(timing.median_s * US_PER_S, 3), round(timing.spread_s * US_PER_S, 3), timing.n)
