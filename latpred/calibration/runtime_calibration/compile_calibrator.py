"""CompileCalibrator: few networks, because torch.compile takes long on each, with every call of theirs timed.

The calls of a compiled wrapper tell what generated kernels take, how library kernels compare to eager's, and what each
costs the host. Only a CPU can be asked so: where a device is waited for, whole networks have to do.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from latpred.calibration import schedules
from latpred.calibration.cells import Cell
from latpred.calibration.fitting.acceptance import HoldoutError
from latpred.calibration.fitting.dispatch_fit import TimedNetwork, of_classes, per_class, with_parents
from latpred.calibration.fitting.kernel_fit import KernelSample, fit_kernels, row_of
from latpred.calibration.fitting.linear_system import Column, System, of_kind
from latpred.calibration.fitting.profile_fit import timed_network
from latpred.calibration.runtime_calibration.base import RuntimeCalibrator, called_again, candidates, effort, rotating
from latpred.calibration.runtime_calibration.network_fit import errors_of_fit, is_holdout, too_few
from latpred.calibration.session import Row
from latpred.calibration.timing import timer
from latpred.calibration.timing.reference_speed import SpeedGauge
from latpred.calibration.workloads import networks
from latpred.calibration.workloads.networks import NetworkSpec
from latpred.errors import CalibrationError
from latpred.graph import features
from latpred.graph.graph import Op
from latpred.ops.families import nearest, root
from latpred.prediction.kernel_times import TINY_US
from latpred.prediction.pricing import ColdDispatch, PriceList, host_cost, precision_of
from latpred.profile.document import DeviceProfile, DispatchFit, KernelFit
from latpred.runtimes import get
from latpred.runtimes.inductor.compiled_ops import EAGER_CLASS, EXTERN_CLASS, GENERATED_CLASS, GUARDS, JOINED_CLASS
from latpred.units import US_PER_S

FEWEST = 3  # networks below which nothing is fitted
# Parts that the networks of the fit fall into, each of which tests a fit of the others: holdouts are too few to tell
# how wide intervals must be.
FOLDS = 8
# Kinds in the order of what a compilation of one teaches. Recurrent networks are hardly compiled at all.
KINDS = {
    "tiny": ("encoder", "window", "mobile", "mixer"),
    "sized": ("encoder", "residual", "patch", "mobile", "window", "decoder", "dense", "mixer", "audio"),
    "holdout": ("patch", "mixer", "encoder", "dense", "audio", "window", "mobile"),
}
# Kernels of its eager graph beyond which a network takes too long to compile; holdouts only have to be many.
MOST_LAUNCHES = {"tiny": math.inf, "sized": 48, "holdout": 36}
TURN = ("tiny", "sized", "holdout", "sized")
REPEATS, CALLS_S = 30, 0.3
LEAST_US = 0.05  # of a kernel whose call took no longer than a call that does nothing
IDLE = 0.25  # quantile of the calls of tiny networks: not all of their kernels have next to nothing to do
SHARING_ROUNDS = 3  # of fitting generated kernels and sharing out the time of calls that run several
# Families whose kernels and layouts are eager's: their scale is 1, but in formats of which eager's own rows are few.
SAME_KERNELS = ("gemm", "bmm", "attention")
# Relative error of what a library call takes, the eager profile's own included, and in microseconds.
CALL_SIGMA, CALL_SIGMA_US = 0.2, 1.0
BESIDE_SIGMA = 0.15  # relative error of what a pass takes beside its calls
PASS_SIGMA = 0.02  # of a pass, which is no error of its parts worth looking at
FIXED, GUARD, INPUT = ("fixed",), ("guards",), ("input",)
EXTERN, GENERATED = ("call", EXTERN_CLASS), ("call", GENERATED_CLASS)
COLD_GUARD, COLD_CALL = ("cold", GUARDS), ("cold", "call")
# Priors, as value and sigma: of the host in microseconds, and of a library kernel's time over eager's.
LIBRARY_CALL_US = (4.0, 8.0)
BESIDE_CALLS_US = {GUARD: (18.0, 9.0), INPUT: (0.75, 0.4), EXTERN: (1.0, 0.6), GENERATED: (0.5, 0.4)}
SCALE = (1.0, 0.3)
# What it takes longer from cold caches, in what a usual class of eager's takes longer.
COLD_BESIDE = {COLD_GUARD: (16.0, 12.0), COLD_CALL: (3.0, 3.0)}
COLD_AS_EAGER = 1.0  # relative sigma of what a library call takes longer, which is taken to be what eager's does
_BYTES = slice(features.WORK.index("weight_bytes"), features.WORK.index("write_bytes") + 1)
_LIBRARIES = ("extern_kernels", "torch", "aten")
_METHOD = "aten::copy_"  # of a tensor, no kernel of a namespace: its time is with what a pass takes beside its calls


class _WrapperCall(NamedTuple):
    """One call of a wrapper: the steps it runs, its microseconds, and how far the caches have forgotten its code."""

    ops: tuple[Op, ...]
    us: float
    cold: float

    @property
    def host_class(self) -> str:
        """Of its first step, which prices the call."""
        return self.ops[0].host_class


class _CompiledNetwork(NamedTuple):
    """A network with the calls of its wrapper, and how far the caches have forgotten its guards."""

    network: TimedNetwork
    calls: tuple[_WrapperCall, ...]
    cold_guards: float

    @property
    def beside_us(self) -> float:
        """What a pass takes beside its calls."""
        return max(self.network.total_us - sum(call.us for call in self.calls), LEAST_US)

    @property
    def beside_calls(self) -> dict[Column, float]:
        """How often a pass does what it does beside its calls, and how often from cold caches."""
        ops = self.network.ops
        generated = sum(call.host_class == GENERATED_CLASS for call in self.calls)
        return {
            FIXED: 1.0,
            GUARD: float(sum(op.host_class == GUARDS for op in ops)),
            INPUT: float(sum(op.python_calls for op in ops)),
            EXTERN: float(len(self.calls) - generated),
            GENERATED: float(generated),
            COLD_GUARD: self.cold_guards,
            COLD_CALL: sum(call.cold for call in self.calls),
        }


class CompileCalibrator(RuntimeCalibrator):
    """Calibrates torch.compile on a CPU."""

    def cells(self, precision: str) -> Iterator[Cell]:
        """Tiny networks for the host's costs between sized ones, of a kind each; holdouts among them."""
        drawn = candidates(len(networks.KINDS))

        def quick(kind: str) -> Iterator[NetworkSpec]:
            return (spec for spec in drawn[kind] if _launches(spec) <= MOST_LAUNCHES[kind])

        ordered = {kind: _in_order(quick(kind), kinds) for kind, kinds in KINDS.items()}
        for spec in rotating(ordered, cycle(TURN)):
            yield schedules.network_cell(called_again(spec), precision, self.runtime)

    def measure(self, cell: Cell) -> Row:
        """Time a network whole, and each call of its wrapper."""
        spec = schedules.network_spec(cell)
        _, call = self.prepared(spec, cell.precision)
        whole = self.timed(call, *effort(spec))
        calls_us, slow = time_calls(call, _wrappers(), self._gauge, repeats=REPEATS, budget_s=CALLS_S)
        return Row(cell, {"single": msgspec.structs.replace(whole, slow=max(whole.slow, slow))}, calls_us=calls_us)

    def fit(self, rows: Sequence[Row], profile: DeviceProfile) -> DispatchFit:
        """Host costs, generated kernels, and library kernels in proportion to eager's."""
        compiled = [one for row in rows if (one := _compiled_network(row, profile)) is not None]
        if len(compiled) < FEWEST:
            timed = f"{len(compiled)} networks were compiled and timed"
            raise too_few(timed, "what torch.compile costs", "5m")
        # What a call takes where it has next to nothing to do.
        tiny = [one for one in compiled if one.network.tiny] or compiled
        calls_us = ((call.host_class, call.us) for one in tiny for call in one.calls)
        idle_us = per_class(calls_us, partial(np.quantile, q=IDLE))
        idle = of_classes(idle_us)
        values = _beside_calls_us(compiled, profile) | _library(compiled, idle, profile)
        return msgspec.structs.replace(
            _host(idle_us, values, profile),
            kernels=_generated(compiled, idle, profile),
            kernel_scales={family: round(scale, 4) for family, scale in of_kind(values, "scale").items()},
        )

    def errors_by_folds(self, rows: Sequence[Row], profile: DeviceProfile) -> list[HoldoutError]:
        """How fits of all but a few networks do on those few; tiny networks, which tell of the host alone, stay in."""
        tested = [row for row in rows if not (is_holdout(row) or schedules.network_spec(row.cell).tiny)]
        errors: list[HoldoutError] = []
        for fold in range(min(FOLDS, len(tested))):
            out = {row.cell.key for row in tested[fold::FOLDS]}
            try:
                fit = self.fit([row for row in rows if row.cell.key not in out], profile)
            except CalibrationError:
                return []  # so few networks that every one is needed
            errors += errors_of_fit(fit, tested[fold::FOLDS], profile, self.runtime)
        return errors


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


def _wrappers() -> list[ModuleType]:
    """The wrappers that torch.compile has loaded so far; one that was loaded before serves the same network again."""
    from torch._inductor.codecache import PyCodeCache

    return list(PyCodeCache.modules)


def time_calls(
    call: Callable[[], object], modules: Sequence[ModuleType], gauge: SpeedGauge, *, repeats: int, budget_s: float
) -> tuple[tuple[float, ...], float]:
    """Median microseconds of each call that the wrappers make in one forward pass, and how slow it was meanwhile.

    Each pass comes after another, unwatched. There are no calls where passes made different numbers of them.
    """
    seconds: list[float] = []

    def turn() -> list[float]:
        call()
        seconds.clear()
        call()
        return list(seconds)

    with _watched(modules, seconds):
        passes, slow = timer.turns(turn, gauge, repeats=repeats, budget_s=budget_s)
    if len({len(one) for one in passes}) != 1:
        return (), slow
    return tuple((np.median(passes, axis=0) * US_PER_S).tolist()), slow


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


def _compiled_network(row: Row, profile: DeviceProfile) -> _CompiledNetwork | None:
    """A row as calls and the steps they run; None for holdouts, and where the two do not fit together."""
    if is_holdout(row):
        return None
    network = timed_network(row, profile.device)
    joined: list[list[Op]] = []
    for op in network.ops:
        if op.host_class == JOINED_CLASS:
            joined[-1].append(op)
        elif op.host_class.startswith("kernel.") and op.name != _METHOD:
            joined.append([op])
    if len(joined) != len(row.calls_us):
        return None
    cold = _cold(network, profile)
    timed = zip(joined, row.calls_us, strict=True)
    calls = tuple(_WrapperCall(tuple(ops), us, cold.get(id(ops[0]), 0.0)) for ops, us in timed)
    guards = [op for op in network.ops if op.host_class == GUARDS]
    return _CompiledNetwork(network, calls, sum(cold.get(id(op), 0.0) for op in guards))


def _cold(network: TimedNetwork, profile: DeviceProfile) -> dict[int, float]:
    """How far the caches have forgotten each op of a network since the last of its class, by the op's id."""
    whole = DispatchFit({}, 0.0, 0.0, 0.0, cold_costs_us={"": 1.0}, cold_bytes=profile.runtimes["eager"].cold_bytes)
    cold = ColdDispatch.of(get("compile").lower(network.graph, network.batch), whole)
    if cold is None or not whole.cold_bytes:
        return {}
    shares = cold.at(np.array([float(network.batch)]))[:, 0]
    return {id(op): share for op, share in zip(network.ops, shares.tolist(), strict=True)}


def _beside_calls_us(compiled: Sequence[_CompiledNetwork], profile: DeviceProfile) -> dict[Column, float]:
    """What a pass takes beside its calls."""
    eager, system = profile.runtimes["eager"], System()
    for one in compiled:
        sigma_us = BESIDE_SIGMA * one.beside_us + PASS_SIGMA * one.network.total_us
        system.measured(one.beside_calls, one.beside_us, sigma_us)
    usual_us = nearest(eager.cold_costs_us, "")
    cold = {name: (usual_us * times, max(usual_us * sigma, TINY_US)) for name, (times, sigma) in COLD_BESIDE.items()}
    system.prior({FIXED: 1.0}, eager.fixed_us, max(eager.fixed_us, 1.0))
    for name, prior in (BESIDE_CALLS_US | cold).items():
        system.prior({name: 1.0}, *prior)
    return system.solve()


def _host(idle_us: Mapping[str, float], values: Mapping[Column, float], profile: DeviceProfile) -> DispatchFit:
    """What calls of each class cost beside their kernels, and what a pass takes beside the calls."""
    eager = profile.runtimes["eager"]
    calls_us = {**idle_us, **of_kind(values, "class")}
    costs = _as_eager(eager.costs_us, eager.scale)
    costs |= with_parents(
        {name: us + values[GENERATED if name == GENERATED_CLASS else EXTERN] for name, us in calls_us.items()}
    )
    costs |= {GUARDS: values[GUARD], JOINED_CLASS: 0.0}
    cold: dict[str, float] = {}
    if eager.cold_costs_us:
        # The same code of PyTorch's runs an op that was not compiled, and the kernel of a library.
        cold = _as_eager(eager.cold_costs_us)
        cold |= with_parents({name: values[COLD_CALL] + values.get(("cold", name), 0.0) for name in calls_us})
        cold |= {GUARDS: values[COLD_GUARD], JOINED_CLASS: 0.0}
    return DispatchFit(
        costs_us={name: round(us, 5) for name, us in costs.items()},
        module_call_us=0.0,
        python_call_us=round(values[INPUT], 5),
        fixed_us=round(values[FIXED], 4),
        cold_costs_us={name: round(us, 4) for name, us in cold.items()},
        cold_bytes=eager.cold_bytes,
    )


def _as_eager(costs_us: Mapping[str, float], scale: float = 1.0) -> dict[str, float]:
    """Costs of eager's classes as those of the ops that a compiled model leaves to eager."""
    return {f"{EAGER_CLASS}.{name}" if name else EAGER_CLASS: us * scale for name, us in costs_us.items()}


def _generated(
    compiled: Sequence[_CompiledNetwork], idle: DispatchFit, profile: DeviceProfile
) -> dict[str, dict[str, KernelFit]]:
    """Fits of generated kernels by precision.

    Kernels that one call runs share its time as fits of the round before have it. Those of the first round are of calls
    that run one alone, which takes 1.4 times as long as beside others; where there are none, bytes decide.
    """
    fits: dict[str, dict[str, KernelFit]] = {}
    alone = any(call.host_class == GENERATED_CLASS and len(call.ops) == 1 for one in compiled for call in one.calls)
    for _ in range(SHARING_ROUNDS):
        prices = _prices(profile, msgspec.structs.replace(idle, kernels=fits))
        samples: dict[str, list[KernelSample]] = {}
        for one in compiled:
            found = samples.setdefault(one.network.graph.precision, [])
            usual_us = _kernels_us(one.network, prices) if fits else {}
            for call in one.calls:
                if call.host_class == GENERATED_CLASS and (fits or not alone or len(call.ops) == 1):
                    us = max(call.us - host_cost(idle, call.host_class), LEAST_US)
                    found += _shared_out(us, call.ops, one.network, usual_us)
        fits = {precision: fit for precision, found in samples.items() if (fit := fit_kernels(found))}
    return fits


def _shared_out(
    us: float, ops: Sequence[Op], network: TimedNetwork, usual_us: Mapping[int, float]
) -> Iterator[KernelSample]:
    """The kernels of a call, which share its time as they usually take, or by their bytes where that is not known."""
    rows = [row_of(op, network.batch, resident=network.resident) for op in ops]
    parts = [max(usual_us.get(id(op), sum(row[_BYTES])), LEAST_US) for op, row in zip(ops, rows, strict=True)]
    for op, row, part in zip(ops, rows, parts, strict=True):
        own_us = max(us * part / sum(parts), LEAST_US)
        yield KernelSample(op.family, row, own_us, beside_us=max(us - own_us, 0.0))


def _library(compiled: Sequence[_CompiledNetwork], idle: DispatchFit, profile: DeviceProfile) -> dict[Column, float]:
    """What a call of each class of library kernels costs the host, and the kernels' time over eager's by family.

    The two are told apart together, by calls that have little to do and calls that have much: some families have none
    of the one kind, and what is left of a small kernel's call says nothing of the other.
    """
    eager, system = profile.runtimes["eager"], System()
    prices = _prices(profile, idle)
    families: dict[str, str] = {}
    for one in compiled:
        eager_us = _kernels_us(one.network, prices)
        for call in one.calls:
            if call.host_class != GENERATED_CLASS:
                op, precision = call.ops[0], one.network.graph.precision
                name = _scaled(op, features.finer_family(op.family, op.dims), precision, profile)
                families[name] = _scaled(op, _general(op.family), precision, profile)
                kernel_us = eager_us.get(id(op), 0.0)
                same = families[name] in SAME_KERNELS
                terms: dict[Column, float] = {
                    ("class", op.host_class): 1.0,
                    ("cold", op.host_class): call.cold,
                    **({} if same else {("scale", name): kernel_us}),
                }
                # Eager's time may be the wrong one of the two.
                sigma_us = CALL_SIGMA * max(call.us, kernel_us) + CALL_SIGMA_US
                system.measured(terms, call.us - kernel_us * same, sigma_us)
    system.prior({("common",): 1.0}, *LIBRARY_CALL_US)
    for name in system.names("class"):
        system.prior({("class", name): 1.0, ("common",): -1.0}, 0.0, LIBRARY_CALL_US[1])
        cold_us = nearest(eager.cold_costs_us, name.removeprefix(f"{EXTERN_CLASS}."))
        system.prior({("cold", name): 1.0}, cold_us, max(COLD_AS_EAGER * cold_us, TINY_US))
    for name, family in families.items():
        system.prior({("scale", family): 1.0}, *SCALE)
        if name != family:
            system.prior({("scale", name): 1.0, ("scale", family): -1.0}, 0.0, SCALE[1])
    return system.solve()


def _general(family: str) -> str:
    """The family that kinds share a scale of: convolutions in channels last, which eager lacks, have their own."""
    return family if family.endswith(f".{features.CHANNELS_LAST}") else root(family)


def _scaled(op: Op, family: str, precision: str, profile: DeviceProfile) -> str:
    """The name of a family's scale in an op's format: another layout suits some formats better than others."""
    wanted = precision_of(op.dtype, precision, profile)
    return family if wanted == "fp32" else f"{wanted}.{family}"


def _prices(profile: DeviceProfile, fit: DispatchFit) -> PriceList:
    """Prices of a profile with a fit of this runtime."""
    return PriceList(msgspec.structs.replace(profile, runtimes={**profile.runtimes, "compile": fit}))


def _kernels_us(network: TimedNetwork, prices: PriceList) -> Mapping[int, float]:
    """Kernel time of each op that has any, by its id."""
    schedule = get("compile").lower(network.graph, network.batch)
    priced = prices.price(schedule, network.graph.precision, resident=network.resident)
    rows = priced.times(np.array([float(network.batch)])).us[:, 0]
    times = rows[priced.kernel_row] * priced.kernel_share
    ops, us = network.ops, np.bincount(schedule.kernel_op, times).tolist()  # an op may take several kernels
    return {id(ops[op]): us[op] for op in schedule.kernel_op.tolist()}
