"""The walk of text generation: transformers' own greedy `generate()`, cut into the prefill and the decode steps.

What is walked is the real call, so that whatever it does between two forward passes (choosing the token, growing the
ids, asking whether to stop) is in the graph with its ops and its Python. The one thing that a walk cannot know is which
token has the highest score: it is taken to be an ordinary one that ends nothing, so all new tokens are generated.

A decode step's work is affine in the number of tokens before it, so two walked steps give all; where the third step or
the last one, walked as well, is off their line (a sliding window), every step is walked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import msgspec
import torch

from latpred.errors import UsageError
from latpred.graph.dtypes import dtype_of
from latpred.graph.graph import ModelGraph, Op
from latpred.sandbox.own_thread import without_modes
from latpred.tracing.affine_ops import TracePass
from latpred.tracing.inputs import Inputs
from latpred.tracing.layer_extrapolation import NotAffineError, graph_between, same_work
from latpred.tracing.meta_module import MetaModule, make_meta_module
from latpred.tracing.op_record import OpRecord
from latpred.tracing.python_calls import HostWork
from latpred.tracing.tracer import Tracer, TraceRecorder
from latpred.zoo import names
from latpred.zoo.names import ARCHITECTURES

# transformers' classes of decoders, and those with a language-modelling head.
_HEADED = {
    "GPT2Model": "GPT2LMHeadModel",
    "LlamaModel": "LlamaForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "MixtralModel": "MixtralForCausalLM",
}


def decoder(model: torch.nn.Module | str, device: str = "meta", precision: str = "fp32") -> tuple[str, torch.nn.Module]:
    """A model's name and the module that has its `generate()`.

    Parameters
    ----------
    model : torch.nn.Module or str
        A module is returned as it is, a name is built.
    device, precision : str
        For a name: where its weights are, and of which dtype.

    Raises
    ------
    UsageError
        When the model generates no text.
    UnknownModelError
        When no model goes by the name.

    Examples
    --------
    >>> decoder("gpt2")[1].__class__.__name__
    'GPT2LMHeadModel'
    """
    name = model if isinstance(model, str) else type(model).__name__
    module = _by_name(model, device, precision) if isinstance(model, str) else model
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"a {name} generates no text; give a transformers model with a generate(), or a decoder's name"
        )
    if not hasattr(module, "prepare_inputs_for_generation") or not _can_generate(module):
        raise UsageError(
            f"{name} generates no text: it has no language-modelling head with a generate(). Give one of transformers' "
            f"causal language models (GPT2LMHeadModel, LlamaForCausalLM), or one of: {', '.join(_names())}"
        )
    config: Any = getattr(module, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"{name} is an encoder with a decoder, whose generation is not predicted; give a decoder alone, one of: "
            f"{', '.join(_names())}"
        )
    if getattr(config, "is_decoder", True) is False:
        raise UsageError(
            f"{name} is an encoder: it keeps no cache, and its head generates nothing as it is configured. Set "
            f"is_decoder=True in its config, or give one of: {', '.join(_names())}"
        )
    return name, module


def longest(module: torch.nn.Module) -> int | None:
    """The most tokens a model takes, where its config tells.

    >>> longest(decoder("gpt2")[1])
    1024
    """
    value = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return value if isinstance(value, int) and value > 0 else None


def demand_room(name: str, module: torch.nn.Module, prompt: int, new_tokens: int) -> None:
    """Refuse numbers of tokens that are none, or that the model cannot take."""
    for what, value in (("prompt", prompt), ("new_tokens", new_tokens)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{what}={value!r} is not a number of tokens; give a whole number of at least 1")
    most = longest(module)
    if most is not None and prompt + new_tokens > most:
        raise UsageError(
            f"{prompt} prompt tokens and {new_tokens} new ones are {prompt + new_tokens}, but {name} takes at most "
            f"{most}; ask for a shorter prompt or fewer new tokens"
        )


def _can_generate(module: Any) -> bool:
    can = getattr(module, "can_generate", None)
    return bool(can()) if callable(can) else False


def _names() -> list[str]:
    """Names of the decoders that can be built."""
    return [name for name, row in ARCHITECTURES.items() if row.model in _HEADED]


def _by_name(name: str, device: str, precision: str) -> torch.nn.Module:
    row = ARCHITECTURES.get(names.full_name(name) or "")
    if row is None or row.model not in _HEADED:
        return names.build(name, device=device, precision=precision).model  # or the error that says what there is
    return names.build_row(msgspec.structs.replace(row, model=_HEADED[row.model]), device, precision)


CACHES = ("dynamic", "static")
_TOKEN = 5
_WALKED = 3  # decode steps of a walk: two for the line, one to see whether it is one


class Span(NamedTuple):
    """Where the forward pass is among the ops of an iteration: its first op, and the first after it."""

    first: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One iteration of the loop: everything from one stop check to the next.

    Attributes
    ----------
    before : int
        Tokens in the cache when it starts.
    graph : ModelGraph
        All of it.
    span, span_at_one : Span
        Where the forward pass is among its ops, and among its ops at batch 1.
    """

    before: int
    graph: ModelGraph
    span: Span
    span_at_one: Span

    @property
    def forward(self) -> ModelGraph:
        """The model's forward pass alone."""
        return self._parts(lambda ops, span: ops[span.first : span.end])

    @property
    def loop(self) -> ModelGraph:
        """What `generate()` does around the forward pass."""
        return self._parts(lambda ops, span: ops[: span.first] + ops[span.end :])

    def _parts(self, choose: Callable[[tuple[Op, ...], Span], tuple[Op, ...]]) -> ModelGraph:
        exact = self.graph.ops_at_one
        return msgspec.structs.replace(
            self.graph,
            ops=choose(self.graph.ops, self.span),
            ops_at_one=None if exact is None else choose(exact, self.span_at_one),
        )


@dataclass(frozen=True, slots=True, eq=False)
class GenerationGraph:
    """What generating text does, for every batch size.

    Attributes
    ----------
    prompt, new_tokens : int
        Tokens given, and tokens generated for each sequence.
    cache : str
        "dynamic" (grows by one token each step) or "static" (as long as everything from the start).
    prefill : Stage
        From the call to the first new token.
    steps : tuple[Stage, ...]
        One for each further token.
    """

    prompt: int
    new_tokens: int
    cache: str
    prefill: Stage
    steps: tuple[Stage, ...]

    @property
    def whole(self) -> ModelGraph:
        """All iterations in one graph, the host waiting for the device between them."""
        graphs = [self.prefill.graph, *(step.graph for step in self.steps)]
        exact = [graph.ops_at_one for graph in graphs]
        at_one = None if all(ops is None for ops in exact) else _in_turn([graph.at(1) for graph in graphs])
        return msgspec.structs.replace(graphs[0], ops=_in_turn([graph.ops for graph in graphs]), ops_at_one=at_one)


@without_modes()
def trace_generation(
    model: torch.nn.Module | str,
    prompt: int,
    new_tokens: int,
    *,
    precision: str | None = None,
    cache: str = "dynamic",
) -> GenerationGraph:
    """Walk greedy generation without computing anything.

    Parameters
    ----------
    model : torch.nn.Module or str
        A transformers model with a language-modelling head and a `generate()`, or the name of a decoder ("gpt2").
    prompt : int
        Tokens of each prompt.
    new_tokens : int
        Tokens to generate for each.
    precision : {"fp32", "tf32", "fp16", "bf16"}, optional
        As what the weights count; the model's own by default.
    cache : {"dynamic", "static"}
        Kind of key-value cache.

    Raises
    ------
    UsageError
        When the model generates no text, or prompt and new tokens are longer than it can take.
    TraceError
        When `generate()` cannot be walked.

    Examples
    --------
    >>> graph = trace_generation("gpt2", prompt=16, new_tokens=4)
    >>> [step.before for step in graph.steps]
    [16, 17, 18]
    """
    if cache not in CACHES:
        raise UsageError(f"cache {cache!r} is not known; choose one of {', '.join(CACHES)}")
    dtype = None if precision is None else dtype_of(precision)
    name, module = decoder(model)
    demand_room(name, module, prompt, new_tokens)
    meta_model = make_meta_module(module, dtype)
    walker = _Walker(name, meta_model, precision, cache)
    found = _extrapolated(walker, prompt, new_tokens) if new_tokens > _WALKED + 1 else None
    prefill, *steps = found or walker.stages(prompt, new_tokens, new_tokens)
    return GenerationGraph(prompt, new_tokens, cache, prefill, tuple(steps))


class _Walker:
    """Walks `generate()` with any prompt."""

    def __init__(self, name: str, meta_model: MetaModule, precision: str | None, cache: str) -> None:
        self._name, self._meta_model, self._precision, self.cache = name, meta_model, precision, cache

    def stages(self, prompt: int, new_tokens: int, walked: int) -> list[Stage]:
        """The prefill and the first decode steps, `walked` in all, of a call that asks for `new_tokens`."""
        tracer = _GenerationTracer(self._meta_model, prompt, new_tokens, self.cache, walked)
        whole = tracer.graph(self._name, self._precision, "contiguous")
        cuts, exact_cuts = tracer.cuts[2], tracer.cuts[1]
        return [_stage(whole, prompt + index - 1 if index else 0, index, cuts, exact_cuts) for index in range(walked)]


def _extrapolated(walker: _Walker, prompt: int, new_tokens: int) -> list[Stage] | None:
    """The prefill and all steps, on the line through the first two; None where other walked steps are not on it."""
    prefill, first, second, third = walker.stages(prompt, new_tokens, 1 + _WALKED)
    steps = new_tokens - 1

    def step(number: int) -> Stage:
        graph = graph_between(first.graph, second.graph, (number, 1))
        return Stage(prompt + number, graph, first.span, first.span_at_one)

    try:
        found = [first, *(step(number) for number in range(1, steps))]
    except NotAffineError:
        return None
    if not same_work(found[2].graph, third.graph):
        return None
    if walker.cache == "dynamic":  # a static cache is as long in the last step as in the first
        last = walker.stages(prompt + steps - 1, 2, 2)[1]
        if not same_work(found[-1].graph, last.graph):
            return None
    return [prefill, *found]


class _GenerationTracer(Tracer):
    """Walks `generate()` in place of a forward pass, and notes where each iteration and its forward pass begin.

    The notes are taken by the two methods that `generate()` calls around a forward pass; the twin is this walk's own.
    """

    def __init__(self, meta_model: MetaModule, prompt: int, new_tokens: int, cache: str, walked: int) -> None:
        self._token = _ordinary_token(meta_model.module)
        ids = torch.full((1, prompt), self._token)
        super().__init__(meta_model, Inputs(lambda batch: _prompts(ids, batch), "seq", prompt), channels_last=False)
        self.cuts: dict[int, list[list[int]]] = {}
        self._new_tokens, self._cache, self._walked = new_tokens, cache, walked
        self._recorder = _GreedyWalk(None, self._token)
        self._note()

    def walk(self, batch: int, host: HostWork | None = None) -> TracePass:
        """One call at one batch size."""
        done = super().walk(batch, host)
        self.cuts[batch] = self._recorder.marks
        return done

    def recorder(self, host: HostWork | None) -> TraceRecorder:
        """A walk that chooses tokens."""
        self._recorder = _GreedyWalk(host, self._token)
        return self._recorder

    def target(self) -> Callable[..., Any]:
        """`generate()`, greedy."""
        module: Any = self._meta_model.module
        config = getattr(module, "generation_config", None)
        end = getattr(config, "eos_token_id", None)
        options: dict[str, Any] = {"max_new_tokens": self._new_tokens, "do_sample": False, "num_beams": 1}
        if end is not None and getattr(config, "pad_token_id", None) is None:
            options["pad_token_id"] = end[0] if isinstance(end, list) else end
        if self._cache == "static":
            options["cache_implementation"] = "static"
        if self._walked == self._new_tokens:
            return partial(module.generate, **options)

        def begin(**inputs: torch.Tensor) -> None:
            self._recorder.hide_caller()
            with suppress(_EnoughError):
                module.generate(**inputs, **options)

        return begin

    def _note(self) -> None:
        module: Any = self._meta_model.module
        prepare = type(module).prepare_inputs_for_generation.__get__(module)
        update = type(module)._update_model_kwargs_for_generation.__get__(module)

        @wraps(prepare)  # generate() asks for its signature
        def prepare_inputs_for_generation(*args: Any, **options: Any) -> Any:
            walk = self._recorder
            walk.hide_caller()
            if len(walk.marks) == self._walked:
                raise _EnoughError
            walk.choosing = False
            walk.marks.append([len(walk.entries)])
            made = prepare(*args, **options)
            walk.marks[-1].append(len(walk.entries))
            return made

        def update_model_kwargs(*args: Any, **options: Any) -> Any:
            walk = self._recorder
            walk.hide_caller()
            walk.choosing = True
            walk.marks[-1].append(len(walk.entries))
            return update(*args, **options)

        module.__dict__["prepare_inputs_for_generation"] = prepare_inputs_for_generation
        module.__dict__["_update_model_kwargs_for_generation"] = update_model_kwargs


class _EnoughError(Exception):
    """Ends a walk after the iterations that were asked for."""


class _GreedyWalk(TraceRecorder):  # type: ignore[no-untyped-call]
    """Answers the choice of a token, which is made outside the model, with an ordinary one.

    Attributes
    ----------
    marks : list of three int
        Of each iteration: its first op, the first of its forward pass, the first after that.
    choosing : bool
        Whether the forward pass is over.
    """

    def __init__(self, host: HostWork | None, token: int) -> None:
        super().__init__(host)
        self.marks: list[list[int]] = []
        self.choosing = False
        self._token = token

    def record(self, entry: OpRecord, out: Any) -> Any:
        """Keep an entry; a chosen token becomes a real one."""
        if self.choosing and entry.name == "aten::argmax" and out.is_meta:
            out = torch.full(out.shape, self._token)
        return super().record(entry, out)

    def hide_caller(self) -> None:
        """Let a function of the walk's own not count as the model's Python; to be called by it."""
        if self._host is not None:
            self._host.forget(2)  # this call and the one that made it


def _ordinary_token(module: torch.nn.Module) -> int:
    """An ordinary token of the vocabulary that is none of the special ones."""
    config: Any = getattr(module, "generation_config", None)
    special: set[int] = set()
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        value = getattr(config, name, None)
        special.update(value if isinstance(value, list) else [] if value is None else [value])
    return next(token for token in range(_TOKEN, _TOKEN + len(special) + 1) if token not in special)


def _prompts(ids: torch.Tensor, batch: int) -> dict[str, torch.Tensor]:
    full = ids.expand(batch, -1).contiguous()
    return {"input_ids": full, "attention_mask": torch.ones_like(full)}


def _stage(whole: ModelGraph, before: int, index: int, cuts: list[list[int]], exact_cuts: list[list[int]]) -> Stage:
    """One iteration of a walk; the first takes in what comes before it."""
    begin, span, end = _bounds(cuts, index)
    exact_begin, exact_span, exact_end = _bounds(exact_cuts, index)
    rows = whole.ops_at_one
    exact = None if rows is None else _waited_for(rows[exact_begin:exact_end])
    graph = msgspec.structs.replace(whole, ops=_waited_for(whole.ops[begin:end]), ops_at_one=exact)
    return Stage(before, graph, span, exact_span)


def _bounds(cuts: list[list[int]], index: int) -> tuple[int, Span, int | None]:
    start, first, last = cuts[index]
    begin = start if index else 0
    return begin, Span(first - begin, last - begin), cuts[index + 1][0] if index + 1 < len(cuts) else None


def _in_turn(stages: list[tuple[Op, ...]]) -> tuple[Op, ...]:
    """Ops of iterations in a row, with the wait at the end of each but the last."""
    *others, last = stages
    waiting = [(*ops[:-1], msgspec.structs.replace(ops[-1], syncs=ops[-1].syncs + 1)) for ops in others]
    return (*(op for ops in waiting for op in ops), *last)


def _waited_for(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Without the last synchronisation, for which the wait at the end of a stage stands."""
    index = next((i for i in reversed(range(len(ops))) if ops[i].syncs), None)
    if index is None or any(op.launches for op in ops[index + 1 :]):
        return ops
    return (*ops[:index], msgspec.structs.replace(ops[index], syncs=ops[index].syncs - 1), *ops[index + 1 :])
