"""CompileCalibrator: few networks, because torch.compile takes long on each, with every call of theirs timed.

On a synchronous device the calls of a compiled wrapper tell what generated kernels take, how library kernels compare to
eager's, and what each costs the host. Where a device is waited for, whole networks have to do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from latpred.calibration import schedules
from latpred.calibration.cells import Cell
from latpred.calibration.devices import Device
from latpred.calibration.fitting.dispatch_fit import with_parents
from latpred.calibration.fitting.kernel_fit import KernelSample, fit_kernels, row_of
from latpred.calibration.fitting.linear_system import Column, System, of_kind
from latpred.calibration.runtime_calibration.base import RuntimeCalibrator, effort
from latpred.calibration.runtime_calibration.network_fit import is_holdout
from latpred.calibration.session import Row, Sampled
from latpred.calibration.timing import timer
from latpred.calibration.timing.reference_speed import SpeedGauge
from latpred.calibration.timing.timer import Timing
from latpred.calibration.workloads import networks
from latpred.calibration.workloads.networks import NetworkSpec
from latpred.errors import CalibrationError
from latpred.graph.features import layout
from latpred.graph.graph import ModelGraph, Op
from latpred.ops.families import root
from latpred.prediction.kernel_times import resident_share
from latpred.prediction.pricing import PriceList, host_cost
from latpred.profile.document import DeviceProfile, DispatchFit, KernelFit
from latpred.runtimes import get
from latpred.runtimes.inductor.compiled_ops import EAGER, GENERATED_CLASS, GUARDS, JOINED_CLASS
from latpred.units import US_PER_S

SECONDS = 240.0
FEWEST = 3  # networks below which nothing is fitted
# Kinds in the order of what a compilation of one teaches. Recurrent networks are hardly compiled at all.
KINDS = {
    "tiny": ("encoder", "window", "mobile", "mixer"),
    "sized": ("encoder", "residual", "patch", "mobile", "window", "decoder", "dense", "mixer", "audio"),
    "holdout": ("patch", "mixer", "encoder", "dense", "audio", "window", "mobile"),
}
# Kernels of its eager graph beyond which a network takes too long to compile; holdouts only have to be many.
MOST_LAUNCHES, MOST_HOLDOUT_LAUNCHES = 48, 36
TURN = ("tiny", "sized", "holdout", "sized")
REPEATS, CALLS_S = 30, 0.3
OUTSIDE = "outside"  # the timing of what a pass takes beside its calls
LEAST_US = 0.05  # of a kernel whose call took no longer than a call that does nothing
IDLE = 0.25  # quantile of the calls of tiny networks: not all of their kernels have next to nothing to do
GENERATED_FAMILY = "generated"
CALL_SIGMA = 0.2  # relative error of what a library call takes, the eager profile's own included
CALL_SIGMA_US = 10.0  # and in microseconds: the host's part of a call is less sure than its kernel's
PUSHING_US = 30.0  # a kernel of that length has pushed out half of what it can
FIXED, CALL = ("fixed",), ("call",)
# Priors, as value and sigma: of the host in microseconds, and of a library kernel's time over eager's.
LIBRARY_CALL_US = (8.0, 8.0)
BESIDE_CALLS_US = {"guards": (10.0, 10.0), "input": (0.15, 0.15), "call": (0.7, 0.5)}
SCALE = (1.0, 0.3)
_COLS = layout(GENERATED_FAMILY).columns.index("cols")
_LIBRARIES = ("extern_kernels", "torch", "aten")


class WrapperCall(NamedTuple):
    """One call of a wrapper: the steps it runs, and the microseconds it took."""

    ops: tuple[Op, ...]
    us: float

    @property
    def host_class(self) -> str:
        """Of its first step, which prices the call."""
        return self.ops[0].host_class


class CompiledNetwork(NamedTuple):
    """A network whose calls were timed; `outside_us` passes beside them, `resident` of its weights are cached."""

    spec: NetworkSpec
    graph: ModelGraph
    outside_us: float
    calls: tuple[WrapperCall, ...]
    resident: float

    @property
    def beside_calls(self) -> dict[Column, float]:
        """How often a pass does what it does beside its calls."""
        ops = self.graph.at(self.spec.batch)
        guards, inputs = sum(op.host_class == GUARDS for op in ops), sum(op.python_calls for op in ops)
        return {FIXED: 1.0, ("guards",): float(guards), ("input",): float(inputs), CALL: float(len(self.calls))}


class CompileCalibrator(RuntimeCalibrator):
    """Calibrates `compile`.

    >>> from latpred.calibration.devices import open_device
    >>> next(CompileCalibrator().cells(open_device("cpu"), "fp32")).name
    'encoder'
    """

    folds = 8

    def __init__(self, runtime: str = "compile") -> None:
        super().__init__(runtime, SECONDS)

    def cells(self, device: Device, precision: str) -> Iterator[Cell]:
        """Tiny networks for the host's costs between sized ones, of a kind each; holdouts among them."""
        if device.asynchronous:
            yield from super().cells(device, precision)
            return
        drawn = {
            "tiny": iter(schedules.tiny_networks(len(networks.KINDS))),
            "sized": (
                spec for spec in schedules.sized_networks() if not spec.holdout and _launches(spec) <= MOST_LAUNCHES
            ),
            "holdout": (spec for spec in schedules.holdout_networks() if _launches(spec) <= MOST_HOLDOUT_LAUNCHES),
        }
        ordered = {name: _in_order(drawn[name], KINDS[name]) for name in drawn}
        for turn in cycle(TURN):
            spec = next(ordered[turn], None)
            if spec is not None:
                yield schedules.network_cell(spec, precision, self.runtime)

    def measure(self, cell: Cell, device: Device) -> Sampled:
        """Time a network whole, and each call of its wrapper."""
        if device.asynchronous:
            return super().measure(cell, device)
        spec = schedules.network_spec(cell)
        graph = networks.graph_in(spec, cell.precision, self.runtime, device.info().kind)
        with _wrappers() as modules:
            call = self.prepared(cell, graph, device)
        before = self._evict if spec.cold else call
        whole = self.timed(call, before, *effort(spec))
        calls_us, outside = time_calls(call, modules, before, self._gauge, repeats=REPEATS, budget_s=CALLS_S)
        return Sampled({"single": whole, OUTSIDE: outside}, calls_us)

    def fit(self, rows: Sequence[Row], profile: DeviceProfile) -> DispatchFit:
        """Host costs, generated kernels, and library kernels in proportion to eager's."""
        if profile.device.asynchronous:
            return super().fit(rows, profile)
        compiled = [one for row in rows if (one := _compiled_network(row, profile)) is not None]
        if len(compiled) < FEWEST:
            raise CalibrationError(
                f"{len(compiled)} networks were compiled and timed, too few to tell what torch.compile costs. "
                "Give it more time: latpred calibrate --runtimes compile --budget 5m"
            )
        beside_us, idle_us = _beside_calls_us(compiled, profile), _idle_us(compiled)
        idle = CallKernels(DispatchFit(with_parents(idle_us), 0.0, 0.0, 0.0))
        kernels = idle.with_refill(compiled, beside_us)
        library_us, scales = _library(compiled, kernels, profile)
        return msgspec.structs.replace(
            _host({**idle_us, **library_us}, beside_us, profile),
            kernels=_generated(compiled, kernels),
            kernel_scales=scales,
        )


def _launches(spec: NetworkSpec) -> int:
    graph = schedules.traced(spec)
    return 0 if graph is None else graph.launches()  # who measures what cannot be traced says so in its row


def _in_order(specs: Iterator[NetworkSpec], kinds: Sequence[str]) -> Iterator[NetworkSpec]:
    """Networks with their kinds in turn; those that come early wait for it."""
    waiting: dict[str, list[NetworkSpec]] = {kind: [] for kind in kinds}
    for kind in cycle(kinds):
        while not waiting[kind]:
            spec = next(specs, None)
            if spec is None:
                return
            waiting.setdefault(spec.kind, []).append(spec)
        yield waiting[kind].pop(0)


# -- timing the calls of a wrapper ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _wrappers() -> Iterator[list[ModuleType]]:
    """The wrappers that are loaded while the context lasts; the list is filled when it ends."""
    from torch._inductor.codecache import PyCodeCache

    before = {id(module) for module in PyCodeCache.modules}
    loaded: list[ModuleType] = []
    yield loaded
    loaded += [module for module in PyCodeCache.modules if id(module) not in before]


def time_calls(
    call: Callable[[], object],
    modules: Sequence[ModuleType],
    before: Callable[[], object],
    gauge: SpeedGauge,
    *,
    repeats: int,
    budget_s: float,
) -> tuple[tuple[float, ...], Timing]:
    """Median microseconds of each call that the wrappers make in one forward pass, and what it takes beside them all.

    `before` runs before each pass. There are no calls where passes made different numbers of them.
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
    beside, passes = timer.summary([one[0] for one in done], slow), [one[1] for one in done]
    if len({len(one) for one in passes}) != 1:
        return (), beside
    return tuple((np.median(passes, axis=0) * US_PER_S).tolist()), beside


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


# -- the fit -------------------------------------------------------------------------------------------------------


def _compiled_network(row: Row, profile: DeviceProfile) -> CompiledNetwork | None:
    """A row as calls and the steps they run; None for holdouts, and where the two do not fit together."""
    if is_holdout(row):
        return None
    spec = schedules.network_spec(row.cell)
    graph = networks.graph_in(spec, row.cell.precision, row.cell.runtime, profile.device.kind)
    joined: list[list[Op]] = []
    for op in graph.at(spec.batch):
        if op.host_class == JOINED_CLASS:
            joined[-1].append(op)
        elif op.host_class.startswith("kernel."):
            joined.append([op])
    if len(joined) != len(row.calls_us) or OUTSIDE not in row.timings:
        return None
    calls = tuple(WrapperCall(tuple(ops), us) for ops, us in zip(joined, row.calls_us, strict=True))
    resident = resident_share(graph.parameter_bytes, graph.bytes(spec.batch), profile.device)
    outside_us = max(row.timings[OUTSIDE].median_s, 0.0) * US_PER_S
    return CompiledNetwork(spec, graph, outside_us, calls, resident)


def _tiny(compiled: Sequence[CompiledNetwork]) -> Sequence[CompiledNetwork]:
    return [one for one in compiled if one.spec.tiny] or compiled


def _idle_us(compiled: Sequence[CompiledNetwork]) -> dict[str, float]:
    """What a call of each class takes where it has next to nothing to do."""
    calls: dict[str, list[float]] = {}
    for call in (call for one in _tiny(compiled) for call in one.calls):
        calls.setdefault(call.host_class, []).append(call.us)
    return {name: float(np.quantile(us, IDLE)) for name, us in calls.items()}


def _beside_calls_us(compiled: Sequence[CompiledNetwork], profile: DeviceProfile) -> dict[Column, float]:
    """What a pass takes beside its calls, where these have next to nothing to do."""
    fixed_us = profile.runtimes["eager"].fixed_us
    system = System()
    for one in _tiny(compiled):
        system.measured(one.beside_calls, one.outside_us, 0.1 * one.outside_us)
    for name, (us, sigma) in {**BESIDE_CALLS_US, "fixed": (fixed_us, max(fixed_us, 1.0))}.items():
        system.prior({(name,): 1.0}, us, sigma)
    return system.solve()


def _host(calls_us: Mapping[str, float], beside_us: Mapping[Column, float], profile: DeviceProfile) -> DispatchFit:
    """What calls of each class cost beside their kernels, and what a pass takes beside the calls."""
    eager = profile.runtimes["eager"]
    costs = _as_eager(eager.costs_us, eager.scale)
    costs |= with_parents({name: us + beside_us[CALL] for name, us in calls_us.items()})
    costs |= {GUARDS: beside_us["guards",], JOINED_CLASS: 0.0}
    return DispatchFit(
        costs_us={name: round(us, 5) for name, us in costs.items()},
        module_call_us=0.0,
        python_call_us=round(beside_us["input",], 5),
        fixed_us=round(beside_us[FIXED], 4),
        # The same code of PyTorch's runs an op that was not compiled; what generated code and guards take is not known.
        cold_costs_us=_as_eager(eager.cold_costs_us),
        cold_bytes=eager.cold_bytes,
    )


def _as_eager(costs_us: Mapping[str, float], scale: float = 1.0) -> dict[str, float]:
    """Costs of eager's classes as those of the ops that a compiled model leaves to eager."""
    return {f"{EAGER}.{name}" if name else EAGER: us * scale for name, us in costs_us.items()}


class CallKernels(NamedTuple):
    """How a call's time becomes its kernel's: from calls that have nothing to do, and what refilling the caches takes.

    Beside calls that do much a pass takes several times what it takes beside tiny ones: kernels push the host's code
    and data out of the caches, the more the longer they run, but no more than caches hold. `cache_refill_us` is what
    the host takes longer after a kernel that has pushed out all.
    """

    idle: DispatchFit
    cache_refill_us: float = 0.0

    def us(self, call: WrapperCall) -> float:
        """What a call takes beyond one that has nothing to do."""
        return max(call.us - host_cost(self.idle, call.host_class), LEAST_US)

    def pushed_out(self, call: WrapperCall) -> float:
        """Share of the host's code and data that a call's kernel has pushed out of the caches."""
        return self.us(call) / (self.us(call) + PUSHING_US)

    def refill_us(self, call: WrapperCall) -> float:
        """What the host takes longer after a call."""
        return self.cache_refill_us * self.pushed_out(call)

    def with_refill(self, compiled: Sequence[CompiledNetwork], beside_us: Mapping[Column, float]) -> CallKernels:
        """The same, with what sized networks take beside their calls and tiny ones do not."""
        refills = []
        for one in (one for one in compiled if not one.spec.tiny):
            usual_us = sum(beside_us[name] * number for name, number in one.beside_calls.items())
            pushed_out = sum(self.pushed_out(call) for call in one.calls)
            refills.append(max(one.outside_us - usual_us, 0.0) / pushed_out)
        return self._replace(cache_refill_us=float(np.median(refills)) if refills else 0.0)


def _generated(compiled: Sequence[CompiledNetwork], kernels: CallKernels) -> dict[str, dict[str, KernelFit]]:
    """Fits of generated kernels by precision."""
    samples: dict[str, list[KernelSample]] = {}
    for one in compiled:
        for call in one.calls:
            if call.host_class == GENERATED_CLASS:
                rows = np.array([row_of(op, one.spec.batch, resident=one.resident) for op in call.ops])
                together = rows.sum(axis=0)  # kernels that one call runs: all but the size of a result's sum adds up
                together[_COLS] = rows[:, _COLS].max()
                families = {op.family for op in call.ops}
                family = families.pop() if len(families) == 1 else GENERATED_FAMILY
                sample = KernelSample(family, tuple(together.tolist()), kernels.us(call) + kernels.refill_us(call))
                samples.setdefault(one.graph.precision, []).append(sample)
    fits = {precision: fit_kernels(found) for precision, found in samples.items()}
    return {precision: fit for precision, fit in fits.items() if fit}


def _library(
    compiled: Sequence[CompiledNetwork], kernels: CallKernels, profile: DeviceProfile
) -> tuple[dict[str, float], dict[str, float]]:
    """What a call of each class of library kernels costs the host, and the kernels' time over eager's by family.

    The two are told apart together, by calls that have little to do and calls that have much: some families have none
    of the one kind, and what is left of a small kernel's call says nothing of the other.
    """
    system = System()
    prices = PriceList(msgspec.structs.replace(profile, runtimes={**profile.runtimes, "compile": kernels.idle}))
    for one in compiled:
        eager_us = _eager_us(one, prices)
        for call in one.calls:
            if call.host_class != GENERATED_CLASS:
                op = call.ops[0]
                us = call.us if one.spec.tiny else call.us + kernels.refill_us(call)
                terms: dict[Column, float] = {
                    ("class", op.host_class): 1.0,
                    ("scale", root(op.family)): eager_us.get(id(op), 0.0),
                }
                system.measured(terms, us, CALL_SIGMA * us + CALL_SIGMA_US)
    system.prior({CALL: 1.0}, *LIBRARY_CALL_US)
    for name in system.names("class"):
        system.prior({("class", name): 1.0, CALL: -1.0}, 0.0, LIBRARY_CALL_US[1])
    for family in system.names("scale"):
        system.prior({("scale", family): 1.0}, *SCALE)
    values = system.solve()
    scales = {family: round(scale, 4) for family, scale in of_kind(values, "scale").items()}
    return of_kind(values, "class"), scales


def _eager_us(one: CompiledNetwork, prices: PriceList) -> Mapping[int, float]:
    """Kernel time of each op, by its id, as the profile's shared fits have it."""
    schedule = get("compile").lower(one.graph, one.spec.batch)
    priced = prices.price(schedule, one.graph.precision, resident=one.resident)
    rows = priced.times(np.array([float(one.spec.batch)])).us[:, 0]
    times = rows[priced.kernel_row] * priced.kernel_share
    ops = one.graph.at(one.spec.batch)
    return {id(ops[op]): us for op, us in zip(schedule.kernel_op.tolist(), times.tolist(), strict=True)}
