"""The command line itself: finding verbs, reading options, streams, files, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from clidata import run

import latpred
from latpred.cli import main, output
from latpred.cli.options import parse_batches, parse_seconds
from latpred.errors import CalibrationError, LatpredError, UsageError
from latpred.progress import ProgressEvent, bar, each_tenth


def test_help_lists_every_verb_and_a_command_to_start_with() -> None:
    shown = run("--help")
    assert shown.exit_code == 0
    listed = re.findall(r"^  (\w+)  +(\w.*)$", shown.stdout.partition("Commands:")[2], re.MULTILINE)
    assert [name for name, _ in listed] == list(main.commands)
    assert "latpred predict bert-base-uncased --batch 1,8,32" in shown.stdout


def test_version() -> None:
    assert run("--version").stdout == f"latpred {latpred.__version__}\n"


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_batches, "8,1,8,32", (8, 1, 32)),
        (parse_batches, "1-4,8-32:8,64-256:2x", (1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 256)),
        (parse_batches, "4-4", (4,)),
        (parse_batches, "3-100:3x", (3, 9, 27, 81)),
        (parse_batches, " 1 , 2-3 ", (1, 2, 3)),
        (parse_seconds, "90", 90),
        (parse_seconds, "1.5h", 5400),
        (parse_seconds, "0.5 m", 30),
    ],
)
def test_the_grammar_of_batches_and_times(parse: Callable[[str], object], text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize("error", [UsageError("a was wrong. Do b."), CalibrationError("c failed. Do d.")])
def test_an_error_is_a_sentence_on_stderr_and_a_code(error: LatpredError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latpred.storage.usage", Mock(side_effect=error))
    shown = run("cache", "show")
    assert (shown.exit_code, shown.stdout, shown.stderr) == (error.exit_code, "", f"latpred: {error}\n")
    for arguments in (("--debug", "cache", "show"), ("cache", "show", "--debug")):
        shown = run(*arguments)
        assert shown.exit_code == error.exit_code
        assert "Traceback (most recent call last)" in shown.stderr
        assert shown.stderr.endswith(f"latpred: {error}\n")


def test_the_package_runs_as_the_command_does() -> None:
    shown = subprocess.run([sys.executable, "-m", "latpred", "predcit"], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith("Usage: latpred [OPTIONS]")
    assert "Did you mean 'predict'?" in shown.stderr


def test_the_package_takes_no_module_of_the_working_directory_for_one_of_python(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(Path(latpred.__file__).parents[1])}
    command = [sys.executable, "-m", "latpred", "--version"]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")


def test_output_goes_to_a_file_in_the_form_of_its_suffix(tmp_path: Path) -> None:
    home = str(os.environ["LATPRED_HOME"])
    for name, start in (("a.json", "{"), ("b.csv", "path,files,bytes"), ("deep/er/c.txt", home)):
        shown = run("cache", "show", "-o", tmp_path / name)
        assert (shown.exit_code, shown.stdout, shown.stderr) == (0, "", f"wrote {tmp_path / name}\n")
        assert (tmp_path / name).read_text().startswith(start)
    assert run("cache", "show", "--quiet", "-o", tmp_path / "d.json").stderr == ""
    assert run("cache", "show", "--csv", "-o", "-").stdout.startswith("path,files,bytes")


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


def written(tmp_path: Path, importing: str = "", building: str = "", forward: str = "") -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(importing=importing, building=building, forward=forward))
    return f"{path}:build"


def test_a_model_imports_what_lies_beside_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = types.SimpleNamespace(__file__=str(tmp_path / "one" / "imported_before.py"))
    monkeypatch.setitem(sys.modules, "imported_before", before)
    kept = {"imported_before"}  # beside packages of an environment below the folder, and the models' files themselves
    packages = tmp_path / "one" / ".venv"
    packages.mkdir(parents=True)
    (packages / "package_below.py").write_text("")
    sys.path.append(str(packages))
    for folder, width in (("one", 4), ("two", 8), ("two", 16)):  # edited the last time
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "layers_beside.py").write_text(f"width = {width}")
        (tmp_path / folder / "this.py").write_text("raise ValueError")  # as one of Python's own, not imported yet
        monkeypatch.delitem(sys.modules, "this", raising=False)
        importing = f"import this, package_below\nfrom layers_beside import width\nassert width == {width}"
        shown = run("trace", written(tmp_path / folder, importing=importing))
        assert shown.exit_code == 0, shown.stderr
        kept = kept | {name for name in sys.modules if name.startswith("latpred_user_model") or name == "package_below"}
    assert kept <= sys.modules.keys()
    assert "package_below" in kept
    shown = run("trace", written(tmp_path, importing="import no_such_package"))
    assert shown.exit_code == 2
    assert "No module named 'no_such_package'; install it, or check the file and PYTHONPATH" in shown.stderr


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
    name = written(tmp_path, **{where: "sys.exit(0)"})
    shown = run("predict", name, "--device", "epyc-shared", "--json", "-o", tmp_path / "out.json")
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "sys.exit(0)" in shown.stderr
    with pytest.raises(LatpredError, match=r"__main__" if where == "importing" else r"sys\.exit\(0\)"):
        latpred.predict(name, device="epyc-shared")


def test_ctrl_c_exits_130_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latpred.storage.usage", Mock(side_effect=KeyboardInterrupt))
    shown = run("cache", "show")
    assert (shown.exit_code, shown.stderr) == (130, "latpred: interrupted.\n")


def test_a_bar_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with bar("measuring", output._how_far) as show:
        show(ProgressEvent(9, 6, "[/old]/models.py:build"))
    assert "100 %  [/old]/models.py:build" in capsys.readouterr().err


def test_a_tenth_that_lasts_minutes_is_told_of_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now_s = iter([0.0, 1.0, 30.0, 61.5, 61.5, 90.0, 95.0, 95.0])
    monkeypatch.setattr("latpred.progress.time.monotonic", now_s.__next__)
    tell = each_tenth("measuring", said.append)
    for done in (0, 1, 2, 3, 10):
        tell(ProgressEvent(done, 100, f"cell {done}"))
    assert said == ["measuring: 0 %", "measuring: 2 %, cell 2", "measuring: 10 %"]


def test_a_run_that_counts_anew_tells_its_tenths_again() -> None:
    said: list[str] = []
    tell = each_tenth("validating", said.append)
    for done in (0, 5, 9, 0, 5):
        tell(ProgressEvent(done, 10, "cell"))
    assert said == [f"validating: {share} %" for share in (0, 50, 90, 0, 50)]


def test_a_run_that_goes_on_for_longer_says_so_at_once() -> None:
    said: list[str] = []
    tell = each_tenth("calibrating", said.append)
    for done, total in ((0, 100), (70, 100), (70, 110), (72, 300), (100, 300), (150, 300)):
        tell(ProgressEvent(done, total, "cell"))
    assert said == [f"calibrating: {told}" for told in ("0 %", "70 %", "24 %, cell", "30 %", "50 %")]
