"""Candidates spread over workers: the same table to the bit, and nothing lost with a worker or a run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import joblib
import pandas as pd
import pytest
import torch
from factories import device, dispatch, kernel_fit, profile
from torch import nn

from latpred import progress
from latpred.errors import BusyError, CandidateError, TableError, UsageError, WorkerError
from latpred.prediction.predictor import Predictor
from latpred.progress import Pace, ProgressEvent
from latpred.search import resume, workers

INPUTS = (torch.zeros(2, 64),)


def predictor(fixed_us: float = 20.0) -> Predictor:
    info = device(name="cpu", kind="cpu", asynchronous=False, launch_us=0.0, gap_us=0.0, sync_us=0.0)
    fits = (kernel_fit("gemm"), kernel_fit("elementwise", macs_per_us=0.0))
    return Predictor(profile(info, fits, {"eager": dispatch(fixed_us=fixed_us), "torchscript": dispatch()}))


def builder(width: int, depth: int = 2) -> Callable[[], nn.Module]:
    """A function that workers can be sent although they cannot import this file."""

    def build() -> nn.Module:
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64)]
        return nn.Sequential(*layers * depth)

    return build


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


class Stubborn:
    """A candidate that cannot be sent anywhere."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self) -> nn.Module:
        return builder(32)()


def candidates(count: int = 12) -> list[Callable[[], nn.Module]]:
    return [builder(8 * (number % 9 + 1), number % 3 + 1) for number in range(count)]


ASKED: dict[str, Any] = {"batch": [1, 8], "inputs": INPUTS}


def test_two_processes_give_the_same_table_to_the_bit() -> None:
    asked = {**ASKED, "runtime": ["torchscript", "eager"]}
    serial = predictor().predict_many(candidates(30), **asked)
    spread = predictor().predict_many((one for one in candidates(30)), n_jobs=2, **asked)
    pd.testing.assert_frame_equal(spread, serial, check_exact=True)
    assert serial.error.isna().all()


def test_a_killed_worker_loses_nothing(tmp_path: Path) -> None:
    several = [*candidates(8), killing(tmp_path / "killed"), *candidates(8)]
    expected = predictor().predict_many(several, **ASKED)
    found = predictor().predict_many(several, n_jobs=2, **ASKED)
    assert (tmp_path / "killed").exists()
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


@pytest.mark.slow
def test_what_kills_workers_or_cannot_be_sent_is_named_and_costs_nobody_else_anything() -> None:
    several: list[Any] = [*candidates(5), killing(), *candidates(3), Stubborn(), 7, *candidates(2)]
    found = predictor().predict_many(several, n_jobs=2, **ASKED)
    said = found[found.batch == 1].error
    assert sorted(said.dropna().index // 2) == [5, 9, 10]
    assert said[10] == "its worker was killed, or crashed; too little memory is the usual cause"
    assert "cannot be sent to a worker" in said[18]
    assert "lock" in said[18]
    assert "a int is no candidate" in said[20]
    rest = [one for number, one in enumerate(several) if number not in (5, 9, 10)]
    good = found[found.error.isna()].reset_index(drop=True)
    expected = predictor().predict_many(rest, **ASKED)
    pd.testing.assert_frame_equal(good.drop(columns="candidate"), expected.drop(columns="candidate"), check_exact=True)


def test_errors_may_end_the_run() -> None:
    with pytest.raises(CandidateError, match=r"candidate 2 \(int\): a int is no candidate"):
        predictor().predict_many([*candidates(2), 7], n_jobs=2, errors="raise", **ASKED)


def test_a_generator_s_own_failure_is_its_own() -> None:
    def failing() -> Iterator[Any]:
        yield from candidates(3)
        raise RuntimeError("the searcher gave up")

    with pytest.raises(RuntimeError, match="the searcher gave up"):
        predictor().predict_many(failing(), n_jobs=2, **ASKED)


def test_when_no_worker_works_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(workers, "work", lambda *_: broken())
    with pytest.raises(WorkerError, match=r"no worker finishes anything.*no space left.*n_jobs=1"):
        predictor().predict_many(candidates(), n_jobs=2, **ASKED)


def test_n_jobs_nobody() -> None:
    with pytest.raises(UsageError, match="n_jobs=0"):
        predictor().predict_many(candidates(), n_jobs=0, **ASKED)
    assert predictor().predict_many([], n_jobs=2, **ASKED).empty


def test_chunks_follow_the_pace_and_candidates_are_read_as_they_are_needed() -> None:
    read: list[int] = []

    def source() -> Iterator[tuple[int, Any]]:
        for number in range(10_000):
            read.append(number)
            yield number, number

    flight = workers._Flight(source(), jobs=2, total=0)
    chunks = iter(flight)
    number, chunk = next(chunks)
    assert len(chunk) == workers.FIRST_CHUNK
    flight.land(workers.Done(number, [], seconds=workers.CHUNK_S / 2))
    number, chunk = next(chunks)
    assert len(chunk) == 2 * workers.FIRST_CHUNK
    flight.land(workers.Done(number, [], seconds=1e-3))
    number, chunk = next(chunks)
    assert len(chunk) == workers.LARGEST_CHUNK
    flight.land(workers.Done(number, [], seconds=3600.0))
    assert [len(chunk) for chunk in flight.under_way()] == []
    assert list(chunks) == []
    assert len(read) == 3 * workers.FIRST_CHUNK + workers.LARGEST_CHUNK


def test_slow_candidates_are_sent_one_by_one_and_the_last_ones_are_shared_out() -> None:
    flight = workers._Flight(iter([(number, number) for number in range(600)]), jobs=2, total=600)
    sizes = []
    for number, chunk in flight:
        sizes.append(len(chunk))
        flight.land(workers.Done(number, [], seconds=1e-3 if number else 100.0))
    assert sizes[:3] == [workers.FIRST_CHUNK, 1, 99]
    assert sum(sizes) == 600
    assert sizes[2:-1] == sorted(sizes[2:-1], reverse=True)
    assert sizes[-2] == workers.FIRST_CHUNK


def test_threads_of_one_process_take_turns() -> None:
    expected = predictor().predict_many(candidates(), **ASKED)
    with joblib.parallel_config(backend="threading", n_jobs=3):
        pd.testing.assert_frame_equal(predictor().predict_many(candidates(), **ASKED), expected, check_exact=True)


@pytest.mark.filterwarnings("default")
def test_a_dask_cluster_gives_the_same_table() -> None:
    distributed = pytest.importorskip("distributed")
    expected = predictor().predict_many(candidates(), **ASKED)
    cluster = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with distributed.Client(**cluster), joblib.parallel_config(backend="dask"):
        found = predictor().predict_many(candidates(), **ASKED)
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_ray_gives_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from ray.util.joblib import register_ray

    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    expected = predictor().predict_many(candidates(), **ASKED)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        register_ray()
        with joblib.parallel_config(backend="ray", n_jobs=2):
            found = predictor().predict_many(candidates(), **ASKED)
    finally:
        ray.shutdown()
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


# -- going on ------------------------------------------------------------------------------------------------------


class Counted:
    """Counts what is predicted rather than read back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[int] = []
        inner = workers.many.evaluate

        def evaluate(found: Predictor, numbered: Any, *rest: Any, **options: Any) -> Any:
            numbered = list(numbered)
            self.steps += [position for position, _ in numbered]
            return inner(found, numbered, *rest, **options)

        monkeypatch.setattr(workers.many, "evaluate", evaluate)

    def since(self) -> list[int]:
        taken, self.steps = self.steps, []
        return taken


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, path = Counted(monkeypatch), tmp_path / "table.parquet"
    expected = predictor().predict_many(candidates(), **ASKED)
    counted.since()

    def interrupted() -> Iterator[Any]:
        yield from candidates()[:7]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predictor().predict_many(interrupted(), resume=path, **ASKED)
    assert counted.since() == list(range(7))
    found = predictor().predict_many(candidates(), resume=path, **ASKED)
    assert counted.since() == [7, 8], "the others are like some that were finished"
    pd.testing.assert_frame_equal(found, expected, check_exact=True)
    assert pd.read_parquet(path).drop(columns="key").latency_ms.notna().all()
    assert not list(tmp_path.glob("*.part"))
    again = predictor().predict_many(candidates()[::-1], resume=path, n_jobs=2, **ASKED)
    assert again.candidate.tolist() == found.candidate.tolist()
    assert again.latency_ms[::2].tolist() == found.latency_ms[::2].tolist()[::-1]


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ("profile", {}),
        ("batch", {"batch": [1, 16]}),
        ("runtime", {"runtime": "torchscript"}),
        ("protocol", {"protocol": "pipelined"}),
        ("inputs", {"inputs": (torch.zeros(2, 3, 64),)}),
        ("candidate", {}),
    ],
)
def test_a_changed_question_is_answered_anew(
    change: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, path = Counted(monkeypatch), tmp_path / "table.parquet"
    predictor().predict_many([builder(16)], resume=path, **ASKED)
    assert counted.since() == [0]
    predictor().predict_many([builder(16)], resume=path, **ASKED)
    assert counted.since() == []
    other = predictor(fixed_us=21.0) if change == "profile" else predictor()
    new = [builder(24)] if change == "candidate" else [builder(16)]
    asked = {**ASKED, **options}
    found = other.predict_many(new, resume=path, **asked)
    assert counted.since() == [0]
    pd.testing.assert_frame_equal(found, other.predict_many(new, **asked), check_exact=True)
    counted.since()
    predictor().predict_many([builder(16)], resume=path, **ASKED)
    assert counted.since() == [], "what was there before is still there"


def test_rows_of_another_version_are_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, path = Counted(monkeypatch), tmp_path / "table.parquet"
    with monkeypatch.context() as older:
        older.setattr(resume.metadata, "version", lambda _: "0.0.1")
        predictor().predict_many([builder(16)], resume=path, **ASKED)
    predictor().predict_many([builder(16)], resume=path, **ASKED)
    assert counted.since() == [0, 0]
    assert len(pd.read_parquet(path)) == 4, "the older rows stay"


def test_what_failed_or_cannot_be_told_apart_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, path = Counted(monkeypatch), tmp_path / "table.parquet"
    for _ in range(2):
        predictor().predict_many([Stubborn(), 7, builder(8)], resume=path, **ASKED)
    assert counted.since() == [0, 1, 2, 0, 1]


def test_files_that_are_no_such_table_are_left_alone(tmp_path: Path) -> None:
    foreign, garbled = tmp_path / "mine.parquet", tmp_path / "garbled.parquet"
    pd.DataFrame({"a": [1]}).to_parquet(foreign)
    garbled.write_bytes(b"PAR1 or not")
    for path, message in (
        (foreign, "holds another table"),
        (garbled, "is no Parquet table"),
        (tmp_path, "is a folder"),
    ):
        before = path.read_bytes() if path.is_file() else b""
        with pytest.raises((TableError, UsageError), match=message):
            predictor().predict_many(candidates(), resume=path, **ASKED)
        assert not path.is_file() or path.read_bytes() == before


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"

    def greedy() -> Iterator[Any]:
        with pytest.raises(BusyError, match="another process writes"):
            predictor().predict_many(candidates(), resume=path, **ASKED)
        yield builder(8)

    assert len(predictor().predict_many(greedy(), resume=path, **ASKED)) == 2


# -- progress ------------------------------------------------------------------------------------------------------


def test_progress_counts_candidates_with_rate_and_time_left(tmp_path: Path) -> None:
    steps: list[ProgressEvent] = []
    predictor().predict_many(candidates(4), progress=steps.append, resume=tmp_path / "t.parquet", **ASKED)
    assert [step.done for step in steps] == [1, 2, 3, 4]
    assert all(step.total == 4 and step.rate > 0 for step in steps)
    assert steps[0].left_s == pytest.approx(3 / steps[0].rate)
    steps.clear()
    predictor().predict_many(iter(candidates(4)), progress=steps.append, n_jobs=2, **ASKED)
    assert steps[-1].done == 4
    assert steps[-1].total == 0
    assert steps[-1].left_s != steps[-1].left_s


def test_rows_read_back_do_not_count_for_the_rate() -> None:
    told: list[ProgressEvent] = []
    counter = Pace("candidates", 10, told.append)
    counter.count(8, worked=False)
    assert told[-1].rate == 0
    assert progress.pace_text(told[-1]) == "8 of 10, 0.0 a second"
    counter.count(1)
    assert told[-1].done == 9
    assert told[-1].left_s == pytest.approx(1 / told[-1].rate)


def test_a_bar_on_no_terminal_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    predictor().predict_many(candidates(2), progress=True, **ASKED)
    assert capsys.readouterr() == ("", "")


def test_a_table_is_written_while_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "WRITE_EVERY_S", -1.0)
    path, lengths = tmp_path / "table.parquet", []

    def watched() -> Iterator[Any]:
        for width in (8, 16, 24):
            lengths.append(len(pd.read_parquet(path)) if path.exists() else 0)
            yield builder(width)

    predictor().predict_many(watched(), resume=path, **ASKED)
    assert lengths == [0, 2, 4]
