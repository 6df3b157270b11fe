"""The graph of a deep model from the trace of a shallow one of the same layers.

Four equal layers show what comes before the middle ones, what each of these adds and what follows the last one; a
config of any other depth is put together from that, without being built or traced. That is done only where it was seen
to be right: the two middle layers must agree in every field, and the first config of each depth is also traced in full
and compared. Sizes may differ between configs, any other field starts anew; a kind that fails is traced in full.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import torch

from latpred.errors import is_stop
from latpred.graph.graph import ZERO, Affine, ModelGraph, Op
from latpred.ops import generation
from latpred.query import ERA
from latpred.sandbox.own_thread import ThreadLock
from latpred.storage import Recent
from latpred.tracing.inputs import dtype_of
from latpred.tracing.meta_module import make_meta_module
from latpred.tracing.tracer import trace
from latpred.zoo import names

SHALLOW = 4  # layers: a first and a last one, and two between them
MOST_TRACES = 512
MOST_KINDS = 64
# Fields that make the same ops larger or smaller; two configs that differ in these alone are of one kind.
SIZES = frozenset(
    {
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
        *("max_position_embeddings", "embedding_size", "type_vocab_size", "d_model", "d_ff", "d_kv", "ffn_dim"),
        *("num_heads", "dim", "hidden_dim", "n_heads", "n_embd", "n_head", "n_inner", "n_positions", "n_ctx"),
    }
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class _Part:
    """Ops of a stack of four: up to the second layer, the second layer, from the last layer on.

    What was made of them for one depth serves others: whoever prices ops has seen those before.
    """

    path: str  # of the list of layers
    head: tuple[Op, ...]
    middle: tuple[Op, ...]
    tail: tuple[Op, ...]
    growth: Affine  # by which each layer raises the memory that is alive, as a cache of keys and values does
    _layers: list[tuple[Op, ...]] = field(default_factory=list)  # from the second on
    _tails: dict[int, tuple[Op, ...]] = field(default_factory=dict)  # by depth

    def deepened(self, depth: int) -> tuple[Op, ...]:
        """The ops of so many layers, four or more."""
        for number in range(1 + len(self._layers), depth - 1):
            self._layers.append(tuple(_moved(self.middle, self.path, 1, number, self.growth, number - 1)))
        if depth not in self._tails:
            moved = _moved(self.tail, self.path, SHALLOW - 1, depth - 1, self.growth, depth - SHALLOW)
            self._tails[depth] = tuple(moved)
        return (*self.head, *chain.from_iterable(self._layers[: depth - 2]), *self._tails[depth])


class _Stack(NamedTuple):
    """A traced model of four layers, ready to be made deeper."""

    graph: ModelGraph
    part: _Part
    part_at_one: _Part | None
    parameters: int  # of one layer
    parameter_bytes: int

    def at(self, depth: int) -> ModelGraph:
        """The graph with another number of layers, four or more."""
        more, exact = depth - SHALLOW, self.part_at_one
        return msgspec.structs.replace(
            self.graph,
            parameters=self.graph.parameters + more * self.parameters,
            parameter_bytes=self.graph.parameter_bytes + more * self.parameter_bytes,
            ops=self.part.deepened(depth),
            ops_at_one=None if exact is None else exact.deepened(depth),
        )


class LayerExtrapolation:
    """Graphs of transformers configs; keeps a bounded number of traces. Threads take turns."""

    def __init__(self) -> None:
        self._stacks: Recent[_Stack | None] = Recent(MOST_TRACES)
        self._graphs: Recent[ModelGraph] = Recent(MOST_TRACES)
        self._kinds: Recent[set[int]] = Recent(MOST_KINDS)
        self._lock = ThreadLock()

    def graph(self, config: Any, **options: Any) -> ModelGraph:
        """What `latpred.trace` gives for a config's base model with the same options."""
        with names.attention(options.get("attention")):
            return self._graph(config, options)

    def _graph(self, config: Any, options: dict[str, Any]) -> ModelGraph:
        depth, fields = getattr(config, "num_hidden_layers", None), _fields(config)
        if fields is None or type(depth) is not int:
            return trace(names.build_config(config), **options)
        surroundings = (names.attention_asked(), ERA.get(), torch.get_default_dtype(), generation())
        asked = (type(config), *sorted(options.items()), *surroundings)
        key = (*asked, *fields.items())

        def whole() -> ModelGraph:
            return self._graphs.get((depth, *key), lambda: trace(names.build_config(config), **options))

        with self._lock.held():
            if depth <= SHALLOW:
                return whole()
            kind = (*asked, *((name, text) for name, text in fields.items() if name not in SIZES))
            stack = self._stacks.get(key, lambda: _stack(config, options))
            right_at = self._kinds.get(kind, set)
            if stack is None or _NEVER in right_at:
                return whole()
            if depth not in right_at:
                right_at.add(depth if stack.at(depth) == whole() else _NEVER)
                return whole()
            return stack.at(depth)


_NEVER = -1


def _fields(config: Any) -> dict[str, str] | None:
    """Everything a config holds but its depth, as text; None where the text does not say everything."""
    depth = getattr(type(config), "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    fields = {name: repr(value) for name, value in vars(config).items() if name != depth}
    return None if any(_ADDRESS.search(text) for text in fields.values()) else fields


def _stack(config: Any, options: dict[str, Any]) -> _Stack | None:
    """The config's layers four times, taken apart; None where they are no such stack."""
    shallow = copy.deepcopy(config)
    try:
        shallow.num_hidden_layers = SHALLOW
        model = names.build_config(shallow)
        parts = [(path, part) for path, part in model.named_modules() if isinstance(part, torch.nn.ModuleList)]
        lists = [(path, part) for path, part in parts if len(part) == SHALLOW]
        if len(lists) != 1:
            return None
        graph = trace(model, **options)
    except Exception as error:  # the config allows no other depth; the full trace will say what is wrong
        if is_stop(error):
            raise
        return None
    path, layers = lists[0]
    part = _taken_apart(graph.ops, path)
    exact = None if graph.ops_at_one is None else _taken_apart(graph.ops_at_one, path)
    if part is None or (exact is None) != (graph.ops_at_one is None):
        return None
    layer = make_meta_module(layers[1], dtype_of(options.get("precision")))
    return _Stack(graph, part, exact, layer.parameters, layer.parameter_bytes)


def _taken_apart(ops: tuple[Op, ...], path: str) -> _Part | None:
    """The parts of a trace of four layers; None where the two in the middle differ in more than their number."""
    firsts = [next((i for i, op in enumerate(ops) if _within(op.module, f"{path}.{n}")), -1) for n in range(SHALLOW)]
    if -1 in firsts or firsts != sorted(firsts):
        return None
    _, second, third, last = firsts
    middle, other = ops[second:third], ops[third:last]
    growth = other[0].live_bytes - middle[0].live_bytes
    if tuple(_moved(middle, path, 1, 2, growth)) != other:
        return None
    return _Part(path, ops[:second], middle, ops[last:], growth)


def _moved(ops: tuple[Op, ...], path: str, old: int, new: int, growth: Affine, times: int = 1) -> Iterator[Op]:
    """A layer's ops as another layer issues them."""
    source, target = f"{path}.{old}", f"{path}.{new}"
    raised = growth * times
    for op in ops:
        module = target + op.module[len(source) :] if _within(op.module, source) else op.module
        live_bytes = op.live_bytes if raised == ZERO else op.live_bytes + raised
        yield msgspec.structs.replace(op, module=module, live_bytes=live_bytes)


def _within(module: str, path: str) -> bool:
    return module == path or module.startswith(path + ".")


STACKS = LayerExtrapolation()
