"""What goes to stdout, to stderr and into files, whatever a user's model, a disk or a reader does."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import latpred
from latpred.cli import main
from latpred.errors import LatpredError, TraceError, UsageError
from latpred.storage import result_file

MODEL = """
import sys
import torch

{importing}

class Model(torch.nn.Linear):
    def forward(self, x):
        print("in forward")
        {forward}
        return super().forward(x)

def build():
    print("in build")
    {building}
    return Model(4, 4), torch.zeros(1, 4)
"""
QUIT = "sys.exit(0)"


def written(tmp_path: Path, importing: str = "", building: str = "", forward: str = "") -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(importing=importing, building=building, forward=forward))
    return f"{path}:build"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_what_a_model_prints_is_no_part_of_a_result(tmp_path: Path) -> None:
    name = written(tmp_path, importing='print("imported")')
    shown = run("predict", name, "--device", "epyc-shared", "--json")
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout)["schema"].startswith("latpred.")
    for text in ("imported", "in build", "in forward"):
        assert text in shown.stderr
    assert "in build" not in run("trace", name).stdout


@pytest.mark.parametrize("where", ["importing", "building", "forward"])
def test_a_file_that_ends_the_program_is_an_error(tmp_path: Path, where: str) -> None:
    name = written(tmp_path, **{where: QUIT})
    shown = run("predict", name, "--device", "epyc-shared", "--json", "-o", str(tmp_path / "out.json"))
    assert shown.exit_code == 2
    assert "sys.exit(0)" in shown.stderr
    assert shown.stdout == ""
    with pytest.raises(LatpredError, match=r"sys\.exit\(0\)"):
        latpred.predict(name, device="epyc-shared")


def test_a_script_without_a_guard_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="__main__"):
        latpred.trace(written(tmp_path, importing=QUIT))


def test_a_candidate_that_ends_the_program_costs_nobody_else_anything() -> None:
    class Quitting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sys.exit("no more")

    def candidate() -> nn.Module:
        sys.exit(3)

    given = [nn.Linear(4, 4), candidate, Quitting(4, 4), nn.Linear(4, 4)]
    table = latpred.predict_many(given, inputs=torch.zeros(1, 4), device="epyc-shared")
    assert table.error.isna().tolist() == [True, False, False, True]
    assert "sys.exit(3)" in table.error[1]
    assert "sys.exit('no more')" in table.error[2]
    with pytest.raises(TraceError, match="model's own forward"):
        latpred.trace(Quitting(4, 4), torch.zeros(1, 4))


def test_other_code_that_ends_the_program_is_an_error_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latpred.profile.store.listing", lambda: sys.exit(0))
    shown = run("profiles", "list")
    assert shown.exit_code == 2
    assert shown.stderr.startswith("latpred: ")


def full_after(characters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let disks be full after so many characters."""
    usual = Path.write_text

    def write_text(path: Path, text: str, *rest: object, **options: object) -> int:
        usual(path, text[:characters])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    full_after(10, monkeypatch)
    shown = run("profiles", "list", "-o", str(path))
    assert shown.exit_code == 2
    assert shown.stderr == f"latpred: cannot write {path}: No space left on device. Name another file with -o.\n"
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_written_at_once_or_not_at_all(tmp_path: Path) -> None:
    target, link = tmp_path / "result.txt", tmp_path / "link.txt"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    with result_file(link) as part:
        part.write_text("new")
        assert part.suffix == ".txt"
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640

    def interrupted() -> None:
        with result_file(target) as part:
            part.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text() == "new"
    with result_file(Path("/dev/null")) as part:
        assert part == Path("/dev/null")
    with result_file(tmp_path / "new" / "file.txt") as part:
        part.write_text("made")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.txt", "new", "result.txt"]


COMMAND = f"{sys.executable} -c 'from latpred.cli import main; main()'"


def shell(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("verb", ["profiles show epyc-shared", "profiles show epyc-shared --json", "profiles path"])
def test_a_reader_that_has_enough_is_no_error(verb: str) -> None:
    done = shell(f"{COMMAND} {verb} | head -c 0")
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize("verb", ["profiles show epyc-shared", "profiles list --json"])
def test_a_full_disk_behind_stdout_is_said(verb: str) -> None:
    done = shell(f"{COMMAND} {verb} > /dev/full")
    assert done.returncode == 3
    assert done.stderr == "latpred: cannot write the result: No space left on device; name a file with -o.\n"
