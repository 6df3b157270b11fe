"""latpred.predict(..., lengths=...): the paper's finding in kind, what contradicts, and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from factories import device, dispatch, kernel_fits
from factories import profile as asynchronous
from torch import nn

import latpred
from latpred import Lengths
from latpred.api import curve_of
from latpred.cli import main
from latpred.errors import RuntimeRefusalError, UsageError
from latpred.prediction.predictor import Predictor
from latpred.profile.document import DeviceProfile
from latpred.query import Options

PAPER = Lengths(mean=20.92, std=10.18, padded_to=128)
NESTED = Options(lengths=PAPER, execution="nested")


pytestmark = pytest.mark.usefixtures("calibrated")


def encoder() -> nn.TransformerEncoder:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, activation="gelu")
        return nn.TransformerEncoder(layer, 2).eval()


def small() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()


def gpu() -> DeviceProfile:
    """A device with one law for all its kernels, in eager and in CUDA graphs."""
    products, others = ("gemm", "bmm", "attention"), ("norm", "softmax", "elementwise", "copy", "cat", "index")
    graphs = dispatch(costs_us={"": 0.5, "replay": 9.0}, module_call_us=0.0, python_call_us=0.0)
    rates = {"macs_per_us": 1e7, "weight_bytes_per_us": 5e5, "activation_bytes_per_us": 5e5}
    fits = kernel_fits(*products, *others, "reduction", "factory", **rates)
    return asynchronous(device(), fits, {"eager": dispatch(), "cuda-graphs": graphs})


def static_and_nested(model: nn.TransformerEncoder, batch: int) -> list[latpred.Prediction]:
    """Lengths as the paper has them, in a static CUDA graph and in eager without their padding."""
    asked = (Options(lengths=PAPER, runtime="cuda-graphs"), NESTED)
    return [curve_of(Predictor(gpu()), model, (batch,), options)[0] for options in asked]


def test_nested_execution_cuts_what_a_static_graph_costs() -> None:
    """At batch 128 the paper measured 80.56 % less than a static CUDA graph takes, on sequences with these lengths."""
    static, nested = static_and_nested(encoder(), 128)
    assert 0.75 < 1 - nested.latency_ms / static.latency_ms < 0.90
    assert nested.compute_ms < 0.25 * static.compute_ms


def test_nested_execution_does_not_pay_at_batch_one_of_a_device_with_cheap_graphs() -> None:
    static, nested = static_and_nested(small(), 1)
    assert nested.regime == "framework-bound"
    assert nested.latency_ms > static.latency_ms


def test_a_list_is_its_own_batch() -> None:
    found = latpred.predict(small(), lengths=[12, 40, 7])
    assert isinstance(found, latpred.Prediction)
    assert found.batch == 3
    assert found.setting.input_size == 40
    assert latpred.predict(small(), 3, lengths=[12, 40, 7]).latency_ms == found.latency_ms


def test_a_distribution_serves_every_batch() -> None:
    curve = latpred.predict(small(), [1, 8, 64], lengths=PAPER, execution="nested")
    assert isinstance(curve, latpred.Curve)
    assert curve.batches.tolist() == [1, 8, 64]
    assert (curve.compute_ms[1:] > curve.compute_ms[:-1]).all()
    assert curve.overhead_ms[2] > curve.overhead_ms[0]  # on a processor each sequence has ops of its own
    assert curve.crossover.batch is not None
    assert any("straight lines" in caveat for caveat in curve.setting.provenance.caveats)
    assert {id(point.setting) for point in curve} == {id(curve.setting)}


def test_the_crossover_between_points_is_where_the_two_lines_meet() -> None:
    predictor = Predictor(gpu())
    curve = curve_of(predictor, small(), (1, 4096), NESTED)
    first, last = curve
    assert first.compute_ms < first.overhead_ms < last.compute_ms
    slope = (last.compute_ms - first.compute_ms) / 4095
    expected = 1 + (first.overhead_ms - first.compute_ms) / slope
    assert curve.crossover.batch == pytest.approx(expected, abs=1.01)
    knee = curve.knee(1.5).batch
    assert knee is not None
    assert knee > curve.crossover.batch, "while the host takes longer, latency does not grow with what the device takes"


def test_lengths_are_traced_as_the_profiles_pytorch_ran_them() -> None:
    older = latpred.predict("bert-base-uncased", lengths=[12, 40, 7], device="rtx-8000")
    names = {share.name for share in older.breakdown}
    assert "softmax" in names
    assert "attention" not in names


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": [3, 6], "lengths": [12, 40, 7]}, "3 lengths are a batch of 3, not of 6"),
        ({"lengths": [12, 40], "seq": 64}, "lengths= says what the inputs are; leave out seq"),
        ({"lengths": [12, 40], "execution": "jagged"}, "execution='jagged' is not known; choose from: padded, nested"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        latpred.predict(small(), **options)


def test_a_graph_has_its_lengths_already() -> None:
    graph = latpred.trace(nn.Linear(4, 4), torch.zeros(1, 4))
    with pytest.raises(UsageError, match="needs the model itself"):
        latpred.predict(graph, lengths=[3, 4])


def test_static_graphs_run_nothing_nested() -> None:
    with pytest.raises(RuntimeRefusalError, match="cuda-graphs runs graphs of fixed shapes, so nothing nested"):
        curve_of(Predictor(gpu()), small(), (2,), replace(NESTED, runtime="cuda-graphs"))


def test_the_command_line() -> None:
    asked = ["predict", "distilbert-base-uncased", "--lengths", "12,40,7", "--json"]
    padded = json.loads(CliRunner().invoke(main, asked).stdout)
    packed = json.loads(CliRunner().invoke(main, [*asked, "--execution", "packed"]).stdout)
    assert [point["batch"] for point in padded["points"]] == [3]
    assert packed["points"][0]["compute_ms"] < padded["points"][0]["compute_ms"]
    spread = ["curve", "distilbert-base-uncased", "--lengths", "mean=20,std=5,pad=64", "-b", "2,4"]
    done = CliRunner().invoke(main, spread)
    assert done.exit_code == 0, done.output
