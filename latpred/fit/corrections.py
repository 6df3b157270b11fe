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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from latpred.graph.features import Floats
from latpred.graph.graph import Ints, ModelGraph, numbered
from latpred.host import SAME
from latpred.ops.families import kind_of, nearest, root, runtime_prefixes
from latpred.prediction import clocks
from latpred.prediction.clocks import Timeline
from latpred.prediction.predictor import Predictor
from latpred.prediction.pricing import CALL, SIZES, TIME, kernel_sizes
from latpred.profile.document import DeviceInfo, DeviceProfile, SizeCorrection

MODULE, PYTHON = "module calls", "python calls"
GENERAL = ""  # what no measured row has takes this factor
_NO_CLASSES = {GENERAL, MODULE, PYTHON, CALL}  # of those that host factors are of
NONE = "none"  # level of a profile as it is
WHOLE = 1.0  # standard deviation of the log of one factor on everything, at every other level

SOFT = 0.10  # error in log latency beyond which a row pulls less than in proportion
MOST_STEPS, MOST_STEPS_LEFT_OUT = 20, 4
# Logs of the host's factor over the device's that are looked at: so many, from -MOST_RATIO_LOG on.
RATIO_LOGS, MOST_RATIO_LOG = 13, 3.0
START_OFFSETS = (0.0, -1.0, -0.5, 0.5, 1.0)  # from the best of these, to start at until rows are met
MET_ERROR = 0.005  # mean error in log latency of rows that are met, or their noise
RATIO_PENALTY = 0.002  # error in log latency that a ratio of e has to save
_LARGEST_STEP, _WHOLE_STEPS = 0.5, 6  # then half steps, for those that swing between two clocks
_ENOUGH = 1e-3  # a step that moves no factor by more was the last
_NUDGE = 0.01


class Level(NamedTuple):
    """How free factors are, and how closely they follow the rows: standard deviations of their logs, 0 for none.

    Beside them, one factor on everything is as free as `WHOLE`.
    """

    name: str
    parts: float  # of those on the host, on the device, and on each host class and kernel family
    sizes: float  # of the exponents of kernels' sizes
    misfit: float  # what a right profile is still off by, in log latency, whatever the noise of the row


class Row(NamedTuple):
    """One measured forward pass."""

    architecture: int  # tells rows of one model from those of others
    graph: ModelGraph
    batch: int
    protocol: str
    latency_us: float
    noise: float  # standard deviation of the log of the measurement


class Factors(NamedTuple):
    """What host costs by class and kernel times by family are multiplied by; "" is for all others."""

    host: dict[str, float]
    kernel: dict[str, float]
    size_corrections: tuple[SizeCorrection, ...] = ()  # on kernel times, according to their size


class Fit(NamedTuple):
    """The likeliest level, factors, and how far off each row is, in log latency, without its architecture's rows."""

    level: str
    factors: Factors
    left_out: Floats


class _Solution(NamedTuple):
    """Parameters, how likely they are, how likely each level is, and how likely all levels together make the rows."""

    theta: Floats
    likelihood: float
    share: Floats
    evidence: float


@dataclass(frozen=True, slots=True)
class _RowPass:
    """A row's forward pass: host time of each step by class, and time, family and sizes of each kernel."""

    timeline: Timeline
    classes: tuple[str, ...]
    host_us: Floats  # (steps, classes)
    families: tuple[str, ...]
    kernel_us: Floats
    kernel_family: Ints  # which of the families each is of
    sizes: Floats  # (kernels, `SIZES`); NaN where a kernel has no such size
    beside_us: float  # what it waits for beside, as a CPU does for memory
    device: DeviceInfo
    protocol: str

    def rescaled(self, host: float, kernel: float) -> float:
        """Log latency with one factor on the host and one on the device."""
        return float(np.log(self._latency(self.host_us.sum(axis=1) * host, self.kernel_us[:, None] * kernel)[0]))

    def evaluate(self, logs: Floats) -> tuple[float, Floats]:
        """Log latency and its slopes in the logs of the factors on classes and families and in the exponents.

        The exponents are of `sizes`, by now logs over their centres, 0 without.
        """
        factors = np.exp(logs[: -len(SIZES)])
        host, kernel = np.split(factors, (len(self.classes),))
        times = self.kernel_us * kernel[self.kernel_family] * np.exp(self.sizes @ logs[-len(SIZES) :])
        steps = self.host_us @ host
        if not self.device.asynchronous:
            by_family = np.bincount(self.kernel_family, times, len(kernel))
            spent = np.concatenate((self.host_us.sum(axis=0) * host, by_family, times @ self.sizes))
            total = float(self._latency(steps, times[:, None])[0])
            return float(np.log(total)), spent / total
        nudged = np.repeat(times[:, None], 1 + len(kernel) + len(SIZES), axis=1)
        nudged[np.arange(len(times)), self.kernel_family + 1] *= 1.0 + _NUDGE
        nudged[:, 1 + len(kernel) :] *= (1.0 + _NUDGE) ** self.sizes
        latency = self._latency(steps, nudged)
        slower = [
            self._latency(steps + _NUDGE * factor * own, times[:, None])[0]
            for factor, own in zip(host, self.host_us.T, strict=True)
        ]
        slopes = np.log(np.array([*slower, *latency[1:]]) / latency[0])
        return float(np.log(latency[0])), slopes / np.log1p(_NUDGE)

    def _latency(self, steps: Floats, kernels: Floats) -> Floats:
        return clocks.latency(self.timeline, steps, kernels, self.device, self.protocol) + self.beside_us


def _row_pass(predictor: Predictor, row: Row, runtime: str) -> _RowPass:
    schedule, priced, device, beside_us = predictor.priced(row.graph, row.batch, runtime=runtime)
    batch = np.array([float(row.batch)])
    ops_us, module_us, *python_us = priced.host_by_kind(row.batch).T
    classes = np.array([CALL, *map(kind_of, schedule.host_class)], dtype=object)
    steps = {name: np.where(classes == name, ops_us, 0.0) for name in dict.fromkeys(classes.tolist())}
    steps |= {MODULE: module_us, PYTHON: sum(python_us)}
    host_us = {name: us for name, us in sorted(steps.items()) if us.any()}
    us = priced.times(batch).us[priced.kernel_row, 0]
    families, kernel_family = numbered(tuple(root(family) for family in schedule.kernel_family))
    ops = [schedule.ops[index] for index in schedule.kernel_op.tolist()]
    _, at_full_speed, *_ = predictor.at(SAME).priced(row.graph, row.batch, runtime=runtime)
    factors = np.array([priced.rows.rows[number].price.model.fit.scale for number in priced.row_numbers.tolist()])
    size_us = (at_full_speed.times(batch).us[:, 0] / factors)[priced.kernel_row]
    told = [{TIME: time, **kernel_sizes(op)} for op, time in zip(ops, size_us.tolist(), strict=True)]
    return _RowPass(
        timeline=priced.timeline,
        classes=tuple(host_us),
        host_us=np.column_stack(list(host_us.values())),
        families=families,
        kernel_us=us * priced.kernel_share,
        kernel_family=kernel_family,
        sizes=np.array([one.get(name, math.nan) for one in told for name in SIZES]).reshape(-1, len(SIZES)),
        beside_us=beside_us,
        device=device,
        protocol=row.protocol,
    )


class LatencyModel:
    """Latencies of rows that were measured in one runtime, as functions of factors to a predictor's profile."""

    def __init__(self, predictor: Predictor, rows: Sequence[Row], runtime: str) -> None:
        passes = [_row_pass(predictor, row, runtime) for row in rows]
        self.host = tuple(sorted({name for forward in passes for name in forward.classes}))
        self.kernel = tuple(sorted({name for forward in passes for name in forward.families}))
        self._centres, self._ranges = _spans(passes)
        self._passes = [replace(one, sizes=np.nan_to_num(np.log(one.sizes / self._centres))) for one in passes]
        self._kinds = np.repeat((0, 1, 2), (len(self.host), len(self.kernel), len(SIZES)))
        self._places = [self._places_of(forward) for forward in passes]
        # What one factor on everything, one on each clock and one on each group do to the logs of groups and exponents.
        shared = (self._kinds < 2, self._kinds == 0, self._kinds == 1)
        self._design = np.column_stack((*shared, np.eye(len(self._kinds)))).astype(float)
        self._measured = np.log([row.latency_us for row in rows])
        self._architecture = np.array([row.architecture for row in rows])
        self._noise = np.array([row.noise for row in rows])

    def _places_of(self, forward: _RowPass) -> Ints:
        """Where the logs of a pass's factors, and the exponents, stand among those of all."""
        own = [*map(self.host.index, forward.classes)]
        own += [len(self.host) + self.kernel.index(family) for family in forward.families]
        return np.array([*own, *range(len(self.host) + len(self.kernel), len(self._kinds))])

    def unchanged(self) -> Fit:
        """The profile as it is."""
        errors, _ = self._errors(np.zeros(len(self._kinds)), np.arange(len(self._passes)))
        return Fit(NONE, Factors({}, {}), errors)

    def fit(self, levels: Sequence[Level]) -> Fit:
        """The mean of what levels make of the rows, each as heavy as it makes the rows likely.

        Rows too few to tell levels apart are told from by all of them, which errs less than the one that looks best.
        """
        # How far each parameter may be from 0 by each level, and by how much a right profile misses the rows.
        own = [np.where(self._kinds < 2, level.parts, level.sizes) for level in levels]
        deviation = np.hstack(([(WHOLE, level.parts, level.parts) for level in levels], own))
        misfit, every = np.array([level.misfit for level in levels]), np.arange(len(self._passes))
        found = _Solution(np.zeros(0), -math.inf, np.zeros(0), -math.inf)
        free = deviation.any(axis=0)  # what no level lets move starts, and stays, at 0
        for number, start in enumerate(self._starts() * free):
            tried = self._solved(start, deviation, misfit, every, MOST_STEPS)
            found = max(found, tried, key=lambda each: each.evidence)
            off = np.abs(self._errors(self._design @ found.theta, every)[0]).mean()
            if number > 0 and off < max(MET_ERROR, self._noise.mean()):
                break
        shares: dict[str, float] = {}
        for level, share in zip(levels, found.share.tolist(), strict=True):
            shares[level.name] = shares.get(level.name, 0.0) + share
        likeliest = max(shares, key=shares.__getitem__)
        return Fit(likeliest, self._factors(found.theta), self._left_out(found.theta, deviation, misfit))

    def _starts(self) -> Floats:
        """Parameters to start from: one factor, clocks as far apart as rows agree on best, and some around that.

        Which clock sets the pace is decided by factors that are far from 1, so that one start may lead nowhere.
        """
        usual = float(np.median(self._measured - self._apart(0.0, 0.0)))
        steps = np.linspace(-MOST_RATIO_LOG, MOST_RATIO_LOG, RATIO_LOGS)
        errors = self._measured - np.array([self._apart(usual, apart) for apart in steps])
        off = np.abs(errors - np.median(errors, axis=1, keepdims=True)).mean(axis=1) + RATIO_PENALTY * np.abs(steps)
        starts = np.zeros((1 + len(START_OFFSETS), 3 + len(self._kinds)))
        starts[:, 0] = usual
        for start, apart in zip(starts[1:], steps[off.argmin()] + np.array(START_OFFSETS), strict=True):
            start[:3] = usual + np.median(self._measured - self._apart(usual, apart)), apart / 2, -apart / 2
        return starts

    def _apart(self, usual: float, apart: float) -> Floats:
        """Log latencies of all rows with clocks apart by a factor, in logs, around the usual one."""
        host, device = np.exp(usual + apart / 2), np.exp(usual - apart / 2)
        return np.array([forward.rescaled(host, device) for forward in self._passes])

    def _solved(self, theta: Floats, deviation: Floats, misfit: Floats, rows: Ints, most_steps: int) -> _Solution:
        """The best of the parameters that Gauss-Newton steps come by, from a guess on."""
        best = _Solution(theta, -math.inf, np.zeros(0), -math.inf)
        for number in range(most_steps):
            errors, slopes = self._errors(self._design @ theta, rows)
            weight = self._weight(misfit, rows) / np.sqrt(1.0 + (errors / SOFT) ** 2)
            likely, means = _means(deviation, weight, slopes @ self._design, errors, theta)
            share = np.exp(likely - likely.max())
            evidence = float(likely.max() + np.log(share.sum()))
            share /= share.sum()
            likelihood = _likelihood(theta, errors, share @ deviation**2, 1.0 / (share @ (1.0 / weight)))
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
        errors, slopes = np.empty(len(rows)), np.zeros((len(rows), len(logs)))
        for number, row in enumerate(rows.tolist()):
            own = self._places[row]
            predicted, slopes[number, own] = self._passes[row].evaluate(logs[own])
            errors[number] = self._measured[row] - predicted
        return errors, slopes

    def _left_out(self, theta: Floats, deviation: Floats, misfit: Floats) -> Floats:
        """Errors that each architecture's rows have where they had no part in the solution."""
        left_out = np.empty(len(self._passes))
        for one in np.unique(self._architecture):
            own = self._architecture == one
            moved = self._solved(theta, deviation, misfit, np.flatnonzero(~own), MOST_STEPS_LEFT_OUT).theta
            left_out[own] = self._errors(self._design @ moved, np.flatnonzero(own))[0]
        return left_out

    def _factors(self, parameters: Floats) -> Factors:
        logs = self._design @ parameters
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


def _spans(passes: Sequence[_RowPass]) -> tuple[Floats, list[tuple[float, float]]]:
    """Of each of `SIZES`: its geometric mean over all kernels, by their time, and its ends; 1 without any."""
    sizes, us = (np.concatenate([getattr(forward, name) for forward in passes]) for name in ("sizes", "kernel_us"))
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
    host, kernel = partial(_of, factors.host), partial(_of, factors.kernel)
    changed = msgspec.structs.replace(
        fit,
        costs_us=_by_kind(fit.costs_us, factors.host),
        cold_costs_us=_by_kind(fit.cold_costs_us, factors.host),
        module_call_us=fit.module_call_us * host(MODULE),
        python_call_us=fit.python_call_us * host(PYTHON),
        attribute_read_us=fit.attribute_read_us * host(PYTHON),
        fixed_us=fit.fixed_us * host(CALL),
        kernels={
            precision: {
                name: msgspec.structs.replace(one, scale=one.scale * kernel(root(name))) for name, one in fits.items()
            }
            for precision, fits in fit.kernels.items()
        },
        # Of shared kernels; a family keeps what it had from the general scale.
        kernel_scales={
            name: _of(fit.kernel_scales, name) * kernel(_family(name, factors.kernel))
            for name in (GENERAL, *fit.kernel_scales, *factors.kernel)
        },
        size_corrections=(*fit.size_corrections, *factors.size_corrections),
    )
    return msgspec.structs.replace(profile, runtimes={**profile.runtimes, runtime: changed})


def _by_kind(costs_us: dict[str, float], factors: dict[str, float]) -> dict[str, float]:
    """Costs by host class times the factors of their kinds; a kind that shared the cost of others gets its own."""
    runtimes_own = {prefix for name in costs_us for prefix in runtime_prefixes(name)}
    named = {f"{prefix}{kind}" for prefix in runtimes_own for kind in factors.keys() - _NO_CLASSES}
    shared_us = {name: us for name in sorted(named - costs_us.keys()) if (us := nearest(costs_us, name))}
    return {name: us * _of(factors, kind_of(name)) for name, us in (costs_us | shared_us).items()}


def _family(name: str, families: Collection[str]) -> str:
    """The family that a scale is of, which may name a number format before it and a kind after it."""
    return next((part for part in name.split(".") if part in families), GENERAL)


def _of(factors: dict[str, float], name: str) -> float:
    return factors.get(name, factors.get(GENERAL, 1.0))
