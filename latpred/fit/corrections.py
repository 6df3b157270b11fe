"""Corrections of a profile: factors on its host costs and kernel times that bring it nearer to measured latencies.

The latency model stays the profile's, two clocks over a schedule. Its host classes and kernel families get factors, and
kernels powers of their size (`prediction.pricing`), believed to be 1 and 0 and the less free the finer they are; rows
move them by damped Gauss-Newton steps on soft relative errors. How free the factors are, and how closely they follow
the rows, is weighed by the likelihood of the rows (Bayesian model averaging); `latpred.accuracy.adaptation` says among
which. What every architecture would have been predicted at without its own rows is a few steps away from the solution
with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from latpred.graph.features import Floats
from latpred.graph.graph import Ints, ModelGraph
from latpred.ops.families import kind_of, root
from latpred.prediction import clocks
from latpred.prediction.clocks import Timeline
from latpred.prediction.predictor import Predictor
from latpred.prediction.pricing import CALL, SIZES, TIME, host_cost, kernel_sizes, ops_slowdown
from latpred.profile.document import DeviceInfo, DeviceProfile, DispatchFit, SizeCorrection, call_prices

MODULE, PYTHON = "module calls", "python calls"
GENERAL = ""  # what no measured row has takes this factor

SOFT = 0.10  # error in log latency beyond which a row pulls less than in proportion
MOST_STEPS, MOST_STEPS_LEFT_OUT = 20, 4
STARTS, MOST_APART = 13, 3.0  # of how far the clocks' factors are apart, in logs
BESIDE = (0.0, -1.0, -0.5, 0.5, 1.0)  # the best of these, and starts around it where rows are not met
WELL = 0.005  # mean error in log latency of rows that are met, or their noise
APART = 0.002  # in log latency, what a start has to gain for clocks that are apart by a factor of e
_LARGEST_STEP, _WHOLE_STEPS = 0.5, 6  # then half steps, for those that swing between two clocks
_ENOUGH = 1e-3  # a step that moves no factor by more was the last
_NUDGE = 0.01


class Level(NamedTuple):
    """How free factors are: standard deviations of their logs, 0 for none; and how closely they follow the rows.

    whole : one factor on everything. clocks : on the host and on the device. classes : on each host class and kernel
    family. sizes : of the exponents of kernels' sizes. misfit : what a right profile is still off by, in log latency,
    whatever the noise of the row.
    """

    name: str
    whole: float
    clocks: float
    classes: float
    sizes: float
    misfit: float


class Row(NamedTuple):
    """One measured forward pass; `architecture` tells rows of one model from those of others.

    noise : standard deviation of the log of the measurement.
    """

    architecture: int
    graph: ModelGraph
    batch: int
    protocol: str
    latency_us: float
    noise: float


class Factors(NamedTuple):
    """What host costs by class and kernel times by family are multiplied by; "" is for all others.

    size_corrections : what kernel times are multiplied by according to their size, beside.
    """

    host: dict[str, float]
    kernel: dict[str, float]
    size_corrections: tuple[SizeCorrection, ...] = ()


class Fit(NamedTuple):
    """The likeliest level, factors, and how far off each row is, in log latency, without its architecture's rows."""

    level: str
    factors: Factors
    left_out: Floats


class _Believed(NamedTuple):
    """What levels say of the parameters and of the rows, by level.

    design : what each parameter does to the groups' log factors and the exponents. deviation : of each parameter.
    """

    design: Floats
    deviation: Floats
    misfit: Floats


class _Solution(NamedTuple):
    """Parameters, how likely they are, how likely each level is, and how likely all levels together make the rows."""

    theta: Floats
    likelihood: float
    share: Floats
    evidence: float


@dataclass(frozen=True, slots=True)
class _Cell:
    """A row's forward pass: host time of each step by group, and time, group and sizes of each kernel.

    sizes : logs of `SIZES` over their centres, 0 without. waits_us : for a synchronous device, and for memory.
    """

    timeline: Timeline
    host_us: Floats
    kernel_us: Floats
    kernel_group: Ints
    sizes: Floats
    waits_us: float
    device: DeviceInfo
    protocol: str

    def rescaled(self, host: float, kernel: Floats) -> Floats:
        """Log latencies with one factor on the host and each of some on the device."""
        if not self.device.asynchronous:
            synchronous: Floats = np.log(self.host_us.sum() * host + self.kernel_us.sum() * kernel + self.waits_us)
            return synchronous
        logs: Floats = np.log(self._latency(self.host_us.sum(axis=1) * host, self.kernel_us[:, None] * kernel))
        return logs

    def evaluate(self, host: Floats, kernel: Floats, exponents: Floats) -> tuple[float, Floats]:
        """Log latency and its slopes in the logs of the groups' factors and in the exponents."""
        times = self.kernel_us * kernel[self.kernel_group] * np.exp(self.sizes @ exponents)
        if not self.device.asynchronous:
            by_group = np.bincount(self.kernel_group, times, len(kernel))
            spent = np.concatenate((self.host_us.sum(axis=0) * host, by_group))
            total = float(spent.sum()) + self.waits_us
            return float(np.log(total)), np.concatenate((spent, times @ self.sizes)) / total
        steps, groups = self.host_us @ host, len(kernel)
        nudged = np.repeat(times[:, None], 1 + groups + len(exponents), axis=1)
        nudged[np.arange(len(times)), self.kernel_group + 1] *= 1.0 + _NUDGE
        nudged[:, 1 + groups :] *= (1.0 + _NUDGE) ** self.sizes
        latency = self._latency(steps, nudged)
        slower = [self._host_nudged(steps, times, host[group], group) for group in range(len(host))]
        slopes = np.log(np.array([*(latency[0] if us is None else us for us in slower), *latency[1:]]) / latency[0])
        return float(np.log(latency[0])), slopes / np.log1p(_NUDGE)

    def _host_nudged(self, steps: Floats, times: Floats, factor: float, group: int) -> float | None:
        """Latency with one host group slower; None where the forward pass has none of it."""
        own = self.host_us[:, group]
        if not own.any():
            return None
        return float(self._latency(steps + _NUDGE * factor * own, times[:, None])[0])

    def _latency(self, steps: Floats, kernels: Floats) -> Floats:
        return clocks.latency(self.timeline, steps, kernels, self.device, self.protocol)


class LatencyModel:
    """Latencies of rows that were measured in one runtime, as functions of factors to a predictor's profile."""

    def __init__(self, predictor: Predictor, rows: Sequence[Row], runtime: str) -> None:
        parts = [_Parts.of(predictor, row, runtime) for row in rows]
        self.host = tuple(sorted({name for part in parts for name in part.host_us}))
        self.kernel = tuple(sorted({name for part in parts for name in part.families}))
        self._centres, self._ranges = _spans(parts)
        self._cells = [
            part.cell(self.host, self.kernel, self._centres, row.protocol)
            for part, row in zip(parts, rows, strict=True)
        ]
        self._measured = np.log([row.latency_us for row in rows])
        self._architecture = np.array([row.architecture for row in rows])
        self._noise = np.array([row.noise for row in rows])

    def unchanged(self, level: str) -> Fit:
        """The profile as it is."""
        nothing = np.zeros(len(self.host) + len(self.kernel) + len(SIZES))
        errors, _ = self._errors(nothing, np.arange(len(self._cells)))
        return Fit(level, Factors({}, {}), errors)

    def fit(self, levels: Sequence[Level]) -> Fit:
        """The mean of what levels make of the rows, each as heavy as it makes the rows likely.

        Rows too few to tell levels apart are told from by all of them, which errs less than the one that looks best.
        """
        believed, every = self._believed(levels), np.arange(len(self._cells))
        found = _Solution(np.zeros(0), -math.inf, np.zeros(0), -math.inf)
        for number, start in enumerate(self._starts()):
            found = max(found, self._solved(start, believed, every, MOST_STEPS), key=lambda each: each.evidence)
            off = np.abs(self._errors(believed.design @ found.theta, every)[0]).mean()
            if number > 0 and off < max(WELL, self._noise.mean()):
                break
        shares: dict[str, float] = {}
        for level, share in zip(levels, found.share.tolist(), strict=True):
            shares[level.name] = shares.get(level.name, 0.0) + share
        likeliest = max(shares, key=shares.__getitem__)
        return Fit(likeliest, self._factors(believed.design, found.theta), self._left_out(found.theta, believed))

    def _starts(self) -> Floats:
        """Parameters to start from: one factor, clocks as far apart as rows agree on best, and some around that.

        Which clock sets the pace is decided by factors that are far from 1, so that one start may lead nowhere.
        """
        usual = float(np.median(self._measured - self._apart(0.0, 0.0)))
        steps = np.linspace(-MOST_APART, MOST_APART, STARTS)
        errors = self._measured - np.array([self._apart(usual, apart) for apart in steps])
        off = np.abs(errors - np.median(errors, axis=1, keepdims=True)).mean(axis=1) + APART * np.abs(steps)
        starts = np.zeros((1 + len(BESIDE), 3 + len(self.host) + len(self.kernel) + len(SIZES)))
        starts[:, 0] = usual
        for start, apart in zip(starts[1:], steps[off.argmin()] + np.array(BESIDE), strict=True):
            start[:3] = usual + np.median(self._measured - self._apart(usual, apart)), apart / 2, -apart / 2
        return starts

    def _apart(self, usual: float, apart: float) -> Floats:
        """Log latencies of all rows with clocks apart by a factor, in logs, around the usual one."""
        host, device = np.exp(usual + apart / 2), np.exp([usual - apart / 2])
        return np.array([cell.rescaled(host, device)[0] for cell in self._cells])

    def _solved(self, theta: Floats, believed: _Believed, rows: Ints, most_steps: int) -> _Solution:
        """The best of the parameters that Gauss-Newton steps come by, from a guess on."""
        best = _Solution(theta, -math.inf, np.zeros(0), -math.inf)
        for number in range(most_steps):
            errors, slopes = self._errors(believed.design @ theta, rows)
            weight = self._weight(believed.misfit, rows) / np.sqrt(1.0 + (errors / SOFT) ** 2)
            likely, means = _means(believed.deviation, weight, slopes @ believed.design, errors, theta)
            share = np.exp(likely - likely.max())
            evidence = float(likely.max() + np.log(share.sum()))
            share /= share.sum()
            likelihood = _likelihood(theta, errors, share @ believed.deviation**2, 1.0 / (share @ (1.0 / weight)))
            if likelihood > best.likelihood:
                best = _Solution(theta, likelihood, share, evidence)
            step = np.clip(share @ means - theta, -_LARGEST_STEP, _LARGEST_STEP)
            theta = theta + (step if number < _WHOLE_STEPS else step / 2)
            if np.abs(step).max() < _ENOUGH:
                break
        return best

    def _weight(self, misfit: Floats, rows: Ints) -> Floats:
        """Of each row by each level; rows of one model share its error: n of them count as the square root of n."""
        count = np.bincount(self._architecture)[self._architecture[rows]]
        weight: Floats = 1.0 / (np.sqrt(count) * (misfit[:, None] ** 2 + self._noise[rows] ** 2))
        return weight

    def _errors(self, logs: Floats, rows: Ints) -> tuple[Floats, Floats]:
        """Log measured over predicted of some rows, and the slopes of the prediction."""
        host, kernel, exponents = np.split(logs, np.cumsum((len(self.host), len(self.kernel))))
        host, kernel = np.exp(host), np.exp(kernel)
        found = [self._cells[row].evaluate(host, kernel, exponents) for row in rows.tolist()]
        slopes = np.array([slopes for _, slopes in found]).reshape(len(rows), len(logs))
        return self._measured[rows] - np.array([log for log, _ in found]), slopes

    def _believed(self, levels: Sequence[Level]) -> _Believed:
        """What each parameter does to the groups' log factors and the exponents, and how far it may be from 0."""
        kinds = np.repeat((0, 1, 2), (len(self.host), len(self.kernel), len(SIZES)))
        design = np.column_stack((kinds < 2, kinds == 0, kinds == 1, np.eye(len(kinds)))).astype(float)
        own = [np.where(kinds < 2, level.classes, level.sizes) for level in levels]
        shared = [(level.whole, level.clocks, level.clocks) for level in levels]
        return _Believed(design, np.hstack((shared, own)), np.array([level.misfit for level in levels]))

    def _left_out(self, theta: Floats, believed: _Believed) -> Floats:
        """Errors that each architecture's rows have where they had no part in the solution."""
        left_out = np.empty(len(self._cells))
        for one in np.unique(self._architecture):
            own = self._architecture == one
            moved = self._solved(theta, believed, np.flatnonzero(~own), MOST_STEPS_LEFT_OUT).theta
            left_out[own] = self._errors(believed.design @ moved, np.flatnonzero(own))[0]
        return left_out

    def _factors(self, design: Floats, parameters: Floats) -> Factors:
        logs = design @ parameters
        factors = np.exp(logs).tolist()
        whole, host, device = parameters[:3].tolist()
        by_size = zip(SIZES, logs[-len(SIZES) :].tolist(), self._centres.tolist(), self._ranges, strict=True)
        size_corrections = tuple(
            SizeCorrection(of, exponent, centre, low, high)
            for of, exponent, centre, (low, high) in by_size
            if abs(exponent) > _ENOUGH and low < high
        )
        return Factors(
            {GENERAL: float(np.exp(whole + host)), **dict(zip(self.host, factors, strict=False))},
            {GENERAL: float(np.exp(whole + device)), **dict(zip(self.kernel, factors[len(self.host) :], strict=False))},
            size_corrections,
        )


def _means(deviation: Floats, weight: Floats, slopes: Floats, errors: Floats, theta: Floats) -> tuple[Floats, Floats]:
    """How likely each level makes rows whose latencies are straight lines, in logs, and its likeliest parameters."""
    target = errors + slopes @ theta
    scaled = slopes * deviation[:, None, :]  # by level, row and parameter
    pulled = scaled * weight[:, :, None]
    curvature = np.matmul(pulled.transpose(0, 2, 1), scaled) + np.eye(len(theta))
    pull = pulled.transpose(0, 2, 1) @ target
    solved = np.linalg.solve(curvature, pull[:, :, None])[:, :, 0]
    off = weight @ target**2 - (pull * solved).sum(axis=1)
    likely = 0.5 * (np.log(weight).sum(axis=1) - np.linalg.slogdet(curvature)[1] - off)
    return likely, deviation * solved


def _likelihood(theta: Floats, errors: Floats, variance: Floats, weight: Floats) -> float:
    """Log likelihood of parameters, but for a constant."""
    free = variance > 0
    believed = float((theta[free] ** 2 / variance[free]).sum())
    return 0.5 * (float(np.log(weight).sum() - (weight * errors**2).sum()) - believed)


class _Parts(NamedTuple):
    """A row's forward pass before groups have numbers: host time of each step by class, kernels by family."""

    timeline: Timeline
    host_us: dict[str, Floats]
    kernel_us: Floats
    families: tuple[str, ...]
    sizes: Floats  # of `SIZES`; NaN where a kernel has no such size
    waits_us: float
    device: DeviceInfo

    @classmethod
    def of(cls, predictor: Predictor, row: Row, runtime: str) -> _Parts:
        schedule, priced, device, beside_us = predictor.priced(row.graph, row.batch, runtime=runtime)
        fit = predictor.profile.runtimes[runtime]
        classes = np.array([kind_of(name) for name in schedule.host_class], dtype=object)
        slow, slow_ops = predictor.slowdown.dispatch, ops_slowdown(fit, predictor.slowdown)
        costs = np.array([host_cost(fit, name) for name in schedule.host_class]) * (fit.scale * slow_ops)
        if priced.cold is not None:
            costs += priced.cold.at(np.array([float(row.batch)]))[:, 0]
        steps = {name: np.where(classes == name, costs, 0.0) for name in dict.fromkeys(classes.tolist())}
        steps[MODULE] = schedule.calls[:, 0] * (fit.module_call_us * fit.scale * slow)
        steps[PYTHON] = schedule.calls[:, 1:] @ call_prices(fit)[1:] * (fit.scale * slow)
        host_us = {name: np.concatenate(([0.0], us)) for name, us in steps.items()}
        host_us[CALL] = np.concatenate(([fit.fixed_us * slow], np.zeros(len(costs))))
        us = priced.times(np.array([float(row.batch)])).us[priced.kernel_row, 0]
        families = tuple(root(family) for family in schedule.kernel_family)
        ops = [schedule.ops[index] for index in schedule.kernel_op.tolist()]
        told = [{TIME: time, **kernel_sizes(op)} for op, time in zip(ops, us.tolist(), strict=True)]
        sizes = np.array([one.get(name, math.nan) for one in told for name in SIZES])
        spent, times = {name: own for name, own in host_us.items() if own.any()}, us * priced.kernel_share
        waits_us = float(priced.timeline.sync.sum()) * device.sync_us + beside_us
        return cls(priced.timeline, spent, times, families, sizes.reshape(-1, len(SIZES)), waits_us, device)

    def cell(self, host: Sequence[str], kernel: Sequence[str], centres: Floats, protocol: str) -> _Cell:
        nothing = np.zeros(len(self.timeline.sync))
        steps = np.column_stack([self.host_us.get(name, nothing) for name in host])
        number = {name: index for index, name in enumerate(kernel)}
        groups: NDArray[np.int64] = np.array([number[name] for name in self.families], dtype=np.int64)
        sizes = np.nan_to_num(np.log(self.sizes / centres))
        return _Cell(self.timeline, steps, self.kernel_us, groups, sizes, self.waits_us, self.device, protocol)


def _spans(parts: Sequence[_Parts]) -> tuple[Floats, list[tuple[float, float]]]:
    """Of each of `SIZES`: its geometric mean over all kernels, by their time, and its ends; 1 without any."""
    sizes, us = np.concatenate([part.sizes for part in parts]), np.concatenate([part.kernel_us for part in parts])
    centres, ends = np.ones(len(SIZES)), [(1.0, 1.0)] * len(SIZES)
    for index, column in enumerate(sizes.T):
        known = np.isfinite(column)
        if us[known].sum() > 0:
            centres[index] = np.exp(np.average(np.log(column[known]), weights=us[known]))
            ends[index] = float(column[known].min()), float(column[known].max())
    return centres, ends


def corrected(profile: DeviceProfile, runtime: str, factors: Factors) -> DeviceProfile:
    """The profile with one runtime's host costs and kernel times multiplied; other runtimes stay as they are."""
    fit = profile.runtimes[runtime]
    host, kernel = factors.host, factors.kernel
    usual = host.get(GENERAL, 1.0)
    own = {
        precision: {
            name: msgspec.structs.replace(one, scale=one.scale * _of(kernel, root(name))) for name, one in fits.items()
        }
        for precision, fits in fit.kernels.items()
    }
    changed = msgspec.structs.replace(
        fit,
        costs_us=_multiplied(fit.costs_us, host, usual),
        cold_costs_us=_multiplied(fit.cold_costs_us, host, usual),
        module_call_us=fit.module_call_us * host.get(MODULE, usual),
        python_call_us=fit.python_call_us * host.get(PYTHON, usual),
        attribute_read_us=fit.attribute_read_us * host.get(PYTHON, usual),
        fixed_us=fit.fixed_us * host.get(CALL, usual),
        host_spread=0.0,  # the rows are of the host that is asked about
        kernels=own,
        kernel_scales=_scales(fit, kernel),
        kernel_tilts=(*fit.kernel_tilts, *factors.size_corrections),
    )
    return msgspec.structs.replace(profile, runtimes={**profile.runtimes, runtime: changed})


def _multiplied(costs_us: dict[str, float], host: dict[str, float], usual: float) -> dict[str, float]:
    return {name: cost * host.get(kind_of(name), usual) for name, cost in costs_us.items()}


def _scales(fit: DispatchFit, kernel: dict[str, float]) -> dict[str, float]:
    """The runtime's scales of shared kernels, times the factors; a family keeps what it had from the general one."""
    known = fit.kernel_scales
    return {name: known.get(name, known.get(GENERAL, 1.0)) * _of(kernel, name) for name in (GENERAL, *known, *kernel)}


def _of(kernel: dict[str, float], family: str) -> float:
    return kernel.get(family, kernel.get(GENERAL, 1.0))
