"""Sessions: locked, journalled, resumed, and honest about cells that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from latpred.calibration import session
from latpred.calibration.cells import Cell
from latpred.calibration.devices.simulated import SimulatedDevice
from latpred.calibration.session import Sampled, Session
from latpred.calibration.timing.timer import Timing
from latpred.errors import BusyError, CalibrationError, DeviceError

SETTINGS = {"budget_s": 60, "runtimes": ["eager"]}
TIMING = Timing(1e-3, 1e-5, 30, True)


@pytest.fixture(scope="module")
def machine():
    return SimulatedDevice().machine()


def gemm(m, n=64, name="gemm"):
    return Cell("kernel", name, {"m": m, "n": n, "k": 64})


class Measuring:
    """A measure that remembers what it was asked."""

    def __init__(self, failing=None):
        self.asked, self.failing = [], failing or {}

    def __call__(self, cell):
        self.asked.append(cell)
        if cell.key in self.failing:
            raise self.failing[cell.key]
        return {"queued": TIMING}


def test_measured_cells_are_not_measured_again(tmp_path, machine):
    first, second = Measuring(), Measuring()
    with Session(tmp_path, machine, SETTINGS) as one:
        rows = [one.run(gemm(m), first) for m in (1, 2)]
        assert one.resumed == 0
    with Session(tmp_path, machine, SETTINGS) as two:
        assert two.resumed == 2
        assert two.holds(gemm(2))
        assert not two.holds(gemm(3))
        again = [two.run(gemm(m), second) for m in (1, 2, 3)]
        assert two.rows == tuple(again)
    assert [cell.dims["m"] for cell in second.asked] == [3]
    assert [row.timings for row in again[:2]] == [row.timings for row in rows]


def test_cell_of_one_session_is_measured_once(tmp_path, machine):
    measure = Measuring()
    with Session(tmp_path, machine, SETTINGS) as one:
        assert one.run(gemm(1), measure) is one.run(gemm(1), measure)
    assert len(measure.asked) == 1


def test_each_cell_is_on_the_disk_before_the_next_is_measured(tmp_path, machine, monkeypatch):
    forced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: forced.append(os.fstat(descriptor).st_size) or fsync(descriptor)
    )
    path = tmp_path / session.JOURNAL
    with Session(tmp_path, machine, SETTINGS) as one:
        one.run(gemm(1), Measuring())
        assert forced[-1] == path.stat().st_size
        one.run(gemm(2), lambda cell: {"before": Timing(forced[-1] * 1.0, 0.0, 1, True)})
    first = path.read_bytes().splitlines(keepends=True)[:2]
    assert one.rows[1].timings["before"].median_s == len(b"".join(first))


@pytest.mark.parametrize("torn", [b'{"cell":{"kind":"kernel"', b'{"cell', b"\x00\x00\x00"])
def test_torn_last_line_is_forgotten_and_measured_again(tmp_path, machine, torn):
    with Session(tmp_path, machine, SETTINGS) as one:
        one.run(gemm(1), Measuring())
    with (tmp_path / session.JOURNAL).open("ab") as journal:
        journal.write(torn)
    with Session(tmp_path, machine, SETTINGS) as two:
        assert two.resumed == 1
        two.run(gemm(2), Measuring())
    assert [row.cell.dims["m"] for row in session.read_rows(tmp_path / session.JOURNAL)] == [1, 2]


def test_damaged_line_in_the_middle_costs_only_itself(tmp_path, machine):
    with Session(tmp_path, machine, SETTINGS) as one:
        for m in (1, 2, 3):
            one.run(gemm(m), Measuring())
    path = tmp_path / session.JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:10] + b"\x07" + lines[2][11:]
    path.write_bytes(b"".join(lines))
    with Session(tmp_path, machine, SETTINGS) as two:
        assert [row.cell.dims["m"] for row in two.rows] == [1, 3]


@pytest.mark.parametrize("damage", [b"", b"{}", b"not a journal\n", b'{"journal":99}\n'])
def test_journal_without_its_header_is_started_anew(tmp_path, machine, damage):
    (tmp_path / session.JOURNAL).write_bytes(damage)
    with Session(tmp_path, machine, SETTINGS) as one:
        assert one.resumed == 0
        one.run(gemm(1), Measuring())
    assert len(session.read_rows(tmp_path / session.JOURNAL)) == 1


def test_another_machine_or_other_settings_start_anew(tmp_path, machine):
    def resumed(on, settings, fresh=False):
        with Session(tmp_path, on, settings, fresh=fresh) as one:
            one.run(gemm(1), Measuring())
            return one.resumed

    updated = msgspec.structs.replace(machine, stack={**machine.stack, "torch": "99.0"})
    assert resumed(machine, SETTINGS) == 0
    assert resumed(machine, SETTINGS) == 1
    assert resumed(machine, dict(reversed(SETTINGS.items()))) == 1
    assert resumed(machine, SETTINGS, fresh=True) == 0
    assert resumed(updated, SETTINGS) == 0
    assert resumed(updated, {**SETTINGS, "budget_s": 61}) == 0


def test_failed_cell_is_a_row_and_the_next_is_measured(tmp_path, machine):
    measure = Measuring({gemm(1).key: RuntimeError("no kernel image for\nthis op")})
    with Session(tmp_path, machine, SETTINGS) as one:
        failed, fine = one.run(gemm(1), measure), one.run(gemm(2), measure)
    assert failed.error.startswith("RuntimeError: no kernel image")
    assert not failed.timings
    assert fine.timings == {"queued": TIMING}
    assert not fine.error
    assert session.read_rows(tmp_path / session.JOURNAL) == [failed, fine]


def test_calls_timed_in_place_are_kept_beside_timings(tmp_path, machine):
    with Session(tmp_path, machine, SETTINGS) as one:
        row = one.run(Cell("network", "encoder"), lambda cell: Sampled({"single": TIMING}, (2.0, 3.0)))
    assert row.calls_us == (2.0, 3.0)
    assert row.timings == {"single": TIMING}
    assert session.read_rows(tmp_path / session.JOURNAL) == [row]


def test_out_of_memory_spares_larger_cells_but_not_others(tmp_path, machine):
    measure = Measuring({gemm(100).key: MemoryError("40 GiB needed")})
    others = [gemm(50), gemm(200, n=32), gemm(200, name="bmm"), Cell("kernel", "gemm", gemm(200).dims, "fp16")]
    with Session(tmp_path, machine, SETTINGS) as one:
        assert one.run(gemm(100), measure).error == "out of memory: 40 GiB needed"
        spared = one.run(gemm(200, n=65), measure)
        assert spared.error == f"out of memory: already {gemm(100).key} did not fit"
        assert all(one.run(cell, measure).timings for cell in others)
    assert measure.asked == [gemm(100), *others]
    with Session(tmp_path, machine, SETTINGS) as two:
        two.run(gemm(300), measure)
    assert gemm(300) not in measure.asked


@pytest.mark.parametrize("end", [KeyboardInterrupt(), DeviceError("cuda:0 failed")])
def test_interruption_and_a_lost_device_leave_the_journal_resumable(tmp_path, machine, end):
    measure = Measuring({gemm(2).key: end})
    with Session(tmp_path, machine, SETTINGS) as one:
        one.run(gemm(1), measure)
        with pytest.raises(type(end)):
            one.run(gemm(2), measure)
    with Session(tmp_path, machine, SETTINGS) as two:
        assert [row.cell.dims["m"] for row in two.rows] == [1]


def test_second_session_is_told_who_holds_the_first(tmp_path, machine):
    with Session(tmp_path / "cpu", machine, SETTINGS), pytest.raises(BusyError) as raised:
        Session(tmp_path / "cpu", machine, SETTINGS).__enter__()
    message = str(raised.value)
    assert f"calibration of cpu is under way (process {os.getpid()}, since 20" in message
    assert f"kill -INT {os.getpid()}" in message


def test_lock_is_free_after_a_session_and_its_failures(tmp_path, machine):
    with pytest.raises(ZeroDivisionError), Session(tmp_path, machine, SETTINGS):
        raise ZeroDivisionError
    with Session(tmp_path, machine, SETTINGS):
        pass


def test_lock_holds_between_processes(tmp_path, machine):
    code = (
        "import sys; from pathlib import Path; from latpred.calibration.session import Session\n"
        "from latpred.calibration.devices.simulated import SimulatedDevice\n"
        "with Session(Path(sys.argv[1]), SimulatedDevice().machine(), {}): print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=f"process {other.pid}, since"):
            Session(tmp_path, machine, {}).__enter__()
        other.kill()
        other.wait()
    with Session(tmp_path, machine, {}):
        pass


def test_completed_journal_is_kept_as_the_last_and_not_resumed(tmp_path, machine):
    with Session(tmp_path, machine, SETTINGS) as one:
        row = one.run(gemm(1), Measuring())
        last = one.complete()
        with pytest.raises(CalibrationError, match="this session is over"):
            one.run(gemm(2), Measuring())
    assert session.read_rows(last) == [row]
    with Session(tmp_path, machine, SETTINGS) as two:
        assert two.resumed == 0


def test_journal_is_json_lines_that_anyone_can_read(tmp_path, machine):
    with Session(tmp_path, machine, SETTINGS) as one:
        one.run(gemm(7), Measuring())
    header, row = (json.loads(line) for line in (tmp_path / session.JOURNAL).read_text().splitlines())
    assert header["machine"]["cpu"] == machine.cpu
    assert row["cell"]["dims"] == {"m": 7, "n": 64, "k": 64}
    assert row["timings"]["queued"]["median_s"] == 1e-3


def test_place_that_cannot_be_written_says_where_to_go(tmp_path, machine):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CalibrationError, match=r"cannot keep a calibration journal in .*LATPRED_HOME=DIR"):
        Session(tmp_path / "file" / "cpu", machine, SETTINGS).__enter__()


def test_what_is_no_journal_says_so(tmp_path):
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    with pytest.raises(CalibrationError, match="is no calibration journal"):
        session.read_rows(tmp_path / "table.csv")
    with pytest.raises(CalibrationError, match=r"cannot read .*missing"):
        session.read_rows(tmp_path / "missing")


def test_each_device_has_its_own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("LATPRED_HOME", str(tmp_path))
    assert session.directory("cuda:0") == tmp_path / "calibration" / "cuda-0"
    assert session.directory("cpu") != session.directory("cuda:0")


def test_a_cell_that_failed_is_tried_once_more_on_resume(tmp_path, machine):
    failing = Measuring({gemm(1).key: ValueError("not here")})
    for tries in (1, 2):
        with Session(tmp_path, machine, SETTINGS) as one:
            assert not one.holds(gemm(1))
            row = one.run(gemm(1), failing)
            assert (row.tries, row.error) == (tries, "ValueError: not here")
            assert one.holds(gemm(1))
    with Session(tmp_path, machine, SETTINGS) as last:
        assert last.holds(gemm(1))
    assert len(failing.asked) == 2


def test_a_second_try_that_succeeds_stands(tmp_path, machine):
    with Session(tmp_path, machine, SETTINGS) as one:
        one.run(gemm(1), Measuring({gemm(1).key: ValueError("not yet")}))
    with Session(tmp_path, machine, SETTINGS) as two:
        row = two.run(gemm(1), Measuring())
    assert (row.error, row.tries) == ("", 2)
    with Session(tmp_path, machine, SETTINGS) as three:
        assert three.rows == (row,)


def killed(folder, cell, tries):
    """What a process leaves behind that was killed while it timed a cell."""
    (folder / session.UNDER_WAY).write_bytes(msgspec.json.encode(session.UnderWay(cell.key, tries)))


def test_a_cell_that_ended_the_process_twice_is_left_out(tmp_path, machine):
    with Session(tmp_path, machine, SETTINGS) as one:
        one.run(gemm(1), Measuring())
    killed(tmp_path, gemm(2), 1)
    again = Measuring()
    with Session(tmp_path, machine, SETTINGS) as two:
        assert two.run(gemm(2), again).tries == 2  # once more, and this time it works
    assert again.asked == [gemm(2)]
    killed(tmp_path, gemm(3), 2)
    never = Measuring()
    with Session(tmp_path, machine, SETTINGS) as three:
        row = three.run(gemm(3), never)
    assert never.asked == []
    assert row.error == "ended the process each time it was timed"


def test_word_of_a_cell_is_left_while_it_is_timed_and_not_longer(tmp_path, machine):
    def measure(cell):
        left = msgspec.json.decode((tmp_path / session.UNDER_WAY).read_bytes(), type=session.UnderWay)
        assert left == session.UnderWay(cell.key, 1)
        return {"queued": TIMING}

    with Session(tmp_path, machine, SETTINGS) as one:
        assert one.run(gemm(1), measure).error == ""
    assert not (tmp_path / session.UNDER_WAY).exists()


def test_what_is_no_number_is_an_error(tmp_path, machine):
    bad = Timing(float("nan"), 0.0, 3, True)
    with Session(tmp_path, machine, SETTINGS) as one:
        row = one.run(gemm(1), lambda _: {"queued": bad})
        calls = one.run(gemm(2), lambda _: Sampled({"queued": TIMING}, (1.0, float("inf"))))
    assert (row.error, row.timings) == ("no number was measured for queued", {})
    assert (calls.error, calls.calls_us) == ("no number was measured for calls", ())


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")
def test_a_cell_that_hangs_becomes_a_row(tmp_path, machine):
    def hang(cell):
        time.sleep(60)

    with Session(tmp_path, machine, SETTINGS, limit_s=0.05) as one:
        row = one.run(gemm(1), hang)
        assert row.error == "TimeLimitError: it took longer than 0.05 s"
        assert one.run(gemm(2), Measuring()).error == ""


def test_a_repeat_replaces_a_row_but_not_by_an_error(tmp_path, machine):
    better = Timing(5e-4, 1e-5, 30, True)
    with Session(tmp_path, machine, SETTINGS) as one:
        one.run(gemm(1), Measuring())
        assert one.run(gemm(1), lambda _: {"queued": better}, again=True).timings["queued"] == better
        one.run(gemm(1), Measuring({gemm(1).key: ValueError("no")}), again=True)
        assert one.rows[0].timings["queued"] == better
    with Session(tmp_path, machine, SETTINGS) as two:
        assert [row.timings["queued"] for row in two.rows] == [better]


def test_a_clock_that_is_set_changes_nothing(tmp_path, machine, monkeypatch):
    days = iter([0.0, 9e9, -9e9] * 99)
    monkeypatch.setattr(time, "time", lambda: next(days))
    with Session(tmp_path, machine, SETTINGS) as one:
        row = one.run(gemm(1), Measuring())
    assert 0 <= row.seconds < 50


def test_a_full_disk_ends_with_a_sentence(tmp_path, machine):
    class Full:
        def write(self, _):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    with Session(tmp_path, machine, SETTINGS) as one:
        one._file.close()
        one._file = Full()
        with pytest.raises(CalibrationError, match=r"cannot keep a calibration journal in .*No space left on device"):
            one.run(gemm(1), Measuring())
