"""Device profiles from a table of latencies, one for each GPU, and what all its GPUs have in common.

A profile belongs to one machine, a table often covers several hosts of one GPU: the profile takes the middle of their
host factors, and its intervals cover how far hosts lie apart. Only numbers of the fit are written, no row of the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import numpy as np
import pandas as pd

from latpred import tables
from latpred.accuracy.metrics import conformal
from latpred.calibration.published import leave_out, published_table
from latpred.calibration.published.joint_fit import Mask, Problem, problem
from latpred.calibration.published.leave_out import SMALL, Accuracy, HoldoutRows
from latpred.calibration.published.parameters import DEVIATING, OTHER_HOST
from latpred.calibration.published.published_table import Graphs, Progress, PublishedTable
from latpred.calibration.published.row_counts import ALONE, EAGER, FIXED, MODULE, PYTHON, SCRIPTED, multiplies
from latpred.errors import TableError
from latpred.graph.features import Floats
from latpred.graph.graph import CONTIGUOUS
from latpred.ops.families import DIMS
from latpred.prediction.clocks import Z90
from latpred.profile import gpus
from latpred.profile.datasheet import (
    ANY,
    GUESSES,
    PRODUCT_ONLY,
    SLOTS,
    STAND_INS,
    Shared,
    device_of,
    kernel_fit,
    mode_of,
    short,
)
from latpred.profile.document import FITTED, SCHEMA_VERSION, Acceptance, DeviceProfile, DispatchFit, KernelFit, Machine
from latpred.profile.gpus import Spec
from latpred.runtimes.legacy_torch import TORCH_1_12

ADVICE = "latpred calibrate on a machine that has this device"
GOOD_ENOUGH = 0.15  # median error on models left out, up to which a profile passes
UNKNOWN = 0.5  # error and spread where nobody judged

_PROTOCOLS = {
    "pipelined": "pipelined: mean over forward passes issued back to back",
    "single": "single: each forward pass waited for",
}

Accuracies = Mapping[str, Accuracy | None]  # by runtime


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
        input_size, input_kind have defaults): see `latpred.calibration.published.published_table`.
    gpu : str, optional
        Which, as the table calls it; may be left out where it has one only.
    name : str, optional
        Of the profile; default: that of the GPU's datasheet.
    judge : bool
        Leave each model out in turn, to say what the profile is worth and how wide its intervals are.
    known : mapping, optional
        Traced models, by `latpred.calibration.published.published_table.TraceKey`.
    progress : callable, optional
        Told what is being done.

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
    table = published_table.read(source)
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
    table = published_table.read(source)
    whole = problem(_fitted_rows(table), graphs, progress)
    if progress is not None:
        progress("fitting")
    thetas = whole.thetas()
    wanted = only or sorted(set(whole.rows.gpu[whole.rows.runtime == EAGER]))
    holdout = leave_out.by_model(whole, progress, wanted) if judge else None
    profiles = {}
    for gpu in wanted:
        accuracies = {runtime: _accuracy(holdout, gpu, runtime) for runtime in thetas}
        profiles[gpu] = profile_of(whole, thetas, accuracies, gpu)
    return profiles


def _fitted_rows(table: PublishedTable) -> PublishedTable:
    """Rows that profiles are fitted to: other runtimes have steps of their own, which a table does not tell.

    Except TorchScript of a PyTorch whose fusers are known.
    """
    runtime = table.cells["runtime"]
    if not (runtime == EAGER).any():
        raise TableError("The table has no rows of runtime eager, which profiles are fitted to. Add some.")
    older = np.array(table.eras()) == TORCH_1_12
    used = (runtime.isin((EAGER, ALONE)) | (runtime.isin(SCRIPTED) & older)).to_numpy()
    others = sorted(set(runtime[~used]))
    notes = (f"rows of {', '.join(others)} were left out of the profile",) if others else ()
    return replace(table.where(used), notes=(*table.notes, *notes))


def _chosen(table: PublishedTable, gpu: str | None) -> str:
    there = sorted(set(table.cells["device"].astype(str)))
    if gpu is None and len(there) == 1:
        return there[0]
    if gpu in there:
        return str(gpu)
    sheets = {gpus.spec(one).name: one for one in there if gpus.known(one)}
    if gpu is not None and gpus.known(gpu) and gpus.spec(gpu).name in sheets:
        return sheets[gpus.spec(gpu).name]
    said = "The table has several GPUs" if gpu is None else f"The table has no GPU called {gpu!r}"
    raise TableError(f"{said}; name one of: {', '.join(there)} (--gpu NAME).")


def _accuracy(holdout: HoldoutRows | None, gpu: str, runtime: str) -> Accuracy | None:
    """What was shown on one GPU in one runtime, where anything was."""
    if holdout is None:
        return None
    everywhere = holdout.where("runtime", runtime)
    here = everywhere.where("device", gpu)
    return None if here.frame.empty else leave_out.accuracy(here, everywhere)


class FittedNumbers:
    """Fitted numbers by what they are of; parameters that no row needed are at their prior."""

    def __init__(self, problem: Problem, theta: Floats) -> None:
        self._parameters, self._theta = deepcopy(problem.parameters), theta  # asking adds parameters
        self._rows = problem.rows

    def kernel(self, family: str, gpu: Spec, precision: str, runtime: str) -> dict[str, float]:
        """What each slot of a family is on a GPU; a precision may name its memory format, as "fp16 channels_last"."""
        return {slot: float(np.exp(sum(logs))) for slot, *logs in self._slots(family, gpu, precision, runtime)}

    def reached(self, family: str, gpu: Spec, precision: str) -> dict[str, float]:
        """The same in eager, over what the GPU's datasheet promises."""
        return {slot: float(np.exp(own)) for slot, _, own in self._slots(family, gpu, precision, EAGER)}

    def _slots(self, family: str, gpu: Spec, precision: str, runtime: str) -> Iterator[tuple[str, float, float]]:
        """Slots, with logarithms of what is promised, and of what is reached of that."""
        number_format, _, memory_format = precision.partition(" ")
        for slot in SLOTS:
            if multiplies(family) or slot not in PRODUCT_ONLY:
                promised, terms = self._parameters.kernel(
                    family, slot, gpu, number_format, runtime, memory_format or CONTIGUOUS
                )
                yield slot, promised, self._sum(terms)

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

    def power_limited(self, slot: str) -> float:
        """How many times that of other GPUs a slot of those is that their power limits; 1 where there are none."""
        index = self._parameters.names.get(("power limited", slot))
        return 1.0 if index is None else short(float(np.exp(self._sum([index]))))

    @property
    def knee(self) -> float:
        """Exponent that joins the clocks."""
        return float(np.exp(self._sum(self._parameters.knee("pipelined"))))

    def _sum(self, terms: Sequence[int]) -> float:
        means = self._parameters.means
        return float(sum(self._theta[i] if i < len(self._theta) else means[i] for i in terms))


def profile_of(problem: Problem, thetas: Mapping[str, Floats], accuracies: Accuracies, gpu: str) -> DeviceProfile:
    """The profile of one GPU of a table, from the parameters of each runtime and what they are worth."""
    spec = problem.gpus[gpu]
    numbers = {runtime: FittedNumbers(problem, theta) for runtime, theta in thetas.items()}
    rows = problem.rows
    told = (rows.gpu == gpu) & (rows.runtime == EAGER) & (leave_out.tells_hosts(problem) | (rows.host != ""))
    if not told.any():  # as good as any other GPU's hosts
        told = _unnamed_hosts(problem)
    factors = numbers[EAGER].host_factors(told)
    runtimes = {EAGER: dispatch(problem, numbers[EAGER], EAGER, spec, float(np.median(factors)), accuracies[EAGER])}
    for runtime, own in numbers.items():
        if runtime != EAGER and own.host_factors_on(gpu, runtime):
            factor = float(np.median(own.host_factors(told))) * _shift(problem, own, runtime)
            plain = dispatch(problem, own, runtime, spec, factor, accuracies[runtime])
            kernels = _kernels(problem, own, gpu, runtime, accuracies[runtime])
            runtimes[runtime] = msgspec.structs.replace(plain, kernels=kernels)
    spread = host_spread(problem, numbers[EAGER]) if len(factors) > 1 else 0.0
    era = _era(problem, gpu)
    if era != TORCH_1_12:  # today's TorchScript has steps of its own
        runtimes = {EAGER: runtimes[EAGER]}
    here = {runtime: accuracies[runtime] for runtime in runtimes}
    return DeviceProfile(
        name=spec.name,
        schema=SCHEMA_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        provenance=FITTED,
        machine=_machine(problem, gpu, era, len(factors)),
        device=device_of(spec, numbers[EAGER].knee),
        protocol=_protocol(problem, gpu, era, factors, here),
        runtimes={name: msgspec.structs.replace(fit, host_spread=spread) for name, fit in runtimes.items()},
        kernels=_kernels(problem, numbers[EAGER], gpu, EAGER, accuracies[EAGER]),
        samples=(),
        acceptance=_acceptance(here),
        seconds=0.0,
    )


def host_spread(problem: Problem, numbers: FittedNumbers) -> float:
    """Standard deviation of the log of a host's factor over the middle of the other hosts with the same GPU.

    That of a normal distribution with nine in ten of them within its 90 % interval, over all GPUs of the table; 0 where
    each has one host.
    """
    apart: list[float] = []
    for gpu in sorted(set(problem.rows.gpu)):
        logs = np.log(numbers.host_factors_on(gpu, EAGER))
        if len(logs) > 1:
            apart += [abs(own - float(np.median(np.delete(logs, index)))) for index, own in enumerate(logs)]
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
    problem: Problem, numbers: FittedNumbers, runtime: str, spec: Spec, factor: float, accuracy: Accuracy | None
) -> DispatchFit:
    """Host costs of a runtime on a host of some factor."""

    def cost(name: str) -> float:
        return short(factor * numbers.host(name, runtime, spec))

    eager = runtime == EAGER  # no other runtime of a table calls modules or Python
    return DispatchFit(
        costs_us={"": short(factor * OTHER_HOST)}
        | {name: cost(name) for name in problem.cells.classes if name not in (FIXED, MODULE, PYTHON)},
        module_call_us=cost(MODULE) if eager else 0.0,
        python_call_us=cost(PYTHON) if eager else 0.0,
        fixed_us=cost(FIXED),
        spread=short(accuracy.small_batch / Z90) if accuracy else UNKNOWN,
        busy_spread=short(accuracy.large_batch / Z90) if accuracy else UNKNOWN,
    )


def _kernels(
    problem: Problem, numbers: FittedNumbers, gpu: str, runtime: str, accuracy: Accuracy | None
) -> dict[str, dict[str, KernelFit]]:
    """Kernels of a runtime by precision and family; convolutions of a memory format that was measured are apart."""
    spec = problem.gpus[gpu]
    formats = set(problem.rows.memory_format[problem.rows.runtime == runtime]) - {CONTIGUOUS}
    families = {family: family for family in sorted(problem.families(runtime))}
    families |= {family: like for family, like in STAND_INS.items() if like in families and family not in families}
    error, spread = (accuracy.median, short(accuracy.large_batch / Z90)) if accuracy else (UNKNOWN, UNKNOWN)
    return {
        precision: {
            family: kernel_fit(family, numbers.kernel(like, spec, precision, runtime), spec, error, spread)
            for family, like in families.items()
        }
        for precision in (
            *spec.precisions,
            *(f"{precision} {one}" for precision in spec.precisions for one in sorted(formats)),
        )
    }


def _machine(problem: Problem, gpu: str, era: str, hosts: int) -> Machine:
    own = (problem.rows.gpu == gpu) & (np.array(problem.table.eras()) == era)
    stack = dict(re.findall(r"(\w+)=([\w.+-]+)", problem.table.cells["stack"][own].astype(str).mode()[0]))
    spec = problem.gpus[gpu]
    return Machine(
        hostname_hash="",
        cpu="a published host" if hosts == 1 else f"{hosts} published hosts",
        cores=0,
        memory_bytes=0,
        system="Linux",
        accelerator=spec.title,
        driver="",
        stack=stack,
        threads=1,
    )


def _era(problem: Problem, gpu: str) -> str:
    """The PyTorch that most of a GPU's eager rows are of; that of scripted rows where there are any of its fusers."""
    here, runtime, eras = problem.rows.gpu == gpu, problem.rows.runtime, np.array(problem.table.eras())
    if (here & np.isin(runtime, SCRIPTED) & (eras == TORCH_1_12)).any():
        return TORCH_1_12
    own = eras[here & (runtime == EAGER)].tolist()
    return str(max(sorted(set(own)), key=own.count))


def _protocol(problem: Problem, gpu: str, era: str, factors: list[float], accuracies: Accuracies) -> dict[str, str]:
    table, own = problem.table, problem.rows.gpu == gpu
    sources = ", ".join(sorted(set(problem.rows.source[own])))
    of_all = len({spec.title for spec in problem.gpus.values()})  # at whatever clocks
    rows = f"{own.sum():,} of this GPU ({sources}), fitted together with {len(own):,} of {of_all} GPUs"
    low, high = min(factors) / float(np.median(factors)), max(factors) / float(np.median(factors))
    return {
        "latency": "; ".join(_PROTOCOLS[name] for name in sorted(set(table.cells["protocol"]))),
        "mode": "evaluation mode, inputs on the device, one thread, contiguous, cudnn.benchmark off",
        "source": "fitted to published end-to-end latencies; no kernel or op was timed by itself",
        "hosts": f"dispatch of the middle host; those of the table took {low:.2f} to {high:.2f} times that",
        "assumed": "launch latency, synchronisation and copies are typical values",
        **({"era": era} if era else {}),
        **{
            "leave-one-model-out" if runtime == EAGER else f"leave-one-model-out, {runtime}": accuracy.text
            for runtime, accuracy in accuracies.items()
            if accuracy is not None
        },
        # Models of somebody's file go by the file's name: where it lay is no one's business.
        "rows": re.sub(r"\S*[/\\](?=[\w-]+\.py\b)", "", "; ".join((rows, *table.notes))),
    }


def _acceptance(accuracies: Accuracies) -> Acceptance:
    passed = {
        runtime: accuracy is not None and accuracy.median <= GOOD_ENOUGH for runtime, accuracy in accuracies.items()
    }
    eager, accuracy = passed.pop(EAGER), accuracies[EAGER]
    advice = (f"Measure it: {ADVICE}",)
    if accuracy is None:
        advice = ("Judge the fit: latpred evaluate TABLE --leave-out model",)
    said = "not tried" if accuracy is None else accuracy.text
    return Acceptance(eager, {"models left out": said}, () if eager else advice, passed)


# -- what GPUs have in common --------------------------------------------------------------------------------------


def shared_of(problem: Problem, holdout: HoldoutRows, hosts_known: HoldoutRows, source: str) -> Shared:
    """What the GPUs of a table have in common, from its rows of eager.

    `holdout` is from `without_gpu`; `hosts_known` are GPUs left out whose hosts one row of each run tells, so that its
    errors have nothing to do with the host. `source` says in a sentence what the numbers come from.
    """
    numbers = FittedNumbers(problem, problem.solve(problem.telling))
    designs = {gpu.design: gpu.compute_capability for gpu in problem.gpus.values()}
    families = sorted({*problem.families(EAGER), *DIMS} - {*STAND_INS, *GUESSES})
    known = hosts_known.where("runtime", EAGER)
    small = known.frame["batch"].to_numpy() <= SMALL
    sizes = np.abs(known.log_errors)
    # Most GPUs that nobody measured have tensor cores.
    middle = float(np.median(numbers.host_factors(_unnamed_hosts(problem))))
    host = dispatch(problem, numbers, EAGER, _nameless("a100", (0, 0)), middle, None)
    return Shared(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        source=source,
        kernels={
            design: {family: _reached(numbers, capability, family) for family in families}
            for design, capability in sorted({ANY: (0, 0), **designs}.items())
        },
        dispatch=msgspec.structs.replace(
            host,
            spread=short(conformal(sizes[small]) / Z90),
            busy_spread=short(conformal(sizes[~small]) / Z90),
            host_spread=host_spread(problem, numbers),
        ),
        knee=short(numbers.knee),
        error=float(f"{holdout.errors()['all'].median:.4g}"),
        power_limited={slot: numbers.power_limited(slot) for slot in DEVIATING},
    )


def _unnamed_hosts(problem: Problem) -> Mask:
    """Eager rows that tell hosts which nobody names; all eager rows where there are none."""
    eager = problem.rows.runtime == EAGER
    told: Mask = eager & leave_out.tells_hosts(problem) & (problem.rows.host == "")
    return told if told.any() else eager


def without_gpu(problem: Problem) -> HoldoutRows:
    """Eager rows of each GPU, predicted from the other GPUs, its datasheet, and the middle of the others' hosts."""
    rows = problem.rows
    eager = rows.runtime == EAGER
    parts = []
    for gpu in sorted(set(rows.gpu[eager])):
        mine, others = eager & (rows.gpu == gpu), eager & (rows.gpu != gpu)
        theta = problem.solve(problem.telling & (rows.gpu != gpu))
        told = _unnamed_hosts(problem) & others
        middle = np.log(np.median(FittedNumbers(problem, theta).host_factors(told if told.any() else others)))
        names = problem.parameters.names
        for run in sorted(set(rows.run[mine & (rows.host == "")]) - set(rows.run[others])):
            theta[names["run", run]] = middle - theta[names["middle host",]]
        parts.append(problem.table.cells[mine].assign(predicted_s=problem.predict(theta)[mine]))
    return HoldoutRows("a GPU left out, its host not known", pd.concat(parts))


def _reached(numbers: FittedNumbers, capability: tuple[int, int], family: str) -> dict[str, dict[str, float]]:
    """By mode and slot, what kernels of a family reach on GPUs of a compute capability; one GPU for each mode."""
    reached = {}
    for like, precisions in (("titan-x-pascal", ("fp32", "fp16")), ("a100", ("tf32", "fp16"))):
        spec = _nameless(like, capability)
        for precision in precisions:
            shares = numbers.reached(family, spec, precision)
            reached[mode_of(spec, precision, family)] = {slot: short(share) for slot, share in shares.items()}
    if "compute" in reached["tf32"] and not family.startswith("conv"):
        # No table has products in TF32. In each cycle they take as many bytes as those in half precision.
        reached["tf32"]["compute"] = max(reached[mode]["compute"] for mode in ("tf32", "fp16"))
    return reached


def _nameless(like: str, capability: tuple[int, int]) -> Spec:
    """A GPU's datasheet without its name, so that nothing that the fit knows of a single GPU takes part."""
    return msgspec.structs.replace(gpus.spec(like), name="", compute_capability=capability)
