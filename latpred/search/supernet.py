"""Supernet: a network with choices is traced once for each option; any architecture is then put together from that.

An architecture's trace is what all have in common, with the ops of the chosen options in the places of the choices.
Three things cross the borders between them and are counted anew: Python calls, which belong to the next op wherever it
lies; memory, which lives until the last of those who hold it lets go; and parameters.

That is done only where it was seen to be right: the architectures that were traced, one of them with options mixed,
are put together again and compared with their traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple

import msgspec
import torch

from latpred.errors import TraceError, UsageError
from latpred.graph.graph import CONTIGUOUS, NO_CALLS, NO_PYTHON, ZERO, Affine, Calls, ModelGraph, Op
from latpred.sandbox.own_thread import without_modes
from latpred.search.choices import NOWHERE, Choice, ChoiceRecorder, Span, shown
from latpred.storage import Recent
from latpred.tracing.inputs import DTYPES, Inputs, demand_one, derived, from_example, refuse_autocast, whole_sizes
from latpred.tracing.meta_module import MetaModule, make_meta_module
from latpred.tracing.trace_pass import PassWatcher, TracePass, closing, on_one_line
from latpred.tracing.tracer import Naming, Tracer, TraceRecorder, check
from latpred.zoo.candidates import traceable


class Segment(NamedTuple):
    """What one option does in one place."""

    ops: tuple[Op, ...]  # as they were traced; of the calls before the first, only those made within the option
    live: tuple[Affine, ...]  # bytes alive after each, without those that were alive before the option
    calls: Calls  # after the last op
    size: Affine | None  # bytes of the memory that it gives; None where that is its input's


NOTHING = Segment((), (), NO_CALLS, None)


class Event(NamedTuple):
    """An op that all architectures have, or the place of a choice."""

    segment: Segment | None  # the op; None at the place of a choice
    calls: Calls  # before it
    death: int | None  # the first event that no longer has the memory made here; None where it stays
    source: int | None  # the event that made the input of a choice; None where that was there before


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """The place of a choice with the events up to the next one, and the bytes alive before each."""

    events: tuple[Event, ...]
    alive: tuple[Affine, ...]


class Piece(NamedTuple):
    """What one option makes of a stretch, and the calls after its last op."""

    ops: tuple[Op, ...]
    calls: Calls


@dataclass(frozen=True, slots=True)
class TracedOption:
    """The passes of one architecture, and what its choices did in the one that was watched."""

    graph: ModelGraph
    two: TracePass
    three: TracePass
    spans: list[Span]

    def new_bytes(self, op: int) -> Affine:
        at_two, at_three = (done.records[op].new_bytes for done in (self.two, self.three))
        return Affine.through((2, at_two), (3, at_three))


class _ChoiceTracer(Tracer):
    """Traces a network whose choices tell a recorder what they do."""

    def __init__(self, meta_module: MetaModule, inputs: Inputs, naming: Naming) -> None:
        self.choices = [part for part in meta_module.module.modules() if isinstance(part, Choice)]
        paths = _paths(meta_module, self.choices)
        super().__init__(replace(meta_module, paths=paths), inputs, naming)
        self._choice_recorder = ChoiceRecorder(paths)
        self._passes: dict[int, tuple[TracePass, list[Span]]] = {}  # the latest at each batch size
        for choice in self.choices:
            choice.recorder = self._choice_recorder

    def recorder(self, watcher: PassWatcher | None) -> TraceRecorder:
        self._choice_recorder.start(watcher)
        return super().recorder(watcher)

    def one_pass(self, batch: int, *, watched: bool = False) -> TracePass:
        """One forward pass at one batch size; its choices must fit those of the passes before it."""
        self._choice_recorder.batch = batch
        done = super().one_pass(batch, watched=watched)
        spans = self._choice_recorder.spans
        expected = self._choice_recorder.expected.setdefault(batch, spans)
        if len(spans) < len(expected):
            raise TraceError(
                f"the network goes without {expected[len(spans)].path!r} once other options are chosen; "
                "give latpred.trace each architecture as a whole"
            )
        self._passes[batch] = done, spans
        return done

    def traced(self, numbers: Sequence[int]) -> TracedOption:
        """The architecture of these options, by their numbers in each choice."""
        for choice, number in zip(self.choices, numbers, strict=True):  # a forward may look at what is chosen
            choice.chosen = choice.names[number]
        graph = self.graph()
        if graph.ops_at_one is not None:
            raise _refusal("the network does other work at batch 1 than at 2 and 3")
        if any(op.reread_after is not None for op in graph.ops):
            raise _refusal("the network reads weights more than once")
        (two, spans), (three, _), far = self._passes[2], self._passes[3], self._far(())
        with self.alone():
            large = self._attempt(far) if far > 3 else None
        if large is not None and not on_one_line(two, three, large):
            raise _refusal(f"the network's work is not affine in batch: at {far} it is another than at 2 and 3 say")
        return TracedOption(graph, two, three, spans)

    def common(self, first: TracedOption) -> tuple[list[Event], Calls]:
        """What all architectures have, and the calls after the last event; from a pass without any option."""
        self._choice_recorder.blanks = [span.given for span in first.spans]
        with self.alone():
            done = self.one_pass(2, watched=True)
        self._choice_recorder.blanks = None
        return _events(done.watched, self._choice_recorder.spans, first)


def _refusal(why: str) -> TraceError:
    return TraceError(f"{why}, which is not put together; give latpred.trace each architecture as a whole")


def segments(architectures: list[TracedOption], place: int) -> dict[str, Segment]:
    first = architectures[0].spans[place]
    by_option = {each.spans[place].option: _segment(each, each.spans[place]) for each in architectures}
    for name, layer in zip(first.choice.names, first.choice.options, strict=True):
        if layer is None and first.taken != first.given:
            raise UsageError(
                f"the options of choice {first.choice.label!r} at {first.path!r} do not fit each other: {name!r} "
                f"leaves {shown(first.taken)} as it is, {first.option!r} gives {shown(first.given)}; "
                "what options give must be of one shape"
            )
        if layer is None:
            by_option[name] = NOTHING
    return by_option


def _segment(traced: TracedOption, span: Span) -> Segment:
    begin, end, made = span.begin, span.end, span.made
    fresh = made is not None and made >= begin.ops
    if not fresh and made != span.source:
        raise TraceError(
            f"option {span.option!r} of choice {span.choice.label!r} gives a tensor that it neither made nor was given"
        )
    ops = traced.graph.ops[begin.ops : end.ops]
    before = begin if not ops else NOWHERE
    if ops:
        own = ops[0].calls - begin.calls
        ops = (msgspec.structs.replace(ops[0], **own._asdict()), *ops[1:])
    return Segment(
        ops=ops,
        live=_live(traced, begin.ops, end.ops),
        calls=end.calls - before.calls,
        size=traced.new_bytes(made) if made is not None and fresh else None,
    )


def _live(traced: TracedOption, begin: int, end: int) -> tuple[Affine, ...]:
    """Bytes alive after each op of a stretch, of what the stretch itself made."""
    change = [traced.new_bytes(op) for op in range(begin, end)]
    for birth, death in traced.two.watched.deaths.items():
        if begin <= birth and death < end:
            change[death - begin] -= traced.new_bytes(birth)
    return tuple(accumulate(change, add))


def _events(watcher: PassWatcher, spans: list[Span], first: TracedOption) -> tuple[list[Event], Calls]:
    """Events of a pass in which each choice made nothing but the memory that it gives."""
    inside = {op for span in first.spans for op in range(span.begin.ops, span.end.ops)}
    shared = [op for op in range(len(first.two.records)) if op not in inside]
    at = {span.begin.ops: span for span in spans}
    if len(shared) + len(spans) != len(watcher.modules):
        raise TraceError(ENTANGLED)
    events, left, rest = [], NOWHERE, iter(shared)
    for index in range(len(watcher.modules)):
        span, death = at.get(index), watcher.deaths.get(index)
        if span is None:
            op = next(rest)
            bare = msgspec.structs.replace(first.graph.ops[op], **NO_PYTHON)
            size = first.new_bytes(op)
            alone = Segment((bare,), (size,), NO_CALLS, size)
            events.append(Event(alone, watcher.calls[index] - left.calls, death, None))
            left = NOWHERE
        else:
            events.append(Event(None, span.begin.calls - left.calls, death, span.source))
            left = span.end
    return events, watcher.calls[-1] - left.calls


def _paths(meta_module: MetaModule, choices: list[Choice]) -> dict[int, str]:
    """Paths of modules as they are without choices: a layer stands where its choice does."""
    paths = dict(meta_module.paths)
    for choice in choices:
        for layer in choice.options:
            for inner, part in () if layer is None else layer.named_modules():
                paths[id(part)] = f"{paths[id(choice)]}.{inner}".strip(".")
    return paths


ENTANGLED = (
    "the network does not go together from its layers: what it does around a choice depends on the option; "
    "give latpred.trace each architecture as a whole"
)


MOST_PIECES = 50_000  # stretches of ops that architectures share
MOST_PATTERNS = 512  # combinations of which options make memory

Pattern = tuple[Affine | None, ...]
Owner = tuple[str, str] | None  # label and option, None for what all architectures have


@dataclass(slots=True)
class Kept:
    """What a supernet keeps for speed: stretches by pattern and by what they hold, pieces by what they come from."""

    by_pattern: Recent[list[Stretch]] = field(default_factory=lambda: Recent(MOST_PATTERNS))
    stretches: dict[tuple[int, int, tuple[Affine, ...]], Stretch] = field(default_factory=dict)
    pieces: dict[tuple[Stretch, str, Calls], Piece] = field(default_factory=dict)


class Supernet:
    """All architectures of a network with `latpred.Choice`s in it, each as a graph in a fraction of a millisecond.

    The graph of an architecture is what `latpred.trace` gives of the network with the chosen layers in place of the
    choices. Only paths of modules may differ where an option is None, since layers behind it move up in a Sequential.

    Parameters
    ----------
    model : torch.nn.Module or callable
        With choices in it; or a function that builds it, which is called on the meta device, without initialisation.
    inputs, seq, image, precision, target
        As for `latpred.trace`.

    Attributes
    ----------
    choices : dict[str, tuple[str, ...]]
        The options of each label.

    Raises
    ------
    UsageError
        When there is nothing to choose, options of a choice give tensors of different shapes, or an argument is wrong.
    TraceError
        When the network cannot be traced, or does not go together from its layers.

    Examples
    --------
    >>> from torch import nn
    >>> layers = {"3": nn.Conv2d(8, 8, 3, padding=1), "7": nn.Conv2d(8, 8, 7, padding=3), "none": None}
    >>> supernet = Supernet(nn.Sequential(nn.Conv2d(3, 8, 1), Choice("kernel", layers), nn.ReLU()), image=32)
    >>> supernet.graph({"kernel": "7"}).launches(), supernet.graph({"kernel": "none"}).launches()
    (3, 2)
    """

    @without_modes()
    def __init__(
        self,
        model: torch.nn.Module | Callable[[], torch.nn.Module],
        inputs: Any = None,
        *,
        seq: int | None = None,
        image: int | None = None,
        precision: str | None = None,
        target: str = "cuda",
    ) -> None:
        check(precision, CONTIGUOUS, target)
        refuse_autocast(precision, "a supernet")  # whose choices would share the casts of weights
        seq, image = whole_sizes(seq, image)
        demand_one(inputs, seq, image)
        network = traceable(model)
        if not isinstance(network, torch.nn.Module):
            raise UsageError(f"{model!r} is no network with choices; give an nn.Module or a function that builds one")
        given = derived(network, seq, image) if inputs is None else from_example(inputs)
        meta_module = make_meta_module(network, DTYPES.get(precision or ""))
        tracer = _ChoiceTracer(meta_module, given, Naming(type(network).__name__, precision, target=target))
        self.choices = _options(tracer.choices)
        architectures = [tracer.traced(numbers) for numbers in _architectures(tracer.choices)]
        self._weights = _weights(meta_module.module, tracer.choices)
        first = architectures[0]
        target = architectures[-1].graph.target  # the last one knows whether any option is another on another device
        self._graph = msgspec.structs.replace(tracer.noted(first.graph), target=target)
        self._labels = [span.choice.label for span in first.spans]
        self._segments = [segments(architectures, place) for place in range(len(self._labels))]
        self._events, self._closing = tracer.common(first)
        self._kept = Kept()
        for traced in architectures:
            if tuple(self._ops([span.option for span in traced.spans])) != traced.graph.ops:
                raise TraceError(ENTANGLED)

    def graph(self, chosen: Mapping[str, str], name: str | None = None) -> ModelGraph:
        """The graph of one architecture.

        Parameters
        ----------
        chosen : mapping of str to str
            An option for each label.
        name : str, optional
            What tables call it; by default the class of the network.

        Raises
        ------
        UsageError
            When a label has no option, or there is no such label or option.
        """
        if not isinstance(chosen, Mapping) or chosen.keys() != self.choices.keys():
            raise UsageError(
                f"{chosen!r} is no choice for each label; give a mapping with an option of each of: "
                f"{', '.join(self.choices)}."
            )
        for label, options in self.choices.items():
            if chosen[label] not in options:
                raise UsageError(
                    f"choice {label!r} has no option {chosen[label]!r}; it has: {', '.join(map(str, options))}"
                )
        weights = [self._weights[label, option] for label, option in chosen.items()]
        common = self._weights[None]
        return msgspec.structs.replace(
            self._graph,
            model=name or self._graph.model,
            parameters=common[0] + sum(each[0] for each in weights),
            parameter_bytes=common[1] + sum(each[1] for each in weights),
            ops=tuple(self._ops([chosen[label] for label in self._labels])),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without what is kept for speed, which is large."""
        return {**self.__dict__, "_kept": Kept()}

    def _ops(self, options: list[str]) -> list[Op]:
        """The ops of one architecture, by the option in each place."""
        chosen = [by_option[option] for by_option, option in zip(self._segments, options, strict=True)]
        pattern = tuple([segment.size for segment in chosen])
        if len(self._kept.pieces) >= MOST_PIECES:
            self._kept = Kept()
        kept = self._kept
        stretches = kept.by_pattern.get(pattern, lambda: self._stretches_of(pattern, kept))
        ops: list[Op] = []
        calls = NO_CALLS
        for stretch, option, segment in zip(stretches, ["", *options], [NOTHING, *chosen], strict=True):
            key = stretch, option, calls
            piece = kept.pieces.get(key)
            if piece is None:
                piece = kept.pieces[key] = _put_together(stretch, segment, calls)
            ops += piece.ops
            calls = piece.calls
        calls += self._closing
        if any(calls):
            ops.append(closing(ops[-1].live_bytes if ops else ZERO, calls))
        return ops

    def _stretches_of(self, pattern: Pattern, kept: Kept) -> list[Stretch]:
        """The network from choice to choice; the first stretch has no choice, and may have no events."""
        events, alive = tuple(self._events), tuple(self._alive_before(pattern))
        starts = [0, *(index for index, event in enumerate(events) if event.segment is None)]
        stretches = []
        for start, end in zip(starts, [*starts[1:], len(events)], strict=True):
            known = start, end, alive[start:end]
            stretches.append(kept.stretches.setdefault(known, Stretch(events[start:end], alive[start:end])))
        return stretches

    def _alive_before(self, pattern: Pattern) -> list[Affine]:
        """Bytes alive before each event; `pattern` says what memory each choice makes."""
        events, sizes = self._events, iter(pattern)
        makers: list[int | None] = []  # whose memory an event gives: its own, an earlier one's, or the input's
        made: dict[int, Affine] = {}
        deaths: dict[int, int | None] = {}
        for index, event in enumerate(events):
            size = event.segment.size if event.segment else next(sizes)
            maker = index if size is not None else None if event.source is None else makers[event.source]
            makers.append(maker)
            if size is not None:
                made[index], deaths[index] = size, event.death
            elif maker is not None:
                death = deaths[maker]
                deaths[maker] = None if death is None or event.death is None else max(death, event.death)
        change = [ZERO] * (len(events) + 1)
        change[0] = self._graph.input_bytes
        for index, size in made.items():
            change[index + 1] += size
            death = deaths[index]
            if death is not None:
                change[death] -= size
        return list(accumulate(change[:-1], add))


def _put_together(stretch: Stretch, chosen: Segment, calls: Calls) -> Piece:
    """The ops of a stretch as an architecture has them, with these calls before it."""
    ops: list[Op] = []
    for event, alive in zip(stretch.events, stretch.alive, strict=True):
        segment = chosen if event.segment is None else event.segment
        calls += event.calls
        if segment.ops:
            ops += _moved(segment, alive, calls)
            calls = NO_CALLS
        calls += segment.calls
    return Piece(tuple(ops), calls)


def _moved(segment: Segment, base: Affine, calls: Calls) -> tuple[Op, ...]:
    """A segment's ops as an architecture has them."""
    replace, first = msgspec.structs.replace, segment.ops[0]
    ops = (replace(first, **(calls + first.calls)._asdict()), *segment.ops[1:])
    return tuple(replace(op, live_bytes=base + live) for op, live in zip(ops, segment.live, strict=True))


def _options(choices: list[Choice]) -> dict[str, tuple[str, ...]]:
    options: dict[str, tuple[str, ...]] = {}
    for choice in choices:
        if options.setdefault(choice.label, choice.names) != choice.names:
            raise UsageError(
                f"choices of label {choice.label!r} have different options: {', '.join(options[choice.label])} and "
                f"{', '.join(choice.names)}; give each its own label"
            )
    if not options:
        raise UsageError("the network has no latpred.Choice in it; latpred.trace takes it as it is")
    return options


def _architectures(choices: list[Choice]) -> list[list[int]]:
    """Numbers of the options that choices take in the architectures to trace: each option somewhere, and then mixed."""
    layers = [[number for number, layer in enumerate(choice.options) if layer is not None] for choice in choices]
    most = max(map(len, layers))
    alike = [[numbers[min(place, len(numbers) - 1)] for numbers in layers] for place in range(most)]
    mixed = [numbers[place % len(numbers)] for place, numbers in enumerate(layers)]
    return [*alike, mixed]


def _weights(network: torch.nn.Module, choices: list[Choice]) -> dict[Owner, tuple[int, int]]:
    """Parameters, and bytes of parameters and buffers, of each option; under None of what is always there."""
    parts: dict[Owner, list[torch.nn.Module]] = {None: list(_around(network))}
    for choice in choices:
        for name, layer in zip(choice.names, choice.options, strict=True):
            parts.setdefault((choice.label, name), []).extend([] if layer is None else layer.modules())
    owners: dict[int, Owner] = {}
    counted = {}
    for owner, layers in parts.items():
        held = (tensor for layer in layers for tensor in (*layer._parameters.values(), *layer._buffers.values()))
        own = {id(tensor): tensor for tensor in held if tensor is not None}
        for shared in owners.keys() & own.keys():
            raise TraceError(
                f"{_named(owner)} shares weights with {_named(owners[shared])}, so that they cannot be counted apart; "
                "give each option weights of its own"
            )
        owners |= dict.fromkeys(own, owner)
        parameters = sum(tensor.numel() for tensor in own.values() if isinstance(tensor, torch.nn.Parameter))
        counted[owner] = parameters, sum(tensor.numel() * tensor.dtype.itemsize for tensor in own.values())
    return counted


def _around(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A module and all within it that lies in no choice."""
    yield module
    if not isinstance(module, Choice):
        for child in module.children():
            yield from _around(child)


def _named(owner: Owner) -> str:
    return "the network around the choices" if owner is None else f"option {owner[1]!r} of choice {owner[0]!r}"
