"""predict, curve and trace through the command line: what they print, and one sentence for every bad input."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import filelock
import msgspec
import pytest
from click.testing import CliRunner, Result
from profiledata import machine, profile

import latpred
from latpred import storage, tables
from latpred.cli import main
from latpred.profile import store
from latpred.profile.document import SCHEMA_VERSION

MODELS = '''
import torch
from torch import nn


def small():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def picture():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        raise RuntimeError("the flux is misaligned")


class Mismatched(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.conv(x).flatten(1))


class Picking(nn.Module):
    """How many rows it keeps depends on what its weights make of the input."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        y = self.conv(x).flatten()
        return y[torch.nonzero(y > 0).flatten()]


@torch.library.custom_op("latpred_cli_test::mystery", mutates_args=())
def mystery(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@mystery.register_fake
def _(x):
    return torch.empty_like(x)


class Strange(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return mystery(self.conv(x))


def broken():
    raise ValueError("no such layer")
'''


@pytest.fixture
def models(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return str(path)


@pytest.fixture
def calibrated() -> None:
    store.save(profile())


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def predict(*arguments: str) -> dict:
    shown = run("predict", *arguments, "--json")
    assert shown.exit_code == 0, shown.stderr
    document: dict = json.loads(shown.stdout)
    return document


@pytest.mark.usefixtures("calibrated")
def test_numbers_are_whole_in_a_narrow_terminal(models: str) -> None:
    shown = CliRunner(env={"COLUMNS": "50"}).invoke(main, ["predict", f"{models}:picture", "--image", "32"])
    assert shown.exit_code == 0, shown.output
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown.stdout
    assert shown.stdout.splitlines()[1].split()[-1] == "samples/s"


@pytest.mark.usefixtures("calibrated")
def test_a_terminal_without_unicode_gets_no_sparkline(models: str) -> None:
    shown = CliRunner(charset="ascii").invoke(main, ["curve", f"{models}:picture", "--image", "32", "--batch", "1,2,4"])
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:5]] == ["batch", "1", "2", "4"]


def test_a_missing_onnx_file_is_missing_in_any_runtime() -> None:
    shown = run("predict", "nowhere.onnx")
    assert shown.exit_code == 2
    assert "There is no file nowhere.onnx" in shown.stderr


@pytest.mark.usefixtures("calibrated")
def test_the_table_has_a_row_per_batch_and_fits_a_terminal(models: str) -> None:
    shown = run("predict", f"{models}:picture", "--image", "32", "--batch", "1,8,512")
    lines = shown.stdout.splitlines()
    assert shown.exit_code == 0
    assert shown.stderr == ""
    assert lines[0] == f"{models}:picture, 32 pixels, fp32, eager on cpu, single"
    assert lines[1].split() == ["batch", "latency", "90", "%", "interval", "overhead", "compute", "regime", "samples/s"]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "8", "512"]
    assert [lines[2].split()[-2], lines[4].split()[-2]] == ["framework", "compute"]
    assert max(len(line) for line in lines[1:5]) <= 80
    assert lines[5].startswith("compute-bound from batch ")
    assert lines[6] == "coverage: formulas for all launches"
    assert lines[7].startswith("profile: this machine (cpu, 1 thread, calibrated ")
    assert len(lines) == 8


@pytest.mark.usefixtures("calibrated")
def test_json_is_the_curve_with_its_schema(models: str) -> None:
    document = predict(f"{models}:picture", "--image", "32", "--batch", "1,8")
    assert next(iter(document)) == "schema"
    assert document["schema"] == "latpred.curve/1"
    assert [point["batch"] for point in document["points"]] == [1, 8]
    for point in document["points"]:
        # A CPU is synchronous: dispatch and kernels add up.
        assert math.isclose(point["latency_ms"], point["overhead_ms"] + point["compute_ms"], rel_tol=1e-9)
        assert point["interval_ms"][0] < point["latency_ms"] < point["interval_ms"][1]


@pytest.mark.usefixtures("calibrated")
def test_csv_is_a_predicted_table(models: str, tmp_path: Path) -> None:
    shown = run("curve", f"{models}:picture", "--image", "32", "--batch", "1-8:2x", "--csv")
    written = tmp_path / "predicted.csv"
    written.write_text(shown.stdout)
    table = tables.read(written, tables.PREDICTED)
    assert list(table["batch"]) == [1, 2, 4, 8]
    assert set(table["input_size"]) == {32}
    assert list(table["macs"] / table["batch"]) == [30 * 30 * 8 * 27 + 80] * 4
    assert (table["launches"] >= 4).all()
    assert (table["bytes"] > 0).all()


@pytest.mark.usefixtures("calibrated")
def test_a_curve_doubles_to_128_unless_told_otherwise(models: str) -> None:
    document = json.loads(run("curve", f"{models}:picture", "--image", "16", "--json").stdout)
    assert [point["batch"] for point in document["points"]] == [1, 2, 4, 8, 16, 32, 64, 128]


@pytest.mark.usefixtures("calibrated")
def test_a_file_takes_its_form_from_its_suffix(models: str, tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    shown = run("predict", f"{models}:picture", "--image", "16", "-o", str(target))
    assert (shown.stdout, shown.stderr) == ("", f"wrote {target}\n")
    assert next(csv.DictReader(io.StringIO(target.read_text())))["model"] == f"{models}:picture"


def test_trace_counts_by_hand(models: str) -> None:
    shown = run("trace", f"{models}:picture", "--image", "10", "--batch", "2", "--json")
    document = json.loads(shown.stdout)
    assert document["schema"] == "latpred.trace/1"
    # 8 x 8 positions of a 3 x 3 window over 3 channels for 8 outputs, then 8 to 10; both twice.
    assert document["totals"][0]["macs"] == 2 * (8 * 8 * 9 * 3 * 8 + 80)
    assert document["totals"][0]["launches"] == 4
    text = run("trace", f"{models}:picture", "--image", "10", "--batch", "2").stdout
    assert "0.000 GMACs" in text
    assert "conv" in text


def test_trace_lists_ops_as_csv(models: str) -> None:
    rows = list(csv.DictReader(io.StringIO(run("trace", f"{models}:picture", "--image", "10", "--csv").stdout)))
    assert sum(int(row["macs"]) for row in rows) == 8 * 8 * 9 * 3 * 8 + 80
    assert rows[0]["module"] == "0"


@pytest.mark.usefixtures("calibrated")
def test_an_unknown_name_suggests_the_nearest() -> None:
    shown = run("predict", "bert-bas-uncased")
    assert shown.exit_code == 2
    assert shown.stderr.startswith("latpred: no model is called 'bert-bas-uncased'; did you mean bert-base-uncased")


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("gone.py:build", "there is no file 'gone.py'"),
        ("{models}:pictur", "has no function 'pictur'; it offers"),
        ("{models}:broken", "broken failed: ValueError: no such layer"),
        ("{models}:small", "nothing tells what Sequential takes"),
        ("{models}:Raises", "RuntimeError: the flux is misaligned"),
        ("{models}:Mismatched", "the forward pass failed at aten::linear in module 'head'"),
        ("{models}:Picking", "aten::nonzero"),
    ],
)
def test_a_model_that_cannot_be_walked(models: str, target: str, sentence: str) -> None:
    shown = run("predict", target.format(models=models), "--image", "8")
    assert shown.exit_code == 2
    assert sentence in shown.stderr
    assert "Traceback" not in shown.stderr
    assert shown.stdout == ""


@pytest.mark.usefixtures("calibrated")
def test_a_batch_beyond_any_device(models: str) -> None:
    shown = run("predict", f"{models}:picture", "--image", "8", "--batch", "99999999")
    assert shown.exit_code == 2
    assert "Batch 99999999 is beyond anything a device holds" in shown.stderr


@pytest.mark.usefixtures("calibrated")
def test_an_unknown_op_is_estimated_named_and_widens_the_interval(models: str) -> None:
    shown = run("predict", f"{models}:Strange", "--image", "64")
    assert shown.exit_code == 0
    assert "estimated: latpred_cli_test::mystery (1)" in shown.stdout
    strange = predict(f"{models}:Strange", "--image", "64")["points"][0]
    known = predict(f"{models}:picture", "--image", "64")["points"][0]
    assert strange["coverage"]["launches"] == 0.5
    assert strange["interval_ms"][1] / strange["latency_ms"] > known["interval_ms"][1] / known["latency_ms"]


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("verb", ["predict", "curve", "trace"])
def test_strict_refuses_an_unknown_op(models: str, verb: str) -> None:
    shown = run(verb, f"{models}:Strange", "--image", "64", "--strict")
    assert shown.exit_code == 1
    assert "latpred_cli_test::mystery" in shown.stderr
    assert shown.stdout == ""


@pytest.mark.usefixtures("calibrated")
def test_what_the_profile_does_not_cover(models: str) -> None:
    shown = run("predict", f"{models}:picture", "--image", "8", "--runtime", "lisp")
    assert (shown.exit_code, "No runtime is called 'lisp'" in shown.stderr) == (2, True)
    shown = run("predict", f"{models}:picture", "--image", "8", "--runtime", "torchscript")
    assert (shown.exit_code, "latpred calibrate --runtimes torchscript" in shown.stderr) == (3, True)
    shown = run("predict", f"{models}:picture", "--image", "8", "--runtime", "cuda-graphs")
    assert (shown.exit_code, "cuda-graphs needs a CUDA device" in shown.stderr) == (2, True)
    shown = run("predict", f"{models}:picture", "--image", "8", "--precision", "fp16")
    assert (shown.exit_code, "no kernels in fp16 (it has: fp32)" in shown.stderr) == (3, True)
    shown = run("predict", f"{models}:picture", "--image", "8", "--device", "xeon")
    assert (shown.exit_code, "no profile is called 'xeon'" in shown.stderr) == (3, True)


@pytest.mark.usefixtures("calibrated")
def test_doubles_are_predicted_as_in_python(models: str) -> None:
    given = (f"{models}:picture", "--image", "8", "--batch", "4")
    shown = predict(*given, "--precision", "fp64")
    assert shown["precision"] == "fp64"
    asked = latpred.predict(f"{models}:picture", 4, image=8, precision="fp64", device="cpu")
    assert shown["points"][0]["latency_ms"] == asked.latency_ms > predict(*given)["points"][0]["latency_ms"]
    assert any("float64 were not measured" in caveat for caveat in shown["provenance"]["caveats"])


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("verb", ["predict", "explain", "trace", "measure", "timeline"])
@pytest.mark.parametrize("name", ["nosuch.py", "./folder/nosuch.py:build", "nosuch.json", "nosuch.onnx"])
def test_a_file_that_is_missing_is_said_to_be(name: str, verb: str) -> None:
    shown = run(verb, name)
    assert shown.exit_code == 2
    assert "there is no file" in shown.stderr.lower()
    assert len(shown.stderr.splitlines()) == 1


def damaged(kind: str) -> bytes:
    good = store.save(profile()).read_bytes()
    return {
        "truncated": good[: len(good) // 2],
        "bit-flipped": good.replace(b"50000.0", b"50001.0", 1),
        "newer": good.replace(b'"schema": %d' % SCHEMA_VERSION, b'"schema": 99'),
        "NaN": good.replace(b"50000.0", b"NaN", 1),
        "empty": b"",
    }[kind]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("truncated", "is cut short"),
        ("bit-flipped", "was altered after it was written"),
        ("newer", f"has schema 99 and this latpred reads up to {SCHEMA_VERSION}. Upgrade with"),
        ("NaN", "holds NaN where a number must be"),
        ("empty", "is empty"),
    ],
)
def test_a_profile_that_cannot_be_used(models: str, kind: str, sentence: str) -> None:
    store.path("cpu").parent.mkdir(parents=True)
    store.path("cpu").write_bytes(damaged(kind))
    for device in ((), ("--device", "cpu"), ("--device", str(store.path("cpu")))):
        shown = run("predict", f"{models}:picture", "--image", "8", *device)
        assert shown.exit_code == 3
        assert sentence in shown.stderr
        assert shown.stderr.count("\n") == 1


def test_a_profile_of_another_machine_is_used_with_a_caveat_when_named(models: str) -> None:
    store.save(profile("server", machine=machine(cpu="Another CPU", hostname_hash="0" * 16)))
    shown = run("predict", f"{models}:picture", "--image", "8", "--device", "server")
    assert shown.exit_code == 0
    assert "profile: server (cpu, 1 thread" in shown.stdout
    assert "caveat: measured on another machine (Another CPU" in shown.stdout


def test_a_profile_that_failed_its_gate_says_so(models: str) -> None:
    failed = msgspec.structs.replace(profile().acceptance, passed=False)
    store.save(profile(acceptance=failed))
    shown = run("predict", f"{models}:picture", "--image", "8")
    assert shown.exit_code == 0
    assert "caveat: the profile failed its acceptance gate" in shown.stdout


def test_without_a_profile_and_without_a_terminal_the_quick_calibration_runs(
    models: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def calibrate(device: str, *, quick: bool, **_rest: object) -> object:
        asked.append((device, quick))
        store.save(profile())
        return profile()

    monkeypatch.setenv("LATPRED_CALIBRATE", "quick")
    monkeypatch.setattr("latpred.calibration.calibrator.calibrate", calibrate)
    shown = run("predict", f"{models}:picture", "--image", "8", "--device", "cpu")
    assert shown.exit_code == 0
    assert asked == [("cpu", True)]
    assert "no profile of cpu in" in shown.stderr
    assert "calibrating it now" in shown.stderr
    assert shown.stdout.startswith(f"{models}:picture")


def test_the_first_calibration_can_be_switched_off(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in ("predict", "explain", "timeline", "report"):
        shown = run(verb, f"{models}:picture", "--image", "8")
        assert shown.exit_code == 3
        assert "no profile of this machine in" in shown.stderr
        assert "latpred calibrate" in shown.stderr
    monkeypatch.setenv("LATPRED_CALIBRATE", "bogus")
    shown = run("predict", f"{models}:picture", "--image", "8")
    assert shown.exit_code == 2
    assert "LATPRED_CALIBRATE='bogus' is not known; set it to quick or never." in shown.stderr


def test_of_two_first_predictions_the_second_waits(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATPRED_CALIBRATE", "quick")
    monkeypatch.setattr("latpred.calibration.calibrator.calibrate", lambda *_, **__: pytest.fail("calibrated again"))
    folder = storage.data_dir() / "calibration"
    folder.mkdir(parents=True)
    first = filelock.FileLock(folder / "first.lock", thread_local=False)
    first.acquire()

    def finish() -> None:
        store.save(profile())
        first.release()

    threading.Timer(0.2, finish).start()
    shown = run("predict", f"{models}:picture", "--image", "8")
    assert shown.exit_code == 0
    assert "another process calibrates this machine for the first time; waiting for it" in shown.stderr


@pytest.mark.parametrize("verb", ["predict", "timeline", "explain"])
def test_a_runtime_that_needs_more_than_the_quick_calibration_is_said_before_it(
    verb: str, models: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATPRED_CALIBRATE", "quick")
    monkeypatch.setattr("latpred.calibration.calibrator.calibrate", lambda *_, **__: pytest.fail("calibrated in vain"))
    device = ("--device", "simulated", "--yes")
    shown = run(verb, f"{models}:picture", "--image", "8", "--runtime", "torchscript", *device)
    assert shown.exit_code == 3
    said = "Make one that knows torchscript with: latpred calibrate --device simulated --runtimes torchscript"
    assert said in shown.stderr


def test_on_a_terminal_the_calibration_is_offered_and_can_be_declined(
    models: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATPRED_CALIBRATE", "quick")
    main_end, terminal = pty.openpty()
    os.write(main_end, b"n\n")
    command = [sys.executable, "-c", "from latpred.cli import main; main()", "predict", f"{models}:picture"]
    done = subprocess.Popen(
        [*command, "--image", "8", "--device", "cpu"], stdin=terminal, stderr=terminal, stdout=subprocess.PIPE
    )
    os.close(terminal)
    said = b""
    while True:
        try:
            part = os.read(main_end, 4096)
        except OSError:  # a terminal whose other end is closed
            break
        if not part:
            break
        said += part
    assert done.wait() == 3
    assert b"Calibrate it now (about a minute)?" in said
    assert b"Make one with: latpred calibrate --device cpu" in said
    assert done.stdout is not None
    assert done.stdout.read() == b""
    done.stdout.close()
    os.close(main_end)
