"""Kernel samples to `KernelFit`s: one regressor for each family, special families where they have samples enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.optimize import nnls

from latpred.calibration.fitting.dispatch_fit import TimedNetwork, steps_us
from latpred.calibration.timing.in_network import calls
from latpred.fit.roofline import RooflineRegressor, scale_leaf, weighted_median
from latpred.graph.features import NATIVE, Floats, native
from latpred.graph.graph import Op
from latpred.ops.families import lineage, nearest, root
from latpred.prediction.kernel_times import columns, fresh_bytes, slower_kernels
from latpred.prediction.pricing import SUBSTITUTES, ColdDispatch, host_cost, scaled_likes
from latpred.profile.datasheet import short
from latpred.profile.document import DispatchFit, KernelFit
from latpred.runtimes import one_step_per_op

FEWEST = 6  # samples below which a family borrows
# Points that a residual keeps. Twice as many made no left-out network better and predictions several times slower.
MOST_POINTS = 200
FEWEST_LEAF = 24  # samples that earn a special family a fit of its own
FEWEST_APART = {"conv_transpose": FEWEST_LEAF}  # six, all of one window, priced another one eight times too dear
# The same where a special family has other code, and little of it in a network. The plain one learns nothing of it.
APART = {
    "rnn": 8,
    "pooling.max": 8,
    "pooling.avg": 8,
    "pooling.average": 8,
    "batch_norm.training": 8,
    "conv_depthwise.padded": FEWEST,
    "conv_depthwise.multiplied": FEWEST,
    "conv.nchwc": 8,
    "conv_grouped.nchwc": 8,
    "conv_depthwise.nchwc": 8,
}


# Kinds of pooling have loops of their own, and oneDNN multiplies matrices, channel by channel, where it has no kernel
# for a depthwise convolution: numbers of the family say nothing of these.
OWN_ALGORITHM = frozenset({"pooling", "conv_depthwise.padded", "conv_depthwise.multiplied"})


class KernelSample(NamedTuple):
    """One timed kernel.

    row : work and dimensions in the order of `graph.features.layout(family).columns`. us : its time without dispatch.
    beside_us : what always comes with it, so that an error of the kernel counts as one of both: its dispatch and a
    share of its pass. dispatch_us : the dispatch alone.
    """

    family: str
    row: tuple[float, ...]
    us: float
    beside_us: float = 0.0
    dispatch_us: float = 0.0


def row_of(op: Op, batch: int, *, resident: float = 0.0) -> tuple[float, ...]:
    """Work and dimensions of one op at a batch size; the `resident` share of its weights was in the cache."""
    return tuple(float(line.at(batch)) for line in columns(op, root(op.family), resident=resident))


def fit_kernels(
    samples: Iterable[KernelSample],
    multiprocessors: int = 0,
    *,
    native_threads: int = 0,
    prior: Mapping[str, KernelFit] = MappingProxyType({}),
) -> dict[str, KernelFit]:
    """A fit for every family that has samples of one device and precision; repeated rows are averaged.

    A CPU has no multiprocessors; `native_threads` are those on which PyTorch computes some convolutions of this
    precision itself, 0 where it does not. `prior` is what a datasheet tells of the device's kernels.
    """
    by_family: dict[str, dict[str, list[KernelSample]]] = {}
    for sample in samples:
        family = sample.family
        if native_threads and native(family, np.array([sample.row]), native_threads)[0]:
            family = NATIVE
        by_family.setdefault(root(family), {}).setdefault(family, []).append(sample)
    fits: dict[str, KernelFit] = {}
    for family in sorted(by_family, key=lambda family: len(SUBSTITUTES.get(family, ()))):  # each after its like
        like = next((name for name in SUBSTITUTES.get(family, ()) if name in fits), None)
        several = [sample for leaf in by_family[family].values() for sample in leaf]
        if like is None or family in prior or len(several) >= FEWEST_APART.get(family, FEWEST):
            fits.update(_fit_family(family, by_family[family], multiprocessors, prior))
        elif len(several) > 1:  # few samples tell how far off a fit of their like is
            fits[like] = _with_leaf(fits[like], family, several)
    return _with_datasheet(fits, by_family, prior) if fits and prior else fits


def _fit_family(
    family: str,
    leaves: Mapping[str, Sequence[KernelSample]],
    multiprocessors: int,
    prior: Mapping[str, KernelFit],
) -> dict[str, KernelFit]:
    pooled = [sample for samples in leaves.values() for sample in samples]
    if len(pooled) < FEWEST:
        return {}
    enough = {leaf: FEWEST if leaf in prior else nearest(APART, leaf, FEWEST_LEAF) for leaf in leaves}
    if len(leaves.get(family, ())) >= FEWEST:
        apart = {leaf for leaf, samples in leaves.items() if len(samples) >= enough[leaf] and nearest(APART, leaf)}
        pooled = [sample for sample in pooled if sample.family not in apart]
    # What leaves without a fit of their own differ by is taken off before the residual is fitted, which would otherwise
    # call it noise.
    plain = RooflineRegressor(family, multiprocessors, prior=prior.get(family)).fit_roofline(*_averaged(pooled))
    few = {leaf: samples for leaf, samples in leaves.items() if leaf != family and len(samples) < enough[leaf]}
    scales = {leaf: _leaf_scale(plain, samples) for leaf, samples in few.items()}
    alike = [_as_family(sample, plain, scales.get(sample.family, 1.0)) for sample in pooled]
    general = _fit(family, alike, multiprocessors, prior.get(family))
    # Few samples leave terms open: one batch alone says nothing of others. There the family's numbers stand, but for
    # kernels that have nothing in common with it.
    unrelated = {leaf for leaf in leaves if not OWN_ALGORITHM.isdisjoint(lineage(leaf))}
    special = {
        leaf: _fit(leaf, samples, multiprocessors, prior.get(leaf, prior.get(family) if leaf in unrelated else plain))
        for leaf, samples in leaves.items()
        if leaf != family and len(samples) >= enough[leaf]
    }
    fits = {family: general, **special}
    for leaf, samples in few.items():
        above = nearest_fit(fits, leaf) or family  # prices the leaf
        fits[above] = _with_leaf(fits[above], leaf, samples)
    return fits


def _with_leaf(fit: KernelFit, leaf: str, samples: Sequence[KernelSample]) -> KernelFit:
    """The fit, with what it takes to price a leaf that has few samples."""
    return msgspec.structs.replace(fit, leaf_scales={**fit.leaf_scales, leaf: _leaf_scale(fit, samples)})


def _with_datasheet(
    fits: Mapping[str, KernelFit],
    samples: Mapping[str, Mapping[str, Sequence[KernelSample]]],
    prior: Mapping[str, KernelFit],
) -> dict[str, KernelFit]:
    """The fits, and for every kind of kernel of a datasheet that too few samples were of, the datasheet's own.

    Their floors are as much lower or higher as those of what was fitted, and their rates as far from the datasheet's as
    those of their family are, or of all families where there are no samples of theirs.
    """
    higher_us = float(
        np.median([fit.floor_us - prior[name].floor_us for name, fit in fits.items() if name in prior] or [0.0])
    )
    least_us = min(fit.floor_us for fit in fits.values())
    off = {
        family: [log(longer) for leaf, several in leaves.items() if (longer := _longer(leaf, several, prior))]
        for family, leaves in samples.items()
    }
    usual = float(np.median([one for each in off.values() for one in each] or [0.0]))
    told = dict(fits)
    for name, known in prior.items():
        if name not in fits:
            longer = exp(float(np.median(off.get(root(name)) or [usual])))
            told[name] = msgspec.structs.replace(
                known,
                floor_us=short(max(known.floor_us + higher_us, least_us)),
                macs_per_us=short(known.macs_per_us / longer),
                weight_bytes_per_us=short(known.weight_bytes_per_us / longer),
                activation_bytes_per_us=short(known.activation_bytes_per_us / longer),
            )
    return told


def _longer(leaf: str, samples: Sequence[KernelSample], prior: Mapping[str, KernelFit]) -> float:
    """How many times longer kernels take above their floor than a datasheet has it; 0 where it says nothing."""
    name = nearest_fit(prior, leaf)
    if name is None:
        return 0.0
    rows, times, _, _ = _averaged(samples)
    floor_us = 0.9 * min(float(times.min()), prior[name].floor_us)
    return scale_leaf(msgspec.structs.replace(prior[name], floor_us=floor_us), rows, times, floor_us)


def nearest_fit(fits: Mapping[str, object], family: str) -> str | None:
    """The family itself, the nearest more general one that has a fit, or that of its like which it scales; or None."""
    return next((name for name in (*lineage(family), *scaled_likes(fits, family)) if name in fits), None)


def _leaf_scale(plain: KernelFit, samples: Sequence[KernelSample]) -> float:
    # A long pass makes errors of its kernels matter less, but these are no less known for that.
    rows, times, _, hidden = _averaged([sample._replace(beside_us=sample.dispatch_us) for sample in samples])
    # A kernel of a GPU that has hardly anything to do says as little as one that its dispatch hides.
    return scale_leaf(plain, rows, times, hidden + plain.floor_us * bool(plain.multiprocessors))


def _as_family(sample: KernelSample, plain: KernelFit, scale: float) -> KernelSample:
    """A sample of a more special family as the family itself would have taken it."""
    floor_us = min(plain.floor_us, 0.9 * sample.us)
    return sample._replace(us=floor_us + (sample.us - floor_us) / scale)


def _fit(family: str, samples: Sequence[KernelSample], multiprocessors: int, prior: KernelFit | None) -> KernelFit:
    regressor = RooflineRegressor(family, multiprocessors, MOST_POINTS, prior=prior)
    return regressor.fit(*_averaged(samples)).fit_


def _averaged(samples: Sequence[KernelSample]) -> tuple[Floats, Floats, Floats, Floats]:
    """Rows, each once, with the median of its times, how well that is known, and what passes beside them."""
    by_row: dict[tuple[float, ...], list[KernelSample]] = {}
    for sample in samples:
        by_row.setdefault(sample.row, []).append(sample)
    times = [_middle(group) for group in by_row.values()]
    # A row seen often is known better, but not without end: what is left is the regressor's own error.
    weights = np.minimum(4.0, [len(group) for group in by_row.values()])
    beside = [float(np.median([sample.beside_us for sample in group])) for group in by_row.values()]
    return np.array(list(by_row)), np.array(times), weights, np.array(beside)


def _middle(samples: Sequence[KernelSample]) -> float:
    """Median of times; those count more beside which less passes."""
    times, beside = (np.array([getattr(sample, name) for sample in samples]) for name in ("us", "beside_us"))
    return weighted_median(times, 1.0 / (times + beside))


# Of a call's time that is taken for kernel at least. A kernel that cannot be told from its dispatch is known to be
# short: without such calls a family's floor would be that of its longer ones.
LEAST_SHARE = 0.02
LEAST_ROOM = 0.6  # of kernels' clocked time, that a pass leaves for them
# Of a pass, that counts as passing beside each of its kernels. In a large network a short kernel finds nothing in the
# caches and takes several times as long, which matters to no prediction; in a small one it does.
PASS_SHARE = 0.03
FEWEST_COLD, MOST_COLD_US = 24, 30.0  # calls without a kernel that tell what cold code takes, and the most of one
COLD_BYTES = float(16 << 20)  # touched since code last ran, which leave half of it in the caches
SHORT_US = 5.0  # a kernel so long leaves half of what the shortest ones that leave anything do


class _Kernel(NamedTuple):
    """One launching call: its op (None for several in one), its kernel's time, and its dispatch."""

    op: Op | None
    us: float
    dispatch_us: float


def kernel_samples(runs: Sequence[TimedNetwork], dispatch: DispatchFit, in_place: DispatchFit) -> list[KernelSample]:
    """Samples of every kernel that had a call of its own, from runs of one precision with the times of their calls.

    `dispatch` are the costs in tiny networks, with how much longer dispatch takes from cold caches; `in_place` the same
    as the clock around each call has it, which is a little longer.
    """
    timed_calls = msgspec.structs.replace(dispatch, cold_calls=0.0)  # what precedes a call, no clock is on
    kernels = [_kernels(run, dispatch, in_place, _cold_us(run, timed_calls)) for run in runs]
    refill = _cache_refill(runs, kernels, dispatch)
    samples = []
    for run, launched in zip(runs, kernels, strict=True):
        for op, us, dispatch_us in launched:
            # What the system takes to give memory is no part of a kernel's work.
            if op is not None and not fresh_bytes(op.family, np.array([row_of(op, run.batch)]), 0)[0]:
                after_us = float(_terms(np.array([us]))[0] @ refill)
                beside_us = dispatch_us + PASS_SHARE * run.total_us
                row = row_of(op, run.batch, resident=run.resident)
                each = 1.0 / op.launches / float(slower_kernels(run.slowdown, op.family, np.array(row)))
                times = (us + after_us) * each, beside_us * each, dispatch_us * each
                samples.append(KernelSample(op.family, row, *times))
    return samples


def with_cold(dispatch: DispatchFit, in_place: DispatchFit, runs: Sequence[TimedNetwork]) -> DispatchFit:
    """Dispatch with what it takes longer from cold caches: the same multiple, for every call, of what it takes warm.

    Calls that compute nothing tell: what one takes beyond its dispatch is cold code's.
    """
    all_cold = msgspec.structs.replace(dispatch, cold_costs_us=in_place.costs_us, cold_bytes=COLD_BYTES)
    cold, extra = [], []
    for run in runs:
        for group, taken, cold_us in zip(calls(run.ops), run.calls_us, _cold_us(run, all_cold), strict=True):
            if not any(op.launches for op in group):
                cold.append(cold_us)
                extra.append(min(taken / run.slowdown.ops - _dispatch_us(group, in_place), MOST_COLD_US))
    if len(cold) < FEWEST_COLD or not any(cold):
        return dispatch
    factor = max(float(np.dot(cold, extra) / np.dot(cold, cold)), 0.0)
    costs_us = {name: round(factor * cost, 4) for name, cost in in_place.costs_us.items()}
    # Python's own code goes as that of the calls which it makes.
    return msgspec.structs.replace(all_cold, cold_costs_us=costs_us, cold_calls=round(factor, 4))


def host_us(run: TimedNetwork, dispatch: DispatchFit) -> float:
    """Dispatch of a whole forward pass, on a machine as fast as it was then."""
    calls_us, ops_us = (dispatch.scale * us for us in steps_us(dispatch, run))
    ops_us += sum(_cold_us(run, dispatch))
    return run.slowdown.dispatch * (dispatch.fixed_us + calls_us) + run.slowdown.ops * ops_us


def _kernels(
    run: TimedNetwork, dispatch: DispatchFit, in_place: DispatchFit, cold_us: Sequence[float]
) -> list[_Kernel]:
    """The launching calls of a run, without their dispatch and what that takes longer from cold caches.

    With a clock around each, calls of short passes sum to more than a pass leaves beside dispatch: they are shortened.
    """
    kernels = []
    for group, taken, longer_us in zip(calls(run.ops), run.calls_us, cold_us, strict=True):
        if any(op.launches for op in group):
            cost = (_dispatch_us(group, in_place) + longer_us) * run.slowdown.ops
            us = max(taken - cost, LEAST_SHARE * taken)
            alone = len(group) == 1 and not group[0].estimated
            kernels.append(_Kernel(group[0] if alone else None, us, cost))
    clocked_us = sum(kernel.us for kernel in kernels)
    left_us = run.total_us - host_us(run, dispatch)
    shorter = left_us / clocked_us if clocked_us > 0 else 1.0
    return [kernel._replace(us=kernel.us * min(max(shorter, LEAST_ROOM), 1.0)) for kernel in kernels]


def _dispatch_us(group: Sequence[Op], dispatch: DispatchFit) -> float:
    return sum(host_cost(dispatch, op.host_class) for op in group) * dispatch.scale


def _cold_us(run: TimedNetwork, dispatch: DispatchFit) -> list[float]:
    """What each call's dispatch takes longer because its code has left the caches."""
    groups, ops = calls(run.ops), run.ops
    cold = ColdDispatch.of(one_step_per_op("eager", ops), dispatch)
    if cold is None:
        return [0.0] * len(groups)
    # What closes a pass belongs to no call and dispatches nothing; the others stand in order.
    ends = np.cumsum([len(group) for group in groups], dtype=np.int64)  # a chain of module calls has no groups
    total = np.concatenate(([0.0], np.cumsum(cold.at(np.array([float(run.batch)]))[:, 0])))
    longer: list[float] = np.diff(total[ends], prepend=0.0).tolist()
    return longer


def _cache_refill(runs: Sequence[TimedNetwork], kernels: Sequence[Sequence[_Kernel]], dispatch: DispatchFit) -> Floats:
    """Coefficients of `_terms` that explain what networks take beyond their dispatch and their kernels."""
    totals = np.array([run.total_us for run in runs])
    kernels_us = np.array([sum(kernel.us for kernel in launched) for launched in kernels])
    left = totals - (np.array([host_us(run, dispatch) for run in runs]) + kernels_us)
    terms = np.array([_terms(np.array([k.us for k in launched])).sum(axis=0) for launched in kernels])
    coefficients: Floats = nnls(terms / totals[:, None], left / totals)[0]
    return coefficients


def _terms(us: Floats) -> Floats:
    """What kernels leave behind: a constant part, but for the shortest ones, the root and a proportional part."""
    return np.column_stack((us / (us + SHORT_US), np.sqrt(us), us))
