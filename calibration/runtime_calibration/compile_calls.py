"""The study of torch.compile: few networks, because each takes long to compile, with every call of theirs timed.

On a synchronous device the calls tell what generated kernels take, how library kernels compare to eager's, and what
each costs the host. Where a device is waited for, whole networks have to do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from latpred.calibration import schedules
from latpred.calibration.cells import Cell
from latpred.calibration.devices.base import Device
from latpred.calibration.fitting.dispatch_fit import with_parents
from latpred.calibration.fitting.kernel_fit import KernelSample, fit_kernels, row_of
from latpred.calibration.fitting.linear_system import Column, System
from latpred.calibration.runtime_calibration import runs
from latpred.calibration.runtime_calibration.whole_networks import WholeNetworks, effort, timed_after
from latpred.calibration.session import Row, Sampled
from latpred.calibration.timing import timer
from latpred.calibration.timing.reference_speed import SpeedGauge
from latpred.calibration.timing.timer import Timing
from latpred.calibration.workloads import networks
from latpred.calibration.workloads.networks import NetworkSpec
from latpred.errors import CalibrationError
from latpred.graph.features import layout
from latpred.graph.graph import Op
from latpred.ops.families import root
from latpred.prediction.kernel_times import resident_share
from latpred.prediction.pricing import PriceList, host_cost
from latpred.profile.document import DeviceProfile, DispatchFit, KernelFit
from latpred.runtimes import get
from latpred.runtimes.inductor.compiled_ops import EAGER, GENERATED_CLASS, GUARDS, JOINED_CLASS
from latpred.runtimes.lowering import target_of
from latpred.units import US_PER_S

_LIBRARIES = ("extern_kernels", "torch", "aten")


class Placed(NamedTuple):
    """Passes whose calls were timed: median microseconds of each call, and what a pass takes beside them all.

    There are no calls where passes made different numbers of them.
    """

    calls_us: tuple[float, ...]
    outside: Timing


@contextlib.contextmanager
def wrappers() -> Iterator[list[ModuleType]]:
    """The wrappers that are loaded while the context lasts; the list is filled when it ends."""
    from torch._inductor.codecache import PyCodeCache

    before = {id(module) for module in PyCodeCache.modules}
    found: list[ModuleType] = []
    yield found
    found += [module for module in PyCodeCache.modules if id(module) not in before]


def time_calls(
    call: Callable[[], object],
    modules: Sequence[ModuleType],
    before: Callable[[], object],
    gauge: SpeedGauge,
    *,
    repeats: int,
    budget_s: float,
) -> Placed:
    """Time each call that the wrappers make in one forward pass, in order.

    Parameters
    ----------
    call : callable
        Runs the forward pass.
    modules : sequence of module
        Its wrappers.
    before : callable
        Run before each pass.
    gauge : SpeedGauge
        Tells slow moments, whose passes do not count.
    repeats, budget_s : int, float
        Passes, and seconds after which there is no other once there were three.
    """
    seconds: list[float] = []

    def turn() -> tuple[float, list[float]]:
        before()
        seconds.clear()
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun - sum(seconds), list(seconds)

    with _watched(modules, seconds):
        done, slow = timer.turns(turn, gauge, repeats=repeats, budget_s=budget_s)
    outside, passes = [one[0] for one in done], [one[1] for one in done]
    beside = timer.summary(outside, slow)
    if len({len(one) for one in passes}) != 1:
        return Placed((), beside)
    return Placed(tuple(float(us) for us in np.median(np.array(passes), axis=0) * US_PER_S), beside)


@contextlib.contextmanager
def _watched(modules: Sequence[ModuleType], seconds: list[float]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in modules:
            names = vars(module)
            stack.callback(names.update, dict(names))
            for name, value in list(names.items()):
                if name.startswith("cpp_") and callable(value):
                    names[name] = _with_timer(value, seconds)
                elif name in _LIBRARIES:
                    names[name] = _Library(value, seconds, name != "torch")
        yield


class _Library:
    """A namespace of kernels whose calls are timed; what is no kernel is passed on."""

    def __init__(self, inside: Any, seconds: list[float], kernels: bool) -> None:
        self._inside, self._seconds, self._kernels = inside, seconds, kernels

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inside, name)
        if name == "ops" or (self._kernels and not callable(value)) or hasattr(value, "overloads"):
            value = _Library(value, self._seconds, True)
        elif self._kernels and callable(value):
            value = _with_timer(value, self._seconds)
        self.__dict__[name] = value
        return value


def _with_timer(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    clock = time.perf_counter

    def timed(*args: Any, **options: Any) -> Any:
        begun = clock()
        out = function(*args, **options)
        seconds.append(clock() - begun)
        return out

    return timed


SECONDS = 240.0
FOLDS = 8
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
IDLE = 0.25  # quantile of the calls of tiny networks: not all of their kernels have next to nothing to do
GENERATED_FAMILY = "generated"
CALL_SIGMA = 0.2  # relative error of what a library call takes, the eager profile's own included
CALL_SIGMA_US = 10.0  # and in microseconds: the host's part of a call is less sure than its kernel's
PUSHING_US = 30.0  # a kernel of that length has pushed out half of what it can
LIBRARY_CALL = (8.0, 8.0)  # microseconds of the host that such a call is believed to cost, and the doubt
SCALE_SIGMA = 0.3  # how far a library kernel's time is believed to lie from eager's
FIXED, CALL = ("fixed",), ("call",)
_COLS = layout(GENERATED_FAMILY).columns.index("cols")
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
    resident: float


class Compiled(WholeNetworks):
    """The study of `compile`.

    Examples
    --------
    >>> from latpred.calibration.devices.base import open_device
    >>> next(Compiled().cells(open_device("cpu"), "fp32")).name
    'encoder'
    """

    def __init__(self, runtime: str = "compile") -> None:
        super().__init__(runtime, SECONDS)
        self.folds = FOLDS

    def cells(self, device: Device, precision: str) -> Iterator[Cell]:
        """Tiny networks for the host's costs between sized ones, of a kind each; judges among them."""
        if device.asynchronous:
            yield from super().cells(device, precision)
            return
        drawn = {
            "tiny": iter(schedules.tiny_networks(len(networks.KINDS))),
            "sized": (
                spec for spec in schedules.sized_networks() if not spec.judge and _launches(spec) <= MOST_LAUNCHES
            ),
            "judge": (spec for spec in schedules.judging_networks() if _launches(spec) <= MOST_JUDGED),
        }
        wanted = {"tiny": TINY_KINDS, "sized": KINDS, "judge": JUDGE_KINDS}
        ordered = {name: _in_order(drawn[name], wanted[name]) for name in drawn}
        for turn in count():
            spec = next(ordered[TURN[turn % len(TURN)]], None)
            if spec is not None:
                yield schedules.network_cell(spec, precision, self.runtime)

    def measure(self, cell: Cell, device: Device) -> Sampled:
        """Time a network whole, and each call of its wrapper."""
        if device.asynchronous:
            return super().measure(cell, device)
        spec = schedules.network_spec(cell)
        runs.graph_of(spec, cell.precision, self.runtime, target_of(device.info().kind))
        device.use_precision(cell.precision)
        with wrappers() as modules:
            model, inputs = runs.built(spec, cell.precision), runs.inputs_of(spec, cell.precision)
            call = device.prepare_model(model, inputs, self.runtime)
        before = self._evict if spec.cold else call
        forward = timed_after(call, before, self._gauge, *effort(spec))
        placed = time_calls(call, modules, before, self._gauge, repeats=REPEATS, budget_s=CALLS_S)
        return Sampled({"single": forward, OUTSIDE: placed.outside}, placed.calls_us)

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
        calls, scales = _library(timed, kernels, profile)
        return msgspec.structs.replace(
            _host({**_idle_us(timed), **calls}, beside, profile),
            kernels=_generated(timed, kernels),
            kernel_scales=scales,
        )


def _launches(spec: NetworkSpec) -> int:
    graph = schedules.walked(spec)
    return 0 if graph is None else graph.launches()  # who measures what cannot be traced says so in its row


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
    spec = schedules.network_spec(row.cell)
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
    resident = resident_share(graph.parameter_bytes, graph.bytes(spec.batch), profile.device)
    outside_us = max(row.timings[OUTSIDE].median_s, 0.0) * US_PER_S
    return Timed(spec, row.cell.precision, ops, outside_us, groups, resident)


def _tiny(timed: Sequence[Timed]) -> Sequence[Timed]:
    return [one for one in timed if one.spec.tiny] or timed


def _idle_us(timed: Sequence[Timed]) -> dict[str, float]:
    """What a call of each class takes where it has next to nothing to do."""
    calls: dict[str, list[float]] = {}
    for group in (group for one in _tiny(timed) for group in one.groups):
        calls.setdefault(group.ops[0].host_class, []).append(group.us)
    return {name: float(np.quantile(us, IDLE)) for name, us in calls.items()}


def _beside(timed: Sequence[Timed], profile: DeviceProfile) -> dict[Column, float]:
    """What a pass takes beside its calls, where these have next to nothing to do."""
    eager = profile.runtimes["eager"]
    system = System()
    for one in _tiny(timed):
        system.measured(_steps(one), one.outside_us, 0.1 * one.outside_us)
    for name, (us, sigma) in {**BELIEFS, "fixed": (eager.fixed_us, max(eager.fixed_us, 1.0))}.items():
        system.believed({(name,): 1.0}, us, sigma)
    return system.solve()


def _steps(one: Timed) -> dict[Column, float]:
    """How often a pass does what it does beside its calls."""
    guards, inputs = sum(op.host_class == GUARDS for op in one.ops), sum(op.python_calls for op in one.ops)
    return {FIXED: 1.0, ("guards",): float(guards), ("input",): float(inputs), ("call",): float(len(one.groups))}


def _host(calls: Mapping[str, float], beside: Mapping[Column, float], profile: DeviceProfile) -> DispatchFit:
    """What calls of each class cost beside their kernels, and what a pass takes beside the calls."""
    eager = profile.runtimes["eager"]
    costs = _as_eager(eager.costs_us, eager.scale)
    costs |= with_parents({name: us + beside["call",] for name, us in calls.items()})
    costs |= {GUARDS: beside["guards",], JOINED_CLASS: 0.0}
    return DispatchFit(
        costs_us={name: round(us, 5) for name, us in costs.items()},
        module_call_us=0.0,
        python_call_us=round(beside["input",], 5),
        fixed_us=round(beside[FIXED], 4),
        # The same code of PyTorch's runs an op that was not compiled; what generated code and guards take is not known.
        cold_costs_us=_as_eager(eager.cold_costs_us),
        cold_bytes=eager.cold_bytes,
    )


def _as_eager(costs_us: Mapping[str, float], scale: float = 1.0) -> dict[str, float]:
    """Costs of eager's classes as those of the ops that a compiled model leaves to eager."""
    return {f"{EAGER}.{name}" if name else EAGER: us * scale for name, us in costs_us.items()}


class Kernels(NamedTuple):
    """How a call's time becomes its kernel's: calls that have nothing to do, and what a kernel leaves behind."""

    idle: DispatchFit
    afterwork: float

    def us(self, group: Group) -> float:
        """What a call takes beyond one that has nothing to do, with what the host takes longer after it."""
        return _kernel_us(group, self.idle) + self.after_us(group)

    def after_us(self, group: Group) -> float:
        """What the host takes longer after a call, for what its kernel has pushed out of the caches."""
        return self.afterwork * _pushed(_kernel_us(group, self.idle))


def _afterwork(timed: Sequence[Timed], beside: Mapping[Column, float], idle: DispatchFit) -> float:
    """What the host takes longer after a kernel that has pushed all of its own out of the caches.

    Beside calls that do much a pass takes several times what it takes beside tiny ones: kernels push the host's code
    and data out of the caches, the more the longer they run, but no more than caches hold.
    """
    found = []
    for one in [one for one in timed if not one.spec.tiny]:
        usual_us = sum(beside[name] * number for name, number in _steps(one).items())
        pushed = sum(_pushed(_kernel_us(group, idle)) for group in one.groups)
        found.append(max(one.outside_us - usual_us, 0.0) / pushed)
    return float(np.median(found)) if found else 0.0


def _pushed(kernel_us: float) -> float:
    """Share of the host's code and data that a kernel has pushed out of the caches."""
    return kernel_us / (kernel_us + PUSHING_US)


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
                families = {op.family for op in group.ops}
                family = families.pop() if len(families) == 1 else GENERATED_FAMILY
                sample = KernelSample(family, row, kernels.us(group))
                samples.setdefault(one.precision, []).append(sample)
    fits = {precision: fit_kernels(found) for precision, found in samples.items()}
    return {precision: found for precision, found in fits.items() if found}


def _together(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Kernels that one call runs, as one: all but the size of a result's sum adds up."""
    summed = np.sum(rows, axis=0)
    summed[_COLS] = np.max(rows, axis=0)[_COLS]
    return tuple(summed.tolist())


def _library(
    timed: Sequence[Timed], kernels: Kernels, profile: DeviceProfile
) -> tuple[dict[str, float], dict[str, float]]:
    """What a call of each class of library kernels costs the host, and the kernels' time over eager's by family.

    The two are told apart together, by calls that have little to do and calls that have much: some families have none
    of the one kind, and what is left of a small kernel's call says nothing of the other.
    """
    system = System()
    prices = PriceList(msgspec.structs.replace(profile, runtimes={**profile.runtimes, "compile": kernels.idle}))
    for one in timed:
        eager_us = _eager_us(one, prices)
        for group in one.groups:
            name, usual = group.ops[0].host_class, eager_us.get(id(group.ops[0]), 0.0)
            if name != GENERATED_CLASS:
                family = root(group.ops[0].family)
                us = group.us if one.spec.tiny else group.us + kernels.after_us(group)
                sigma = CALL_SIGMA * us + CALL_SIGMA_US
                system.measured({("class", name): 1.0, ("scale", family): usual}, us, sigma)
    system.believed({CALL: 1.0}, *LIBRARY_CALL)
    for name in system.names("class"):
        system.believed({("class", name): 1.0, CALL: -1.0}, 0.0, LIBRARY_CALL[1])
    for family in system.names("scale"):
        system.believed({("scale", family): 1.0}, 1.0, SCALE_SIGMA)
    found = system.solve()
    calls = {column[1]: us for column, us in found.items() if column[0] == "class"}
    return calls, {column[1]: round(scale, 4) for column, scale in found.items() if column[0] == "scale"}


def _eager_us(one: Timed, prices: PriceList) -> Mapping[int, float]:
    """Kernel time of each op as the profile's shared fits have it."""
    graph = runs.graph_of(one.spec, one.precision, "compile", "cpu")
    schedule = get("compile").lower(graph, one.spec.batch)
    priced = prices.price(schedule, one.precision, resident=one.resident)
    rows = priced.rows_at(np.array([float(one.spec.batch)])).us[:, 0]
    times = rows[priced.kernel_row] * priced.kernel_share
    return {id(one.ops[op]): us for op, us in zip(schedule.kernel_op.tolist(), times.tolist(), strict=True)}
