"""predict_many: candidates of every kind become rows, in order, and those that fail say why."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from factories import device, profile
from reportdata import half_unknown
from searchdata import INPUTS, SMALL, predictor
from torch import nn
from transformers import BertConfig, BertModel

import latpred
from latpred.errors import CandidateError, ProfileError, RuntimeRefusalError, TimeLimitError, UsageError
from latpred.prediction.predictor import Predictor
from latpred.profile.document import Acceptance
from latpred.search.resume import COLUMNS

predict_many = partial(latpred.predict_many, device=predictor())


def network(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8))


def broken() -> nn.Module:
    raise RuntimeError("no such block")


def test_a_candidate_that_failed_is_freed_without_a_search_for_cycles() -> None:
    built: list[weakref.ref[nn.Module]] = []

    def candidates() -> Iterator[nn.Module]:
        for _ in range(2):
            wrong = nn.Linear(3, 3)
            built.append(weakref.ref(wrong))
            yield wrong

    gc.disable()
    try:
        assert predict_many(candidates(), inputs=INPUTS).error.notna().all()
        assert [freed() for freed in built] == [None, None]
    finally:
        gc.enable()


def gpu(name: str, **changes: float) -> Predictor:
    info = device(name=name, kind="cuda", asynchronous=True, **changes)
    return Predictor(msgspec.structs.replace(profile(info), name=name))


@pytest.mark.parametrize("method", ["trace", "curve"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_time_limit_of_a_search_is_raised(method: str, wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, refused = TimeLimitError("late"), RuntimeRefusalError("it cannot be traced")
    refused.__cause__ = stop
    monkeypatch.setattr(Predictor, method, mock.Mock(side_effect=refused if wrapped else stop))
    with pytest.raises(TimeLimitError, match="late"):
        predict_many([network], inputs=INPUTS)


def test_several_devices_share_one_trace() -> None:
    built: list[int] = []

    def candidate() -> nn.Module:
        built.append(1)
        return network()

    devices = [predictor(), gpu("fast"), gpu("slow", launch_us=90.0)]
    table = latpred.predict_many([candidate, broken], batch=[1, 8], inputs=INPUTS, device=devices)
    assert len(built) == 1
    names = [each.profile.name for each in devices for _ in (1, 8)]
    assert table["device"].tolist() == names * 2
    assert table["error"].notna().tolist() == [False] * 6 + [True] * 6
    for predicts, (_, cells) in zip(devices, table[:6].groupby("device", sort=False), strict=True):
        alone = latpred.predict_many([network], batch=[1, 8], inputs=INPUTS, device=predicts)
        assert cells.drop(columns="name").reset_index(drop=True).equals(alone.drop(columns="name"))
    ranked = latpred.rank([network, partial(network, 512)], inputs=INPUTS, device=devices)
    assert ranked.groupby("device")["rank"].apply(list).tolist() == [[1, 2]] * 3


def test_rows_say_where_memory_does_not_suffice() -> None:
    needed = gpu("some").predict(latpred.trace(network(), INPUTS), 1).peak_bytes
    table = latpred.predict_many([network], batch=[1, 64], inputs=INPUTS, device=gpu("small", memory_bytes=needed))
    (fits, too_large), said = table.caveats, "batch 64 needs more memory than the device has"
    assert (said in too_large, any("memory" in caveat for caveat in fits)) == (True, False)


@pytest.mark.parametrize("candidate", [SMALL, lambda: latpred.trace("distilbert", seq=16)], ids=["config", "graph"])
def test_a_device_of_another_time_has_a_model_of_its_own(candidate: Any) -> None:
    asked = {"inputs": {"input_ids": torch.ones(1, 16, dtype=torch.long)}}
    both = latpred.predict_many([candidate], device=["rtx-8000", "epyc-shared"], **asked)
    alone = latpred.predict_many([candidate], device="epyc-shared", **asked)
    assert both[1:].reset_index(drop=True).equals(alone)


def test_rows_are_what_single_predictions_say() -> None:
    found = predictor()
    widths = (16, 64, 256)
    table = predict_many((network(width) for width in widths), batch=[1, 8], inputs=INPUTS)
    assert list(table.columns) == list(COLUMNS)
    assert table.candidate.tolist() == [0, 0, 1, 1, 2, 2]
    assert table.batch.tolist() == [1, 8] * 3
    for _, row in table.iterrows():
        graph = latpred.trace(network(widths[row.candidate]), INPUTS)
        one = found.predict(graph, row.batch)
        assert (row.latency_ms, (row.low_ms, row.high_ms)) == (one.latency_ms, one.interval_ms)
        assert (row.overhead_ms, row.compute_ms, row.regime) == (one.overhead_ms, one.compute_ms, one.regime)
        assert (row.macs, row.parameters) == (graph.macs(row.batch), graph.parameters)
        assert (row.launches, row.error) == (3, None)


@pytest.mark.parametrize(
    ("asked", "special"),
    [
        (  # of which the profile's PyTorch does not choose the attention
            {"runtime": "cuda-graphs", "precision": "fp16", "protocol": "pipelined", "seq": 64},
            {"attention": "sdpa"},
        ),
        ({"precision": "fp16", "seq": 32}, {"host": 0.5}),
    ],
)
def test_all_ways_to_ask_hand_on_the_whole_question(asked: dict[str, Any], special: dict[str, Any]) -> None:
    name, batch, asked = "distilbert", 4, {"device": "rtx-8000", **asked}
    expected = latpred.predict(name, batch, **asked, **special).latency_ms
    assert expected != latpred.predict(name, batch, **asked).latency_ms
    assert latpred.LatencyBudget(expected, batch=batch, **asked, **special)(name) == 0.0
    for table in (latpred.predict_many, latpred.rank):
        assert table([name], batch=batch, **asked, **special).latency_ms.tolist() == [expected]
    largest = latpred.max_batch(name, expected, **asked, **special)
    beyond_ms = (latpred.predict(name, largest + more, **asked, **special).latency_ms - expected for more in (0, 1))
    assert [ms > 0 for ms in beyond_ms] == [False, True]


def test_every_row_says_what_may_not_hold() -> None:
    failed = msgspec.structs.replace(predictor().profile, acceptance=Acceptance(passed=False, checks={}, advice=()))
    given, models = Predictor(failed, ["as of a test"]), [latpred.trace(network(), INPUTS), half_unknown()]
    table = latpred.predict_many([*models, broken], device=given)
    expected = [given.predict(model).provenance.caveats for model in models]
    assert table.caveats.tolist() == [*expected, ()]
    assert ["no cost formula" in " ".join(said) for said in expected] == [False, True]
    assert latpred.LatencyBudget(1.0, device=given).check(models[1]).caveats == expected[1]


def test_every_kind_of_candidate() -> None:
    def reading() -> nn.Module:  # numbers out of tensors, which the meta device does not hold
        return network(int(torch.linspace(16, 48, 3)[1].item()))

    kinds = [network(), network, latpred.trace(network(), INPUTS), lambda: network(32), reading]
    table = predict_many(kinds, inputs=INPUTS)
    assert table.name.tolist() == ["Sequential", "network", "Sequential", "<lambda>", "reading"]
    assert table.error.isna().all()
    wide, narrow = table.latency_ms[0], table.latency_ms[3]
    assert table.latency_ms.tolist() == [wide] * 3 + [narrow] * 2
    assert wide > narrow


def test_a_graph_is_not_taken_for_one_of_another_size() -> None:
    graph, model = latpred.trace(nn.Conv2d(3, 4, 3), image=32), nn.Conv2d(3, 4, 3)
    asked = {"device": "rtx-8000", "image": 32}
    assert predict_many([graph, lambda: graph, model], **asked).latency_ms.nunique() == 1
    *refused, predicted = predict_many([graph, lambda: graph, model], **asked | {"image": 64}).error
    assert refused == ["This graph was traced at image=32; trace it again to predict image=64."] * 2
    assert predicted is None


def test_configs_and_names() -> None:
    table = predict_many([SMALL, "distilbert"], seq=16)
    assert table.name.tolist() == ["bert", "distilbert"]
    assert table.error.isna().all()
    expected = latpred.trace(BertModel(SMALL), seq=16)
    assert table.macs[0] == expected.macs()
    assert table.parameters[0] == expected.parameters


def test_batches_and_runtimes_are_in_order() -> None:
    runtimes = ["torchscript", "eager", "torchscript"]  # what is asked twice is answered once
    table = predict_many([network()] * 2, batch=[4, 1, 4], runtime=runtimes, inputs=INPUTS)
    assert table.batch.tolist() == [4, 4, 1, 1] * 2
    assert table.runtime.tolist() == ["torchscript", "eager"] * 4
    assert (table.latency_ms[:4].tolist()) == table.latency_ms[4:].tolist()


def test_a_candidate_that_fails_says_why_and_the_rest_go_on() -> None:
    candidates = [broken, nn.Linear(32, 4), network(), 7, lambda: "no module", nn.ReLU]
    table = predict_many(candidates, inputs=INPUTS)
    assert table.error.isna().tolist() == [False, False, True, False, False, False]
    assert "the class ReLU is no candidate" in table.error[5]
    assert "RuntimeError: no such block" in table.error[0]
    assert "forward pass failed" in table.error[1]
    assert "a value of type int is no candidate" in table.error[3]
    assert "returned a str" in table.error[4]
    numbers = table[table.error.notna()].select_dtypes("float64")
    assert list(numbers) == [*COLUMNS[6:11], "macs", "parameters", "launches"]
    assert numbers.isna().all(axis=None)


class Twice(nn.Module):
    """The same parts as `Once`, used otherwise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(64, 64), nn.Dropout(0.5)
        self.last = nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.layer(self.layer(x))))  # type: ignore[no-any-return]


class Once(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.layer(x)))  # type: ignore[no-any-return]


def test_what_one_candidate_leaves_behind_changes_no_other() -> None:
    fits = predictor().profile.kernels["fp32"]
    shared = Predictor(msgspec.structs.replace(predictor().profile, kernels={"fp32": fits, "fp16": fits}))
    candidates = [kind(width).train(mode) for kind in (Once, Twice) for width in (8, 64) for mode in (True, False)]
    questions = [
        {"precision": precision, "runtime": runtime, "batch": batch, "inputs": (torch.zeros(2, *rows, 64),)}
        for precision in ("fp32", "fp16")
        for runtime in ("eager", "torchscript")
        for batch in (1, 2, 9)
        for rows in ((), (5,))
    ]
    random.Random(0).shuffle(questions)
    for question in questions[:8]:
        table = latpred.predict_many(candidates, **question, device=shared)
        fresh = latpred.predict_many(reversed(candidates), **question, device=Predictor(shared.profile))
        assert table.error.isna().all()
        alone = fresh.iloc[::-1].reset_index(drop=True)
        assert table.drop(columns="candidate").equals(alone.drop(columns="candidate"))
        assert table.latency_ms.nunique() == 4  # training mode makes no difference, code and widths do


def test_nothing_gives_an_empty_table() -> None:
    table = predict_many([])
    assert list(table.columns) == list(COLUMNS)
    assert len(table) == 0
    assert table.latency_ms.dtype == "float64"
    assert table.candidate.dtype == "int64"


def test_candidates_are_taken_one_at_a_time_and_the_first_failure_can_end_it() -> None:
    taken: list[int] = []

    def endless() -> Iterator[Any]:
        while True:
            taken.append(1)
            yield network if len(taken) < 3 else broken

    with pytest.raises(CandidateError, match=r"candidate 2 \(broken\): .*no such block"):
        predict_many(endless(), errors="raise", inputs=INPUTS)
    assert len(taken) == 3


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"batch": 0}, UsageError, "Batch 0"),
        ({"runtime": "egaer"}, UsageError, "No runtime is called"),
        ({"runtime": ["eager", "onnxruntime"]}, ProfileError, "no dispatch costs"),
        ({"precision": "bf16"}, ProfileError, "bf16"),
        ({"precision": "fp61"}, UsageError, "precision 'fp61' is not known; choose one of fp32"),
        ({"precision": ["fp16"]}, UsageError, "is no name of a precision; give one, as in"),
        ({"errors": "ignore"}, UsageError, "errors='ignore'"),
        ({"protocol": "double"}, UsageError, "protocol='double'"),
        ({"device": []}, UsageError, "no device was named"),
        ({"device": ["rtx-8000"] * 2}, UsageError, "2 of the devices have the profile 'rtx-8000'; .* calibrate --name"),
        ({"n_jobs": 0}, ValueError, "n_jobs == 0"),
        ({"device": predictor(), "host": "EPYC 7742"}, UsageError, "has its host already"),
    ],
)
def test_wrong_questions_are_refused_before_any_trace(asked: dict[str, Any], error: type[Exception], said: str) -> None:
    def untouched() -> Iterator[nn.Module]:
        raise AssertionError
        yield

    with pytest.raises(error, match=said):
        predict_many(untouched(), **asked)


@pytest.mark.parametrize(
    "one",
    ["resnet18", Path("models.py:build"), network(), network, BertConfig(), latpred.trace(network(), INPUTS), None],
    ids=["name", "path", "module", "function", "config", "graph", "nothing"],
)
def test_one_candidate_is_not_taken_for_a_list(one: Any) -> None:
    for function in (predict_many, latpred.rank):
        with pytest.raises(UsageError, match="is one candidate; give a list"):
            function(one)
        with pytest.raises(UsageError, match=r"give its models alone: predict_many\(models.values\(\)\)"):
            function({"one": one})


def test_a_graph_is_held_to_what_is_asked_of_the_others() -> None:
    graph = latpred.trace(network(), INPUTS, precision="fp16")
    table = predict_many([graph, lambda: graph, network], precision="fp32", inputs=INPUTS)
    assert ["was traced in fp16" in str(error) for error in table["error"]] == [True, True, False]
    with pytest.raises(CandidateError, match="was traced in fp16"):
        latpred.LatencyBudget(5.0, device=predictor(), precision="fp32").check(graph)
