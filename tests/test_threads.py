"""Predictions beside other threads: nothing that belongs to the process is different, for a moment or for good."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from processstate import different, settings
from torch import nn
from transformers import BertConfig

import latpred
from latpred.runtimes import lowering
from latpred.runtimes.onnx import onnx_export
from latpred.sandbox.own_thread import TOOLS, no_collection, replaced
from latpred.tracing.meta_module import Unweighted
from latpred.zoo import names

THREADS = 8
DEVICE = "epyc-shared"


@cache
def import_everything() -> None:
    """Have every runtime and two named models predicted once, which imports what such predictions import."""
    for runtime in ("eager", "torchscript", "onnxruntime", "compile"):
        latpred.predict(nn.Linear(4, 4), inputs=torch.zeros(1, 4), runtime=runtime, device=DEVICE)
    latpred.trace("torchvision:resnet18")
    latpred.trace("gpt2")


@pytest.fixture
def unchanged() -> Iterator[None]:
    """After a test no setting of the process is another one; layers here draw from torch's generator."""
    import_everything()
    known = settings()
    assert len(known) >= 25
    yield
    assert different(known, settings(), but=("torch's generator",)) == []


class Net(nn.Module):
    """A network whose weights follow from a seed, whatever else draws random numbers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)
        for weight in self.parameters():
            nn.init.normal_(weight, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        return self.head(self.attention(tokens, tokens, tokens)[0].mean(1))  # type: ignore[no-any-return]


def trained(seed: int) -> dict[str, torch.Tensor]:
    """The weights of a network after one step."""
    model = Net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    return model.state_dict()


def uninitialised(layer: nn.Linear) -> bool:
    """Whether a layer lacks the weights that PyTorch gives a new one."""
    bound = layer.in_features**-0.5
    return bool((layer.weight.abs() > bound).any()) or float(layer.weight.detach().std()) < bound / 10


def test_threads_that_build_train_and_predict_at_once_do_not_notice_each_other(unchanged: None) -> None:
    alone = [trained(seed) for seed in range(THREADS)]
    expected = latpred.predict(Net(), inputs=torch.zeros(1, 3, 8, 8), device=DEVICE).latency_ms
    start, wrong, end = threading.Barrier(THREADS), [], time.monotonic() + 3

    def one(seed: int) -> int:
        rounds = 0
        start.wait()
        while time.monotonic() < end or not rounds:
            if uninitialised(nn.Linear(64, 64)):
                wrong.append("a layer without weights")
            found = trained(seed)
            if any(not torch.equal(tensor, alone[seed][name]) for name, tensor in found.items()):
                wrong.append(f"other weights with seed {seed}")
            name = ("torchvision:resnet18", "gpt2")[seed % 2]
            built = names.build(name).model
            if any(not weight.is_meta for weight in built.parameters()):
                wrong.append("a named model with weights")
            table = latpred.predict_many([lambda: Net()], inputs=torch.zeros(1, 3, 8, 8), device=DEVICE)
            if table.latency_ms[0] != expected:
                wrong.append("another latency")
            rounds += 1
        return rounds

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(one, range(THREADS)))
    assert wrong == []


@pytest.mark.parametrize(
    ("runtime", "target"),
    [
        *(("eager", "cpu"), ("torchscript", "cpu"), ("torchscript", "cuda"), ("onnxruntime", "cpu")),
        *(("compile", "cpu"), ("compile", "cuda"), ("cuda-graphs", "cuda")),
    ],
)
def test_no_setting_is_different_after_a_prediction(runtime: str, target: str, unchanged: None) -> None:
    lowering.trace_for_runtime(Net(), torch.zeros(1, 3, 8, 8), runtime=runtime, target=target)


def test_no_setting_is_different_meanwhile(unchanged: None) -> None:
    """Seen by another thread, while models are built by all ways there are and traced."""
    seen: SimpleQueue[list[str]] = SimpleQueue()  # what a trace puts into a list is taken out again

    def look(*_: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(settings).result()
        # The collector has one switch for all threads, off in a trace; from the generator a layer here draws.
        seen.put(different(elsewhere, found, but=("collector", "torch's generator")))

    class Watched(nn.Linear):
        def __init__(self) -> None:
            look()
            super().__init__(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            look()
            return super().forward(x)

    with ThreadPoolExecutor(1) as other:
        elsewhere = other.submit(settings).result()
    table = latpred.predict_many([lambda: Watched()], inputs=torch.zeros(1, 4), device=DEVICE)
    assert table.error.isna().all()
    latpred.predict(Watched(), inputs=torch.zeros(1, 4), device=DEVICE)
    layers = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.models.bert.modeling_bert.BertModel._init_weights", look, raising=False)
        patch.setattr("transformers.models.bert.modeling_bert.BertModel.get_input_embeddings", look)
        assert latpred.predict_many([layers], device=DEVICE).error.isna().all()
    looks = [seen.get() for _ in range(seen.qsize())]
    assert len(looks) >= 8
    assert [look for look in looks if look] == []


@pytest.mark.parametrize("runtime", ["compile", "onnxruntime", "torchscript"])
def test_two_threads_may_ask_for_one_runtime_at_a_time(runtime: str, unchanged: None) -> None:
    """What each puts in a library's place is gone when both are done, in whatever order they end."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(latpred.predict, Net(), inputs=torch.zeros(1, 3, 6 + n, 8), runtime=runtime, device=DEVICE)
            for n in range(2)
        ]
        assert all(job.result().latency_ms > 0 for job in jobs)


def test_other_threads_warn_log_and_print_while_a_model_is_exported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    usual: Callable[..., Any] = torch.onnx.export

    def other() -> None:
        print("printed")
        logging.getLogger("training").warning("logged")
        with pytest.warns(UserWarning, match="warned"):
            warnings.warn("warned", stacklevel=1)

    def export(*args: Any, **options: Any) -> Any:
        warnings.warn("of the exporter", stacklevel=1)
        logging.getLogger("torch.onnx").error("of the exporter")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other).result()
        return usual(*args, **options)

    monkeypatch.setattr(torch.onnx, "export", export)
    onnx_export.export(nn.Linear(4, 4), (torch.zeros(2, 4),))
    assert capsys.readouterr().out == "printed\n"
    assert [record.message for record in caplog.records] == ["logged"]


def test_a_function_is_replaced_for_one_thread() -> None:
    class Owner:
        @staticmethod
        def say() -> str:
            return "usual"

    class Heir(Owner):
        pass

    with replaced(Heir, "say", lambda: "mine"), replaced(Owner, "say", lambda: "other"), ThreadPoolExecutor(1) as pool:
        assert Heir.say() == "mine"
        assert pool.submit(Heir.say).result() == "usual"
    assert "say" not in vars(Heir)
    assert isinstance(vars(Owner)["say"], staticmethod)


def test_a_real_model_is_built_without_the_processs_generator(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("import torch\ndef build():\n    return torch.nn.Conv2d(3, 4, 3)\n")
    torch.manual_seed(123)
    before = torch.get_rng_state()
    latpred.predict(f"{path}:build", runtime="torchscript", device=DEVICE)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_without_weights_has_the_shapes_of_one_with_them() -> None:
    def build() -> nn.Module:
        layer = nn.LSTM(4, 4)
        nn.init.orthogonal_(layer.weight_hh_l0)
        with torch.device("cpu"):
            real = nn.Linear(2, 2)
        return nn.ModuleList([layer, nn.Conv2d(4, 4, 3), nn.MultiheadAttention(4, 2), real])

    with torch.device("meta"):
        expected = build()
        with Unweighted():
            found = build()
        assert torch.zeros(1).is_meta
    assert torch.zeros(1).device.type == "cpu"
    assert [(t.shape, t.is_meta) for t in found.parameters()] == [(t.shape, t.is_meta) for t in expected.parameters()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_process_that_is_forked_beside_a_trace_traces() -> None:
    begun, over = threading.Event(), threading.Event()

    def trace() -> None:
        with no_collection(), TOOLS.held():
            begun.set()
            over.wait()

    thread = threading.Thread(target=trace)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # where a lock is held
        with no_collection(), TOOLS.held():
            os._exit(0)
    over.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()
