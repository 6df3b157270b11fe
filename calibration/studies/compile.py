"""The study of torch.compile: few networks, because each takes long to compile, with every call of theirs timed.

On a synchronous device the calls tell what generated kernels take, how library kernels compare to eager's, and what
each costs the host. Where a device is waited for, whole networks have to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import msgspec
import numpy as np

from latpred.calibration import networks, suite
from latpred.calibration.cells import Cell
from latpred.calibration.device import Device
from latpred.calibration.dispatchfit import with_parents
from latpred.calibration.kernelfit import KernelSample, fit_kernels, row_of
from latpred.calibration.networks import NetworkSpec
from latpred.calibration.session import Row, Sampled
from latpred.calibration.studies import runs, wrapper
from latpred.calibration.studies.solving import Column, System
from latpred.calibration.studies.whole import WholeNetworks, effort, in_turns
from latpred.calibration.tempo import TEMPO
from latpred.errors import CalibrationError
from latpred.features import WORK
from latpred.graph import Op
from latpred.ops.families import root
from latpred.pricing import PriceList, host_cost
from latpred.profile import DeviceProfile, DispatchFit, KernelFit
from latpred.runtimes import get
from latpred.runtimes.inductor_lines import EAGER, GUARDS
from latpred.runtimes.inductor_steps import GENERATED_CLASS, JOINED_CLASS
from latpred.runtimes.walking import target_of
from latpred.units import US_PER_S

SECONDS = 150.0
FEWEST = 3  # networks below which nothing is fitted
# Kinds in the order of what a compilation of one teaches. Recurrent networks are hardly compiled at all.
TINY_KINDS = ("encoder", "window", "mobile", "mixer")
KINDS = ("encoder", "residual", "patch", "mobile", "window", "decoder", "dense", "mixer", "audio")
JUDGE_KINDS = ("patch", "mixer", "encoder", "dense", "audio", "window", "mobile")
# Kernels of its eager walk beyond which a network takes too long to compile; judges only have to be many.
MOST_LAUNCHES, MOST_JUDGED = 48, 36
TURN = ("tiny", "sized", "judge", "sized")
REPEATS, CALLS_S = 30, 0.3
OUTSIDE = "outside"  # the timing of what a pass takes beside its calls
LEAST_US = 0.05  # of a kernel whose call took no longer than a call that does nothing
TOLD_US = 5.0  # kernel time from which a call tells how fast a library kernel is
SHRINKAGE = 2.0  # calls' worth of belief that a library kernel takes what it takes in eager
FIXED = ("fixed",)
# What is believed of the host before anything is measured, in microseconds: value and doubt.
BELIEFS = {"guards": (10.0, 10.0), "input": (0.15, 0.15), "call": (0.7, 0.5)}


class Group(NamedTuple):
    """One call of a wrapper: the steps it runs, and the microseconds it took."""

    ops: tuple[Op, ...]
    us: float


class Timed(NamedTuple):
    """A network whose calls were timed: its spec and precision, its steps, their calls and what passes beside them."""

    spec: NetworkSpec
    precision: str
    ops: tuple[Op, ...]
    outside_us: float
    groups: tuple[Group, ...]
    resident: bool


class Compiled(WholeNetworks):
    """The study of `compile`.

    Examples
    --------
    >>> from latpred.calibration.device import open_device
    >>> next(Compiled().cells(open_device("cpu"), "fp32")).name
    'encoder'
    """

    def __init__(self, runtime: str = "compile") -> None:
        super().__init__(runtime, SECONDS)

    def cells(self, device: Device, precision: str) -> Iterator[Cell]:
        """Tiny networks for the host's costs between sized ones, of a kind each; judges among them."""
        if device.asynchronous:
            yield from super().cells(device, precision)
            return
        drawn = {
            "tiny": iter(suite.tiny_networks(len(networks.KINDS))),
            "sized": (spec for spec in suite.sized_networks() if not spec.judge and _launches(spec) <= MOST_LAUNCHES),
            "judge": (spec for spec in suite.judging_networks() if _launches(spec) <= MOST_JUDGED),
        }
        wanted = {"tiny": TINY_KINDS, "sized": KINDS, "judge": JUDGE_KINDS}
        ordered = {name: _in_order(drawn[name], wanted[name]) for name in drawn}
        for turn in count():
            spec = next(ordered[TURN[turn % len(TURN)]], None)
            if spec is not None:
                yield suite.network_cell(spec, precision, self.runtime)

    def measure(self, cell: Cell, device: Device) -> Sampled:
        """Time a network whole, and each call of its wrapper."""
        if device.asynchronous:
            return super().measure(cell, device)
        spec = suite.network_spec(cell)
        runs.graph_of(spec, cell.precision, self.runtime, target_of(device.info().kind))
        device.use_precision(cell.precision)
        with wrapper.wrappers() as modules:
            model, inputs = runs.built(spec, cell.precision), runs.inputs_of(spec, cell.precision)
            call = device.prepare_model(model, inputs, self.runtime)
        before = self._evict if spec.cold else call
        forward, tempo = in_turns(call, before, self._metronome.beat, *effort(spec))
        placed = wrapper.time_calls(call, modules, before, repeats=REPEATS, budget_s=CALLS_S)
        return Sampled({"single": forward, TEMPO: tempo, OUTSIDE: placed.outside}, placed.calls_us)

    def fit(self, rows: Sequence[Row], profile: DeviceProfile) -> DispatchFit:
        """Host costs, generated kernels, and library kernels in proportion to eager's."""
        if profile.device.asynchronous:
            return super().fit(rows, profile)
        timed = [one for one in (_timed(row, profile) for row in rows) if one is not None]
        if len(timed) < FEWEST:
            raise CalibrationError(
                f"{len(timed)} networks were compiled and timed, too few to tell what torch.compile costs. "
                "Give it more time: latpred calibrate --runtimes compile --budget 5m"
            )
        beside, idle = _beside(timed, profile), DispatchFit(with_parents(_idle_us(timed)), 0.0, 0.0, 0.0)
        kernels = Kernels(idle, _afterwork(timed, beside, idle))
        return msgspec.structs.replace(
            _host(timed, beside, profile),
            kernels=_generated(timed, kernels),
            kernel_scales=_library(timed, kernels, profile),
        )


def _launches(spec: NetworkSpec) -> int:
    return networks.graph(spec).launches()


def _in_order(specs: Iterator[NetworkSpec], kinds: Sequence[str]) -> Iterator[NetworkSpec]:
    """Networks with their kinds in turn; those that come early wait for it."""
    waiting: dict[str, list[NetworkSpec]] = {kind: [] for kind in kinds}
    for turn in count():
        kind = kinds[turn % len(kinds)]
        while not waiting[kind]:
            spec = next(specs, None)
            if spec is None:
                return
            waiting.setdefault(spec.kind, []).append(spec)
        yield waiting[kind].pop(0)


def _timed(row: Row, profile: DeviceProfile) -> Timed | None:
    """A row as calls and the steps they run; None for judges, and where the two do not fit together."""
    spec = suite.network_spec(row.cell)
    if spec.judge:
        return None
    graph = runs.graph_of(spec, row.cell.precision, row.cell.runtime, target_of(profile.device.kind))
    ops = graph.at(spec.batch)
    joined: list[list[Op]] = []
    for op in ops:
        if op.host_class == JOINED_CLASS:
            joined[-1].append(op)
        elif op.host_class.startswith("kernel."):
            joined.append([op])
    if len(joined) != len(row.calls_us) or OUTSIDE not in row.timings:
        return None
    groups = tuple(Group(tuple(one), us) for one, us in zip(joined, row.calls_us, strict=True))
    resident = 0 < graph.parameter_bytes <= profile.device.cache_bytes
    outside_us = max(row.timings[OUTSIDE].median_s, 0.0) * US_PER_S
    return Timed(spec, row.cell.precision, ops, outside_us, groups, resident)


def _tiny(timed: Sequence[Timed]) -> Sequence[Timed]:
    return [one for one in timed if one.spec.tiny] or timed


def _idle_us(timed: Sequence[Timed]) -> dict[str, float]:
    """What a call of each class takes where it has next to nothing to do."""
    calls: dict[str, list[float]] = {}
    for group in (group for one in _tiny(timed) for group in one.groups):
        calls.setdefault(group.ops[0].host_class, []).append(group.us)
    return {name: float(np.median(us)) for name, us in calls.items()}


def _beside(timed: Sequence[Timed], profile: DeviceProfile) -> dict[Column, float]:
    """What a pass takes beside its calls, where these have next to nothing to do."""
    eager = profile.runtimes["eager"]
    system = System()
    for one in _tiny(timed):
        system.measured(_steps(one), one.outside_us, 0.1 * one.outside_us)
    for name, (us, doubt) in {**BELIEFS, "fixed": (eager.fixed_us, max(eager.fixed_us, 1.0))}.items():
        system.believed({(name,): 1.0}, us, doubt)
    return system.solve()


def _steps(one: Timed) -> dict[Column, float]:
    """How often a pass does what it does beside its calls."""
    guards, inputs = sum(op.host_class == GUARDS for op in one.ops), sum(op.python_calls for op in one.ops)
    return {FIXED: 1.0, ("guards",): float(guards), ("input",): float(inputs), ("call",): float(len(one.groups))}


def _host(timed: Sequence[Timed], beside: Mapping[Column, float], profile: DeviceProfile) -> DispatchFit:
    """What calls cost where they have next to nothing to do, and what a pass takes beside them."""
    eager = profile.runtimes["eager"]
    costs = {f"{EAGER}.{name}" if name else EAGER: us * eager.scale for name, us in eager.costs_us.items()}
    costs |= with_parents({name: us + beside["call",] for name, us in _idle_us(timed).items()})
    costs |= {GUARDS: beside["guards",], JOINED_CLASS: 0.0}
    return DispatchFit(
        costs_us={name: round(us, 5) for name, us in costs.items()},
        module_call_us=0.0,
        python_call_us=round(beside["input",], 5),
        fixed_us=round(beside[FIXED], 4),
    )


class Kernels(NamedTuple):
    """How a call's time becomes its kernel's: calls that have nothing to do, and what a kernel leaves behind."""

    idle: DispatchFit
    afterwork: float

    def us(self, group: Group) -> float:
        """What a call takes beyond one that has nothing to do, with what the host takes longer after it."""
        own = _kernel_us(group, self.idle)
        return own + self.afterwork * math.sqrt(own)


def _afterwork(timed: Sequence[Timed], beside: Mapping[Column, float], idle: DispatchFit) -> float:
    """What the host takes longer after a kernel of one microsecond; it grows with the root of the kernel's time.

    Beside calls that do much a pass takes several times what it takes beside tiny ones: kernels push the host's own
    code and data out of the caches, the more the longer they run, but no more than caches hold. A cold network's are
    out from the beginning, so only others tell.
    """
    sized = [one for one in timed if not one.spec.tiny]
    found = []
    for one in [one for one in sized if not one.spec.cold] or sized:
        usual_us = sum(beside[name] * number for name, number in _steps(one).items())
        roots = sum(_kernel_us(group, idle) ** 0.5 for group in one.groups)
        found.append(max(one.outside_us - usual_us, 0.0) / roots)
    return float(np.median(found)) if found else 0.0


def _kernel_us(group: Group, idle: DispatchFit) -> float:
    """What a call takes beyond one that has nothing to do."""
    return max(group.us - host_cost(idle, group.ops[0].host_class), LEAST_US)


def _generated(timed: Sequence[Timed], kernels: Kernels) -> dict[str, dict[str, KernelFit]]:
    """Fits of generated kernels by precision."""
    samples: dict[str, list[KernelSample]] = {}
    for one in timed:
        for group in one.groups:
            if group.ops[0].host_class == GENERATED_CLASS:
                row = _together([row_of(op, one.spec.batch, resident=one.resident) for op in group.ops])
                sample = KernelSample(group.ops[0].family, row, kernels.us(group))
                samples.setdefault(one.precision, []).append(sample)
    fits = {precision: fit_kernels(found) for precision, found in samples.items()}
    return {precision: found for precision, found in fits.items() if found}


def _together(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Kernels that one call runs, as one: work, points and parts add up."""
    work, (points, cols, parts) = np.sum(rows, axis=0)[: len(WORK)], np.array(rows)[:, len(WORK) :].T
    return (*work.tolist(), float(points.sum()), float(cols.max()), float(parts.sum()))


def _library(timed: Sequence[Timed], kernels: Kernels, profile: DeviceProfile) -> dict[str, float]:
    """Time of library kernels over eager's, by family."""
    logs: dict[str, list[float]] = {}
    prices = PriceList(msgspec.structs.replace(profile, runtimes={**profile.runtimes, "compile": kernels.idle}))
    for one in timed:
        eager_us = _eager_us(one, prices)
        for group in one.groups:
            usual = eager_us.get(id(group.ops[0]), 0.0)
            if group.ops[0].host_class != GENERATED_CLASS and usual >= TOLD_US:
                logs.setdefault(root(group.ops[0].family), []).append(float(np.log(kernels.us(group) / usual)))
    return {family: _scale(found) for family, found in logs.items()}


def _scale(logs: Sequence[float]) -> float:
    return round(float(np.exp(np.median(logs) * len(logs) / (len(logs) + SHRINKAGE))), 4)


def _eager_us(one: Timed, prices: PriceList) -> Mapping[int, float]:
    """Kernel time of each op as the profile's shared fits have it."""
    graph = runs.graph_of(one.spec, one.precision, "compile", "cpu")
    schedule = get("compile").lower(graph, one.spec.batch)
    priced = prices.price(schedule, one.precision, resident=one.resident)
    rows = priced.rows_at(np.array([float(one.spec.batch)])).us[:, 0]
    times = rows[priced.kernel_row] * priced.kernel_share
    return {id(one.ops[op]): us for op, us in zip(schedule.kernel_op.tolist(), times.tolist(), strict=True)}
