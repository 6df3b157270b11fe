"""Candidates spread over workers: the same table to the bit, and nothing lost with a worker."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from itertools import chain, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import joblib
import pandas as pd
import pytest
import torch
from searchdata import ASKED, Stubborn, builder, candidates
from smallmodels import default_dtype
from torch import nn

from latpred import predict_many, runtimes
from latpred.errors import CandidateError, WorkerError
from latpred.ops import Work, cost
from latpred.progress import ProgressCounter, ProgressEvent
from latpred.search import workers


def test_two_processes_give_the_same_table_to_the_bit() -> None:
    asked = {**ASKED, "runtime": ["torchscript", "eager"]}
    serial = predict_many(candidates(30), **asked)
    spread = predict_many((one for one in candidates(30)), n_jobs=2, **asked)
    pd.testing.assert_frame_equal(spread, serial, check_exact=True)
    assert serial.error.isna().all()
    assert predict_many([], n_jobs=2, **ASKED).empty


def test_a_generator_may_make_the_next_candidate_of_the_last() -> None:
    def changed() -> Iterator[nn.Module]:
        model = builder(8, depth=1)()
        for width in range(8, 88, 8):
            model[0], model[2] = nn.Linear(64, width), nn.Linear(width, 64)  # type: ignore[index, operator]
            yield model

    found, expected = predict_many(changed(), n_jobs=2, **ASKED), predict_many(changed(), **ASKED)
    pd.testing.assert_frame_equal(found, expected, check_exact=True)
    assert expected.parameters.nunique() == 10


def test_code_of_a_notebook_may_say_torch_and_ops() -> None:
    def build() -> nn.Module:
        model = nn.Linear(64, 64)
        model.ops = torch.arange(3)  # for which its pickler takes the module torch.ops along
        return model

    assert predict_many([build], n_jobs=2, **ASKED).error.isna().all()


@pytest.mark.filterwarnings("ignore:.*have been cancelled")  # joblib says of what it had begun
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # and its threads may end so
def test_errors_may_end_a_run_that_has_no_end() -> None:
    endless = chain(candidates(2), [7], cycle(candidates()))
    with pytest.raises(CandidateError, match=r"candidate 2 \(int\): a value of type int is no candidate"):
        predict_many(endless, n_jobs=2, errors="raise", **ASKED)


@pytest.mark.parametrize("a_worker_dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_generator_s_own_failure_is_its_own(a_worker_dies: bool) -> None:
    def failing() -> Iterator[Any]:
        yield from [killing()] if a_worker_dies else candidates(3)
        raise RuntimeError("the searcher gave up")

    with pytest.raises(RuntimeError, match="the searcher gave up"):
        predict_many(failing(), n_jobs=2, **ASKED)


def test_when_no_worker_works_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(workers, "work", lambda *_: broken())
    with pytest.raises(WorkerError, match=r"no worker finishes anything.*no space left.*n_jobs=1"):
        predict_many(candidates(), n_jobs=2, **ASKED)


def test_threads_of_one_process_take_turns() -> None:
    expected = predict_many(candidates(), **ASKED)
    with joblib.parallel_config(backend="threading", n_jobs=3):
        pd.testing.assert_frame_equal(predict_many(candidates(), **ASKED), expected, check_exact=True)


def test_progress_counts_candidates_with_rate_and_time_left(tmp_path: Path) -> None:
    steps: list[ProgressEvent] = []
    predict_many(candidates(4), progress=steps.append, resume=tmp_path / "t.parquet", **ASKED)
    assert [step.done for step in steps] == [1, 2, 3, 4]
    assert all(step.total == 4 and step.rate > 0 for step in steps)
    assert steps[0].left_s == pytest.approx(3 / steps[0].rate)
    steps.clear()
    predict_many(iter(candidates(4)), progress=steps.append, n_jobs=2, **ASKED)
    assert (steps[-1].done, steps[-1].total, math.isnan(steps[-1].left_s)) == (4, 0, True)


def test_a_budget_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latpred.progress.time.monotonic", iter([100.0, 101.0, 104.0]).__next__)
    counter = ProgressCounter("cells", 3, budget_s=3.0)
    assert [counter.next("one"), counter.next("two")] == [True, False]


def killing(flag: Path | None = None) -> Callable[[], nn.Module]:
    """A candidate that kills the worker that builds it: always, or until a file is there."""
    home, inner = os.getpid(), builder(48)

    def build() -> nn.Module:
        if os.getpid() != home and (flag is None or not flag.exists()):
            if flag is not None:
                flag.touch()
            os._exit(9)
        return inner()

    return build


def test_a_killed_worker_loses_nothing(tmp_path: Path) -> None:
    several = [*candidates(8), killing(tmp_path / "killed"), *candidates(8)]
    expected = predict_many(several, **ASKED)
    found = predict_many(several, n_jobs=2, **ASKED)
    assert (tmp_path / "killed").exists()
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


@pytest.mark.slow
def test_what_kills_workers_or_cannot_be_sent_is_named_and_costs_nobody_else_anything() -> None:
    several: list[Any] = [*candidates(2), killing(), *candidates(1), Stubborn(), 7]
    found = predict_many(several, n_jobs=2, **ASKED)
    said = found[found.batch == 1].error
    assert sorted(said.dropna().index // 2) == [2, 4, 5]
    assert said[4] == "its worker was killed, or crashed; too little memory is the usual cause"
    assert "cannot be sent to a worker" in said[8]
    assert "lock" in said[8]
    assert "a value of type int is no candidate" in said[10]
    rest = [one for number, one in enumerate(several) if number not in (2, 4, 5)]
    good = found[found.error.isna()].reset_index(drop=True)
    expected = predict_many(rest, **ASKED)
    pd.testing.assert_frame_equal(good.drop(columns="candidate"), expected.drop(columns="candidate"), check_exact=True)


def test_workers_have_the_default_dtype_of_their_user() -> None:
    with default_dtype(torch.float64):
        alone, spread = (predict_many(candidates(2), n_jobs=jobs, **ASKED) for jobs in (1, 2))
    assert set(alone.precision) == {"fp64"}
    pd.testing.assert_frame_equal(spread, alone)


def test_a_worker_has_its_user_s_threads() -> None:
    sender = workers._Sender("elsewhere", 1, (), torch.float32, 2)
    seeing: Any = SimpleNamespace(rows=lambda *_: [torch.get_num_threads()])
    assert workers.work(seeing, sender, 0, workers._sent(None)) == [2]
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("own_formulas")
def test_workers_have_the_formulas_of_their_user() -> None:
    cost("aten::relu")(lambda x, *, out: Work("elementwise", {"numel": out.numel(), "operands": 1}, macs=out.numel()))
    alone, spread = (predict_many([builder(8), builder(16)], n_jobs=jobs, **ASKED) for jobs in (1, 2))
    pd.testing.assert_frame_equal(spread, alone)


def test_workers_whose_tools_are_set_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(runtimes.get("eager")), "options", "set by this program", raising=False)
    with pytest.raises(WorkerError, match=r"tools of eager have other settings .* Try a single process with n_jobs=1"):
        predict_many(candidates(), n_jobs=2, **ASKED)
