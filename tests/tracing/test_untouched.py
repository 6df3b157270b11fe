"""A model, and all that it and its code hold, is after a prediction what it was before."""

from __future__ import annotations

import enum
import functools
import itertools
import random
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from smallmodels import Function
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import DynamicCache

import latpred
from latpred.tracing.tracer import COMPILED

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # importing torch's compiler
DEVICE = "epyc-shared"
X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    """A layer, and things that it holds; what it gives is what a function makes of itself and the layer's result."""

    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor] | None = None, **held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        nn.init.normal_(self.layer.weight, generator=torch.Generator().manual_seed(1))
        nn.init.ones_(self.layer.bias)
        self.use = use
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x if self.use is None else self.use(self, x)


class Rotary:
    """Keeps what it computed, as long as it fits."""

    table: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or self.table.shape[0] != x.shape[0]:
            self.table = torch.arange(x.shape[-1], device=x.device).cos().expand(x.shape[0], 1, -1).clone()
        return x * self.table


def helpers() -> nn.Module:
    filled = Rotary()
    filled(X)
    return Base(lambda self, x: self.filled(self.rotary(x)), rotary=Rotary(), filled=filled)


def grow(self: Any, x: torch.Tensor) -> torch.Tensor:
    keys, _ = self.cache.update(x[:, None].detach(), x[:, None].detach(), 0)
    return x + keys.mean((1, 2))[:, None]


@functools.lru_cache
def bias_of(width: int) -> torch.Tensor:
    return torch.arange(width).float()


@functools.cache
def table_of(width: int) -> tuple[torch.Tensor, int]:
    return torch.eye(width), width


TABLES: dict[int, torch.Tensor] = {}
TABLE: torch.Tensor | None = None
SEEN: list[Any] = []
STATE = SimpleNamespace(mask=None)
GENERATOR = torch.Generator()


class Elsewhere(Base):
    """Variables of the file and attributes of the class."""

    shared: ClassVar[dict[str, Any]] = {}
    last: ClassVar[torch.Tensor | None] = None
    table: ClassVar[torch.Tensor] = torch.zeros(0)
    reach: ClassVar[int] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global TABLE
        TABLE = x
        if x.shape[1] not in TABLES:
            TABLES[x.shape[1]] = torch.ones(x.shape[1], 1, device=x.device)
        SEEN.append(x)
        STATE.mask = x > 0
        type(self).last = self.shared["last"] = x
        if self.reach < x.shape[1]:
            type(self).table, type(self).reach = x.new_ones(x.shape[1], 1), x.shape[1]
            self.shared["object"] = SimpleNamespace(table=self.table)
        return super().forward(x) * TABLES[x.shape[1]] * len(SEEN) * self.table


def own_functions() -> nn.Module:
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor, found: dict[str, Any] | None = None) -> torch.Tensor:
        kept.append(x)
        keep.calls = getattr(keep, "calls", 0) + 1  # type: ignore[attr-defined]
        return x * len(kept) * keep.calls  # type: ignore[attr-defined]

    return Base(lambda self, x: self.part(self.keep(x)), keep=keep, part=partial(keep, found={}))


def fill(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Containers in containers in containers."""
    self.deep[0][0][0][0][0]["seen"].append(x)
    by_name, counter, recent, ordered, numbers, plain, user = self.kinds
    by_name["x"].append(x)
    counter["calls"] += 1
    recent.append(x)
    ordered[len(ordered)] = x
    numbers.add(len(numbers))
    plain["a"][1].append(x)
    user["last"] = self.top = x.topk(2)
    return x * len(self.deep[0][0][0][0][0]["seen"]) * counter["calls"] * len(numbers)


def nested() -> nn.Module:
    kinds = (defaultdict(list), Counter(), deque(maxlen=3), OrderedDict(), set(), {"a": (1, [2])}, UserDict())  # type: ignore[var-annotated]
    return Base(fill, deep=[[[[[{"seen": []}]]]]], kinds=kinds, top=X.topk(2))


def closing() -> nn.Module:
    """What a function of a class closes over: a table, and how far it reaches."""
    table, reach = torch.zeros(0), 0

    class Closing(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal table, reach
            if reach < x.shape[1]:
                table, reach = x.new_ones(x.shape[1], 1), x.shape[1]
            return super().forward(x) * table[:reach]

    return Closing()


@dataclass(slots=True)
class Slots:
    tensor: torch.Tensor
    calls: int = 0


class Frozen(dict[str, int]):
    def __copy__(self) -> Frozen:
        return Frozen(self)

    def clear(self) -> None:
        raise TypeError("frozen")


def slotted(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.slots.calls += 1
    self.slots.tensor.add_(1)
    return x * self.slots.calls * self.slots.tensor.sum() * self.settings["scale"]


def count(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    self.tensor += 1
    self.steps += 1
    self.array += 1
    return x * self.calls * self.tensor.sum() * self.steps + float(self.array.sum())


def counting() -> nn.Module:
    model = Base(count, calls=0, tensor=torch.zeros(3, dtype=torch.long), array=np.zeros(2))
    model.register_buffer("steps", torch.zeros((), dtype=torch.long))
    return model


@dataclass
class Records:
    parts: list[Any] = field(default_factory=list)
    own: Records | None = None


class Mode(enum.Enum):
    ON = 1


NOTHING = object()


def compare(self: Any, x: torch.Tensor) -> torch.Tensor:
    assert self.records.own is self.records
    assert self.records.parts[0] is self
    assert (self.mode, self.default, self.kind) == (Mode.ON, NOTHING, Mode)
    self.records.parts.append(x)
    self.me().calls += 1
    return x * len(self.records.parts) * self.calls


def identical() -> nn.Module:
    """Objects that hold each other and the model, weak references to it, and values that are compared by identity."""
    records = Records()
    model = Base(compare, records=records, calls=0, mode=Mode.ON, default=NOTHING, kind=Mode)
    records.own = records
    records.parts.append(model)
    model.me = weakref.ref(model)
    return model


def double(memory: dict[str, Any], module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    memory["out"] = out
    return 2 * out


def count_calls(module: nn.Module, args: Any) -> None:
    SEEN.append(args[0])


def hooked() -> nn.Module:
    """Hooks that collect, and one that changes the result."""
    model = Base()
    model.layer.register_forward_hook(partial(double, {}))
    model.layer.register_forward_pre_hook(count_calls)
    return model


def draw(self: Any, x: torch.Tensor) -> torch.Tensor:
    """From generators of its own and those of the process."""
    noise = torch.rand(8, generator=self.generator) + torch.rand(8, generator=GENERATOR)
    number = self.random.random() + self.rng.random() + next(self.count)
    return x + noise.to(x.device) * float(number) + torch.randperm(8).to(x.device)


def dropping(self: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, training=True)


def drawing() -> nn.Module:
    own = {"random": random.Random(4), "rng": np.random.default_rng(5), "count": itertools.count()}
    return Base(draw, generator=torch.Generator().manual_seed(3), **own)


def noisy(self: Any, x: torch.Tensor) -> torch.Tensor:
    """From PyTorch's generator alone, which tools of runtimes leave where it was."""
    return x + torch.randn_like(x)


class Closed:
    """Has a finalizer, which a copy must not run."""

    closed = 0

    def __del__(self) -> None:
        Closed.closed += 1


def layers(*more: nn.Module) -> nn.Module:
    return nn.Sequential(Base(), *more)


def changed(change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Base()
    model.layer = change(model.layer)  # type: ignore[assignment]
    return model


def with_graph() -> nn.Module:
    model = helpers()
    model.last = model(X)  # type: ignore[assignment]  # no leaf: it remembers how it was computed
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "helpers": helpers,
    "keys and values": lambda: Base(grow, cache=DynamicCache()),
    "lru_cache": lambda: Base(lambda self, x: x @ table_of(8)[0] + bias_of(8)),
    "elsewhere": Elsewhere,
    "own functions": own_functions,
    "nested": nested,
    "closing": closing,
    "slots": lambda: Base(slotted, slots=Slots(torch.zeros(64, 300)), settings=Frozen(scale=2)),
    "counting": counting,
    "identical": identical,
    "hooked": hooked,
    "drawing": drawing,
    "noisy": lambda: Base(noisy),
    "dropping": lambda: Base(dropping),
    "finalizer": lambda: Base(resource=Closed()),
    "buffers": lambda: layers(nn.BatchNorm1d(4), nn.Dropout(0.5)),
    "recurrent": lambda: layers(nn.GRU(8, 8), Function(lambda given: given[0])),
    "frozen": lambda: layers(nn.Linear(8, 8).requires_grad_(False)),
    "parametrised": lambda: changed(parametrizations.weight_norm),
    "spectral": lambda: changed(nn.utils.spectral_norm),
    "pruned": lambda: changed(lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
    "part compiled": lambda: layers(torch.compile(nn.ReLU())),  # type: ignore[arg-type]
    "with a graph": with_graph,
    "large": lambda: Base(vocabulary={str(number): number for number in range(100_000)}),
}


def as_new() -> None:
    """Give the variables of this file their first values."""
    global TABLE
    TABLE = STATE.mask = Elsewhere.last = None
    Elsewhere.table, Elsewhere.reach = torch.zeros(0), 0
    for memory in (TABLES, SEEN, Elsewhere.shared):
        memory.clear()  # type: ignore[attr-defined]
    bias_of.cache_clear()
    table_of.cache_clear()
    GENERATOR.manual_seed(7)


def called(model: nn.Module) -> torch.Tensor:
    """What a model gives, without its compiler, which takes seconds."""
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(11)
        return model(X)  # type: ignore[no-any-return]


def held(model: nn.Module) -> str:
    """A picture of what a model holds."""
    own = [{name: value for name, value in vars(part).items() if name != "training"} for part in model.modules()]
    return repr((own, [part.training for part in model.modules()]))


def kept() -> str:
    """A picture of what this file holds."""
    caches = bias_of.cache_info().currsize, table_of.cache_info().currsize
    return repr((TABLES, TABLE, SEEN, vars(STATE), Elsewhere.shared, Elsewhere.reach, GENERATOR.get_state(), caches))


def after(build: Callable[[], nn.Module], ask: Callable[[nn.Module], object] | None, runs: bool = False) -> list[Any]:
    """Build a model, have it predicted, then run it, train it and run it again: its outputs and its weights.

    A runtime that runs a copy of it may leave real tensors in the variables of this file.
    """
    as_new()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = build()
    if ask is not None:
        before, there, drawn, closed = held(model), kept(), torch.get_rng_state(), Closed.closed
        ask(model)
        assert held(model) == before
        assert runs or kept() == there
        assert torch.equal(torch.get_rng_state(), drawn)
        assert Closed.closed == closed
    outputs = [called(model)]
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    called(model).square().mean().backward()
    optimizer.step()
    outputs.append(called(model.eval()))
    return [tensor.tolist() for tensor in (*outputs, *model.parameters())]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_does_what_it_would_have_done(name: str) -> None:
    expected = after(MODELS[name], None)
    asked: dict[str, Callable[[nn.Module], object]] = {
        "predict": lambda model: latpred.predict(model, batch=[1, 4], inputs=X, device=DEVICE),
        "explain": lambda model: latpred.explain(model, runtimes=["eager"], inputs=X, device=DEVICE),
        "predict_many": lambda model: latpred.predict_many([model, model], inputs=X, device=DEVICE),
    }
    for ask in asked.values():
        assert after(MODELS[name], ask) == expected


@pytest.mark.parametrize("runtime", ["torchscript", "onnxruntime", "compile"])
@pytest.mark.parametrize("name", ["helpers", "lru_cache", "nested", "hooked", "with a graph", "noisy", "dropping"])
def test_runtimes_that_run_a_model_run_a_copy(name: str, runtime: str) -> None:
    asked: dict[str, Any] = {"inputs": X, "runtime": runtime, "device": DEVICE}
    found = after(MODELS[name], lambda model: latpred.predict(model, **asked), runs=True)
    assert found == after(MODELS[name], None)


def test_inputs_that_are_no_tensors_are_copied_too() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(2, 1, 3, 8), torch.ones(2, 1, 3, 8), 0)

    class Taking(Base):
        def forward(self, x: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
            keys, _ = cache.update(x[:, None], x[:, None], 0)
            return super().forward(keys)

    graph = latpred.trace(Taking(), {"x": X, "cache": cache})
    assert cache.get_seq_length() == 3
    linear = next(op for op in graph.ops if op.name == "aten::linear")
    assert linear.macs.at(5) == 5 * (3 + 4) * 8 * 8


def test_objects_in_each_other_may_go_deeper_than_python_calls() -> None:
    end: Any = None
    for _ in range(1000):
        end = SimpleNamespace(next=end)
    assert latpred.trace(Base(end=end), X).launches() == 1


def test_a_cache_that_grows_starts_anew_with_each_batch() -> None:
    graph = latpred.trace(MODELS["keys and values"](), X)
    assert [op.name for op in graph.ops if "cat" in op.name] == ["aten::cat", "aten::cat"]
    assert graph.macs(8) == 4 * graph.macs(2)


def test_a_compiled_model_is_priced_as_eager_and_says_so() -> None:
    compiled = Base()
    compiled.compile()
    plain = latpred.trace(Base(), X)
    assert plain.notes == ()
    within = Base(lambda self, x: torch.compile(lambda y: y, fullgraph=True)(x))
    around = torch.compile(Base()), layers(torch.compile(nn.Identity())), nn.DataParallel(compiled)  # type: ignore[arg-type]
    for model in (compiled, *around, within):
        graph = latpred.trace(model, X)
        assert graph.notes == (COMPILED,)
        assert (graph.macs(4), graph.launches()) == (plain.macs(4), plain.launches())
    assert COMPILED in latpred.predict(compiled, inputs=X, device=DEVICE).provenance.caveats
    for runtime in ("compile", "torchscript"):
        assert COMPILED not in latpred.predict(compiled, inputs=X, runtime=runtime, device=DEVICE).provenance.caveats
        assert COMPILED not in latpred.predict(graph, runtime=runtime, device=DEVICE).provenance.caveats
    assert compiled._compiled_call_impl is not None


def test_what_is_never_compiled_is_not_called_compiled() -> None:
    class Without(Base):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    assert latpred.trace(Without(), X).notes == ()
    model = Base()
    model.forward = torch.compiler.disable(model.forward)  # type: ignore[method-assign]
    assert latpred.trace(model, X).notes == ()
