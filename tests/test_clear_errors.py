"""What is given wrongly is told in a sentence of latpred's own, never by what broke inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from factories import graph, linear
from profiledata import profile
from torch import nn

import latpred
from latpred.errors import LatpredError, NoProfileError, ProfileError, TableError, UsageError

pytestmark = pytest.mark.usefixtures("calibrated")


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"batch": torch.zeros(1, 4)}, UsageError, "^A tensor is no batch size; .* and inputs as inputs=x"),
        ({"batch": (torch.zeros(1, 4),)}, UsageError, "^A tensor is no batch size"),
        ({"runtime": None}, UsageError, "None is no runtime; give the name of one: eager"),
        ({"runtime": ["eager"]}, UsageError, "is no runtime; give the name of one: eager"),
        ({"host": []}, UsageError, r"host=\[\] is not a host; give a factor such as 1.3"),
        ({"host": True}, UsageError, "host=True is not a host"),
        ({"device": profile()}, UsageError, "device= takes a name or a path, not a DeviceProfile; give cpu, cuda:0"),
        ({"device": "cpu", "threads": "1"}, UsageError, "threads='1' is not a number of threads"),
        ({"device": "gpu"}, ProfileError, "own GPU is cuda or cuda:0"),
        ({"device": "cpu", "cudnn_benchmark": True}, NoProfileError, "runs on CUDA devices only(?!.*calibrate)"),
        ({"model": nn.Linear(2, 2), "precision": ["fp16"]}, UsageError, "is no name of a precision; give one, as in"),
        ({"model": 3}, UsageError, "an object of type"),
        ({"model": None}, UsageError, "an object of type"),
    ],
)
def test_a_question_that_is_none(asked: dict[str, Any], error: type[LatpredError], said: str) -> None:
    with pytest.raises(error, match=said):
        latpred.predict(**{"model": graph(linear()), **asked})


@pytest.mark.parametrize(
    ("predicted", "measured"), [(None, None), ([{"model": "a"}], [{"model": "a"}]), (pd.DataFrame(), Path())]
)
def test_what_is_no_table(predicted: Any, measured: Any, tmp_path: Path) -> None:
    with pytest.raises(TableError):
        latpred.compare(predicted, measured)
    with pytest.raises(TableError, match=r"cannot read .*: Is a directory"):
        latpred.compare(tmp_path, tmp_path)


class Sparse(nn.Module):
    """Holds a matrix that most devices keep by its rows."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.register_buffer("links", torch.eye(4).to_sparse(layout=layout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.links


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_tensors(layout: torch.layout) -> None:
    with pytest.raises(UsageError, match=r"the model holds a tensor of layout sparse_\w+, .*give it dense"):
        latpred.trace(Sparse(layout), torch.zeros(1, 4))
    with pytest.raises(UsageError, match=r"inputs hold a tensor of layout sparse_\w+"):
        latpred.trace(nn.Linear(4, 4), torch.eye(4).to_sparse(layout=layout))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=layout)
    for inputs in (nested, lambda batch: nested):
        with pytest.raises(UsageError, match=r"inputs hold a nested tensor.*lengths="):
            latpred.trace(nn.Linear(4, 4), inputs)


def test_an_exported_program_has_a_module_to_give() -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.zeros(2, 4),))
    with pytest.raises(UsageError, match=r"give an nn\.Module, as the \.module\(\) of an ExportedProgram"):
        latpred.trace(program, torch.zeros(2, 4))  # type: ignore[arg-type]


def test_a_predictor_of_what_is_no_profile_and_of_what_is_no_graph() -> None:
    with pytest.raises(UsageError, match="a Predictor takes a profile, not a str; load one first"):
        latpred.Predictor("rtx-8000")  # type: ignore[arg-type]
    predictor, model = latpred.Predictor(profile()), nn.Linear(2, 2)
    asks: list[Callable[[Any], object]] = [
        predictor.predict,
        partial(predictor.curve, batches=[1, 8]),
        partial(predictor.max_batch, latency_ms=1.0),
    ]
    for ask in asks:
        with pytest.raises(UsageError, match=r"predicts graphs, not a Linear; trace .*predictor\.trace\(model\)"):
            ask(model)


@pytest.mark.parametrize("text", ["", "{", '{"model": "net"}', b"\xff", "[" * 100_000])
def test_a_text_that_is_no_graph(text: str | bytes) -> None:
    with pytest.raises(UsageError, match=r"is no graph that this latpred wrote: .*\. Trace the model again"):
        latpred.ModelGraph.from_json(text)


def test_a_predictor_is_told_where_its_profile_is() -> None:
    with pytest.raises(UsageError, match=r"^Predictor is no profile; give .* a DeviceProfile, as Predictor.profile"):
        latpred.adapt(latpred.Predictor(profile()), [("resnet18", 1, "eager", "fp32", 5.0)])  # type: ignore[arg-type]
