"""Traces of text generation: transformers' own greedy `generate()`, cut into the prefill and the decode steps.

Traced is the real call, with its ops and Python between two forward passes. The token with the highest score, which no
trace can know, is taken to be an ordinary one that ends nothing. A decode step's work is affine in the tokens before
it, so two steps give all; where the third or the last one is off their line (a sliding window), every step is traced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import msgspec
import torch

from latpred.errors import UsageError
from latpred.graph.graph import COUNTS, ModelGraph, Op, combined
from latpred.graph.rewrites import attended
from latpred.query import check_attention, whole_number
from latpred.sandbox.own_thread import uncounted, without_modes
from latpred.tracing.inputs import Inputs, dtype_of, longest, refuse_autocast
from latpred.tracing.meta_module import MetaModule, attend, make_meta_module
from latpred.tracing.op_record import OpRecord
from latpred.tracing.trace_pass import RETURN, PassWatcher, TracePass, same_ops
from latpred.tracing.tracer import Naming, Tracer, TraceRecorder, dtype_of_build
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


def decoder(
    model: torch.nn.Module | str, device: str = "meta", precision: str | None = None
) -> tuple[str, torch.nn.Module]:
    """A model's name and the module that has its `generate()`."""
    name = model if isinstance(model, str) else type(model).__name__
    module = _by_name(model, device, precision) if isinstance(model, str) else model
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"a {name} generates no text; give a transformers model with a generate(), as "
            "AutoModelForCausalLM.from_config(config), or a decoder's name"
        )
    can_generate = getattr(module, "can_generate", None)
    if not hasattr(module, "prepare_inputs_for_generation") or not callable(can_generate) or not can_generate():
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
    return name, module


def demand_room(name: str, module: torch.nn.Module, prompt: int, new_tokens: int) -> tuple[int, int]:
    """Numbers of tokens of the prompt and of new ones; refuse what is none, or what the model cannot take."""
    prompt = whole_number("prompt", prompt, "number of tokens")
    new_tokens = whole_number("new_tokens", new_tokens, "number of tokens")
    most, taken = longest(module), prompt + new_tokens - 1  # the last token is not fed back
    if most is not None and taken > most:
        raise UsageError(
            f"{prompt} prompt tokens and {new_tokens} new ones take {taken} positions, but {name} has {most}; ask for "
            "a shorter prompt or fewer new tokens"
        )
    return prompt, new_tokens


def _names() -> list[str]:
    """Names of the decoders that can be built."""
    return [name for name, row in ARCHITECTURES.items() if row.model in _HEADED]


def _by_name(name: str, device: str, precision: str | None) -> torch.nn.Module:
    row = ARCHITECTURES.get(names.full_name(name) or "")
    if row is None or row.model not in _HEADED:
        return names.build(name, device=device, precision=precision).model  # or the error that says what there is
    return names.build_row(msgspec.structs.replace(row, model=_HEADED[row.model]), device, precision)


CACHES = ("dynamic", "static")
_TOKEN = 5
_TRACED = 3  # decode steps of a pass: two for the line, one to see whether it is one
_WORK = COUNTS[:-1]  # without what is alive


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One iteration of the loop: everything from one stop check to the next."""

    graph: ModelGraph
    span: slice  # the forward pass among the ops
    span_at_one: slice  # and among those at batch 1

    @property
    def forward(self) -> ModelGraph:
        """The model's forward pass alone."""
        return self._parts(lambda ops, span: ops[span])

    @property
    def loop(self) -> ModelGraph:
        """What `generate()` does around the forward pass."""
        return self._parts(lambda ops, span: ops[: span.start] + ops[span.stop :])

    def _parts(self, choose: Callable[[tuple[Op, ...], slice], tuple[Op, ...]]) -> ModelGraph:
        exact = self.graph.ops_at_one
        return msgspec.structs.replace(
            self.graph,
            ops=choose(self.graph.ops, self.span),
            ops_at_one=None if exact is None else choose(exact, self.span_at_one),
        )


@dataclass(frozen=True, slots=True, eq=False)
class GenerationGraph:
    """What generating text does, for every batch size."""

    prompt: int  # tokens given
    new_tokens: int  # generated for each sequence
    cache: str  # "dynamic" (grows by one token each step) or "static" (as long as everything from the start)
    prefill: Stage  # from the call to the first new token
    steps: Sequence[Stage]  # one for each further token

    @property
    def whole(self) -> ModelGraph:
        """All iterations in one graph, the host waiting for the device between them."""
        graphs = [self.prefill.graph, *(step.graph for step in self.steps)]
        on_line = all(graph.ops_at_one is None for graph in graphs)
        at_one = None if on_line else _in_turn([graph.at(1) for graph in graphs])
        return msgspec.structs.replace(graphs[0], ops=_in_turn([graph.ops for graph in graphs]), ops_at_one=at_one)


@without_modes()
def trace_generation(
    model: torch.nn.Module | str,
    prompt: int,
    new_tokens: int,
    *,
    precision: str | None = None,
    attention: str | None = None,
    cache: str = "dynamic",
    target: str = "cuda",
) -> GenerationGraph:
    """Trace greedy generation without computing anything."""
    if cache not in CACHES:
        raise UsageError(f"cache {cache!r} is not known; choose one of {', '.join(CACHES)}")
    dtype = dtype_of(precision)
    refuse_autocast(precision, "generation")
    check_attention(attention)
    with names.attention(attention), dtype_of_build(model):
        name, module = decoder(model)
    prompt, new_tokens = demand_room(name, module, prompt, new_tokens)
    naming = Naming(name, precision, target=target)
    made = make_meta_module(module, dtype)
    attend(made.module, attention)

    def stages(prompt: int, new_tokens: int, traced: int) -> list[Stage]:
        """The prefill and the first decode steps, `traced` in all, of a call that asks for `new_tokens`."""
        tracer = _GenerationTracer(made, naming, cache, prompt, new_tokens, traced)
        with dtype_of_build(model):
            whole = _attended(tracer.graph(), attention)
        cuts, exact_cuts = tracer.cuts[2], tracer.cuts[1]
        return [_stage(whole, index, cuts, exact_cuts) for index in range(traced)]

    extrapolated = _extrapolated(stages, prompt, new_tokens) if new_tokens > _TRACED + 1 else None
    if extrapolated is None:
        prefill, *steps = stages(prompt, new_tokens, new_tokens)
        extrapolated = prefill, steps
    return GenerationGraph(prompt, new_tokens, cache, *extrapolated)


def _extrapolated(
    stages: Callable[[int, int, int], list[Stage]], prompt: int, new_tokens: int
) -> tuple[Stage, Sequence[Stage]] | None:
    """The prefill and all steps, on the line through the first two; None where other traced steps are not on it."""
    prefill, first, second, third = stages(prompt, new_tokens, 1 + _TRACED)
    if not _same_ops(first.graph, second.graph):
        return None
    steps = _StepsOnLine(first, second, new_tokens - 1)
    last = stages(prompt + new_tokens - 2, 2, 2)[1]
    straight = all(same_work(steps[number].graph, traced.graph) for number, traced in ((2, third), (-1, last)))
    return (prefill, steps) if straight else None


@dataclass(frozen=True, slots=True, eq=False)
class _StepsOnLine(Sequence[Stage]):
    """Steps that differ in sizes only; one is made when it is asked for, since few of a thousand are."""

    first: Stage
    second: Stage
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Stage:  # type: ignore[override]
        number = range(self.length)[index]
        graph = _graph_on_line(self.first.graph, self.second.graph, number)
        return Stage(graph, self.first.span, self.first.span_at_one)


def _graph_on_line(first: ModelGraph, second: ModelGraph, steps: int) -> ModelGraph:
    """The graph so many steps behind the first, where the second is one step behind it."""

    def on_line(ops: Sequence[Op], others: Sequence[Op]) -> tuple[Op, ...]:
        pairs = zip(ops, others, strict=True)
        line = (combined(pair, lambda x, y: x if x == y else x + (y - x) * steps) for pair in pairs)
        if not steps:
            return tuple(line)
        # Weights were last read a step ago, or for the first step in the prefill, which touches far more.
        return tuple(
            msgspec.structs.replace(op, reread_after=later.reread_after) for op, later in zip(line, others, strict=True)
        )

    exact = None
    if first.ops_at_one is not None and second.ops_at_one is not None:
        exact = on_line(first.ops_at_one, second.ops_at_one)
    return msgspec.structs.replace(first, ops=on_line(first.ops, second.ops), ops_at_one=exact)


def _same_ops(a: ModelGraph, b: ModelGraph) -> bool:
    """Whether two graphs differ in sizes at most."""
    return same_ops(a.ops, b.ops) and same_ops(a.ops_at_one or (), b.ops_at_one or ())


def same_work(a: ModelGraph, b: ModelGraph) -> bool:
    """Whether two graphs launch the same work, whatever the host was seen to do around it."""
    return _rows(a.ops) == _rows(b.ops) and _rows(a.ops_at_one or ()) == _rows(b.ops_at_one or ())


def _rows(ops: tuple[Op, ...]) -> list[tuple[object, ...]]:
    return [
        (op.name, op.family, op.dims, op.launches, op.syncs, *(getattr(op, name) for name in _WORK))
        for op in ops
        if op.name != RETURN
    ]


class _GenerationTracer(Tracer):
    """Traces `generate()` in place of a forward pass, and notes where each iteration and its forward pass begin.

    The notes are taken by the two methods that `generate()` calls around a forward pass.
    """

    def __init__(
        self, meta_module: MetaModule, naming: Naming, cache: str, prompt: int, new_tokens: int, traced: int
    ) -> None:
        self._token = _ordinary_token(meta_module.module)

        def prompts(batch: int) -> dict[str, torch.Tensor]:
            ids = torch.full((batch, prompt), self._token)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        super().__init__(meta_module, Inputs(prompts, "seq", prompt), naming)
        self.cuts: dict[int, list[list[int]]] = {}  # by batch: what the recorder marked
        self._new_tokens, self._cache, self._traced = new_tokens, cache, traced
        self._recorder: _GreedyRecorder  # of the latest pass
        self._note()

    def one_pass(self, batch: int, *, watched: bool = False) -> TracePass:
        done = super().one_pass(batch, watched=watched)
        self.cuts[batch] = self._recorder.marks
        return done

    def recorder(self, watcher: PassWatcher | None) -> TraceRecorder:
        self._recorder = _GreedyRecorder(watcher, self._token)
        return self._recorder

    def target(self) -> Callable[..., Any]:
        module: Any = self._meta_module.module
        config = getattr(module, "generation_config", None)
        end = getattr(config, "eos_token_id", None)
        options: dict[str, Any] = {"max_new_tokens": self._new_tokens, "do_sample": False, "num_beams": 1}
        if end is not None and getattr(config, "pad_token_id", None) is None:
            options["pad_token_id"] = end[0] if isinstance(end, list) else end
        if self._cache == "static":
            options["cache_implementation"] = "static"

        @uncounted
        def begin(**inputs: torch.Tensor) -> None:
            try:
                module.generate(**inputs, **options)
            except _EnoughError:
                return  # `suppress` would be calls of Python, which are counted

        return begin

    def _note(self) -> None:
        module: Any = self._meta_module.module
        if not hasattr(type(module), "_update_model_kwargs_for_generation"):
            raise UsageError(
                f"{self._naming.model} hands generate() on to a model within it; give that model, as PEFT's "
                "get_base_model() does"
            )
        prepare = type(module).prepare_inputs_for_generation.__get__(module)
        update = type(module)._update_model_kwargs_for_generation.__get__(module)

        @wraps(prepare)  # generate() asks for its signature
        @uncounted
        def prepare_inputs_for_generation(*args: Any, **options: Any) -> Any:
            recorder = self._recorder
            if len(recorder.marks) == self._traced:
                raise _EnoughError
            recorder.choosing = False
            recorder.marks.append([len(recorder.records)])
            made = prepare(*args, **options)
            recorder.marks[-1].append(len(recorder.records))
            return made

        @uncounted
        def update_model_kwargs(*args: Any, **options: Any) -> Any:
            recorder = self._recorder
            recorder.choosing = True
            recorder.marks[-1].append(len(recorder.records))
            return update(*args, **options)

        module.__dict__["prepare_inputs_for_generation"] = prepare_inputs_for_generation
        module.__dict__["_update_model_kwargs_for_generation"] = update_model_kwargs


class _EnoughError(Exception):
    """Ends a pass after the iterations that were asked for."""


class _GreedyRecorder(TraceRecorder):  # type: ignore[no-untyped-call]
    """Answers the choice of a token, which is made outside the model, with an ordinary one."""

    def __init__(self, watcher: PassWatcher | None, token: int) -> None:
        super().__init__(watcher)
        # Of each iteration: its first op, the first of its forward pass, the first after that.
        self.marks: list[list[int]] = []
        self.choosing = False  # whether the forward pass is over
        self._token = token

    def record(self, record: OpRecord, out: Any) -> Any:
        """Keep a record; a chosen token becomes a real one."""
        if self.choosing and record.name == "aten::argmax" and out.is_meta:
            out = torch.full(out.shape, self._token)
        return super().record(record, out)


def _ordinary_token(module: torch.nn.Module) -> int:
    """An ordinary token of the vocabulary that is none of the special ones."""
    config: Any = getattr(module, "generation_config", None)
    size = getattr(module.config, "vocab_size", None) or sys.maxsize
    special: set[int] = set()
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        value = getattr(config, name, None)
        special.update(value if isinstance(value, list) else [] if value is None else [value])
    tokens = (*range(_TOKEN, _TOKEN + len(special) + 1), *range(_TOKEN))
    return next((token for token in tokens if token not in special and token < size), 0)


def _attended(graph: ModelGraph, attention: str | None) -> ModelGraph:
    """The graph with the word of how attention was asked for; an error where the model computes it otherwise."""
    made = graph if attention is None else attended(graph, attention)
    if len(made.ops) != len(graph.ops):  # rewritten, which would move the cuts
        raise UsageError(f"{graph.model} computes attention in one call whatever its config says; leave attention out")
    return made


def _stage(whole: ModelGraph, index: int, cuts: list[list[int]], exact_cuts: list[list[int]]) -> Stage:
    """One iteration of a pass; the first takes in what comes before it."""
    own, span = _bounds(cuts, index)
    own_at_one, exact_span = _bounds(exact_cuts, index)
    rows = whole.ops_at_one
    exact = None if rows is None else _waited_for(rows[own_at_one])
    graph = msgspec.structs.replace(whole, ops=_waited_for(whole.ops[own]), ops_at_one=exact)
    return Stage(graph, span, exact_span)


def _bounds(cuts: list[list[int]], index: int) -> tuple[slice, slice]:
    """Where an iteration is among the ops of a pass, and its forward pass among its own."""
    start, first, last = cuts[index]
    begin = start if index else 0
    end = cuts[index + 1][0] if index + 1 < len(cuts) else None
    return slice(begin, end), slice(first - begin, last - begin)


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
