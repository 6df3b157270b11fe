"""Writes a fitted law down as device profiles, one for each GPU, that predict like any other.

A profile belongs to one machine, a table often covers several hosts of one GPU: the profile takes the middle of their
host factors, and its intervals cover how far hosts lie apart. Only numbers of the fit are written, no row of the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
import numpy as np

from latpred.accuracy.metrics import conformal
from latpred.calibration.published.joint_fit import Problem
from latpred.calibration.published.parameters import EAGER
from latpred.calibration.published.priors import OTHER_HOST, multiplies
from latpred.calibration.published.row_counts import FIXED, MODULE, PYTHON
from latpred.graph.features import Floats
from latpred.prediction.crossover import Z90
from latpred.profile.datasheet import PRODUCT_ONLY, SLOTS, STAND_INS, device_of, kernel_fit, short
from latpred.profile.document import FITTED, SCHEMA_VERSION, Acceptance, DeviceProfile, DispatchFit, KernelFit, Machine
from latpred.profile.gpus import Spec

ADVICE = "latpred calibrate on a machine that has this device"
GOOD_ENOUGH = 0.15  # median error on models left out, up to which a profile passes


class Accuracy(NamedTuple):
    """What leaving out models showed: median error, and half widths of 90 % intervals in log latency by regime."""

    median: float
    small_batch: float
    large_batch: float
    text: str


class Fitted(NamedTuple):
    """Parameters that were found, and what they are worth; None where nobody judged them."""

    theta: Floats
    accuracy: Accuracy | None = None


class Numbers:
    """Fitted numbers by what they are of; parameters that no row needed are at what is believed."""

    def __init__(self, problem: Problem, theta: Floats) -> None:
        self._builder, self._theta = deepcopy(problem.law.builder), theta  # to ask adds parameters

    def sum(self, terms: list[int]) -> float:
        means = self._builder.parameters.means
        return float(sum(self._theta[i] if i < len(self._theta) else means[i] for i in terms))

    def kernel(self, family: str, gpu: Spec, precision: str, runtime: str) -> dict[str, float]:
        """What each slot of a family is on a GPU."""
        return {slot: float(np.exp(sum(parts))) for slot, parts in self._kernel(family, gpu, precision, runtime)}

    def reached(self, family: str, gpu: Spec, precision: str) -> dict[str, float]:
        """The same in eager, over what the GPU's datasheet promises."""
        return {slot: float(np.exp(own)) for slot, (_, own) in self._kernel(family, gpu, precision, EAGER)}

    def _kernel(
        self, family: str, gpu: Spec, precision: str, runtime: str
    ) -> Iterator[tuple[str, tuple[float, float]]]:
        """By slot, logarithms of what is promised, and of what is reached of that."""
        for slot in SLOTS:
            if multiplies(family) or slot not in PRODUCT_ONLY:
                constant, terms = self._builder.kernel(family, slot, gpu, precision, runtime)
                yield slot, (constant, self.sum(terms))

    def host(self, name: str, runtime: str, gpu: Spec) -> float:
        return float(np.exp(self.sum(self._builder.host(name, runtime, gpu))))

    def run(self, run: str, group: str) -> float:
        return float(np.exp(self.sum([*self._builder.run(run), *self._builder.run_group(run, group)])))

    @property
    def knee(self) -> float:
        return float(np.exp(self.sum(self._builder.knee())))


def profile_of(problem: Problem, fits: Mapping[str, Fitted], gpu: str, name: str | None = None) -> DeviceProfile:
    """The profile of one GPU of a table.

    Parameters
    ----------
    problem : Problem
        The table and its law.
    fits : mapping
        By runtime, eager among them: what was found on its rows, and what that is worth.
    gpu : str
        As the table calls it.
    name : str, optional
        Of the profile; default: that of the GPU's datasheet.
    """
    spec, accuracy = problem.law.gpus[gpu], fits[EAGER].accuracy
    numbers = {runtime: Numbers(problem, fit.theta) for runtime, fit in fits.items()}
    factors = _host_factors(problem, numbers[EAGER], gpu, EAGER)
    apart = host_spread(problem, numbers[EAGER]) if len(factors) > 1 else 0.0
    runtimes = {EAGER: dispatch(problem, numbers[EAGER], EAGER, Place(spec, factors), accuracy)}
    for runtime, fit in fits.items():
        if runtime != EAGER and _host_factors(problem, numbers[runtime], gpu, runtime):
            same = _host_factors(problem, numbers[runtime], gpu, EAGER)
            shifted = [factor * _shift(problem, numbers[runtime], runtime) for factor in same]
            plain = dispatch(problem, numbers[runtime], runtime, Place(spec, shifted), fit.accuracy)
            own = _kernels_of(problem, numbers[runtime], gpu, runtime, fit.accuracy)
            runtimes[runtime] = msgspec.structs.replace(plain, kernels=own)
    runtimes = {name: msgspec.structs.replace(fit, host_spread=apart) for name, fit in runtimes.items()}
    return DeviceProfile(
        name=name or spec.name,
        schema=SCHEMA_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        provenance=FITTED,
        machine=_machine(problem, spec, len(factors)),
        device=device_of(spec, numbers[EAGER].knee),
        protocol=_protocol(problem, factors, {runtime: fits[runtime].accuracy for runtime in runtimes}),
        runtimes=runtimes,
        kernels=_kernels_of(problem, numbers[EAGER], gpu, EAGER, accuracy),
        samples=(),
        acceptance=_acceptance({runtime: fits[runtime].accuracy for runtime in runtimes}),
        seconds=0.0,
    )


def _host_factors(problem: Problem, numbers: Numbers, gpu: str, runtime: str) -> list[float]:
    rows = problem.law.rows
    mine = (rows.gpu == gpu) & (rows.runtime == runtime)
    where = sorted(set(zip(rows.run[mine], rows.group[mine], strict=True)))
    return [numbers.run(str(run), str(group)) for run, group in where]


def host_spread(problem: Problem, numbers: Numbers) -> float:
    """Standard deviation of the log of a host's factor over the middle of the other hosts with the same GPU.

    That of a normal distribution with nine in ten of them within its 90 % interval, over all GPUs of the table; 0 where
    each has one host.
    """
    apart: list[float] = []
    for gpu in sorted(set(problem.law.rows.gpu)):
        logs = np.log(_host_factors(problem, numbers, gpu, EAGER))
        if len(logs) > 1:
            apart += [abs(own - float(np.median(np.delete(logs, index)))) for index, own in enumerate(logs)]
    return short(conformal(apart) / Z90) if apart else 0.0


def _shift(problem: Problem, numbers: Numbers, runtime: str) -> float:
    """Host factors of a runtime's runs over those of eager's, GPU by GPU the middle one, in the mean over GPUs.

    A profile is about one host for all its runtimes, and a GPU's runs in two runtimes were often on different hosts.
    All hosts together are taken to be as fast in both, so that what remains belongs to the runtime.
    """
    middles = []
    for gpu in sorted(set(problem.law.rows.gpu)):
        both = [_host_factors(problem, numbers, gpu, name) for name in (runtime, EAGER)]
        if all(both):
            middles.append([float(np.log(np.median(factors))) for factors in both])
    own, eager = np.mean(middles, axis=0)
    return float(np.exp(own - eager))


class Place(NamedTuple):
    """A GPU, and the factors of the hosts that it was measured on."""

    spec: Spec
    factors: list[float]


def dispatch(problem: Problem, numbers: Numbers, runtime: str, place: Place, accuracy: Accuracy | None) -> DispatchFit:
    """Host costs of a runtime on the middle of the hosts it was measured on."""
    factor = float(np.median(place.factors))

    def cost(name: str) -> float:
        return short(factor * numbers.host(name, runtime, place.spec))

    eager = runtime == EAGER  # no other runtime of a table calls modules or Python
    return DispatchFit(
        costs_us={"": short(factor * OTHER_HOST)}
        | {name: cost(name) for name in problem.law.cells.classes if name not in (FIXED, MODULE, PYTHON)},
        module_call_us=cost(MODULE) if eager else 0.0,
        python_call_us=cost(PYTHON) if eager else 0.0,
        fixed_us=cost(FIXED),
        spread=short(accuracy.small_batch / Z90) if accuracy else 0.5,
        busy_spread=short(accuracy.large_batch / Z90) if accuracy else 0.5,
    )


def _kernels_of(
    problem: Problem, numbers: Numbers, gpu: str, runtime: str, accuracy: Accuracy | None
) -> dict[str, dict[str, KernelFit]]:
    """Kernels of a runtime by precision and family, in the precisions that it was measured in."""
    rows, spec = problem.law.rows, problem.law.gpus[gpu]
    families = {family: family for family in sorted(problem.law.families(runtime))}
    families |= {family: like for family, like in STAND_INS.items() if like in families and family not in families}
    error, spread = (accuracy.median, short(accuracy.large_batch / Z90)) if accuracy else (0.5, 0.5)
    return {
        precision: {
            family: kernel_fit(family, numbers.kernel(like, spec, precision, runtime), spec, error, spread)
            for family, like in families.items()
        }
        for precision in sorted(set(rows.precision[(rows.gpu == gpu) & (rows.runtime == runtime)]))
    }


def _machine(problem: Problem, spec: Spec, hosts: int) -> Machine:
    stacks = sorted(set(problem.table.cells["stack"].astype(str)))
    stack = dict(re.findall(r"(\w+)=([\w.+-]+)", stacks[0])) if stacks else {}
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


def _protocol(problem: Problem, factors: list[float], worth: Mapping[str, Accuracy | None]) -> dict[str, str]:
    low, high = min(factors) / float(np.median(factors)), max(factors) / float(np.median(factors))
    return {
        "latency": "pipelined: mean over forward passes issued back to back",
        "mode": "evaluation mode, inputs on the device, one thread, contiguous, cudnn.benchmark off",
        "source": "fitted to published end-to-end latencies; no kernel or op was timed by itself",
        "hosts": f"dispatch of the middle host; those of the table took {low:.2f} to {high:.2f} times that",
        "assumed": "launch latency, synchronisation and copies are typical values",
        **({"era": problem.table.era} if problem.table.era else {}),
        **{
            "leave-one-model-out" if runtime == EAGER else f"leave-one-model-out, {runtime}": accuracy.text
            for runtime, accuracy in worth.items()
            if accuracy is not None
        },
    }


def _acceptance(worth: Mapping[str, Accuracy | None]) -> Acceptance:
    accuracy = worth[EAGER]
    others = {
        runtime: found is not None and found.median <= GOOD_ENOUGH
        for runtime, found in worth.items()
        if runtime != EAGER
    }
    if accuracy is None:
        return Acceptance(
            False,
            {"models left out": "not tried"},
            ("Judge the fit: latpred evaluate TABLE --leave-out model",),
            others,
        )
    passed = accuracy.median <= GOOD_ENOUGH
    checks = {"models left out": accuracy.text}
    return Acceptance(passed, checks, () if passed else (f"Measure it: {ADVICE}",), others)
