"""A calibration killed at random moments, again and again, loses at most the cell under way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from latpred.calibration import session

KILLS = 20
CELLS = 300
CELL_S = 0.004

# Started once: it forks one calibration after another, kills each at a random moment and starts the next at once, so
# that twenty kills do not cost twenty interpreters. Each calibration notes what it starts to measure in `started`, and
# once all cells are there writes an artefact and completes.
PROGRAM = f"""
import os, random, signal, sys, time
from pathlib import Path
from latpred.calibration import session
from latpred.calibration.timing import timer
from latpred.calibration.cells import Cell
from latpred.calibration.devices.simulated import SimulatedDevice

session.MOST_TRIES = 99  # the kills are this test's, and not the cells'
folder = Path(sys.argv[1])

def calibrate(cell_s, told):
    started = os.open(folder / "started", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    device = SimulatedDevice()

    def measure(cell):
        os.write(started, (cell.key + "\\n").encode())
        os.write(told, b".")
        time.sleep(cell_s)
        return session.Row(cell, dict(queued=timer.queued(device, device.prepare(cell), timer.QUICK)))

    with session.Session(folder / "session", device.machine(), "any") as running:
        for index in range({CELLS}):
            running.run(Cell("memory", "bandwidth", dict(bytes=1000 + index)), measure)
        running.complete()

rng = random.Random(20)
killed = 0
while True:
    reading, running = os.pipe()
    child = os.fork()
    if child == 0:
        calibrate({CELL_S} if killed < {KILLS} else 0.0, running)
        os._exit(0)
    os.close(running)
    if killed < {KILLS}:
        if killed % 5:  # every fifth is killed while it starts, the others once they measure
            os.read(reading, 1)
        time.sleep(rng.uniform(0.0, 5 * {CELL_S}))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reading)
    killed += os.WIFSIGNALED(status)
    print("killed" if os.WIFSIGNALED(status) else "exit %d" % os.waitstatus_to_exitcode(status), flush=True)
    if not os.WIFSIGNALED(status):
        break
"""


@pytest.mark.skipif(os.name != "posix", reason="needs fork and SIGKILL")
def test_twenty_kills_repeat_at_most_one_cell_each(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines() == [*["killed"] * KILLS, "exit 0"], ran.stderr
    started = Counter((tmp_path / "started").read_text().splitlines())
    rows = session.read_journal(tmp_path / "session" / session.LAST)[1]
    assert [row.cell.dims["bytes"] for row in rows] == list(range(1000, 1000 + CELLS))
    assert all(row.timings and not row.error for row in rows)
    assert set(started) == {row.cell.key for row in rows}
    assert sum(started.values()) - CELLS <= KILLS
    assert sum(started.values()) > CELLS  # or no kill met a cell under way
    assert not (tmp_path / "session" / session.JOURNAL).exists()
