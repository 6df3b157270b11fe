"""Two clocks over a schedule, host and device, and the batch sizes at which one overtakes the other.

Arrays of device times have a batch axis; host times have none but on a synchronous device. All times are microseconds.
Nothing here knows where costs come from.

With dispatch d, kernel times k, launch latency L, gap g and synchronisation cost s the recurrence is

    host    H_i = H_{i-1} + d_i, at least the start of the kernel that is `queue` before the one it launches;
            at a synchronisation H_i = max(H_i, G) + s
    device  G_j = max(G_{j-1} + g, H_{i(j)} + L) + k_j

Between synchronisations, and while no more kernels than `queue` are under way, G after a stretch of m kernels is
max_j(H_{i(j)} + L + sum_{l>=j} k_l + (m - j) g): sums and a maximum that cover a whole batch axis at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latpred.errors import UsageError
from latpred.graph.features import Floats
from latpred.graph.graph import Ints
from latpred.profile.document import DeviceInfo

_WARM_PERIODS = 4
_PERIODS = 12  # a multiple of every likely cycle of the recurrence


@dataclass(frozen=True, slots=True)
class Timeline:
    """The order of a schedule, cut into stretches after each step that synchronises; the last may be empty."""

    kernel_step: Ints  # which step launches each kernel
    sync: Ints  # how often each step synchronises
    cut_steps: Ints  # bounds of the stretches, one more than there are
    cut_kernels: Ints
    cut_syncs: Ints  # synchronisations that end each stretch

    @classmethod
    def of(cls, kernel_step: Ints, sync: Ints) -> Timeline:
        cuts = np.flatnonzero(sync) + 1
        steps = np.concatenate(([0], cuts, [len(sync)]))
        kernels = np.searchsorted(kernel_step, steps)
        syncs = np.concatenate((sync[cuts - 1], [0]))
        return cls(kernel_step, sync, steps, kernels, syncs)

    @property
    def most_under_way(self) -> int:
        """The most kernels that the host launches before it waits for them."""
        return int((self.cut_kernels[1:] - self.cut_kernels[:-1]).max())


def latency(timeline: Timeline, host: Floats, kernels: Floats, device: DeviceInfo, protocol: str) -> Floats:
    """Microseconds of one forward pass at each batch.

    `host`, shape (n,), is the dispatch time of each step, with what Python does before it; it may be (n, batches) on a
    synchronous device. `kernels`, shape (m, batches), are device times. Of the protocols "single" synchronises after
    each forward, and "pipelined" gives the period when forwards follow each other.
    """
    if not device.asynchronous:
        waits = float(timeline.sync.sum()) * device.sync_us
        together: Floats = host.sum(axis=0) + kernels.sum(axis=0) + waits
        return together
    if protocol == "pipelined":
        return _pipelined(timeline, host, kernels, device)
    through = _by_steps if timeline.most_under_way > device.queue else _by_stretches
    single: Floats = np.maximum(*through(timeline, host, kernels, device, periods=1)[0]) + device.sync_us
    # Forwards that are waited for overlap less: where the clocks bend into each other, these do as well.
    slower_us, bend = _side_by_side(host, kernels, device)
    return np.maximum(single, slower_us * bend)


def _pipelined(timeline: Timeline, host: Floats, kernels: Floats, device: DeviceInfo) -> Floats:
    cuts, (period, bend) = timeline.cut_kernels, _side_by_side(host, kernels, device)
    if len(cuts) > 2 and max(int(cuts[-1] - cuts[-2] + cuts[1]), timeline.most_under_way) <= device.queue:
        # A synchronisation leaves the device idle and the host free: from the second forward on all are alike.
        _, (second, _), (third, _) = _by_stretches(timeline, host, kernels, device, periods=3)
        return (third - second) * bend
    stepwise = ~_queue_is_long(len(kernels), period, device) if len(cuts) == 2 else np.full(len(period), True)
    if stepwise.any():
        ends = _by_steps(timeline, host, kernels[:, stepwise], device, _WARM_PERIODS + _PERIODS)
        first, last = (np.maximum(*ends[index]) for index in (_WARM_PERIODS - 1, -1))
        period[stepwise] = (last - first) / _PERIODS
    return period * bend


def _side_by_side(host: Floats, kernels: Floats, device: DeviceInfo) -> tuple[Floats, Floats]:
    """What the slower clock takes, and how much longer both do: a smooth bend where a profile says how round it is."""
    dispatch, busy = float(host.sum()), kernels.sum(axis=0) + len(kernels) * device.gap_us
    slower_us: Floats = np.maximum(dispatch, busy)
    if not device.clock_exponent:
        return slower_us, np.ones_like(busy)
    share = np.minimum(dispatch, busy) / np.maximum(slower_us, np.finfo(float).tiny)
    return slower_us, (1.0 + share**device.clock_exponent) ** (1.0 / device.clock_exponent)


def _queue_is_long(count: int, period: Floats, device: DeviceInfo) -> NDArray[np.bool_]:
    """Whether a full queue changes the period of each batch by less than a thousandth.

    Going once through the queue, from a kernel's start to the host and back to the device, costs one launch latency and
    skips `queue` kernels, so that each forward pays at most `count / queue` of it.
    """
    extra = device.launch_us * count / device.queue if count <= device.queue else math.inf
    return extra <= 1e-3 * period


Clocks = tuple[Floats, Floats]
"""When the host and when the device are through, at each batch."""


def _at_rest(kernels: Floats) -> Clocks:
    batches = kernels.shape[1]
    return np.zeros(batches), np.full(batches, -np.inf)


def _by_stretches(timeline: Timeline, host: Floats, kernels: Floats, device: DeviceInfo, periods: int) -> list[Clocks]:
    """Host and device clock after each period, by sums over stretches: while the launch queue never fills up."""
    total = np.concatenate(([0.0], np.cumsum(host)))
    launched = total[timeline.kernel_step + 1] + device.launch_us
    last_step, last_kernel = _at_rest(kernels)
    # Of each stretch: what it takes the host, what it takes the device at least, and when an idle device is through
    # with it, counted from when the host entered it.
    stretches = []
    for index in range(len(timeline.cut_syncs)):
        first, last = timeline.cut_kernels[index : index + 2]
        start, end = total[timeline.cut_steps[index : index + 2]]
        if first == last:
            stretches.append((float(end - start), last_step, last_kernel))  # no time, and no kernel to wait for
            continue
        with_gaps = kernels[first:last] + device.gap_us
        rest = np.cumsum(with_gaps[::-1], axis=0)[::-1]  # from each kernel on, one gap too many: the one before it
        through = (launched[first:last, None] - start + rest).max(axis=0) - device.gap_us
        stretches.append((float(end - start), rest[0], through))
    ends = []
    for _ in range(periods):
        for (dispatch, busy, through), syncs in zip(stretches, timeline.cut_syncs.tolist(), strict=True):
            last_kernel = np.maximum(last_kernel + busy, last_step + through)
            last_step = last_step + dispatch
            if syncs:
                last_step = np.maximum(last_step, last_kernel) + syncs * device.sync_us
        ends.append((last_step, last_kernel))
    return ends


def _by_steps(timeline: Timeline, host: Floats, kernels: Floats, device: DeviceInfo, periods: int) -> list[Clocks]:
    """The same by the recurrence itself: what a full launch queue needs."""
    batches = kernels.shape[1]
    launches = np.searchsorted(timeline.kernel_step, np.arange(len(host) + 1)).tolist()
    costs, syncs = host.tolist(), timeline.sync.tolist()
    ring = np.full((max(device.queue, 1), batches), -np.inf)
    last_step, last_kernel = _at_rest(kernels)
    issued, ends = 0, []
    for _ in range(periods):
        for step, cost in enumerate(costs):
            last_step = last_step + cost
            for kernel in range(launches[step], launches[step + 1]):
                slot = issued % len(ring)
                last_step = np.maximum(last_step, ring[slot])
                start = np.maximum(last_kernel + device.gap_us, last_step + device.launch_us)
                ring[slot], last_kernel = start, start + kernels[kernel]
                issued += 1
            if syncs[step]:
                last_step = np.maximum(last_step, last_kernel) + syncs[step] * device.sync_us
        ends.append((last_step, last_kernel))
    return ends


LARGEST_SEARCHED = 2**16  # batch up to which a threshold is looked for
KNEE_RATIO = 1.1  # times the latency at batch 1, which a curve exceeds from its knee on
Z90 = 1.6448536269514722  # half width of the central 90 % of a normal distribution, in standard deviations

_POINTS = 8  # batches evaluated at once while a bracket is narrowed


class BatchThreshold(NamedTuple):
    """A batch size, and the 90 % interval it lies in; None stands for "not up to the largest batch looked at"."""

    batch: int | None
    low: int | None
    high: int | None


class CurveSamples(NamedTuple):
    """What thresholds depend on, at some batches: microseconds of host, of device and of all.

    They are not numbers at a batch that the runtime refuses, which passes no threshold.
    """

    overhead_us: Floats
    compute_us: Floats
    latency_us: Floats


Sampler = Callable[[Ints, float], CurveSamples]
"""Samples a curve at some batches, with device times multiplied by exp(shift * their log_std)."""
Test = Callable[[CurveSamples, CurveSamples], NDArray[np.bool_]]
"""Whether a threshold is passed, from samples at some batches and at batch 1."""


@dataclass
class BatchThresholds:
    """Crossover and knee of one model in one runtime on one device.

    Copies and pickles keep the answers, and not what they were computed from.
    """

    _sample: Sampler | None
    _answers: dict[tuple[str, float], BatchThreshold] = field(default_factory=dict)

    def crossover(self) -> BatchThreshold:
        """The smallest batch from which on the device takes at least as long as the host."""
        return self._search("crossover", 1.0, lambda curve, _: curve.compute_us >= curve.overhead_us)

    def knee(self, ratio: float = KNEE_RATIO) -> BatchThreshold:
        """The smallest batch from which on latency exceeds `ratio` times that of batch 1."""
        if not (isinstance(ratio, Real) and ratio > 1.0):
            raise UsageError(f"A knee needs a ratio above 1, not {ratio!r}; use 1.1 for 10 % over the flat latency.")
        return self._search("knee", ratio, lambda curve, flat: curve.latency_us > ratio * flat.latency_us)

    def __getstate__(self) -> dict[str, object]:
        if self._sample is not None:
            self.crossover()
            self.knee()
        return {"_sample": None, "_answers": self._answers}

    def _search(self, kind: str, ratio: float, test: Test) -> BatchThreshold:
        if (kind, ratio) in self._answers:
            return self._answers[kind, ratio]
        sample = self._sample
        if sample is None:
            raise UsageError(
                f"This prediction is a copy, or from another process, without its knee at {ratio}. Ask the original."
            )

        def threshold(shift: float) -> int | None:
            flat = sample(np.array([1]), shift)
            if np.isnan(flat.latency_us[0]):
                flat = sample(np.array([2]), shift)

            def passed(batches: Ints) -> NDArray[np.bool_]:
                curve = sample(batches, shift)
                return test(curve, flat) | np.isnan(curve.latency_us)

            # Times of kernels of few microseconds go up and down: what counts is from where on all batches pass.
            last = last_false(passed, LARGEST_SEARCHED)
            later = np.unique(np.append(_powers(LARGEST_SEARCHED), last + 1))
            later = later[(later > last) & (later <= LARGEST_SEARCHED)]
            return _first_true(lambda batches: test(sample(batches, shift), flat), later) if len(later) else None

        # A slower device reaches both thresholds at a smaller batch, unless other kernels serve it meanwhile.
        batch = threshold(0.0)
        ends = sorted((threshold(Z90), batch, threshold(-Z90)), key=lambda end: end or math.inf)
        found = self._answers[kind, ratio] = BatchThreshold(batch, ends[0], ends[2])
        return found


def _powers(most: int) -> Ints:
    """Powers of two up to a batch."""
    return 2 ** np.arange(int(math.log2(most)) + 1)


def _first_true(test: Callable[[Ints], NDArray[np.bool_]], numbers: Ints) -> int | None:
    """The smallest whole number at which a test that stays true becomes true; None if it does not up to the last.

    >>> _first_true(lambda batches: batches >= 37, np.array([1, 16, 256]))
    37
    """
    beyond = numbers[-1] + 1
    low, high = numbers[0] - 1, beyond  # not true yet, and true, as far as is known
    while len(numbers):
        hits = np.flatnonzero(test(numbers))
        first = hits[0] if len(hits) else len(numbers)
        low, high = np.concatenate(([low], numbers, [high]))[first : first + 2]
        numbers = np.unique(np.linspace(low, high, _POINTS + 2).round().astype(np.int64))[1:-1]
    return None if high == beyond else int(high)


def last_false(test: Callable[[Ints], NDArray[np.bool_]], most: int) -> int:
    """The largest batch up to `most` at which a test that ends up true is not true yet; 0 where it always is.

    A test that is true of some smaller batch already, as of one that a slower kernel serves, is looked through as far
    as powers of two show it.

    >>> last_false(lambda batches: (batches >= 37) | (batches == 8), 100)
    36
    """
    downwards = -np.unique(np.append(_powers(most), most))[::-1]
    return -(_first_true(lambda batches: ~test(-batches), downwards) or 0)
