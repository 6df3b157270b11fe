"""Device profiles from a table of latencies, one for each GPU.

A profile belongs to one machine, a table often covers several hosts of one GPU: the profile takes the middle of their
host factors, and its intervals cover how far hosts lie apart. Only numbers of the fit are written, no row of the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
import numpy as np
import pandas as pd

from latpred import tables
from latpred.accuracy.metrics import conformal
from latpred.calibration.published import leave_out, published_table
from latpred.calibration.published.joint_fit import Mask, Problem, fitted_rows, problem
from latpred.calibration.published.latency_model import Objects
from latpred.calibration.published.published_table import Graphs, Progress, PublishedTable, eras
from latpred.calibration.published.row_counts import EAGER, FIXED, MODULE, NO_HOST, PYTHON, SCRIPTED, multiplies
from latpred.errors import TableError
from latpred.graph.features import Floats
from latpred.graph.graph import CONTIGUOUS
from latpred.ops.families import takes_images
from latpred.prediction.clocks import Z90
from latpred.profile import gpus
from latpred.profile.datasheet import PRODUCT_ONLY, SLOTS, STAND_INS, device_of, kernel_fit, machine_of, short
from latpred.profile.document import FITTED, SCHEMA_VERSION, Acceptance, DeviceProfile, DispatchFit, KernelFit, Machine
from latpred.profile.gpus import Spec
from latpred.runtimes.legacy_torch import TORCH_1_12, TORCH_2, TORCH_2_4

GOOD_ENOUGH = 0.15  # median error on models left out, up to which a profile passes
_ENOUGH_OF_TODAY = 0.25  # of a GPU's eager rows, from which on its profile is of today's PyTorch
UNKNOWN = 0.5  # error and spread where nobody judged

_PROTOCOLS = {
    "pipelined": "pipelined: mean over forward passes issued back to back",
    "single": "single: each forward pass waited for",
}


class Accuracy(NamedTuple):
    """What a profile says of itself: median error, and half widths of 90 % intervals in log latency by regime."""

    median: float
    small_batch: float
    large_batch: float
    text: str


NOT_TRIED = Accuracy(UNKNOWN, UNKNOWN * Z90, UNKNOWN * Z90, "not tried")

Accuracies = Mapping[str, Accuracy]  # by runtime


def fit_profile(
    source: tables.Source | PublishedTable,
    gpu: str | None = None,
    *,
    name: str | None = None,
    judge: bool = True,
    known: Graphs | None = None,
    progress: Progress | None = None,
) -> DeviceProfile:
    """Fit a profile of one GPU to a table of published latencies.

    All GPUs and runs of the table are fitted together: what they share is learnt from all of them. Eager is fitted by
    itself; rows of TorchScript, where they are of PyTorch 1.12, tell its own costs and leave the rest as eager has it.

    Parameters
    ----------
    source : DataFrame or path
        A measurement table, or one with the columns gpu, model, batch, latency_s and run (runtime, precision,
        input_size, input_kind have defaults; without protocol and stack it is taken for pipelined, of PyTorch 1.12).
        Of other columns, what `latpred.calibration.published.published_table.read_all(paths, mapping)` makes of it.
    gpu : str, optional
        Which, as the table calls it; may be left out where it has one only.
    name : str, optional
        Of the profile; default: that of the GPU's datasheet.
    judge : bool
        Leave each model out in turn, to say what the profile is worth and how wide its intervals are.
    known : mapping, optional
        Traced models, by `latpred.accuracy.predicted.GraphKey`.
    progress : callable, optional
        Told in a line what is being done.

    Returns
    -------
    DeviceProfile
        Not saved yet; see `latpred.profile.store.save`.

    Raises
    ------
    TableError, UnknownGpuError, UnknownModelError
        When the table cannot be used; the message says what to change in it.

    Examples
    --------
    >>> profile = fit_profile("measured.csv", gpu="RTX-8000")  # doctest: +SKIP
    """
    table = _rows_of_profiles(source)
    wanted = _chosen(table, gpu)
    profile = fit_profiles(table, judge=judge, graphs=known, progress=progress, only=(wanted,))[wanted]
    return profile if name is None else msgspec.structs.replace(profile, name=name)


def fit_profiles(
    source: tables.Source | PublishedTable,
    *,
    judge: bool = True,
    graphs: Graphs | None = None,
    progress: Progress | None = None,
    only: Sequence[str] = (),
) -> dict[str, DeviceProfile]:
    """As `fit_profile`, for some GPUs or every one of a table that has eager rows, by the table's name of it."""
    whole = problem(_rows_of_profiles(source), graphs, progress)
    if progress is not None:
        progress("fitting")
    thetas = whole.thetas()
    wanted = only or sorted(set(whole.rows.gpu[whole.rows.runtime == EAGER]))
    holdout = leave_out.by_column(whole, "model", progress, gpus=wanted) if judge else None
    profiles = {}
    for gpu in wanted:
        accuracies = {runtime: _accuracy(holdout, gpu, runtime) for runtime in thetas}
        profiles[gpu] = profile_of(whole, thetas, accuracies, gpu)
    return profiles


def _rows_of_profiles(source: tables.Source | PublishedTable) -> PublishedTable:
    """Rows that profiles are fitted to: others have steps of their own, which a table does not tell."""
    table = fitted_rows(published_table.read(source))
    runtime = table.cells["runtime"]
    if not (runtime == EAGER).any():
        raise TableError("The table has no rows of runtime eager, which profiles are fitted to. Add some.")
    older = np.array(eras(table.cells)) == TORCH_1_12
    used = (runtime.isin((EAGER, *NO_HOST)) | (runtime.isin(SCRIPTED) & older)).to_numpy()
    others = sorted(set(runtime[~used]))
    notes = (f"rows of {', '.join(others)} were left out of the profile",) if others else ()
    return replace(table.where(used), notes=(*table.notes, *notes))


def _chosen(table: PublishedTable, gpu: str | None) -> str:
    there = sorted(set(table.cells["device"][table.cells["runtime"] == EAGER].astype(str)))
    if len(there) == 1 and (gpu is None or there[0] == tables.DEFAULTS["device"]):  # which has no datasheet
        return there[0]
    sheet = None if gpu is None else gpus.find(gpu)
    for name in there:
        if gpu == name or (sheet is not None and gpus.find(name) == sheet):
            return name
    said = "The table has several GPUs" if gpu is None else f"The table has no eager rows of a GPU called {gpu!r}"
    raise TableError(f"{said}; name one of: {', '.join(there)} (--gpu NAME).")


def _accuracy(holdout: pd.DataFrame | None, gpu: str, runtime: str) -> Accuracy:
    """What was shown on one GPU in one runtime."""
    if holdout is None:
        return NOT_TRIED
    everywhere = holdout[holdout["runtime"] == runtime]
    errors = leave_out.errors_by(everywhere, "device").get(gpu)
    if errors is None:
        return NOT_TRIED
    # A model is as far off on one GPU as on another: widths come from all, since each alone has few models.
    regimes = [*leave_out.coverage_by_regime(everywhere).values()]
    known = [[each.width for each in part if each.rows] for part in (regimes[:1], regimes[1:])]
    small, large = (max(own or others) for own, others in (known, known[::-1]))  # a table may have batches of one size
    return Accuracy(
        median=float(f"{errors.median:.4g}"),
        small_batch=small,
        large_batch=large,
        text=f"{errors.median:.1%} median, {errors.p90:.1%} p90, {errors.near:.0%} within 10 % "
        f"({errors.models} models, {errors.cells} cells)",
    )


class FittedNumbers:
    """Fitted numbers by what they are of; parameters that no row needed are at their prior."""

    def __init__(self, problem: Problem, theta: Floats) -> None:
        self._parameters, self._theta = deepcopy(problem.parameters), theta  # asking adds parameters
        self._rows = problem.rows

    def kernel(self, family: str, gpu: Spec, precision: str, runtime: str, release: str = "") -> dict[str, float]:
        """What each slot of a family is on a GPU, in a release of PyTorch before today's.

        A precision may name its memory format, as "fp16 channels_last".
        """
        number_format, _, memory_format = precision.partition(" ")
        numbers = {}
        for slot in SLOTS:
            if multiplies(family) or slot not in PRODUCT_ONLY:
                promised, terms = self._parameters.kernel(
                    family, slot, gpu, number_format, runtime, memory_format or CONTIGUOUS, release
                )
                numbers[slot] = float(np.exp(promised + self._sum(terms)))
        return numbers

    def host(self, name: str, runtime: str, gpu: Spec) -> float:
        """Microseconds of a host class, on a host of factor 1."""
        return float(np.exp(self._sum(self._parameters.host(name, runtime, gpu))))

    def host_factors(self, used: Mask) -> list[float]:
        """Factors of the hosts of some rows: one for each run and group of models."""
        rows, parameters = self._rows, self._parameters
        hosts = sorted(set(zip(rows.run[used], rows.host[used], rows.group[used], strict=True)))
        return [
            float(np.exp(self._sum([*parameters.run(run, host), *parameters.run_group(run, group)])))
            for run, host, group in hosts
        ]

    def host_factors_on(self, gpu: str, runtime: str) -> list[float]:
        """The same, of the rows of a GPU in a runtime."""
        return self.host_factors((self._rows.gpu == gpu) & (self._rows.runtime == runtime))

    @property
    def clock_exponent(self) -> float:
        """Exponent that joins the clocks."""
        return float(np.exp(self._sum(self._parameters.clock_exponent("pipelined"))))

    def _sum(self, terms: Sequence[int]) -> float:
        means = self._parameters.means
        return float(sum(self._theta[i] if i < len(self._theta) else means[i] for i in terms))


def profile_of(problem: Problem, thetas: Mapping[str, Floats], accuracies: Accuracies, gpu: str) -> DeviceProfile:
    """The profile of one GPU of a table, from the parameters of each runtime and what they are worth."""
    spec = problem.gpus[gpu]
    numbers = {runtime: FittedNumbers(problem, theta) for runtime, theta in thetas.items()}
    rows = problem.rows
    own = (rows.gpu == gpu) & (rows.runtime == EAGER)
    told = own & (leave_out.tells_hosts(problem) | (rows.host != ""))
    if not told.any():
        told = own  # large batches say little of their hosts, of which the fit makes what it can
    factors = numbers[EAGER].host_factors(told)
    runtimes = {EAGER: dispatch(problem, numbers[EAGER], EAGER, spec, float(np.median(factors)), accuracies[EAGER])}
    era, release, mine = _era(problem, gpu)
    for runtime, own in numbers.items():
        # Today's TorchScript has steps of its own.
        if runtime != EAGER and era == TORCH_1_12 and own.host_factors_on(gpu, runtime):
            factor = float(np.median(own.host_factors(told))) * _shift(problem, own, runtime)
            plain = dispatch(problem, own, runtime, spec, factor, accuracies[runtime])
            kernels = _kernels(problem, own, spec, runtime, release, accuracies[runtime])
            runtimes[runtime] = msgspec.structs.replace(plain, kernels=kernels)
    here = {runtime: accuracies[runtime] for runtime in runtimes}
    hosts = host_spread(problem, numbers[EAGER])
    return DeviceProfile(
        name=spec.name,
        schema=SCHEMA_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        provenance=FITTED,
        machine=_machine(problem, spec, mine, len(set(rows.machine[told]))),
        device=device_of(spec, numbers[EAGER].clock_exponent),
        protocol=_protocol(problem, gpu, era, factors, here),
        runtimes={name: msgspec.structs.replace(fit, host_spread=hosts) for name, fit in runtimes.items()},
        kernels=_kernels(problem, numbers[EAGER], spec, EAGER, release, accuracies[EAGER]),
        samples=(),
        acceptance=_acceptance(here),
        seconds=0.0,
    )


def host_spread(problem: Problem, numbers: FittedNumbers) -> float:
    """Standard deviation of the log of a host's factor over the middle of the other hosts with the same GPU.

    A host has a factor for each of its runs and groups of models: none of them says where another host may lie.
    """
    rows, apart = problem.rows, list[float]()
    eager = rows.runtime == EAGER
    for gpu, machine in sorted(set(zip(rows.gpu[eager], rows.machine[eager], strict=True))):
        here, own = eager & (rows.gpu == gpu), rows.machine == machine
        if others := numbers.host_factors(here & ~own):
            middle = np.median(np.log(others))
            apart += np.abs(np.log(numbers.host_factors(here & own)) - middle).tolist()
    return short(conformal(apart) / Z90) if apart else 0.0


def _shift(problem: Problem, numbers: FittedNumbers, runtime: str) -> float:
    """Host factors of a runtime's runs over those of eager's, GPU by GPU the middle one, in the mean over GPUs.

    A profile is about one host for all its runtimes, and a GPU's runs in two runtimes were often on different hosts.
    All hosts together are taken to be as fast in both, so that what remains belongs to the runtime.
    """
    middles = []
    for gpu in sorted(set(problem.rows.gpu)):
        both = [numbers.host_factors_on(gpu, name) for name in (runtime, EAGER)]
        if all(both):
            middles.append([float(np.log(np.median(factors))) for factors in both])
    own, eager = np.mean(middles, axis=0)
    return float(np.exp(own - eager))


def dispatch(
    problem: Problem, numbers: FittedNumbers, runtime: str, spec: Spec, factor: float, accuracy: Accuracy
) -> DispatchFit:
    """Host costs of a runtime on a host of some factor."""

    def cost(name: str) -> float:
        return short(factor * numbers.host(name, runtime, spec))

    eager = runtime == EAGER  # no other runtime of a table calls modules or Python
    return DispatchFit(
        costs_us={name: cost(name) for name in ("", *problem.cells.classes) if name not in (FIXED, MODULE, PYTHON)},
        module_call_us=cost(MODULE) if eager else 0.0,
        python_call_us=cost(PYTHON) if eager else 0.0,
        fixed_us=cost(FIXED),
        spread=short(accuracy.small_batch / Z90),
        busy_spread=short(accuracy.large_batch / Z90),
    )


def _kernels(
    problem: Problem, numbers: FittedNumbers, spec: Spec, runtime: str, release: str, accuracy: Accuracy
) -> dict[str, dict[str, KernelFit]]:
    """Kernels of a runtime by precision and family; those of images in a format that was measured are apart."""
    formats = set(problem.rows.memory_format[problem.rows.runtime == runtime]) - {CONTIGUOUS}
    families = {family: family for family in sorted(problem.families(runtime))}
    families |= {family: like for family, like in STAND_INS.items() if like in families and family not in families}
    error, spread = accuracy.median, short(accuracy.large_batch / Z90)
    endings = ("", *(f" {one}" for one in sorted(formats)))
    return {
        precision: {
            family: kernel_fit(family, numbers.kernel(like, spec, precision, runtime, release), spec, error, spread)
            for family, like in families.items()
            if not ending or takes_images(family)
        }
        for ending in endings
        for precision in (f"{number_format}{ending}" for number_format in spec.precisions)
    }


def _machine(problem: Problem, spec: Spec, own: Mask, hosts: int) -> Machine:
    stack = dict(re.findall(r"(\w+)=([\w.+-]+)", problem.table.cells["stack"][own].astype(str).mode()[0]))
    cpu = "a published host" if hosts == 1 else f"{hosts} published hosts"
    return machine_of(spec, cpu, system="Linux", stack=stack, threads=1)


def _era(problem: Problem, gpu: str) -> tuple[str, str, Mask]:
    """The PyTorch and the release that most of a GPU's eager rows are of, and the rows that are of both.

    Today's PyTorch where enough are of it: that is what people run.
    """
    rows, ran = problem.rows, eras(problem.table.cells)
    known = np.array([TORCH_2 if era == TORCH_2_4 else era for era in ran], dtype=object)  # profiles know one of both
    mine = rows.gpu == gpu
    eager = known[mine & (rows.runtime == EAGER)]
    era = TORCH_2 if np.mean(eager == TORCH_2) >= _ENOUGH_OF_TODAY else _usual(eager)
    mine &= known == era
    release = _usual(rows.release[mine])
    return era, release, mine & (rows.release == release)


def _usual(names: Objects) -> str:
    """The name that comes most often."""
    return str(pd.Series(names).mode()[0])


def _protocol(problem: Problem, gpu: str, era: str, factors: list[float], accuracies: Accuracies) -> dict[str, str]:
    table, own = problem.table, problem.rows.gpu == gpu
    sources = ", ".join(sorted(set(problem.rows.source[own])))
    of_all = len({spec.title for spec in problem.gpus.values()})  # at whatever clocks
    rows = f"{own.sum():,} of this GPU ({sources}), fitted together with {len(own):,} of {of_all} GPUs"
    low, high = min(factors) / float(np.median(factors)), max(factors) / float(np.median(factors))
    return {
        "latency": "; ".join(_PROTOCOLS[name] for name in sorted(set(table.cells["protocol"]))),
        "mode": "evaluation mode, inputs on the device, one thread, cudnn.benchmark as its sources had it",
        "source": "fitted to published end-to-end latencies; no kernel or op was timed by itself",
        "hosts": f"dispatch of the middle host; those of the table took {low:.2f} to {high:.2f} times that",
        "assumed": "launch latency, synchronisation and copies are typical values",
        **({"era": era} if era else {}),
        **{
            "leave-one-model-out" if runtime == EAGER else f"leave-one-model-out, {runtime}": accuracy.text
            for runtime, accuracy in accuracies.items()
            if accuracy is not NOT_TRIED
        },
        # Models of somebody's file go by the file's name: where it lay is no one's business.
        "rows": re.sub(r"\S*[/\\](?=[\w-]+\.py\b)", "", "; ".join((rows, *table.notes))),
    }


def _acceptance(accuracies: Accuracies) -> Acceptance:
    passed = {runtime: accuracy.median <= GOOD_ENOUGH for runtime, accuracy in accuracies.items()}
    eager, accuracy = passed.pop(EAGER), accuracies[EAGER]
    judge = "Judge the fit: latpred evaluate TABLE --leave-out model"
    advice = judge if accuracy is NOT_TRIED else "Measure it: latpred calibrate on a machine that has this device"
    return Acceptance(eager, {"models left out": accuracy.text}, () if eager else (advice,), passed)
