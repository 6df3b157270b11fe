"""The command line itself: finding verbs, reading options, streams, exit codes, and the verbs that need no model."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from profiledata import machine, profile

from latpred.cli import VERBS, main
from latpred.cli.main import SUMMARIES
from latpred.cli.options import parse_batches, parse_seconds
from latpred.errors import CalibrationError, LatpredError, UsageError
from latpred.profile import store


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every verb, the ones within groups included."""
    found = []
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        found += commands(command, (*path, name)) if isinstance(command, click.Group) else [(*path, name)]
    return found


COMMANDS = commands(main)


def test_help_lists_every_verb_and_a_command_to_start_with() -> None:
    shown = run("--help")
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.stdout.partition("Commands:")[2].splitlines() if line.startswith("  ")][
        : len(VERBS)
    ] == list(VERBS)
    assert "latpred predict bert-base-uncased --batch 1,8,32" in shown.stdout


def test_the_list_of_verbs_says_what_each_verb_says_of_itself() -> None:
    for name in VERBS:
        verb = main.get_command(click.Context(main), name)
        assert verb is not None
        assert SUMMARIES[name] == " ".join((verb.help or "").partition("\n\n")[0].split())
    assert list(SUMMARIES) == list(VERBS)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_verb_has_an_example_that_its_own_parser_accepts(path: tuple[str, ...]) -> None:
    shown = run(*path, "--help")
    assert shown.exit_code == 0
    examples = shown.stdout.partition("Example:")[2].split("\n\n")[0].strip().splitlines()
    words = [line.split() for line in examples]
    own = [line[1 + len(path) :] for line in words if line[: 1 + len(path)] == ["latpred", *path]]
    nested = [line for line in words if f"$(latpred {' '.join(path)}" in " ".join(line)]
    assert own or nested
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    for arguments in own:
        folder = str(Path(__file__).parent)
        given = zip(["", *arguments], arguments, strict=False)
        existing = ["/dev/null" if word.endswith(".csv") and before != "-o" else word for before, word in given]
        existing = [folder if word.endswith("/") else word for word in existing]
        # Below the program's own context, since a verb keeps the first form of --help that it is asked for.
        command.make_context("example", existing, parent=click.Context(main, **main.context_settings))


def test_a_misspelt_verb_suggests_the_nearest() -> None:
    for typed, meant in (("predcit", "predict"), ("calibrat", "calibrate"), ("docter", "doctor")):
        shown = run(typed)
        assert shown.exit_code == 2
        assert f"No such command '{typed}'. Did you mean {meant}?" in shown.stderr
    assert "There are: predict, curve," in run("zzzzzz").stderr
    assert "Did you mean show?" in run("cache", "shwo").stderr


def test_a_misspelt_option_suggests_the_nearest() -> None:
    shown = run("predict", "resnet18", "--bacth", "8")
    assert shown.exit_code == 2
    assert "--bacth" in shown.stderr
    assert "--batch" in shown.stderr.partition("No such option")[2]


def test_version() -> None:
    from importlib.metadata import version

    assert run("--version").stdout == f"latpred {version('latpred')}\n"


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1", (1,)),
        ("8,1,8,32", (8, 1, 32)),
        ("1-5", (1, 2, 3, 4, 5)),
        ("4-4", (4,)),
        ("8-32:8", (8, 16, 24, 32)),
        ("1-100:2x", (1, 2, 4, 8, 16, 32, 64)),
        ("3-100:3x", (3, 9, 27, 81)),
        (" 1 , 2-3 ", (1, 2, 3)),
    ],
)
def test_batch_grammar(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_batches(text) == sizes


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0", "'0' asks for batch 0; the smallest batch is 1."),
        ("0-4", "'0-4' asks for batch 0; the smallest batch is 1."),
        ("-3", "'-3' is not a batch size; give whole numbers of 1 or more"),
        ("eight", "'eight' is not a batch size"),
        ("1.5", "'1.5' is not a batch size"),
        ("", "'' is not a batch size"),
        ("1,,2", "'' is not a batch size"),
        ("8-4", "'8-4' ends before it starts; write 4-8."),
        ("1-8:0", "'1-8:0' never moves on"),
        ("1-8:1x", "'1-8:1x' never moves on"),
        ("1-999999999999", "names more than 4096 batch sizes; use a step, as in 1-4096:2x."),
    ],
)
def test_what_is_no_batch_size_is_said(text: str, sentence: str) -> None:
    shown = run("predict", "resnet18", f"--batch={text}")
    assert shown.exit_code == 2
    assert sentence in " ".join(shown.stderr.split())


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400), ("0.5 m", 30)])
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["0", "-5m", "5 minutes", "soon", ""])
def test_what_is_no_time_is_said(text: str) -> None:
    shown = run("calibrate", f"--budget={text}")
    assert shown.exit_code == 2
    assert "is not a time to spend; write 90s, 5m or 1h." in " ".join(shown.stderr.split())


@pytest.mark.parametrize("error", [UsageError("a was wrong. Do b."), CalibrationError("c failed. Do d.")])
def test_an_error_is_one_sentence_on_stderr_and_its_exit_code(
    error: LatpredError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("latpred.storage.usage", fail)
    shown = run("cache", "show")
    assert shown.exit_code == error.exit_code
    assert shown.stdout == ""
    assert shown.stderr == f"latpred: {error}\n"
    for arguments in (("--debug", "cache", "show"), ("cache", "show", "--debug")):
        shown = run(*arguments)
        assert shown.exit_code == error.exit_code
        assert "Traceback (most recent call last)" in shown.stderr
        assert shown.stderr.endswith(f"latpred: {error}\n")


def test_profiles_without_any_of_this_machine() -> None:
    shown = run("profiles", "list")
    assert shown.exit_code == 0
    assert "shipped" in shown.stdout
    assert "make one with: latpred calibrate" in shown.stdout


def test_profiles_list_show_and_path() -> None:
    path = store.save(profile())
    listed = run("profiles", "list")
    assert listed.stdout.splitlines()[0].split() == ["name", "source", "device", "host", "calibrated", "state"]
    assert "cpu" in listed.stdout
    shown = run("profiles", "show", "cpu")
    assert shown.exit_code == 0
    assert "cpu: cpu, 1 thread, calibrated" in shown.stdout
    assert "gemm" in shown.stdout
    assert run("profiles", "path", "cpu").stdout == f"{path}\n"
    assert run("profiles", "path").stdout == f"{store.directory()}\n"


def test_profiles_as_json_and_csv() -> None:
    store.save(profile("good"))
    store.path("bad").write_text("{")
    document = json.loads(run("profiles", "list", "--json").stdout)
    assert document["schema"] == "latpred.profiles/1"
    own = {entry["name"]: entry for entry in document["profiles"] if entry["source"] == "user"}
    assert own["good"]["passed"] is True
    assert "is cut short" in own["bad"]["problem"]
    rows = list(csv.DictReader(io.StringIO(run("profiles", "list", "--csv").stdout)))
    assert {row["name"] for row in rows if row["source"] == "user"} == {"good", "bad"}
    shown = json.loads(run("profiles", "show", "good", "--json").stdout)
    assert list(shown) == ["schema", "profile"]
    assert shown["profile"]["kernels"]["fp32"]["gemm"]["macs_per_us"] == 50_000.0


def test_an_unknown_profile_is_said() -> None:
    store.save(profile("workstation"))
    shown = run("profiles", "show", "workstaton")
    assert shown.exit_code == 3
    assert "Did you mean workstation?" in shown.stderr


def test_output_goes_to_a_file_in_the_form_of_its_suffix(tmp_path: Path) -> None:
    for name, start in (
        ("a.json", "{"),
        ("b.csv", "path,files,bytes"),
        ("deep/er/c.txt", str(os.environ["LATPRED_HOME"])),
    ):
        shown = run("cache", "show", "-o", str(tmp_path / name))
        assert shown.exit_code == 0
        assert shown.stdout == ""
        assert shown.stderr == f"wrote {tmp_path / name}\n"
        assert (tmp_path / name).read_text().startswith(start)
    assert run("cache", "show", "--quiet", "-o", str(tmp_path / "d.json")).stderr == ""


def test_json_and_csv_exclude_each_other() -> None:
    shown = run("cache", "show", "--json", "--csv")
    assert (shown.exit_code, shown.stderr) == (2, "latpred: --json and --csv exclude each other; give one.\n")


def test_an_output_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown = run("cache", "show", "-o", str(tmp_path / "file" / "a.json"))
    assert shown.exit_code == 2
    assert "Name another file with -o." in shown.stderr


def test_the_cache_is_shown_and_cleared_and_profiles_stay(latpred_home: Path) -> None:
    store.save(profile())
    folder = latpred_home / "cache" / "walks"
    folder.mkdir(parents=True)
    (folder / "a.json").write_bytes(b"x" * 2048)
    shown = json.loads(run("cache", "show", "--json").stdout)
    assert (shown["schema"], shown["files"], shown["bytes"]) == ("latpred.cache/1", 1, 2048)
    assert run("cache", "clear").stdout == f"removed 1 files, 2.00 KiB, from {latpred_home / 'cache'}\n"
    assert json.loads(run("cache", "show", "--json").stdout)["files"] == 0
    assert run("cache", "clear").exit_code == 0
    assert store.find().name == "cpu"


@pytest.mark.usefixtures("read_only_home")
def test_a_cache_that_cannot_be_deleted() -> None:
    shown = run("cache", "clear")
    assert shown.exit_code == 3
    assert "Permission denied. Make it writable, or choose another directory with LATPRED_HOME=DIR." in shown.stderr


def test_doctor_without_a_profile_says_what_to_do() -> None:
    shown = run("doctor", "--json")
    found = {finding["topic"]: finding for finding in json.loads(shown.stdout)["findings"]}
    assert shown.exit_code == 0
    assert found["torch"]["verdict"] == "ok"
    assert found["profile"]["advice"] == "latpred calibrate"
    assert "→ latpred calibrate" in run("doctor").stdout


def test_doctor_says_what_differs_and_what_is_broken() -> None:
    store.save(profile(machine=machine(stack={"torch": "2.11.0"})))
    store.path("bad").write_text("")
    shown = run("doctor", "--json")
    found = {finding["topic"]: finding for finding in json.loads(shown.stdout)["findings"]}
    assert shown.exit_code == 3
    assert found["profile bad"]["verdict"] == "fail"
    assert "the profile's is 2.11.0" in found["profile cpu"]["detail"]


def test_doctor_in_a_read_only_home(request: pytest.FixtureRequest) -> None:
    run("doctor")  # imports what it needs while the test may still read everything
    request.getfixturevalue("read_only_home")
    shown = run("doctor", "--json")
    found = {finding["topic"]: finding for finding in json.loads(shown.stdout)["findings"]}
    assert shown.exit_code == 3
    assert found["profiles directory"]["advice"] == "make it writable, or choose another with LATPRED_HOME=DIR"


def test_results_survive_a_closed_pipe() -> None:
    script = f"{sys.executable} -c 'from latpred.cli import main; main()' doctor --json | head -c 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "{"
    assert "Traceback" not in done.stderr


def test_ctrl_c_exits_130_with_one_sentence() -> None:
    code = (
        "import os, signal, latpred.storage\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "latpred.storage.usage = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        "from latpred.cli import main\n"
        "main(['cache', 'show'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == "latpred: interrupted.\n"
