"""Runs that go on where they stopped, whoever stopped them, and files that cannot be read or written."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from searchdata import ASKED, SMALL, Stubborn, builder, candidates, predictor
from smallmodels import default_dtype
from torch import nn

from latpred import predict_many
from latpred.errors import BusyError, TableError, UsageError
from latpred.host import Slowdown
from latpred.ops import Work, cost, families
from latpred.prediction.predictor import Predictor
from latpred.runtimes import graph_store
from latpred.runtimes.torchscript import TorchScript
from latpred.search import resume
from latpred.search.resume import CandidateRow, Evaluator
from latpred.zoo.names import registered_function

Resumed, Predicted = Callable[..., pd.DataFrame], Callable[[], list[int]]


@pytest.fixture
def resumed(tmp_path: Path) -> Resumed:
    """Predicts candidates, but takes what one table holds of them from there."""
    return partial(predict_many, resume=tmp_path / "table.parquet", **ASKED)


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> Predicted:
    """Positions of the candidates that were predicted, not read back, since this was last asked."""
    steps: list[int] = []
    rows_of = Evaluator.rows

    def rows(evaluator: Evaluator, position: int, *rest: Any) -> list[CandidateRow]:
        steps.append(position)
        return rows_of(evaluator, position, *rest)

    def since() -> list[int]:
        taken = steps[:]
        steps.clear()
        return taken

    monkeypatch.setattr(Evaluator, "rows", rows)
    return since


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, predicted: Predicted) -> None:
    path = tmp_path / "table.parquet"
    expected = predict_many(candidates(), **ASKED)
    predicted()

    def interrupted() -> Iterator[Any]:
        yield from candidates()[:7]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict_many(interrupted(), resume=path, **ASKED)
    assert predicted() == list(range(7))
    found = predict_many(candidates(), resume=path, **ASKED)
    assert predicted() == [7, 8], "the others are like some that were finished"
    pd.testing.assert_frame_equal(found, expected, check_exact=True)
    assert pd.read_parquet(path).drop(columns="key").latency_ms.notna().all()
    assert not list(tmp_path.glob("*.part"))
    again = predict_many(candidates()[::-1], resume=path, n_jobs=2, **ASKED)
    assert again.candidate.tolist() == found.candidate.tolist()
    assert again.latency_ms[::2].tolist() == found.latency_ms[::2].tolist()[::-1]


def test_what_may_not_hold_is_kept_with_the_rows(tmp_path: Path, predicted: Predicted) -> None:
    for caveats in (("a; b", "c"), ("d",), ()):
        asked = {**ASKED, "device": Predictor(ASKED["device"].profile, caveats), "resume": tmp_path / "table.parquet"}
        for new in ([0], []):
            assert predict_many([builder(8)], **asked).caveats.tolist() == [caveats] * 2
            assert predicted() == new


TOKENS = {"candidates": [SMALL], "inputs": None, "seq": 16}
IMAGES = {"candidates": [partial(nn.Conv2d, 3, 8, 3)], "inputs": None, "image": 32}


@pytest.mark.parametrize(
    ("first", "change"),
    [
        ({}, {"candidates": [builder(24)]}),
        ({}, {"device": predictor(fixed_us=21.0)}),
        ({}, {"device": ASKED["device"].at(Slowdown(2.0))}),
        ({}, {"batch": [1, 16]}),
        ({}, {"runtime": "torchscript"}),
        ({}, {"protocol": "pipelined"}),
        ({}, {"inputs": (torch.zeros(2, 3, 64),)}),
        ({}, {"precision": "fp32"}),
        (TOKENS, {"attention": "eager"}),
        (TOKENS, {"seq": 32}),
        (IMAGES, {"image": 64}),
    ],
)
def test_a_changed_question_is_answered_anew(
    first: dict[str, Any], change: dict[str, Any], tmp_path: Path, predicted: Predicted
) -> None:
    asked = {"candidates": [builder(16)], "resume": tmp_path / "table.parquet", **ASKED, **first}
    for expected in ([0], []):
        predict_many(**asked)
        assert predicted() == expected
    changed = {**asked, **change}
    found = predict_many(**changed)
    assert predicted() == [0]
    pd.testing.assert_frame_equal(found, predict_many(**changed | {"resume": None}), check_exact=True)
    predicted()
    predict_many(**asked)
    assert predicted() == [], "what was there before is still there"


def test_another_default_dtype_is_another_question(resumed: Resumed, predicted: Predicted) -> None:
    single = resumed([builder(16)])
    with default_dtype(torch.float64):
        double = resumed([builder(16)])
    assert predicted() == [0, 0]
    assert [set(table.precision) for table in (single, double)] == [{"fp32"}, {"fp64"}]


def test_what_a_builder_draws_is_another_each_time(resumed: Resumed, predicted: Predicted) -> None:
    def drawn() -> nn.Module:
        return builder(int(torch.randint(8, 512, ())))()

    for _ in range(2):
        resumed([drawn] * 2)
    assert predicted() == [0, 1] * 2


def test_a_library_s_name_may_be_that_of_one_s_own_function(
    resumed: Resumed, predicted: Predicted, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = pytest.importorskip("timm.models._registry")
    for width in (8, 16, 16):
        monkeypatch.setitem(registry._model_entrypoints, "mine", lambda width=width, **_: builder(width)())
        resumed(["timm:mine"], errors="raise")
    assert predicted() == [0, 0]
    monkeypatch.setattr("timm.list_models", None)  # which sorts all names, too slow to be asked for each candidate
    assert registered_function("timm:mine") is not None


@pytest.mark.usefixtures("own_formulas")
def test_other_formulas_are_another_question(resumed: Resumed, predicted: Predicted) -> None:
    for times in (1, 2, 2):
        cost("mine::op")(partial(times_numel, times))
        resumed([builder(16)])
        del families._REGISTERED[-1]
    assert predicted() == [0, 0]


def times_numel(times: int, *_: Any, out: Any) -> Work:
    return Work("elementwise", {"numel": times * out.numel(), "operands": 1})


def test_a_disk_that_is_full_costs_no_rows(resumed: Resumed, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(resume, "WRITE_EVERY_S", -1.0)
    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        table = resumed([builder(8), builder(16)])
    assert table["error"].isna().all()


@pytest.mark.parametrize(
    ("owner", "name", "old"),
    [
        (resume, "version", lambda _: "0.0.1"),
        (platform, "python_version", lambda: "0.0.1"),
        (graph_store, "digest_of", lambda *_: "0.0.1"),
        (TorchScript, "options", "0.0.1"),
    ],
)
def test_rows_of_another_version_are_not_taken_over(
    owner: Any, name: str, old: Any, tmp_path: Path, predicted: Predicted, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"candidates": [builder(16)], "resume": tmp_path / "table.parquet", "runtime": "torchscript", **ASKED}
    with monkeypatch.context() as older:
        older.setattr(owner, name, old, raising=False)  # TorchScript has no tools to name
        predict_many(**asked)
    predict_many(**asked)
    assert predicted() == [0, 0]
    assert len(pd.read_parquet(asked["resume"])) == 4, "the older rows stay"


def test_what_failed_or_cannot_be_told_apart_is_tried_again(resumed: Resumed, predicted: Predicted) -> None:
    for _ in range(2):
        resumed([Stubborn(), 7, builder(8)])
    assert predicted() == [0, 1, 2, 0, 1]


def test_files_that_are_no_such_table_are_left_alone(tmp_path: Path) -> None:
    foreign, garbled = tmp_path / "mine.parquet", tmp_path / "garbled.parquet"
    pd.DataFrame({"a": [1]}).to_parquet(foreign)
    garbled.write_bytes(b"PAR1 or not")
    for path, message in ((foreign, "another table"), (garbled, "is no Parquet table"), (tmp_path, "is a folder")):
        before = path.read_bytes() if path.is_file() else b""
        with pytest.raises((TableError, UsageError), match=message):
            predict_many(candidates(), resume=path, **ASKED)
        assert not path.is_file() or path.read_bytes() == before


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"

    def greedy() -> Iterator[Any]:
        with pytest.raises(BusyError, match="another process writes"):
            predict_many(candidates(), resume=path, **ASKED)
        yield builder(8)

    assert len(predict_many(greedy(), resume=path, **ASKED)) == 2


def test_a_table_is_written_while_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "WRITE_EVERY_S", -1.0)
    path, lengths = tmp_path / "table.parquet", []

    def watched() -> Iterator[Any]:
        for width in (8, 16, 24):
            lengths.append(len(pd.read_parquet(path)) if path.exists() else 0)
            yield builder(width)

    predict_many(watched(), resume=path, **ASKED)
    assert lengths == [0, 2, 4]
