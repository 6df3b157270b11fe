"""Times a call on any device: warm-up until stable, automatic loop count, median and interquartile range, a time limit.

Everything goes through the device's own `clock()` and `synchronize()`, so a virtual clock is read by the same code as
a real one. What a call is, and what its time means, is the caller's business.

A sample is a short loop of calls, and the answer is the median over samples. Loops are kept short on purpose: a
hundredth of all calls being several times slower moves the median of short loops by nothing, the mean of long ones by
several percent. With a gauge the speed of the processors is looked at between samples, and only those count that were
taken at full speed.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from types import FrameType
from typing import Literal, TypeVar

import msgspec
import numpy as np

from latpred.calibration.devices.base import Call, Device
from latpred.calibration.timing.reference_speed import SLOW, SpeedGauge, taken_at_full_speed
from latpred.errors import TimeLimitError
from latpred.sandbox.own_thread import no_collection

TOLERANCE = 0.03  # two windows of samples agree when their medians differ by less than this share
ENOUGH = 15  # samples before a median's own error says anything
LEAD = 4  # forwards after which back-to-back ones have found their period
GLANCE_S = 2e-3  # how often a gauge looks at the speed, which takes it a tenth of that
FEWEST_TURNS = 3
SETTLE_S = 5e-3  # in which threads that wait busily for work of before give their processors up
PATIENCE = 3.0  # times the budget that sampling may take where moments at full speed are few


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one call takes."""

    median_s: float  # over samples, seconds per call
    spread_s: float  # half the interquartile range over samples
    n: int  # samples
    stable: bool  # whether the warm-up settled and the first half of the samples agrees with the second
    slow: float = 1.0  # how many times slower than in its fastest moments the machine was; 1 where nothing told


@dataclass(frozen=True, slots=True)
class Plan:
    """How much effort a timing is worth."""

    sample_s: float = 1e-4  # shortest sample; quicker calls are looped until they fill it
    loops: int = 48  # most calls in one sample
    least: int = 5  # fewest samples
    most: int = 200
    precision: float = 0.003  # sampling stops when the standard error of the median is below this share of it
    least_s: float = 0.01  # sampling goes on for at least so long: what is shorter falls into one state of the machine
    budget_s: float = 0.5  # sampling stops after so long, once it has `least` samples
    warmup_s: float = 0.3  # longest warm-up


QUICK = Plan(most=50, precision=0.01, budget_s=0.15, warmup_s=0.1)

Turn = TypeVar("Turn")
Sampler = Callable[[int], float]  # calls in the sample -> seconds per call


def single(device: Device, call: Call, plan: Plan | None = None, gauge: SpeedGauge | None = None) -> Timing:
    """Time of one call with the device idle before and waited for after: what one request sees."""
    return _collect(device, lambda loops: _taken(device, call, loops, "each") / loops, plan or Plan(), gauge=gauge)


def pipelined(device: Device, call: Call, plan: Plan | None = None, gauge: SpeedGauge | None = None) -> Timing:
    """Period of calls issued back to back with one synchronisation: what a stream of requests sees."""
    # On an asynchronous device a few calls are timed alone and taken off: to fill and empty the queue is no part of the
    # period. In the same moment, since the host may be slower in the next.
    lead = LEAD if device.asynchronous else 0

    def period_s(loops: int) -> float:
        edge_s = _taken(device, call, lead, "last") if lead else 0.0
        return (_taken(device, call, lead + loops, "last") - edge_s) / loops

    return _collect(device, period_s, plan or Plan(), fewest_loops=max(2 * lead, 1), gauge=gauge)


def issue(device: Device, call: Call, plan: Plan | None = None, gauge: SpeedGauge | None = None) -> Timing:
    """Host time to issue one call that does not synchronise; `plan.loops` of them must fit the launch queue."""
    return _collect(device, lambda loops: _taken(device, call, loops, "none") / loops, plan or Plan(), gauge=gauge)


def queued(device: Device, call: Call, plan: Plan | None = None) -> Timing:
    """Device time of one call in a queue of them, the gap to its predecessor included."""
    return _collect(device, lambda loops: device.time_queued(call, loops) / loops, plan or Plan(loops=16))


PROTOCOLS = {"single": single, "pipelined": pipelined}


def summary(seconds: Sequence[float], slow: float = 1.0, *, settled: bool = True) -> Timing:
    """Seconds of single calls, or of runs between which other things were timed, as a timing."""
    median_s, spread_s = _middle(seconds)
    return Timing(median_s, spread_s, len(seconds), settled and _halves_agree(seconds), slow)


def _taken(device: Device, call: Call, loops: int, waited: Literal["each", "last", "none"]) -> float:
    """Seconds of calls one after the other, of which so many are waited for while the clock runs."""
    clock, wait, each = device.clock, device.synchronize, waited == "each"
    wait()
    start = clock()
    for _ in repeat(None, loops):
        call()
        if each:
            wait()
    if waited == "last":
        wait()
    taken = clock() - start
    if waited == "none":
        wait()
    return taken


def _collect(
    device: Device, sample: Sampler, plan: Plan, fewest_loops: int = 1, gauge: SpeedGauge | None = None
) -> Timing:
    """Warm up, then sample until the median is precise enough or the budget is spent."""
    with device.errors(), no_collection():
        loops, settled = _warm_up(device, sample, plan, fewest_loops, SETTLE_S if gauge else 0.0)
        if gauge is None:
            samples, slow = _sampled(device, partial(sample, loops), plan), 1.0
        else:
            samples, slow = _gauged(device, partial(sample, loops), plan, gauge)
    return summary(samples, slow, settled=settled)


def _sampled(device: Device, sample: Callable[[], float], plan: Plan) -> list[float]:
    start = device.clock()
    samples: list[float] = []
    next_look = ENOUGH
    while len(samples) < plan.most:
        samples.append(sample())
        spent_s = device.clock() - start
        if len(samples) >= plan.least and spent_s > plan.budget_s:
            break
        if len(samples) >= next_look and spent_s >= plan.least_s:
            if _standard_error(samples) <= plan.precision:
                break
            next_look = len(samples) * 5 // 4  # looking takes time itself
    return samples


def _gauged(device: Device, sample: Callable[[], float], plan: Plan, gauge: SpeedGauge) -> tuple[list[float], float]:
    """Samples at full speed, or the least slowed where those are too few, and how slow it was for the middle one."""
    start = device.clock()
    groups: list[list[float]] = []
    moments = [gauge.read()]
    while True:
        looked, samples = device.clock(), [sample()]
        while device.clock() - looked < GLANCE_S:
            samples.append(sample())
        groups.append(samples)
        moments.append(gauge.read())
        spent_s = device.clock() - start
        kept, slow = taken_at_full_speed(groups, gauge.between(moments), plan.least)
        if len(kept) >= plan.most or (len(kept) >= plan.least and spent_s > PATIENCE * plan.budget_s):
            return kept, float(np.median(slow))
        precise = spent_s >= plan.least_s and len(kept) >= ENOUGH and _standard_error(kept) <= plan.precision
        if max(slow) <= SLOW and len(kept) >= plan.least and (precise or spent_s > plan.budget_s):
            return kept, float(np.median(slow))


def turns(turn: Callable[[], Turn], gauge: SpeedGauge, *, repeats: int, budget_s: float) -> tuple[list[Turn], float]:
    """Take turns, looking at the speed before and after each, until so many were at full speed or the budget is spent.

    Gives what came of those at full speed, of at least the `FEWEST_TURNS` least slowed ones, and how slow it was for
    the middle one of them, as the median of what they took is.
    """
    start, moments = time.perf_counter(), [gauge.read()]
    done: list[Turn] = []
    while True:
        done.append(turn())
        moments.append(gauge.read())
        slow, spent_s = gauge.between(moments), time.perf_counter() - start
        good = sum(one <= SLOW for one in slow)
        given_up = len(done) >= FEWEST_TURNS and spent_s > PATIENCE * budget_s
        if good >= repeats or (good >= FEWEST_TURNS and spent_s > budget_s) or given_up:
            kept, of_kept = taken_at_full_speed([[one] for one in done], slow, FEWEST_TURNS)
            return kept, float(np.median(of_kept))


def _warm_up(device: Device, sample: Sampler, plan: Plan, fewest_loops: int, least_s: float) -> tuple[int, bool]:
    """Run until two windows in a row agree, and so long; gives the calls per sample and whether they did."""
    start = device.clock()
    sample(1)  # pays for whatever the first call builds
    once = sample(1)
    window = max(1, min(5, int(plan.warmup_s / (10 * once)) if once > 0 else 5))
    loops = _loops(once, plan, fewest_loops)
    before = _window(sample, loops, window)
    while True:
        loops = _loops(before, plan, fewest_loops)
        now = _window(sample, loops, window)
        agree, spent_s = abs(now - before) <= TOLERANCE * max(now, before), device.clock() - start
        if (agree and spent_s >= least_s) or spent_s > plan.warmup_s:
            return loops, agree
        before = now


def _loops(once_s: float, plan: Plan, fewest: int) -> int:
    if once_s <= 0:
        return plan.loops
    # A call so long that `fewest` of them would eat the budget is its own average.
    affordable = max(1, int(plan.budget_s / (plan.least * once_s)))
    return min(plan.loops, max(math.ceil(plan.sample_s / once_s), min(fewest, affordable)))


def _window(sample: Sampler, loops: int, count: int) -> float:
    return float(np.median([sample(loops) for _ in range(count)]))


def _middle(samples: Sequence[float]) -> tuple[float, float]:
    low, median, high = np.percentile(np.asarray(samples), (25, 50, 75))
    return float(median), float(high - low) / 2


def _standard_error(samples: Sequence[float]) -> float:
    """Standard error of the median as a share of it, were the samples normal but for outliers."""
    median, spread = _middle(samples)
    return 1.86 * spread / math.sqrt(len(samples)) / median if median > 0 else 0.0


def _halves_agree(samples: Sequence[float]) -> bool:
    half = len(samples) // 2
    if not half:
        return True  # a single sample disagrees with nothing
    first, second = float(np.median(samples[:half])), float(np.median(samples[half:]))
    noise = 4 * _standard_error(samples)
    return abs(first - second) <= max(TOLERANCE, noise) * max(first, second)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt what takes longer than so many seconds, in the main thread of a system with signals."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeLimitError(f"it took longer than {seconds:g} s")

    with ExitStack() as undo:
        if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
            undo.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
            undo.callback(signal.setitimer, signal.ITIMER_REAL, 0.0)
            signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
