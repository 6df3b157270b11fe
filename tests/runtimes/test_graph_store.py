"""Graphs kept between processes: damaged files, folders that can only be read; keys by structure."""

from __future__ import annotations

import gzip
import os
import sys
import types
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from factories import add, graph, linear
from smallmodels import Function, written

from latpred import host, runtimes, tracing
from latpred.errors import RuntimeRefusalError, TimeLimitError
from latpred.graph.graph import ModelGraph
from latpred.runtimes import graph_store
from latpred.runtimes.graph_store import trace_by_name
from latpred.runtimes.lowering import of_source, refusal, trace_for_runtime
from latpred.runtimes.source import source_of
from latpred.runtimes.torchscript import TorchScript, _Interpreted
from latpred.units import format_bytes

GIVEN = graph(linear())
MADE = graph(linear(), add())


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    graph_store.forget()
    graph_store._software.cache_clear()  # another test may have imported what adds to the path, as setuptools does
    yield
    graph_store.forget()
    graph_store._software.cache_clear()


def fetched(options: str = "") -> tuple[ModelGraph, int]:
    """What a process that has just begun gets, and how often it had to be made."""
    made: list[int] = []

    def make() -> ModelGraph:
        made.append(1)
        return MADE

    graph_store.forget()
    return graph_store.kept(GIVEN, "onnxruntime", "cpu", options, make), len(made)


def files() -> list[Path]:
    return sorted(path for path in graph_store.folder().rglob("*") if path.is_file())


def test_another_process_of_the_same_version_finds_what_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [fetched(), fetched(), fetched("another option")] == [(MADE, 1), (MADE, 0), (MADE, 1)]
    with monkeypatch.context() as newer:
        newer.setattr(graph_store, "VERSION", graph_store.VERSION + 1)
        assert [fetched(), fetched()] == [(MADE, 1), (MADE, 0)]
    assert fetched() == (MADE, 0)
    assert len(files()) == 3


@pytest.mark.parametrize(("runtime", "target"), [("torchscript", "cpu"), ("onnxruntime", "cpu"), ("compile", "cuda")])
def test_models_of_a_structure_are_taken_apart_once(runtime: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = type(runtimes.get(runtime))
    calls, real = [], kind.trace
    monkeypatch.setattr(kind, "trace", lambda *given: calls.append(1) or real(*given))
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()) for _ in range(3)]
    first = trace_for_runtime(layers[0], torch.zeros(2, 8), runtime=runtime, target=target)
    assert trace_for_runtime(layers[1], torch.zeros(1, 8), runtime=runtime, target=target) is first
    graph_store.forget()  # what another process finds on the disk
    assert trace_for_runtime(layers[2], torch.zeros(2, 8), runtime=runtime, target=target) == first
    assert len(calls) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: b"no gzip",
        lambda body: body[: len(body) // 2],
        lambda body: body[:20] + bytes(255 - byte for byte in body[20:60]) + body[60:],
        lambda body: gzip.compress(b'{"of": "another version"}'),
    ],
    ids=["no gzip", "half", "garbled", "another version"],
)
def test_a_damaged_file_is_made_again(damage: Callable[[bytes], bytes]) -> None:
    fetched()
    (file,) = files()
    file.write_bytes(damage(file.read_bytes()))
    assert fetched() == (MADE, 1)
    assert fetched() == (MADE, 0)


@pytest.mark.parametrize("error", [PermissionError("read-only file system"), OSError(28, "No space left on device")])
def test_a_folder_that_cannot_be_written_serves(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched()
    refused = mock.Mock(side_effect=error)
    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(os, "replace", refused)
    assert fetched() == (MADE, 0)
    assert fetched("not there yet") == (MADE, 1)
    assert len(files()) == 1, "no half files are left"


def within(error: BaseException, cause: BaseException | None = None) -> Exception:
    """An error that another was raised over, as tools wrap those of what they call."""
    try:
        try:
            raise error
        except BaseException:
            raise RuntimeError("the conversion failed") from cause
    except RuntimeError as outer:
        return outer


FULL = OSError(28, "No space left on device")
MACHINE = (FULL, MemoryError("too large"), within(FULL))
NO_FAULT = OSError("could not get source code"), within(TimeoutError("late"))
EXHAUSTED = (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"))


@pytest.mark.parametrize("error", EXHAUSTED)
def test_an_estimate_for_want_of_memory_is_not_kept(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(torch.nn.Linear(4, 4).eval(), torch.zeros(2, 4))
    for raised in (error, within(error)):
        monkeypatch.setattr(TorchScript, "trace", mock.Mock(side_effect=raised))
        said = refusal(of_source(source, "torchscript", "cpu"))
        assert said == "memory ran out while torchscript's tools were at the model"
    assert not files()
    monkeypatch.setattr(TorchScript, "trace", mock.Mock(side_effect=RuntimeError("a fault")))
    with pytest.raises(RuntimeError, match="a fault"):
        of_source(source, "torchscript", "cpu")


@pytest.mark.parametrize("cause", [*MACHINE, *NO_FAULT])
def test_a_refusal_is_kept_unless_the_machine_was_full(cause: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refused(*_: object) -> ModelGraph:
        asked.append(1)
        raise RuntimeRefusalError(f"it cannot be traced: {cause}") from cause

    source = source_of(torch.nn.Linear(4, 4).eval(), torch.zeros(2, 4))
    with monkeypatch.context() as patch:
        patch.setattr(TorchScript, "trace", refused)
        for _ in range(2):
            assert refusal(of_source(source, "torchscript", "cpu")) == f"it cannot be traced: {cause}"
            graph_store.forget()
    passing = cause in MACHINE
    assert (len(asked), len(files())) == ((2, 0) if passing else (1, 1))
    assert (refusal(of_source(source, "torchscript", "cpu")) is None) == passing


STOPS = [TimeLimitError("it took longer than 1 s"), TimeoutError("late"), KeyboardInterrupt()]


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: type(stop).__name__)
def test_what_ends_work_in_tools_is_raised_and_not_kept(stop: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Function(lambda x: x.softmax(-1)), torch.zeros(2, 8)
    cause = stop if isinstance(stop, TimeoutError) else None
    for owner, name, error in ((torch.jit, "freeze", within(stop, cause)), (_Interpreted, "record", stop)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, mock.Mock(side_effect=chain([error], repeat(ValueError()))))
            with pytest.raises(type(stop)):
                trace_for_runtime(model, x, runtime="torchscript")
    monkeypatch.setattr(torch.jit, "freeze", mock.Mock(side_effect=within(stop, cause)))
    with pytest.raises(type(stop)):
        TorchScript().build(model, (x,))
    assert not files()


class Reading(torch.nn.Linear):
    """Nobody can tell whether it will do the same the next time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        open(__file__).close()
        return super().forward(x)


def test_nothing_is_kept_of_what_nobody_can_tell_from_another() -> None:
    model = Reading(8, 8)
    graphs = [trace_for_runtime(model, torch.zeros(2, 8), runtime="torchscript") for _ in range(2)]
    assert graphs[0] == graphs[1] is not graphs[0]
    assert (files(), len(graph_store._memory._values)) == ([], 0)


def test_what_tools_make_beside_hooks_on_all_modules_is_not_kept() -> None:
    layer, x = torch.nn.Sequential(torch.nn.Linear(8, 4)), torch.zeros(2, 8)
    with torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: float(out.mean())):
        assert trace_for_runtime(layer, x, runtime="torchscript").notes
    assert not trace_for_runtime(layer, x, runtime="torchscript").notes


@pytest.mark.parametrize(
    ("runtime", "copies", "in_memory"),
    [("torchscript", 2, 2e9), ("onnxruntime", 6, 2e9), ("onnxruntime", 3, 4e6), ("compile", 2, 2e9)],
)
def test_a_model_that_memory_has_no_room_for_is_estimated_until_there_is(
    runtime: str, copies: int, in_memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latpred.runtimes.onnx.onnx_export.LARGEST_IN_MEMORY", in_memory)
    source = source_of(torch.nn.Linear(1024, 1023, bias=False).eval(), torch.zeros(2, 1024))
    needed = format_bytes(copies * 4 * 1024 * 1023)
    reason = f"{runtime}'s tools need about {needed} of memory for this model, and {needed} are free"
    with monkeypatch.context() as patch:
        patch.setattr(host, "bytes_left", lambda: copies * 4 * 1024 * 1023 - 1.0)
        assert refusal(of_source(source, runtime, "cpu")) == reason
    assert not files()
    if runtime == "torchscript":
        assert refusal(of_source(source, runtime, "cpu")) is None


def test_what_was_used_longest_ago_is_deleted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for age, option in enumerate("cba"):
        before = {*files()}
        fetched(option)
        (made,) = {*files()} - before
        os.utime(made, (age, age))
    assert fetched("c") == (MADE, 0)
    monkeypatch.setattr(graph_store, "MOST_ON_DISK_BYTES", 3 * made.stat().st_size)
    assert [fetched(option)[1] for option in "dacdb"] == [1, 0, 0, 0, 1]


def test_a_changed_forward_pass_is_taken_apart_again(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[str] = []
    real = TorchScript.trace
    monkeypatch.setattr(TorchScript, "trace", lambda self, *args: traces.append("") or real(self, *args))
    once, twice = "y = torch.relu(x); return y + y", "y, z = torch.relu(x), x; return y + y"
    for text in (once, twice, once):
        of_source(source_of(written(text), torch.zeros(2, 4)), "torchscript", "cpu")
    assert len(traces) == 2


NAME = "torchvision:squeezenet1_0"


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `latpred.trace` is asked for."""
    asked: list[dict[str, Any]] = []
    real = tracing.trace

    def trace(name: str, **options: Any) -> ModelGraph:
        asked.append(options)
        return real(name, **options)

    monkeypatch.setattr(tracing, "trace", trace)
    return asked


def test_a_model_by_name_is_traced_once_for_everything_that_its_trace_depends_on(traces: list[dict[str, Any]]) -> None:
    first = trace_by_name(NAME, image=64, batches=(1, 8))
    assert trace_by_name(NAME, image=64) == first
    assert [asked["batches"] for asked in traces] == [(64,)]
    assert first == tracing.trace(NAME, image=64, batches=(1, 8))
    del traces[:]
    others = [({"image": 32}, ""), ({"precision": "fp16"}, ""), ({"memory_format": "channels_last"}, ""), ({}, "old")]
    for number, (changed, era) in enumerate(others, 1):
        trace_by_name(NAME, era, **({"image": 64} | changed))
        assert len(traces) == number
    trace_by_name(NAME, image=64, batches=(128,))
    trace_by_name("squeezenet1_0", image=64)
    assert len(traces) == len(others) + 2


@pytest.mark.parametrize("changed", ["package", "variable", "switch", "own code"])
def test_other_software_has_other_traces(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = graph_store.file_by_name(NAME)
    graph_store._software.cache_clear()
    assert graph_store.file_by_name(NAME) == before
    graph_store._software.cache_clear()
    if changed == "package":
        (tmp_path / "timm-99.0.dist-info").mkdir()
        monkeypatch.syspath_prepend(str(tmp_path))
    elif changed == "variable":
        monkeypatch.setenv("TIMM_FUSED_ATTN", "0")
    elif changed == "switch":
        monkeypatch.setitem(sys.modules, "timm.layers.config", types.SimpleNamespace(_USE_FUSED_ATTN=0))
    else:
        monkeypatch.setattr(graph_store, "_TRACING", ("tracing/*.py",))
    assert graph_store.file_by_name(NAME) != before


def test_what_may_be_another_tomorrow_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert graph_store.file_by_name("models.py:build") is None
    assert graph_store.file_by_name(NAME) is not None
    with monkeypatch.context() as patch:
        patch.setattr(graph_store, "generation", lambda: -1)  # somebody registered a formula
        assert graph_store.file_by_name(NAME) is None
    edited = types.SimpleNamespace(read_text=lambda _: '{"dir_info": {"editable": true}, "url": "file:///timm"}')
    monkeypatch.setattr(graph_store.metadata, "distribution", lambda _: edited)
    graph_store._software.cache_clear()
    assert graph_store.file_by_name(NAME) is None


def test_what_is_no_line_in_batch_is_traced_anew(traces: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    bent = msgspec.structs.replace(GIVEN, exact={4: GIVEN})
    monkeypatch.setattr(tracing, "trace", lambda name, **asked: traces.append(asked) or bent)
    for batches in ((4,), (4, 8)):
        assert trace_by_name(NAME, batches=batches) == bent
    assert [asked["batches"] for asked in traces] == [(64,), (4,), (64,), (4, 8)]
    assert files() == []
