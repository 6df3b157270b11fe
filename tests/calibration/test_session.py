"""Sessions: locked, journalled, resumed, and honest about cells that fail."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest
from factories import machine

from latpred.calibration import session
from latpred.calibration.cells import Cell
from latpred.calibration.devices.simulated import SimulatedDevice
from latpred.calibration.session import Row, Session, read_journal
from latpred.calibration.timing.timer import Timing
from latpred.errors import BusyError, CalibrationError, DeviceError, RuntimeRefusalError
from latpred.progress import sigterm_as_ctrl_c

SETTINGS = {"budget_s": 60, "runtimes": ["eager"]}
MACHINE = SimulatedDevice().machine()
TIMING = Timing(1e-3, 1e-5, 30, True)


def gemm(m, n=64, name="gemm"):
    return Cell("kernel", name, {"m": m, "n": n, "k": 64})


def sizes(rows):
    return [row.cell.dims["m"] for row in rows]


class Measuring:
    """A measure that remembers what it was asked, and fails at some cells."""

    def __init__(self, failing=None):
        self.asked, self.failing = [], failing or {}

    def __call__(self, cell):
        self.asked.append(cell)
        if cell.key in self.failing:
            raise self.failing[cell.key]
        return Row(cell, {"queued": TIMING})


@pytest.fixture
def opened(tmp_path):
    """Opens sessions of one folder; more options are a session's own."""

    def make(settings=SETTINGS, machine=MACHINE, **options):
        return Session(tmp_path, machine, settings, **options)

    return make


@pytest.fixture
def path(tmp_path):
    return tmp_path / session.JOURNAL


def test_measured_cells_are_not_measured_again(opened, path):
    first, second = Measuring(), Measuring()
    with opened() as one:
        assert one.rows == ()
        rows = [one.run(gemm(m), first) for m in (1, 2)]
        assert one.run(gemm(1), first) is rows[0]
    with opened() as two:
        assert two.rows == tuple(rows)
        assert (two.holds(gemm(2)), two.holds(gemm(3))) == (True, False)
        again = [two.run(gemm(m), second) for m in (1, 2, 3)]
        assert two.rows == tuple(again)
    assert sizes(rows) == [cell.dims["m"] for cell in first.asked] == [1, 2]
    header, row, *_ = (json.loads(line) for line in path.read_text().splitlines())  # that anyone can read
    assert header["machine"]["cpu"] == MACHINE.cpu
    assert (row["cell"]["dims"]["m"], row["timings"]["queued"]["median_s"]) == (1, 1e-3)
    assert second.asked == [gemm(3)]


def test_each_cell_is_on_the_disk_before_the_next_is_measured(opened, path, monkeypatch):
    forced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: forced.append(os.fstat(file).st_size) or fsync(file))
    with opened() as one:
        one.run(gemm(1), Measuring())
        assert forced[-1] == path.stat().st_size
        one.run(gemm(2), lambda cell: Row(cell, {"before": Timing(forced[-1] * 1.0, 0.0, 1, True)}))
    first = path.read_bytes().splitlines(keepends=True)[:2]
    assert one.rows[1].timings["before"].median_s == len(b"".join(first))


WHOLE = msgspec.json.encode(Row(gemm(9), {}, 0.1))  # but for the end of its line


@pytest.mark.parametrize("torn", [b'{"cell":{"kind":"kernel"', b'{"cell', b"\x00\x00\x00", WHOLE])
def test_a_torn_last_line_and_a_damaged_one_cost_only_themselves(opened, path, torn):
    with opened() as one:
        for m in (1, 2, 3):
            one.run(gemm(m), Measuring())
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:10] + b"\x07" + lines[2][11:]
    path.write_bytes(b"".join(lines) + torn)
    with opened() as two:
        assert sizes(two.rows) == [1, 3]
        two.run(gemm(4), Measuring())
    assert sizes(read_journal(path)[1]) == [1, 3, 4]


@pytest.mark.parametrize("damage", [b"", b"{}", b"not a journal\n", b'{"journal":99}\n'])
def test_a_journal_without_its_header_is_started_anew(opened, path, damage):
    path.write_bytes(damage)
    with opened() as one:
        assert one.rows == ()
        one.run(gemm(1), Measuring())
    assert len(read_journal(path)[1]) == 1


@pytest.fixture
def resumed(opened):
    """How many rows a session begins with, which leaves one."""

    def make(**options):
        with opened(**options) as one:
            held = len(one.rows)
            one.run(gemm(1), Measuring())
            return held

    return make


def test_another_machine_or_other_settings_start_anew(resumed):
    updated = msgspec.structs.replace(MACHINE, stack={**MACHINE.stack, "torch": "99.0"})
    reordered = dict(reversed(SETTINGS.items()))
    assert [resumed(), resumed(), resumed(settings=reordered), resumed(fresh=True)] == [0, 1, 1, 0]
    assert [resumed(machine=updated), resumed(machine=updated, settings={"budget_s": 61})] == [0, 0]
    installed = msgspec.structs.replace(updated, stack={**updated.stack, "another": "1.0"})
    assert resumed(machine=installed, settings={"budget_s": 61}) == 1, "it changes nothing of what was measured"
    renamed = msgspec.structs.replace(MACHINE, hostname_hash="1" * 16)
    assert [resumed(), resumed(machine=renamed)] == [0, 1], "a machine is known by its id"
    rented = [msgspec.structs.replace(MACHINE, machine_id="", hostname_hash=name * 16) for name in "12"]
    assert [resumed(machine=machine) for machine in rented] == [0, 1], "and a rented GPU's by its hardware"


NO_TIMERS = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")


@pytest.mark.parametrize(
    ("measure", "error"),
    [
        (Measuring({gemm(1).key: RuntimeError("no image for\nthis op")}), "RuntimeError: no image for this op"),
        (Measuring({gemm(1).key: MemoryError("40 GiB needed")}), "out of memory: 40 GiB needed"),
        (lambda cell: Row(cell, {"queued": Timing(math.nan, 0.0, 3, True)}), "no number was measured for queued"),
        (lambda cell: Row(cell, {"queued": TIMING}, calls_us=(1.0, math.inf)), "no number was measured for calls"),
        pytest.param(lambda _: time.sleep(60), "TimeLimitError: it took longer than 0.05 s", marks=NO_TIMERS),
    ],
)
def test_a_cell_that_fails_or_hangs_is_a_row_and_the_next_is_measured(opened, path, measure, error, monkeypatch):
    monkeypatch.setattr(Session, "limit_s", 0.05)
    with opened() as one:
        failed = one.run(gemm(1), measure)
        calls = one.run(Cell("network", "encoder"), lambda cell: Row(cell, {"single": TIMING}, calls_us=(2.0, 3.0)))
    assert (failed.error, failed.timings, failed.calls_us) == (error, {}, ())
    assert (calls.error, calls.timings, calls.calls_us) == ("", {"single": TIMING}, (2.0, 3.0))
    assert read_journal(path)[1] == [failed, calls]


def test_no_cell_is_begun_with_next_to_no_memory_left_and_none_is_given_up_for_that(opened, monkeypatch):
    left, measure = iter((1.5e8,)), Measuring()
    monkeypatch.setattr(session.host, "bytes_left", lambda: next(left, math.inf))
    with opened() as one:
        assert one.run(gemm(1), measure).error == "less than 200 MB of memory are left for this process"
        assert one.run(gemm(2), measure).timings
    with opened() as two:
        assert two.run(gemm(1), measure).timings
    assert measure.asked == [gemm(2), gemm(1)]


def refused_for(reason):
    """What a compiler that cannot write its files makes of that."""
    refused = RuntimeRefusalError("compile cannot run it")
    refused.__cause__ = OSError(errno.ENOSPC, reason)
    return refused


@pytest.mark.parametrize(
    ("end", "raised", "said"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (DeviceError("cuda:0 failed."), DeviceError, "m=2,n=64: cuda:0 failed. What was measured is kept"),
        (refused_for("No space left"), CalibrationError, "no room is left on the disk: .*No space left"),
    ],
)
def test_interruption_a_lost_device_and_a_full_disk_leave_the_journal_resumable(opened, end, raised, said):
    measure = Measuring({gemm(2).key: end})
    with opened() as one:
        one.run(gemm(1), measure)
        with pytest.raises(raised, match=said):
            one.run(gemm(2), measure)
    with opened() as two:
        assert sizes(two.rows) == [1]


def test_sigterm_ends_a_run_as_ctrl_c_does() -> None:
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_session_is_told_who_holds_the_first(opened, tmp_path):
    code = (
        "import sys; from pathlib import Path; from latpred.calibration.session import Session\n"
        "from latpred.calibration.devices.simulated import SimulatedDevice\n"
        "with Session(Path(sys.argv[1]), SimulatedDevice().machine(), {}): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BusyError) as raised:
            opened().__enter__()
        other.kill()
    said = str(raised.value)
    assert f"calibration of {tmp_path.name} is under way (process {other.pid}, since 20" in said
    with pytest.raises(ZeroDivisionError), opened():
        raise ZeroDivisionError
    with opened():  # the lock is free after a session and its failures
        pass


def test_a_record_says_how_eager_was_asked_for_and_a_resumed_journal_how_it_was_asked_for_last(opened, tmp_path):
    asked, plain = {"options": {"threads": 2}}, {"options": {"threads": None}}
    with opened(about=plain) as one:
        one.run(gemm(1), Measuring())
    with opened(about=asked) as two:
        two.complete()
    with opened(about=plain) as more:
        more.run(Cell("kernel", "gemm", runtime="torchscript"), Measuring())
        more.complete()
    header, rows = read_journal(tmp_path / session.LAST)
    assert (header.about, [row.cell.runtime for row in rows]) == (asked, ["eager", "torchscript"])


def test_a_cell_that_failed_is_tried_once_more_on_resume(opened):
    failing = Measuring({gemm(m).key: ValueError("not here") for m in (1, 2)})
    with opened() as one:
        assert [one.run(gemm(m), failing).tries for m in (1, 2)] == [1, 1]
    with opened() as two:
        assert not two.holds(gemm(1))
        row, settled = two.run(gemm(1), failing), two.run(gemm(2), Measuring())
    assert (row.tries, row.error) == (2, "ValueError: not here")
    assert (settled.tries, settled.error) == (2, "")  # a second try that succeeds stands
    with opened() as last:
        assert last.rows == (row, settled)
    assert len(failing.asked) == 3


def killed(folder, cell, tries):
    """What a process leaves behind that was killed while it timed a cell."""
    (folder / session.UNDER_WAY).write_bytes(msgspec.json.encode(session.UnderWay(cell.key, tries)))


def test_a_cell_that_ended_the_process_twice_is_left_out(opened, tmp_path):
    with opened() as one:
        one.run(gemm(1), Measuring())
    killed(tmp_path, gemm(2), 1)
    again, never = Measuring(), Measuring()
    with opened() as two:
        assert two.run(gemm(2), again).tries == 2  # once more, and this time it works
        left = msgspec.json.decode((tmp_path / session.UNDER_WAY).read_bytes(), type=session.UnderWay)
        assert left == session.UnderWay(gemm(2).key, 2)  # word of it, written before it was timed
    assert again.asked == [gemm(2)]
    assert not (tmp_path / session.UNDER_WAY).exists()  # of whom nobody killed
    killed(tmp_path, gemm(3), 2)
    with opened() as three:
        row = three.run(gemm(3), never)
    assert (never.asked, row.error) == ([], "ended the process each time it was timed")
    killed(tmp_path, gemm(1), 2)  # while it was timed again
    with opened() as four:
        four.run(gemm(1), never, again=lambda row, _: not row.error)
        assert (never.asked, four.rows[0].timings) == ([], {"queued": TIMING})
    killed(tmp_path, gemm(5), 2)
    with opened(settings={}) as other:  # which has not tried it yet
        assert other.run(gemm(5), again).timings


def test_a_repeat_replaces_a_row_where_it_is_said_to_be_better(opened, tmp_path):
    better = Timing(5e-4, 1e-5, 30, True)

    def fine(row, earlier):
        return not row.error

    with opened() as one:
        one.run(gemm(1), Measuring())
        assert one.run(gemm(1), lambda cell: Row(cell, {"queued": better}), again=fine).timings["queued"] == better
        one.run(gemm(1), Measuring({gemm(1).key: ValueError("no")}), again=fine)
        assert one.rows[0].timings["queued"] == better
        one.run(gemm(2), Measuring())
        one.run(gemm(1), lambda cell: Row(cell, {"queued": better}), again=fine)
        assert sizes(one.rows) == [2, 1]  # in the order in which what counts was timed
    with opened() as two:
        assert [row.timings["queued"] for row in two.rows] == [TIMING, better]
        two.complete()
    assert sizes(read_journal(tmp_path / session.LAST)[1]) == [2, 1]


def test_machines_that_share_a_folder_keep_journals_apart():
    usual = session.directory("cpu")
    with Session(usual, MACHINE, SETTINGS):
        assert session.directory("cpu") == usual
    with Session(usual, machine(), SETTINGS):
        assert session.directory("cpu").name == f"cpu-{session.host.short_id()}"


def test_a_place_that_cannot_be_written_says_where_to_go(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CalibrationError, match=r"cannot keep a calibration journal in .*LATPRED_HOME=DIR"):
        Session(tmp_path / "file" / "cpu", MACHINE, SETTINGS).__enter__()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no disk that is always full")
def test_a_full_disk_is_one_sentence_to_the_end(opened):
    def run_on_a_full_disk():
        with opened() as one:
            one._journal.close()
            one._journal = open("/dev/full", "ab")  # noqa: SIM115 (the session closes it)
            one._resources.callback(one._journal.close)
            one.run(gemm(1), Measuring())

    with pytest.raises(CalibrationError, match=r"cannot keep a calibration journal in .*No space left on device"):
        run_on_a_full_disk()
