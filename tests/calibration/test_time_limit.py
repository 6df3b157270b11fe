"""A cell that hangs: interrupted where a signal can do it, else the process ends with a sentence."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from latpred.calibration.timing.timer import EXIT_CODE, TimeLimitError, time_limit


def test_what_is_quick_enough_gives_its_result_or_its_own_error() -> None:
    with time_limit(60.0, "a sum") as limited:
        assert limited(sum)([1, 2]) == 3
        with pytest.raises(ZeroDivisionError):
            limited(lambda number: 1 / number)(0)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")
def test_a_hang_is_interrupted_and_the_signal_given_back() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(0.05, "a sleep") as limited, pytest.raises(TimeLimitError, match=r"longer than 0\.05 s"):
        limited(time.sleep)(60.0)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_beside_the_main_thread_nothing_is_interrupted() -> None:
    ended: list[int] = []

    def run() -> None:
        with time_limit(0.01, "a nap") as limited:
            limited(time.sleep)(0.02)
        ended.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended == [1]


def test_what_no_signal_interrupts_ends_the_process_with_a_sentence() -> None:
    script = (
        "import signal, time\n"
        "from latpred.calibration.timing.timer import time_limit\n"
        "def deaf(_):\n"
        "    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
        "    time.sleep(60)\n"
        "with time_limit(0.1, 'kernel/gemm') as limited:\n"
        "    limited(deaf)(None)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert ended.returncode == EXIT_CODE
    assert "kernel/gemm hangs where nothing can interrupt it" in ended.stderr
    assert "run the same command again" in ended.stderr


def test_without_memory_for_a_watchdog_a_call_is_limited_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", start)
    with time_limit(0.05, "a sleep") as limited, pytest.raises(TimeLimitError):
        limited(time.sleep)(5.0)
