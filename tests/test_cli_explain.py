"""explain through the command line, and the options that say how a device is set up."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from factories import device
from factories import dispatch as host_costs
from profiledata import machine, profile

from latpred.calibration import calibrator
from latpred.calibration.measurement import validation, whole_models
from latpred.cli import main
from latpred.profile import store

MODELS = """
import torch
from torch import nn


def picture():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return f"{path}:picture"


@pytest.fixture
def gpu() -> str:
    """A simulated GPU's profile, with eager and CUDA graphs."""
    costs = {"eager": profile().runtimes["eager"], "cuda-graphs": host_costs(costs_us={"": 3.0}, spread=0.05)}
    store.save(profile("gpu", device=device(), runtimes=costs))
    return "gpu"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_explain_prints_within_a_terminal_what_it_says_in_json(model: str, gpu: str) -> None:
    shown = run("explain", model, "--image", "32", "--batch", "2", "--device", gpu)
    assert shown.exit_code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0] == f"{model}: batch 2, 32 pixels, fp32 on example"
    assert max(len(line) for line in lines[1:]) <= 80
    assert "asking cuda-graphs what it makes of" in shown.stderr
    document = json.loads(run("explain", model, "--image", "32", "-b", "2", "-d", gpu, "--json", "-q").stdout)
    assert document["schema"] == "latpred.explanation/1"
    assert {row["runtime"] for row in document["runtimes"]} == {"eager", "cuda-graphs"}
    assert set(document["outlooks"]["eager"]["rooms"]) == {"batch", "image", "width"}
    assert " ".join(shown.stdout.split()).endswith(document["advice"])


def test_explain_as_csv_compares_only_what_was_asked_for(model: str, gpu: str) -> None:
    shown = run("explain", model, "--image", "16", "-d", gpu, "--runtime", "cuda-graphs", "--csv", "--quiet")
    rows = list(csv.DictReader(io.StringIO(shown.stdout)))
    assert shown.stderr == ""
    assert {row["runtime"] for row in rows} == {"eager", "cuda-graphs"}
    assert {row["launches"] for row in rows} == {"4"}


@pytest.mark.parametrize(
    ("arguments", "exit_code", "sentence"),
    [
        (("--runtime", "cuda-graph"), 2, "No runtime is called 'cuda-graph'. Did you mean 'cuda-graphs'"),
        (("--runtime", "torchscript"), 3, "latpred calibrate --runtimes torchscript"),
        (("--threads", "7", "--device", "cpu"), 3, "no profile of cpu in"),
        (("--batch", "0"), 2, "0 is not in the range x>=1"),
        (("--precision", "bf16"), 3, "no kernels in bf16"),
    ],
)
def test_what_cannot_be_explained(
    arguments: tuple[str, ...], exit_code: int, sentence: str, model: str, gpu: str
) -> None:
    shown = run("explain", model, "--image", "8", "--device", gpu, *arguments)
    assert shown.exit_code == exit_code
    assert sentence in " ".join(shown.stderr.split())
    assert shown.stdout == ""


def test_a_misspelt_model_costs_no_calibration() -> None:
    shown = run("explain", "bert-bas-uncased", "--yes")
    assert shown.exit_code == 2
    assert "did you mean bert-base-uncased" in shown.stderr


@pytest.mark.parametrize("verb", ["predict", "curve", "explain", "measure", "validate", "calibrate"])
def test_every_verb_suggests_the_nearest_runtime(verb: str, model: str) -> None:
    store.save(profile())
    option = "--runtimes" if verb == "calibrate" else "--runtime"
    target = ("--device", "cpu") if verb in ("calibrate", "validate") else (model, "--image", "8", "--device", "cpu")
    shown = run(verb, *target, option, "onnxruntim")
    assert shown.exit_code == 2
    assert "No runtime is called 'onnxruntim'. Did you mean 'onnxruntime'" in shown.stderr


def test_predictions_use_the_profile_of_as_many_threads(model: str) -> None:
    store.save(profile())
    slow = msgspec.structs.replace(profile().runtimes["eager"], fixed_us=5000.0)
    store.save(profile("cpu-2", machine=machine(threads=2), runtimes={"eager": slow}, protocol={"threads": "2"}))
    common = ("predict", model, "--image", "8", "--json")
    one, two = (json.loads(run(*common, *more).stdout)["points"][0] for more in ((), ("--threads", "2")))
    assert two["latency_ms"] == pytest.approx(one["latency_ms"] + 4.995)
    refused = run(*common, "--threads", "3")
    assert refused.exit_code == 3
    assert "latpred calibrate --device cpu --threads 3 --name cpu-3" in refused.stderr
    assert run(*common, "--cudnn-benchmark", "--device", "cpu").exit_code == 3


def test_channels_last_is_another_walk_with_a_caveat(model: str) -> None:
    store.save(profile())
    shown = run("predict", model, "--image", "8", "--channels-last")
    assert shown.exit_code == 0
    assert "caveat: convolutions were measured in the contiguous format" in shown.stdout
    assert "contiguous format" not in run("predict", model, "--image", "8").stdout


def test_the_verbs_that_measure_hand_on_how(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    class StopError(Exception):
        pass

    def stop(*_: object, **given: object) -> None:
        seen.update(given)
        raise StopError

    for module, name in ((calibrator, "calibrate"), (whole_models, "measure"), (validation, "validate")):
        monkeypatch.setattr(module, name, stop)
    assert isinstance(run("calibrate", "-d", "cpu", "--threads", "2", "--cudnn-benchmark").exception, StopError)
    assert (seen["threads"], seen["cudnn_benchmark"]) == (2, True)
    assert isinstance(run("measure", model, "--threads", "3").exception, StopError)
    assert seen["threads"] == 3
    assert isinstance(run("validate", "--threads", "4").exception, StopError)
    assert seen["threads"] == 4


def test_trace_shows_what_a_runtime_does(model: str) -> None:
    eager = json.loads(run("trace", model, "--image", "8", "--json").stdout)
    shown = run("trace", model, "--image", "8", "--runtime", "torchscript", "--json")
    assert shown.exit_code == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert document["graph"]["runtime"] == "torchscript"
    assert document["totals"][0]["macs"] == eager["totals"][0]["macs"]
    assert document["totals"][0]["steps"] == len(document["graph"]["ops_at_one"] or document["graph"]["ops"])
    text = run("trace", model, "--image", "8", "--runtime", "cuda-graphs").stdout
    assert text.startswith(f"{model}: image 8, fp32, cuda-graphs on cuda, batch 1")
    assert "1 host step" in text
    assert "aten::conv2d" in text


def test_trace_refuses_what_cannot_be(model: str) -> None:
    shown = run("trace", model, "--image", "8", "--runtime", "cuda-graphs", "--target", "cpu")
    assert (shown.exit_code, "cuda-graphs needs a CUDA device" in shown.stderr) == (2, True)
    shown = run("trace", model, "--image", "8", "--runtime", "torchscrip")
    assert (shown.exit_code, "Did you mean 'torchscript'" in shown.stderr) == (2, True)
    shown = run("trace", model, "--image", "8", "--runtime", "torchscript", "--check")
    assert (shown.exit_code, "--check counts what eager does" in shown.stderr) == (2, True)


def test_trace_in_channels_last(model: str) -> None:
    document = json.loads(run("trace", model, "--image", "8", "--channels-last", "--json").stdout)
    assert document["graph"]["memory_format"] == "channels_last"


def test_what_is_not_cudas_is_said(model: str) -> None:
    shown = run("calibrate", "--device", "cpu", "--cudnn-benchmark")
    assert shown.exit_code == 2
    assert "cudnn is CUDA's, and cpu has none" in shown.stderr
    shown = run("measure", model, "--device", "simulated", "--threads", "2")
    assert shown.exit_code == 2
    assert "threads are the CPU's, and simulated is none" in shown.stderr
