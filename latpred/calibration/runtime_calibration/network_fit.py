"""Costs of a runtime from whole networks: what each kind of step takes, and how its kernels compare to eager's.

    host    = fixed + Σ steps · cost(class)
    device  = Σ scale(family) · time of the family's kernels by the eager profile + gaps between them
    latency = host + device on a synchronous device, the slower of the two on an asynchronous one

Networks are few and classes many, so priors pull with a stated weight: steps cost one common share of what eager's ops
of the same kind cost, and kernels take what they take in eager. Errors are relative and outliers pull less. Kernels of
families that the profile has no times of get a floor, a bandwidth and a throughput of their own. On CPUs a runtime with
`eager_kernels` has no such scale: what a run of a few minutes tells of it is how fast the machine is meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import msgspec
import numpy as np

from latpred import runtimes
from latpred.calibration import schedules
from latpred.calibration.fitting import acceptance
from latpred.calibration.fitting.acceptance import HoldoutError
from latpred.calibration.fitting.dispatch_fit import TimedNetwork, with_parents
from latpred.calibration.fitting.linear_system import Column, System, of_kind
from latpred.calibration.fitting.profile_fit import timed_network
from latpred.calibration.session import Row
from latpred.calibration.timing import visits
from latpred.errors import CalibrationError
from latpred.graph.graph import Schedule
from latpred.host import SAME
from latpred.ops.families import kind_of, root
from latpred.prediction.fallbacks import GUESSED_LOG_STD
from latpred.prediction.predictor import Predictor
from latpred.prediction.pricing import SUBSTITUTES, PriceList, host_cost, precision_of
from latpred.profile.datasheet import short
from latpred.profile.document import DeviceInfo, DeviceProfile, DispatchFit, KernelFit
from latpred.runtimes.base import REPLAY


def at_profile_speed(rows: Sequence[Row], profile: DeviceProfile) -> list[Row]:
    """Undisturbed rows of a runtime as the machine would have taken them while eager was measured.

    It may have become faster or slower since. A network or model takes as much longer as eager would with its work.
    Rows of other kinds are only brought to the full speed of their own minutes: what is in them their calibrator knows.
    """
    rows = visits.against_fastest(rows)
    speed, predictor, asynchronous = visits.speed_of(rows), Predictor(profile), profile.device.asynchronous

    def brought(row: Row) -> Row:
        if row.cell.kind not in ("network", "model"):
            return visits.brought_to_full_speed(row, speed, asynchronous=asynchronous)
        slowdown = visits.slowdown(row, speed, profile.speed, asynchronous=asynchronous)
        if asynchronous:
            return visits.host_shortened(row, slowdown.ops)
        if slowdown == SAME:
            return row
        in_eager = msgspec.structs.replace(row.cell, runtime="eager")
        graph, batch = schedules.cell_graph(in_eager, profile.device.kind)
        slow, fast = (predictor.at(one).predict(graph, batch) for one in (slowdown, SAME))
        return visits.shortened(row, slow.latency_ms / fast.latency_ms)

    return list(map(brought, visits.undisturbed(rows)))


def is_holdout(row: Row) -> bool:
    """Whether a row is of a model, or of a network that no fit may see."""
    kind = row.cell.kind
    return kind == "model" or (kind == "network" and schedules.network_spec(row.cell).holdout)


def networks_of(rows: Iterable[Row], info: DeviceInfo) -> list[TimedNetwork]:
    """The networks among a runtime's rows that are no holdouts."""
    return [timed_network(row, info) for row in rows if row.cell.kind == "network" and not is_holdout(row)]


def errors_of_fit(fit: DispatchFit, rows: Sequence[Row], profile: DeviceProfile, runtime: str) -> list[HoldoutError]:
    """How a runtime's fit does on networks and models that it did not see."""
    whole = msgspec.structs.replace(profile, runtimes={**profile.runtimes, runtime: fit})
    timed = {row.cell.key: timed_network(row, profile.device) for row in rows}
    return acceptance.holdout_errors(whole, timed, runtime)


FEWEST = 6  # networks below which nothing can be told apart
FEWEST_LIKE = 2  # networks that do where another runtime is known to have the same kernels
FAMILY_RUNS = 5  # networks with a family of the runtime's own that earn it times of its own
MODEL_SIGMA = 0.05  # relative error of the sum of both clocks, beside that of a timing
ISSUE_SIGMA = 0.01  # the same of the host's clock alone
DEVICE_SIGMA = 0.03  # and of the device's
DEVICE_BOUND = 1.3  # device time over host time from which a latency tells of kernels alone
EDGE_SIGMA_US = 1.0  # of what lies before the first kernel and after the last
ROUNDS = 3  # of taking the host from what is known of the device, and the other way round
# Priors.
SHARE, SHARE_SIGMA = 0.5, 1.0  # of eager's cost
CLASS_SIGMA = 0.5  # how far a class's share of eager's cost may lie from the common one
ALIKE_SIGMA = 0.2  # how far a class may lie from its like, as a share of what such a step usually costs
COMMON_SIGMA = 0.2  # how far the common factor on kernels may lie from 1
SCALE_SIGMA = 0.15  # how far a family's factor may lie from the common one
UNPRICED_SIGMA = 5.0  # how far what a kernel of its own costs may lie from the guess, as a multiple of it
FIXED_SIGMA_US = 20.0
REPLAYED_SIGMA_US = 3.0  # of what a call costs beside the graphs it replays
INTERPRETER_US = 0.3  # what stands for eager's cost of a step that an interpreter serves by itself; eager has none such
UNPRICED_SPREAD = GUESSED_LOG_STD / 2  # log standard deviation of the times of such a family

MODULE, PYTHON = "module call", "Python call"  # stand for host classes of their own
FIXED, _SHARE, _COMMON = ("fixed",), ("share",), ("scale", "")

Family = tuple[str, str]  # precision and kernel family
Work = tuple[float, float, float]  # launches, bytes and multiply-adds


def _unpriced_columns(family: Family) -> list[Column]:
    """Unknowns of a family that the profile has no times of: what a launch, a byte and a multiply-add take."""
    return [("unpriced", *family, unit) for unit in ("launch", "byte", "mac")]


@dataclass(frozen=True)
class _NetworkTerms:
    """A timed network as terms of the fit.

    steps : how many of each host class, of some none. kernel_us : time of each family by the eager profile. unpriced :
    work of families that the profile has no times of. kernels : how many it launches. cold_us : what its steps take
    longer from cold caches.
    """

    network: TimedNetwork
    steps: Counter[str]
    kernel_us: dict[Family, float]
    unpriced: dict[Family, Work]
    kernels: int
    cold_us: float

    @property
    def host(self) -> dict[Column, float]:
        return {FIXED: 1.0} | {("class", name): float(count) for name, count in self.steps.items()}

    @property
    def device(self) -> dict[Column, float]:
        return {("scale", family): us for family, us in self.scaled_us.items()} | self.unpriced_terms

    @property
    def scaled_us(self) -> dict[str, float]:
        """Kernel time of each family as far as the profile has times of it."""
        scaled_us: dict[str, float] = {}
        for family, us in self.kernel_us.items():
            if family not in self.unpriced:
                scaled_us[family[1]] = scaled_us.get(family[1], 0.0) + us
        return scaled_us

    @property
    def unpriced_terms(self) -> dict[Column, float]:
        """Terms of the time of families that the profile has no times of."""
        pairs = (zip(_unpriced_columns(family), work, strict=True) for family, work in self.unpriced.items())
        return dict(chain.from_iterable(pairs))


def fit_networks(
    networks: Sequence[TimedNetwork],
    profile: DeviceProfile,
    runtime: str,
    *,
    gap_us: float | None = None,
    like: DispatchFit | None = None,
) -> DispatchFit:
    """A runtime's costs from networks that are no holdouts.

    `gap_us` is the gap between kernels of a replayed graph, where the runtime launches each forward pass as one. `like`
    are the costs of a runtime with the same kernels: what is taken for granted of them where too few networks tell.
    """
    if len(networks) < (FEWEST if like is None else FEWEST_LIKE):
        raise too_few(f"{len(networks)} networks were timed in {runtime}", "its costs")
    terms = _network_terms(networks, profile, runtime)
    if profile.device.asynchronous:
        return _TwoClocks(profile, gap_us).fit(terms, like)
    eager = profile.runtimes["eager"]
    as_eager = getattr(runtimes.get(runtime), "eager_kernels", False)
    system = System()
    for one in terms:
        us, sigma = one.network.total_us, float(np.hypot(MODEL_SIGMA, one.network.sigma))
        known_us = one.cold_us + (sum(one.scaled_us.values()) if as_eager else 0.0)
        device = one.unpriced_terms if as_eager else one.device
        system.measured(one.host | device, us - known_us, us * sigma)
    system.prior({FIXED: 1.0}, eager.fixed_us, FIXED_SIGMA_US)
    _add_share_priors(system, system.names("class"), eager)
    _add_kernel_priors(system, terms, profile)
    values = system.solve()
    return _with_kernels(_with_host(_with_cold_code(eager), values, eager), values, profile)


def too_few(timed: str, told: str, budget: str = "3m") -> CalibrationError:
    """The error where too little was timed to tell what a runtime costs."""
    return CalibrationError(f"{timed}, too few to tell {told}. Give it more time, as with --budget {budget}")


def _network_terms(networks: Sequence[TimedNetwork], profile: DeviceProfile, runtime: str) -> list[_NetworkTerms]:
    bare = {**profile.runtimes, runtime: _with_cold_code(profile.runtimes["eager"])}
    prices, here = PriceList(msgspec.structs.replace(profile, runtimes=bare)), runtimes.get(runtime)
    # What models take and no network need take gets the cost that its prior says, not that of an ordinary step.
    sure = dict.fromkeys(getattr(here, "host_classes", ()), 0)
    measured = {(name, root(family)) for name, fits in profile.kernels.items() for family in fits}
    terms = []
    for network in networks:
        precision, batch = network.graph.precision, np.array([float(network.batch)])
        schedule = here.lower(network.graph, network.batch)
        steps = Counter(schedule.host_class)
        steps[MODULE], steps[PYTHON], _ = schedule.calls.sum(axis=0).tolist()
        priced = prices.price(schedule, precision, resident=network.resident)
        us = priced.times(batch).us[priced.kernel_row, 0] * priced.kernel_share
        families = _kernel_families(schedule, precision, profile)
        kernel_us: dict[Family, float] = {}
        for family, each_us in zip(families, us.tolist(), strict=True):
            kernel_us[family] = kernel_us.get(family, 0.0) + each_us
        terms.append(
            _NetworkTerms(
                network=network,
                steps=Counter(sure | dict(+steps)),
                kernel_us=kernel_us,
                unpriced=_unpriced_work(schedule, families, network.batch, measured),
                kernels=len(schedule.kernel_op),
                cold_us=0.0 if priced.cold is None else float(priced.cold.at(batch).sum()),
            )
        )
    # A family of the runtime's own that few networks have keeps the time that the profile guesses for it.
    often = Counter(family for one in terms for family in one.unpriced)
    return [
        replace(one, unpriced={family: work for family, work in one.unpriced.items() if often[family] >= FAMILY_RUNS})
        for one in terms
    ]


def _kernel_families(schedule: Schedule, precision: str, profile: DeviceProfile) -> list[Family]:
    """The precision and family that each kernel of a schedule is priced by."""
    formats = [precision_of(op.dtype, precision, profile) for op in schedule.ops]
    pairs = zip(schedule.kernel_op.tolist(), schedule.kernel_family, strict=True)
    return [(formats[op], root(family)) for op, family in pairs]


def _unpriced_work(
    schedule: Schedule, families: Sequence[Family], batch: int, measured: Container[Family]
) -> dict[Family, Work]:
    """Work of each family that was not measured; `families` are those of the schedule's kernels."""
    kernels = zip(schedule.kernel_op.tolist(), schedule.kernel_share.tolist(), families, strict=True)
    work: dict[Family, Work] = {}
    for index, share, family in kernels:
        if family not in measured and family[1] not in SUBSTITUTES:
            op, (launches, moved, macs) = schedule.ops[index], work.get(family, (0.0, 0.0, 0.0))
            each = op.weight_bytes.at(batch) + op.read_bytes.at(batch) + op.write_bytes.at(batch)
            work[family] = (launches + 1, moved + share * each, macs + share * op.macs.at(batch))
    return work


def _guess_us(fits: Mapping[str, KernelFit]) -> tuple[float, float, float]:
    """What a launch, a byte and a multiply-add of a family without times may cost: as usual."""
    moving = [fit.activation_bytes_per_us for fit in fits.values() if fit.activation_bytes_per_us]
    multiplying = [fit.macs_per_us for fit in fits.values() if fit.macs_per_us]
    return (
        float(np.median([fit.floor_us for fit in fits.values()])) if fits else 1.0,
        1.0 / float(np.median(moving)) if moving else 1e-4,
        1.0 / float(np.median(multiplying)) if multiplying else 1e-5,
    )


def _eager_us(eager: DispatchFit, name: str) -> float:
    """What eager pays for the same kind of step: "node.gemm" and "kernel.extern.gemm" are compared to its "gemm"."""
    if name in (MODULE, PYTHON):
        return max((eager.module_call_us if name == MODULE else eager.python_call_us) * eager.scale, 0.01)
    if kind_of(name) == "interpreter":
        return INTERPRETER_US
    rest = name
    while rest:
        if rest in eager.costs_us:
            return max(eager.costs_us[rest] * eager.scale, 0.01)
        rest = rest.partition(".")[2]
    return max(host_cost(eager, name) * eager.scale, 0.01)


# -- priors and what the unknowns amount to ------------------------------------------------------------------------


def _add_share_priors(system: System, names: Iterable[str], eager: DispatchFit) -> None:
    """Steps of all classes cost one common share of what eager pays for them, more or less."""
    system.prior({_SHARE: 1.0}, SHARE, SHARE_SIGMA)
    for name in names:
        usual_us = _eager_us(eager, name)
        system.prior({("class", name): 1.0, _SHARE: -usual_us}, 0.0, CLASS_SIGMA * SHARE * usual_us)


def _add_kernel_priors(system: System, terms: Sequence[_NetworkTerms], profile: DeviceProfile) -> None:
    """Kernels take what they take in eager, all a little more or less, and each family a little more or less again."""
    system.prior({_COMMON: 1.0}, 1.0, COMMON_SIGMA)
    for family in system.names("scale"):
        system.prior({("scale", family): 1.0, _COMMON: -1.0}, 0.0, SCALE_SIGMA)
    for own in sorted({family for one in terms for family in one.unpriced}):
        guesses_us = _guess_us(profile.kernels.get(own[0], {}))
        for column, guess in zip(_unpriced_columns(own), guesses_us, strict=True):
            system.prior({column: 1.0}, guess, UNPRICED_SIGMA * guess)


def _with_cold_code(eager: DispatchFit) -> DispatchFit:
    """No costs but of cold caches: steps that dispatch PyTorch's own ops run the same code as eager."""
    cold_us = {name: us for name, us in eager.cold_costs_us.items() if name}
    return DispatchFit({}, 0.0, 0.0, 0.0, cold_costs_us=cold_us, cold_bytes=eager.cold_bytes)


def _with_host(fit: DispatchFit, values: Mapping[Column, float], eager: DispatchFit) -> DispatchFit:
    """A fit with the host costs of a solution."""
    costs = of_kind(values, "class")
    share = values[_SHARE] * eager.scale
    module_us = costs.pop(MODULE, share * eager.module_call_us)
    python_us = costs.pop(PYTHON, share * eager.python_call_us)
    return msgspec.structs.replace(
        fit,
        costs_us={name: short(us) for name, us in with_parents(costs).items()},
        module_call_us=round(module_us, 5),
        python_call_us=round(python_us, 5),
        fixed_us=round(values[FIXED], 4),
    )


def _with_kernels(fit: DispatchFit, values: Mapping[Column, float], profile: DeviceProfile) -> DispatchFit:
    """A fit with the factors on kernel times, and the times of kernels that the profile lacks, of a solution."""
    kernels: dict[str, dict[str, KernelFit]] = {}
    for precision, family in sorted({column[1:3] for column in values if column[0] == "unpriced"}):
        launch_us, byte_us, mac_us = (values[column] for column in _unpriced_columns((precision, family)))
        kernels.setdefault(precision, {})[family] = KernelFit(
            family=family,
            floor_us=round(launch_us, 5),
            macs_per_us=_rate(mac_us),
            weight_bytes_per_us=_rate(byte_us),
            activation_bytes_per_us=_rate(byte_us),
            multiprocessors=profile.device.multiprocessors,
            spread=UNPRICED_SPREAD,
        )
    scales = {family: short(scale) for family, scale in of_kind(values, "scale").items()}
    return msgspec.structs.replace(fit, kernels=kernels, kernel_scales=scales)


def _rate(us_per_unit: float) -> float:
    return short(1.0 / us_per_unit) if us_per_unit > 1e-15 else 0.0


# -- asynchronous devices ------------------------------------------------------------------------------------------


class _TwoClocks:
    """Each network tells of one clock at a time, so each clock is a system of its own.

        time to issue         = the host's
        time in a long queue  = the device's and one gap
        latency, device-bound = the host's first step + launch + the device's time + synchronisation

    Where a runtime can only be timed from outside, as one with a stream of its own, latencies have to do for both.
    """

    def __init__(self, profile: DeviceProfile, gap_us: float | None) -> None:
        self._profile, self._device, self._eager = profile, profile.device, profile.runtimes["eager"]
        self._replayed = gap_us is not None
        self._gap_us = self._device.gap_us if gap_us is None else gap_us

    def fit(self, terms: Sequence[_NetworkTerms], like: DispatchFit | None) -> DispatchFit:
        """Costs on both clocks, each fitted with what is known of the other."""
        fit = DispatchFit({}, 0.0, 0.0, 0.0, gap_us=self._gap_us if self._replayed else None)
        if like is not None:
            fit = msgspec.structs.replace(fit, kernels=like.kernels, kernel_scales=like.kernel_scales)
        for _ in range(ROUNDS):
            fit = self._with_host(fit, terms)
            fit = self._with_device(fit, terms)
        return fit

    def _with_host(self, fit: DispatchFit, terms: Sequence[_NetworkTerms]) -> DispatchFit:
        system, issued = System(), any(one.network.issue_us is not None for one in terms)
        for one in terms:
            network = one.network
            us = network.issue_us if issued else self._host_us(fit, one)
            if us is not None and us > 0:
                sigma = float(np.hypot(ISSUE_SIGMA, network.sigma)) * max(us, 0.1 * network.total_us)
                system.measured(one.host, us, sigma)
        if self._replayed:  # what a call takes is what its graphs take, unless networks of several say otherwise
            system.prior({FIXED: 1.0}, 0.0, REPLAYED_SIGMA_US)
        else:
            system.prior({FIXED: 1.0}, self._eager.fixed_us, FIXED_SIGMA_US)
        classes = system.names("class")
        for name in classes:
            like = _like(name)
            if like is not None:
                sigma = ALIKE_SIGMA * SHARE * _eager_us(self._eager, name)
                system.prior({("class", name): 1.0, ("class", like): -1.0}, 0.0, sigma)
        _add_share_priors(system, sorted({_like(name) or name for name in classes} - {REPLAY}), self._eager)
        return _with_host(fit, system.solve(), self._eager)

    def _with_device(self, fit: DispatchFit, terms: Sequence[_NetworkTerms]) -> DispatchFit:
        timed = [(one, us) for one in terms if (us := self._device_us(fit, one)) is not None]
        if len(timed) < FEWEST:
            return fit
        system = System()
        for one, us in timed:
            sigma_us = float(np.hypot(DEVICE_SIGMA, one.network.sigma)) * us
            system.measured(one.device, us, float(np.hypot(sigma_us, EDGE_SIGMA_US)))
        _add_kernel_priors(system, [one for one, _ in timed], self._profile)
        return _with_kernels(fit, system.solve(), self._profile)

    def _device_us(self, fit: DispatchFit, one: _NetworkTerms) -> float | None:
        """What a network's kernels take together, where a timing tells."""
        if not one.kernels:
            return None
        gaps_us = (one.kernels - 1) * self._gap_us
        if one.network.queued_us is not None:
            busy_us = one.network.queued_us - gaps_us - self._device.gap_us
            return busy_us if busy_us > 0 else None
        host_us = fit.fixed_us + sum(count * _step_us(fit, name) for name, count in one.steps.items())
        # The host's time until the first kernel is launched.
        start_us = host_us if self._replayed else fit.fixed_us + (host_us - fit.fixed_us) / max(one.kernels, 1)
        busy_us = one.network.total_us - start_us - gaps_us - self._device.launch_us - self._device.sync_us
        if busy_us <= 0 or (not self._replayed and busy_us + gaps_us < DEVICE_BOUND * host_us):
            return None
        return busy_us

    def _host_us(self, fit: DispatchFit, one: _NetworkTerms) -> float | None:
        """What issuing a network takes, from its latency and what is known of the device."""
        if not one.network.tiny:
            return None
        rest_us, busy_us = one.network.total_us - self._device.launch_us - self._device.sync_us, _busy_us(fit, one)
        if self._replayed:
            return rest_us - busy_us - (one.kernels - 1) * self._gap_us
        # Of a host-bound network the last kernel alone is waited for. Where the device is slower even here, this is
        # more than the host takes, but no more than keeps up with the device.
        return rest_us - busy_us / max(one.kernels, 1)


def _busy_us(fit: DispatchFit, one: _NetworkTerms) -> float:
    """Time of a network's kernels by a fit."""
    common = fit.kernel_scales.get("", 1.0)
    times_us = {family: us * fit.kernel_scales.get(family[1], common) for family, us in one.kernel_us.items()}
    for family, (launches, moved, macs) in one.unpriced.items():
        kernel = fit.kernels.get(family[0], {}).get(family[1])
        if kernel is not None:
            width, rate = kernel.activation_bytes_per_us, kernel.macs_per_us
            us = launches * kernel.floor_us + (moved / width if width else 0.0) + (macs / rate if rate else 0.0)
            times_us[family] = us
    return sum(times_us.values())


def _like(name: str) -> str | None:
    """The general class that stands for all of one kind: "node.gemm" for "node.gemm.MatMul"."""
    return ".".join(name.split(".")[:2]) if name.count(".") > 1 else None


def _step_us(fit: DispatchFit, name: str) -> float:
    calls = {MODULE: fit.module_call_us, PYTHON: fit.python_call_us}
    return calls[name] if name in calls else host_cost(fit, name)
