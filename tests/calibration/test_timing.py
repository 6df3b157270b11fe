"""Timing on a scripted device, whose every call takes what the test says; and what is done about a cell that hangs."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, count, cycle, repeat

import pytest
from gauges import ScriptedGauge

from latpred.calibration.timing import timer
from latpred.calibration.timing.reference_speed import SpeedGauge, SpeedReading
from latpred.calibration.timing.timer import Plan, Timing, time_limit
from latpred.errors import TimeLimitError

US = 1e-6


class Scripted:
    """A synchronous device whose clock moves by the durations of a script, one a call."""

    name = "scripted"
    asynchronous = False

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0

    def clock(self) -> float:
        return self.now

    def synchronize(self) -> None:
        pass

    def errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def time_queued(self, call: Callable[[], None], count: int) -> float:
        start = self.now
        for _ in repeat(None, count):
            call()
        return self.now - start

    def taking(self, durations_s: Iterator[float]) -> Callable[[], None]:
        def call() -> None:
            self.now += next(durations_s)
            self.calls += 1

        return call


@pytest.fixture
def device() -> Scripted:
    return Scripted()


@pytest.mark.parametrize("measure", [timer.single, timer.pipelined, timer.issue, timer.queued])
def test_constant_call_is_timed_exactly(device, measure):
    timed = measure(device, device.taking(repeat(7 * US)))
    assert timed.median_s == pytest.approx(7 * US, rel=1e-6)
    assert timed.spread_s == pytest.approx(0, abs=1e-12)
    assert timed.stable
    assert timed.n >= 15


def test_a_median_is_as_slow_as_its_middle_sample(device):
    plan = Plan(least=3, most=9, budget_s=0.0, warmup_s=0.0)
    timed = timer.single(device, device.taking(repeat(5e-3)), plan, ScriptedGauge([1.6, 1.5, 1.3, 1.3]))
    assert (timed.n, timed.slow) == (3, 1.5)


@pytest.mark.parametrize(
    ("durations_s", "median_s", "off"),
    [
        (chain([5e-3, 3e-3, 1e-3, 4e-4, 2e-4], repeat(100 * US)), 100 * US, 1e-9),  # warm-up does not count
        (cycle([*repeat(10 * US, 99), 80 * US]), 10 * US, 0.01),  # nor do rare slow calls move the median
    ],
)
def test_what_is_rare_leaves_the_median_alone(device, durations_s, median_s, off):
    timed = timer.single(device, device.taking(durations_s))
    assert timed.median_s == pytest.approx(median_s, rel=off)
    assert timed.spread_s == pytest.approx(0, abs=1e-12)


def test_spread_is_half_the_interquartile_range(device):
    # Samples of one call each, evenly 1, 2, 3, 4, 5 ms: quartiles 2 and 4.
    even = cycle([1e-3, 2e-3, 3e-3, 4e-3, 5e-3])
    timed = timer.single(device, device.taking(even), Plan(least=50, most=50, warmup_s=0.05, budget_s=9))
    assert timed.n == 50
    assert timed.median_s == pytest.approx(3e-3)
    assert timed.spread_s == pytest.approx(1e-3)
    of_runs = timer.summary([1.0, 1.1, 1.2, 1.3, 1.4], slow=1.5)
    assert of_runs == Timing(pytest.approx(1.2), pytest.approx(0.1), 5, True, 1.5)


@pytest.mark.parametrize(
    "durations_s",
    [(100 * US * 1.01**step for step in range(10**6)), chain(repeat(100 * US, 40), repeat(150 * US))],
    ids=["ever slower", "a step between the halves"],
)
def test_what_changes_is_not_stable(device, durations_s):
    assert not timer.single(device, device.taking(durations_s), Plan(least=60, most=60, loops=1)).stable
    assert not timer.summary([1.0] * 20 + [1.1] * 20).stable


@pytest.mark.parametrize(
    ("durations_s", "at_most"), [(repeat(1e-3), 16), (cycle([1e-3, 2e-3]), 70)], ids=["precise enough", "out of budget"]
)
def test_at_full_speed_a_gauged_timing_ends_as_soon_as_one_without_a_gauge(device, durations_s, at_most):
    timed = timer.single(device, device.taking(durations_s), Plan(budget_s=0.1), ScriptedGauge())
    assert timer.ENOUGH <= timed.n <= at_most


class Neighbour(ScriptedGauge):
    """Slows everything three times over for 0.4 s of every 0.5 s, the first ones among them."""

    def __init__(self, device: Scripted) -> None:
        super().__init__()
        self._device = device

    @property
    def slow(self) -> float:
        return 3.0 if self._device.now % 0.5 < 0.4 else 1.0

    def read(self) -> SpeedReading:
        return SpeedReading(self.slow)


@pytest.mark.parametrize("measure", [timer.issue, timer.single, timer.pipelined])
def test_what_a_host_does_in_slow_moments_does_not_count(device, measure):
    plan = Plan(loops=8, least=5, most=15, budget_s=2.0, warmup_s=0.0)
    device.asynchronous, gauge = True, Neighbour(device)
    call = device.taking(1e-3 * gauge.slow for _ in count())
    assert measure(device, call, plan).median_s > 1.5e-3
    timed = measure(device, call, plan, gauge)
    assert (timed.median_s, timed.slow) == (pytest.approx(1e-3), 1.0)


def test_short_calls_are_looped_and_long_ones_are_not(device):
    plan = Plan(least=10, most=10, least_s=0.0)
    timer.single(device, device.taking(repeat(2 * US)), plan)
    short = device.calls
    device.calls = 0
    timer.single(device, device.taking(repeat(2e-3)), plan)
    assert short > 10 * plan.loops >= 480
    assert device.calls < 30


def test_garbage_collection_is_off_while_timing_and_on_again_after(device):
    enabled = []

    def call() -> None:
        enabled.append(gc.isenabled())
        device.now += 1e-3
        if len(enabled) > 20:
            raise MemoryError("too large")

    with pytest.raises(MemoryError, match="too large"):
        timer.single(device, call)
    assert not any(enabled)
    assert gc.isenabled()


def test_what_waits_busily_from_before_is_outlasted(device):
    call = device.taking(chain(repeat(200 * US, 25), repeat(100 * US)))
    assert timer.single(device, call, Plan(most=20), SpeedGauge(threads=1)).spread_s < US / 1e3


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")
def test_a_hang_is_interrupted_and_the_signal_given_back() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeLimitError, match=r"longer than 0\.05 s"), time_limit(0.05):
        time.sleep(60.0)
    with pytest.raises(ZeroDivisionError), time_limit(60.0):  # its own error
        1 / 0  # noqa: B018
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
