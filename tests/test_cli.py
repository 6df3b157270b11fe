"""The command line itself: finding verbs, reading options, streams, files, exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from clidata import run
from torch import nn

import latpred
from latpred.cli import calibrate, main, output
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
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/file/x/y")
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
    assert "Did you mean predict?" in shown.stderr


def test_the_package_takes_no_module_of_the_working_directory_for_one_of_python(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(Path(latpred.__file__).parents[1])}
    command = [sys.executable, "-m", "latpred", "--version"]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "with TMPDIR=DIR."),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/file/x"), "folder with TORCHINDUCTOR_CACHE_DIR=DIR."),
        (ModuleNotFoundError("No module named 'pandas'", name="pandas"), "python -m pip install latpred"),
        (MemoryError(), "allow it more (ulimit -v, or a container's limit)."),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"), "or set PYTHONUTF8=1."),
    ],
)
def test_what_the_system_lacks_is_said_in_a_sentence(
    error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/file/x/y")
    monkeypatch.setattr("latpred.storage.usage", Mock(side_effect=error))
    shown = run("cache", "show")
    assert (shown.exit_code, shown.stdout) == (3, "")
    assert shown.stderr.endswith(f"{sentence}\n")
    assert "Traceback" not in shown.stderr


def test_an_output_called_dash_is_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = run("cache", "show", "--csv", "-o", "-")
    assert (shown.exit_code, shown.stderr, list(tmp_path.glob("-"))) == (0, "", [])
    assert shown.stdout.startswith("path,files,bytes")


def test_output_goes_to_a_file_in_the_form_of_its_suffix(tmp_path: Path) -> None:
    home = str(os.environ["LATPRED_HOME"])
    for name, start in (("a.json", "{"), ("b.csv", "path,files,bytes"), ("deep/er/c.txt", home)):
        shown = run("cache", "show", "-o", tmp_path / name)
        assert (shown.exit_code, shown.stdout, shown.stderr) == (0, "", f"wrote {tmp_path / name}\n")
        assert (tmp_path / name).read_text().startswith(start)
    assert run("cache", "show", "--quiet", "-o", tmp_path / "d.json").stderr == ""


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, usual = tmp_path / "result.json", Path.write_text
    path.write_text("old")

    def write_text(path: Path, text: str, *rest: object, **options: object) -> int:
        usual(path, text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        shown = run("cache", "show", "-o", path)
    assert (shown.exit_code, json.loads(shown.stdout)["files"]) == (2, 0)
    said = "No space left on device. The result is on stdout instead; name another file with -o."
    assert shown.stderr == f"latpred: cannot write {path}: {said}\n"
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    assert f"{path} is a file, not a folder. Name another file." in run("cache", "show", "-o", path / "a.json").stderr


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
    kept: set[str] = set()  # of an environment below the folder, and the models' files themselves
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


def test_a_candidate_that_ends_the_program_costs_nobody_else_anything() -> None:
    class Quitting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sys.exit("no more")

    given = [nn.Linear(4, 4), lambda: sys.exit(3), Quitting(4, 4)]
    table = latpred.predict_many(given, inputs=torch.zeros(1, 4), device="epyc-shared")
    assert [said or "" for said in table.error] == ["", *table.error[1:]]
    assert "sys.exit(3)" in table.error[1]
    assert "sys.exit('no more')" in table.error[2]


def test_other_code_that_ends_the_program_is_an_error_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latpred.profile.store.listing", lambda: sys.exit(0))
    shown = run("profiles", "list")
    assert shown.exit_code == 2
    assert shown.stderr.startswith("latpred: ")


COMMAND = f"{sys.executable} -c 'from latpred.cli import main; main()'"


def shell(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("verb", "characters"), [("profiles show epyc-shared", 0), ("profiles list --json", 1), ("profiles path", 0)]
)
def test_a_reader_that_has_enough_is_no_error(verb: str, characters: int) -> None:
    done = shell(f"{COMMAND} {verb} | head -c {characters}")
    assert (done.returncode, len(done.stdout), done.stderr) == (0, characters, "")


@pytest.mark.parametrize(
    ("verb", "stdout", "why"),
    [
        ("profiles list", ">&-", "stdout is closed"),
        ("profiles path", ">&-", "stdout is closed"),
        ("cache show --json", ">&-", "stdout is closed"),
        ("profiles show epyc-shared", "> /dev/full", "No space left on device"),
        ("profiles list --json", "> /dev/full", "No space left on device"),
    ],
)
def test_a_result_needs_a_stdout(verb: str, stdout: str, why: str, tmp_path: Path) -> None:
    done = shell(f"{COMMAND} {verb} {stdout}")
    assert done.returncode == 3
    assert done.stderr == f"latpred: cannot write the result: {why}; send stdout elsewhere: > FILE.\n"
    if verb != "profiles path":
        assert shell(f"{COMMAND} {verb} -o {tmp_path}/result {stdout}").returncode == 0


def test_a_closed_stream_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(sys, stream, None)
        assert calibrate._agreed("cpu")
    with output.working("judging"), output.progress("measuring") as show:
        assert show is not None
        show(ProgressEvent(1, 2, "half"))


@pytest.mark.parametrize(
    "pressing",
    [
        "import latpred.storage\nlatpred.storage.usage = lambda: signal.raise_signal(signal.SIGINT)\n",
        "sys.modules['click'] = type('', (), {'__getattr__': lambda *_: signal.raise_signal(signal.SIGINT)})()\n",
    ],
    ids=["in a verb", "while the command line is imported"],
)
def test_ctrl_c_exits_130_with_one_sentence(pressing: str) -> None:
    heeding = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs do not
    code = f"{heeding}{pressing}from latpred.cli import main\nmain(['cache', 'show'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "latpred: interrupted.\n")


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
