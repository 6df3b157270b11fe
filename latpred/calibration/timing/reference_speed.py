"""Reference speed: how long small pieces of work take that are always the same, and whether this moment is a slow one.

A core of a shared machine often shares its execution units with a neighbour's. While that one computes, everything
here takes 1.2 to 1.6 times as long; that lasts for tenths of a second to minutes, and no counter of the system shows
it. A host may also move two virtual processors apart, onto cores without a common cache, and together again some
seconds later: what threads hand each other then takes longer, streams through memory take less. A `SpeedGauge` sees
both in a fraction of a millisecond, so that what was timed in such moments can be left out. A `ReferenceTimer` says how
fast the machine is by kind of work: a profile holds for one stated speed. What another speed does to a prediction is
`latpred.host`'s.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise, repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from latpred import runtimes
from latpred.calibration.devices import Device, conditions
from latpred.graph.features import Floats
from latpred.host import CACHE, CACHE_ROWS, COLD_DISPATCH, CONVOLUTION, DISPATCH, ELEMENTWISE, PRODUCT, STREAM, THREADS
from latpred.sandbox.own_thread import no_autocast, unwatched, without_modes

PRODUCT_SIZE = 320  # square, so that all three matrices stay in the cache of one core
# 12 MiB: more than the core's own cache holds, less than a process may hope to keep in the cache that it shares with
# neighbours. Where that is smaller these weights come from memory, as those of models do there.
CACHE_WEIGHTS = (1024, 3072)
STREAM_BYTES = 64 << 20  # more than a shared machine leaves of its last-level cache to one process
CONVOLUTION_SHAPE = (1, 64, 28, 28)
# Calls in each part of a loop. Where a large product ran before, the first hundred calls take 15 % longer, until their
# code is near again; a slow moment lasts for all parts.
PARTS, DISPATCH_CALLS, THREADED_CALLS = 4, 16, 3
THREADED_VALUES = 40_000  # just more than PyTorch leaves to one thread
# By which powers of how slow a moment is each reference took longer on an EPYC of family 26 with one thread, beside
# neighbours, and an elementwise op on one of family 25 with one thread and two; for runs that saw too few slow moments,
# or too few others, to say so themselves.
USUAL_POWERS = {DISPATCH: 1.0, PRODUCT: 0.12, CONVOLUTION: 0.5, CACHE: 0.25, STREAM: 0.35}
USUAL_POWERS |= {COLD_DISPATCH: 1.0, ELEMENTWISE: 0.75, THREADS: 0.75}
# Where few moments are slow, most of those are only readings of dispatch that scattered: nothing else was slower then.
FEWEST_SLOW, FEWEST_FAST = 20, 5
READINGS_AROUND = 31  # of a run, whose median says how fast the machine is in a minute: a single one scatters by 10 %
REPEATS = {PRODUCT: 3, CACHE: 3, COLD_DISPATCH: 5, STREAM: 1, DISPATCH: 3, CONVOLUTION: 3}
FASTEST = 0.1  # quantile of readings that stands for the fastest moments of a run: most may be slow ones
FASTEST_OF_MANY = 0.05  # the same of a gauge's readings, of which there are thousands
# Power of the threaded loop's slowdown that counts: where a neighbour slows another core than the one that dispatches,
# only what is shared out among threads takes longer, and that by less.
THREADED_POWER = 0.4
# Times that threads take longer to meet, against dispatch, from which the processors are apart: 1.8 on an EPYC of
# family 25, 1.6 to 1.9 on one of family 26. A neighbour's work slows both alike.
APART_RATIO = 1.4
WAKE_S = 8e-3  # of products, which take 4 to 40 % longer before: after Python or a rest, most on two threads
FAST_WAIT_S, APART_WAIT_S, POLL_S = 0.5, 20.0, 0.01  # for a neighbour to pause, and until processors are together again
READ_EVERY_S = 1.5  # how often all references are timed where no more is asked for, which takes some ms
REST_S = 0.05  # onnxruntime's threads wait busily for 15 to 40 ms after a pass
SLOW = 1.15  # times the fastest from which a moment is slow: readings scatter by 5 %, a busy neighbour adds 35 to 60 %
MOST_MOMENTS = 1 << 16  # the latest readings, which a gauge keeps
# Times slower than in its fastest moments, from which other work has the processor, and how much of it is unknown: a
# neighbour on the same core has been seen to make dispatch 1.6 to 2.4 times as long.
PREEMPTED = 2.5


Timed = TypeVar("Timed")
_ones = partial(torch.ones, dtype=torch.float32)  # whatever the user's default dtype is
_randn = partial(torch.randn, dtype=torch.float32)


class SpeedReading(NamedTuple):
    """How fast the processors are at one moment: microseconds of dispatch, and of a loop that all threads share."""

    dispatch_us: float
    threads_us: float = 0.0


class SpeedGauge:
    """Tells within a fraction of a millisecond how fast the processors are, against their `fastest` moments so far.

    Of several threads that an op may use the slowest sets the speed. What was taken for full speed before faster
    moments came was none.
    """

    def __init__(self, threads: int) -> None:
        self._small, self._wide = _ones(8), _ones(THREADED_VALUES) if threads > 1 else None
        self._moments: deque[SpeedReading] = deque(maxlen=MOST_MOMENTS)
        self.fastest, self._looked_at = SpeedReading(0.0), 0

    def read(self) -> SpeedReading:
        """The speed of this moment."""
        with torch.inference_mode():
            moment = SpeedReading(1e6 * self._dispatch_s(), 1e6 * self._threads_s())
        self._moments.append(moment)
        # Sorting thousands anew for each would take longer than reading.
        if len(self._moments) >= 1.1 * self._looked_at:
            self.fastest = SpeedReading(*np.quantile(np.array(self._moments), FASTEST_OF_MANY, axis=0).tolist())
            self._looked_at = len(self._moments)
        return moment

    def slowdown(self, moment: SpeedReading) -> float:
        """How many times slower a moment was than the fastest ones of this gauge; at least 1."""
        return slower(moment, self.fastest)

    def await_full_speed(self, limit_s: float, if_apart: Callable[[], object] = lambda: None) -> float:
        """Wait while the processors are slow or, which takes longer and is said, apart; gives the seconds it took."""
        start, longest_s = time.monotonic(), FAST_WAIT_S
        while self.slowdown(moment := self.read()) > SLOW:
            if longest_s < min(APART_WAIT_S, limit_s) and is_apart(moment, self.fastest):
                longest_s = APART_WAIT_S
                if_apart()
            if time.monotonic() - start >= min(longest_s, limit_s):
                break
            time.sleep(POLL_S)
        return time.monotonic() - start

    def between(self, moments: Sequence[SpeedReading]) -> list[float]:
        """How slow it was between each moment and the next: as at the slower of the two."""
        return [max(pair) for pair in pairwise(map(self.slowdown, moments))]

    def _dispatch_s(self) -> float:
        small = self._small
        return _in_parts(DISPATCH_CALLS, lambda: torch.relu(small).view(2, 4))

    def _threads_s(self) -> float:
        return 0.0 if self._wide is None else _in_parts(THREADED_CALLS, self._wide.neg_)


def _in_parts(calls: int, call: Callable[[], object]) -> float:
    """Seconds of a loop, as long as its fastest part says, after one that does not count."""
    fastest_s = math.inf
    for part in range(PARTS + 1):
        start = time.perf_counter()
        for _ in repeat(None, calls):
            call()
        if part:
            fastest_s = min(fastest_s, time.perf_counter() - start)
    return fastest_s * PARTS


def slower(moment: SpeedReading, other: SpeedReading) -> float:
    """How many times slower one moment was than another; at least 1."""
    ratio = 1.0
    if other.dispatch_us > 0:
        ratio = max(ratio, moment.dispatch_us / other.dispatch_us)
    if other.threads_us > 0:
        ratio = max(ratio, (moment.threads_us / other.threads_us) ** THREADED_POWER)
    return ratio


def is_apart(moment: SpeedReading, other: SpeedReading) -> bool:
    """Whether threads meet so late, against another moment, that their processors must be further from each other."""
    if min(other) <= 0:
        return False
    return moment.threads_us / other.threads_us > APART_RATIO * max(moment.dispatch_us / other.dispatch_us, 1.0)


@cache
def gauge_of(threads: int) -> SpeedGauge:
    """The process's gauge for so many threads: what it has seen of the machine serves all that is timed."""
    return SpeedGauge(threads)


def gauge_on(kind: str, runtime: str) -> SpeedGauge | None:
    """The gauge to look at between passes of a runtime on a kind of device; none where no host is timed."""
    if kind == "cpu":
        return gauge_for(runtime)
    return gauge_of(1) if kind == "cuda" else None  # one thread feeds a GPU


def gauge_for(runtime: str) -> SpeedGauge:
    """The gauge to look at between passes of a runtime on a CPU; beside one with threads of its own it wakes none."""
    # PyTorch's threads wait for more work for some milliseconds, busily. On the processors that another library's
    # threads need, that makes its passes last up to 1.9 times as long.
    return gauge_of(1 if _has_own_threads(runtime) else torch.get_num_threads())


def rest_after(runtime: str) -> None:
    """Wait until threads of a runtime's own sleep: beside them a reading takes up to twice as long."""
    if _has_own_threads(runtime) and torch.get_num_threads() > 1:
        time.sleep(REST_S)


def _has_own_threads(runtime: str) -> bool:
    return bool(getattr(runtimes.get(runtime), "own_stream", False))


def taken_at_full_speed(
    groups: Sequence[Sequence[Timed]], slow: Sequence[float], least: int
) -> tuple[list[Timed], list[float]]:
    """Timings taken at full speed, and how slow it was for each; also the least slowed where those are too few.

    A group was taken between two looks at the speed, and `slow` says how slow it was for each.
    """
    used: list[int] = []
    count = 0
    for index in sorted(range(len(groups)), key=slow.__getitem__):
        if slow[index] > SLOW and count >= least:
            break
        used.append(index)
        count += len(groups[index])
    kept = [(value, slow[index]) for index in sorted(used) for value in groups[index]]
    return [value for value, _ in kept], [ratio for _, ratio in kept]


class ReferenceTimer:
    """Reference work of every kind, on the CPU; `host_only` is that of a GPU's host, which does nothing but dispatch.

    Ops dispatch from cold caches where each is called once, after weights went through the caches: in a model the code
    of an op has left them before the next op of its kind.
    """

    def __init__(self, threads: int, *, host_only: bool = False) -> None:
        self._gauge = SpeedGauge(1 if host_only else threads)
        self._threads = threads
        self._read_at, self._last_us = -READ_EVERY_S, dict[str, float]()
        self._host_only = host_only  # other threads, once woken, slow the one that dispatches for a while
        if host_only:
            return
        draw = torch.Generator().manual_seed(0)  # the user's own generator stays where it is
        self._factor = _randn(PRODUCT_SIZE, PRODUCT_SIZE, generator=draw)
        self._result = torch.empty_like(self._factor)
        channels = CONVOLUTION_SHAPE[1]
        self._image = _randn(CONVOLUTION_SHAPE, generator=draw)
        self._window = _randn((channels, channels, 3, 3), generator=draw)
        self._weights = _randn(CACHE_WEIGHTS, generator=draw)
        self._rows = _randn(CACHE_ROWS, CACHE_WEIGHTS[0], generator=draw)
        self._products = _ones(CACHE_ROWS, CACHE_WEIGHTS[1])
        self._stream, self._wide = _ones(STREAM_BYTES // 4), _ones(THREADED_VALUES)
        self._work: dict[str, Callable[[], object]] = {
            PRODUCT: lambda: torch.mm(self._factor, self._factor, out=self._result),
            CONVOLUTION: lambda: torch.relu_(torch.conv2d(self._image, self._window, padding=1)),
            CACHE: lambda: torch.mm(self._rows, self._weights, out=self._products),
            COLD_DISPATCH: _varied_ops(draw),
            STREAM: self._stream.sum,  # last: it leaves nothing of the others in the caches
        }

    def read(self) -> dict[str, float]:
        """Microseconds that each reference takes now: the median of a few, after one that brings its code near."""
        with torch.inference_mode():
            if not self._host_only:
                self._wake()
            moments = [self._gauge.read() for _ in range(REPEATS[DISPATCH])]
            dispatch_us, threads_us = np.median(np.array(moments), axis=0).tolist()
            if self._host_only:
                return {DISPATCH: dispatch_us}
            alone = self._threads == 1  # then the gauge has no loop that threads share
            wide = {ELEMENTWISE: 1e6 * _in_parts(THREADED_CALLS, self._wide.neg_)} if alone else {THREADS: threads_us}
            return {DISPATCH: dispatch_us} | wide | {kind: self._us(kind) for kind in self._work}

    def around(self, runtime: str, *, anew: bool = False) -> dict[str, float]:
        """What they take now, after a runtime's passes; or took a moment ago, which will do unless it is read anew."""
        if anew or time.monotonic() - self._read_at >= READ_EVERY_S:
            rest_after(runtime)
            self._read_at = time.monotonic()
            self._last_us = self.read()
        return self._last_us

    def _wake(self) -> None:
        """Compute until it takes no shorter: after Python or a rest the processors need some milliseconds for that."""
        start = time.perf_counter()
        while time.perf_counter() - start < WAKE_S:
            self._work[PRODUCT]()

    def _us(self, kind: str) -> float:
        work, taken = self._work[kind], []
        work()
        for _ in range(REPEATS[kind]):
            if kind == COLD_DISPATCH:
                self._work[CACHE]()
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
        return float(np.median(taken)) * 1e6


def reference_on(device: Device) -> ReferenceTimer | None:
    """What times the references beside a device, as many threads as PyTorch uses now; none beside a simulated one."""
    if device.info().kind == "simulated":
        return None
    return ReferenceTimer(torch.get_num_threads(), host_only=device.asynchronous)


def _varied_ops(draw: torch.Generator) -> Callable[[], None]:
    """One call each of ops that models use, on so little data that their code takes most of the time."""
    rows, weights = _randn(4, 16, generator=draw), _randn(16, 16, generator=draw)
    image, window = _randn(1, 4, 8, 8, generator=draw), _randn(4, 4, 3, 3, generator=draw)
    heads = _randn(1, 1, 4, 8, generator=draw)
    places, ones = torch.arange(4), _ones(16)

    def run() -> None:
        F.layer_norm(rows, (16,), ones, ones)
        F.linear(rows, weights, ones)
        F.gelu(rows)
        rows.softmax(-1)
        torch.cat((rows, rows))
        rows[places]
        F.embedding(places, weights)
        F.scaled_dot_product_attention(heads, heads, heads)
        torch.bmm(heads[0], heads[0].transpose(1, 2))
        rows.mean(-1)
        F.conv2d(image, window, padding=1)
        F.max_pool2d(image, 2)
        F.batch_norm(image, *(ones[:4],) * 4)
        rows.t().contiguous()
        torch.arange(4)

    return run


@without_modes()
def speed_now(threads: int, seconds: float = 1.0, *, host_only: bool = False) -> dict[str, float]:
    """What each reference takes in a usual moment of the next second, in microseconds."""
    before, timer = torch.get_num_threads(), ReferenceTimer(threads, host_only=host_only)
    readings: list[dict[str, float]] = []
    # Nothing is set that a user's process would notice afterwards.
    with conditions.float32_in_full(), no_autocast(), unwatched():
        try:
            torch.set_num_threads(threads)
            start = time.monotonic()
            while not readings or time.monotonic() - start < seconds:
                readings.append(timer.read())
        finally:
            torch.set_num_threads(before)
    return typical(readings)


class RunSpeed(NamedTuple):
    """How fast a machine is at its full speed, and what its slow moments do; none of it is of processors apart."""

    full_us: Mapping[str, float]  # of each reference
    powers: Mapping[str, float]  # of how slow a moment is by `slower`, by which each takes longer then
    # What they took at full speed in the minute around each reading, since neighbours change a machine over minutes.
    around: Mapping[tuple[float, ...], Mapping[str, float]] = {}

    @classmethod
    def of(cls, readings: Iterable[Mapping[str, float]], known: SpeedReading | None = None) -> RunSpeed:
        """The speed that a run's readings tell of; most of them may be of slow moments.

        `known` are the fastest moments of its gauge, which has looked far more often; without, they are guessed.
        """
        us = _whole(readings)
        if known is not None and known.dispatch_us <= 0:  # it has not looked at all
            known = None
        fastest = known or _fastest(us)
        together = [not is_apart(moment_of(reading), fastest) for reading in us.to_dict("records")]
        us = us[together] if any(together) else us
        fastest = known or _fastest(us)
        slow = np.array([slower(moment_of(reading), fastest) for reading in us.to_dict("records")])
        powers = {kind: _power(us[kind].to_numpy(), slow, USUAL_POWERS[kind]) for kind in us}
        fast = us.assign(**{kind: us[kind] / slow**power for kind, power in powers.items()})
        # Fewer count at the ends, none twice: a run begins with idle caches and clocks.
        near = fast.rolling(READINGS_AROUND, center=True, min_periods=1).median()
        around = zip(us.itertuples(index=False, name=None), near.to_dict("records"), strict=False)
        full_us = fast.median().round(3).to_dict()
        if known is not None and DISPATCH in full_us:
            full_us[DISPATCH] = round(known.dispatch_us, 3)  # which is what a moment is said to be slower than
        return cls(full_us, powers, dict(around))

    def at(self, slow: float, read_us: Mapping[str, float] | None = None) -> dict[str, float]:
        """What each reference takes in moments as slow as that, in one of which they took `read_us`.

        A reading of the run says which minute of it that was. That of the shared cache, which neighbours hold part of,
        counts by itself, beside the product's. Where the processors were apart, all readings count by themselves.
        """
        read = read_us or {}
        if is_apart(moment_of(read), moment_of(self.full_us)):
            return {kind: read.get(kind, full) for kind, full in self.full_us.items()}
        full_us = self.around.get(tuple(read.values()), self.full_us)
        us = {kind: full * slow ** self.powers.get(kind, USUAL_POWERS[kind]) for kind, full in full_us.items()}
        if CACHE in read and CACHE in us:
            beside = read[CACHE] / us[CACHE] / (read.get(PRODUCT, us[PRODUCT]) / us[PRODUCT])
            us[CACHE] *= min(max(beside, 1 / PREEMPTED), PREEMPTED)
        return us


FULL = RunSpeed({}, {})  # of a device that nobody looked at


def _whole(readings: Iterable[Mapping[str, float]]) -> Any:
    """Readings as a table, a column for each kind; those that lack a kind that others have are left out."""
    return pd.DataFrame(list(filter(None, readings))).dropna()


def _fastest(us: Any) -> SpeedReading:
    """What the fastest of some readings say of the processors."""
    return moment_of(us.quantile(FASTEST).to_dict())


def moment_of(read_us: Mapping[str, float]) -> SpeedReading:
    """What a reading says of the processors."""
    return SpeedReading(read_us.get(DISPATCH, 0.0), read_us.get(THREADS, 0.0))


def _power(us: Floats, slow: Floats, usual: float) -> float:
    """By which power of how slow a moment is a reference takes longer, from slow moments beside fast ones."""
    fast = slow <= SLOW
    if (~fast).sum() < FEWEST_SLOW or fast.sum() < FEWEST_FAST:
        return usual
    longer = np.log(np.median(us[~fast]) / np.median(us[fast])) / np.log(np.median(slow[~fast]) / np.median(slow[fast]))
    return float(np.clip(longer, 0.0, 1.2))


def typical(readings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """What each reference takes in a usual moment of a run, in microseconds."""
    return dict(_whole(readings).median().round(3).to_dict())
