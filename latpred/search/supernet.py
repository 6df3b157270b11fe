"""Supernet: a network with choices is walked once for each option; any architecture is then put together from that.

An architecture's walk is what all have in common, with the ops of the chosen options in the places of the choices.
Three things cross the borders between them and are counted anew: Python calls, which belong to the next op wherever it
lies; memory, which lives until the last of those who hold it lets go; and parameters.

That is done only where it was seen to be right: the architectures that were walked, one of them with options mixed,
are put together again and compared with their walks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import torch

from latpred.caches import Recent
from latpred.errors import TraceError, UsageError
from latpred.graph.dtypes import DTYPES, dtype_of
from latpred.graph.graph import ZERO, Affine, ModelGraph, Op
from latpred.sandbox.own_thread import without_modes
from latpred.search.choices import NOWHERE, Choice, Place, Probe, Span, shown
from latpred.tracing.affine_ops import TracePass, closing, in_line
from latpred.tracing.inputs import Inputs, demand_one, derived, from_example
from latpred.tracing.meta_module import MetaModule, make_meta_module
from latpred.tracing.python_calls import NEW, HostWork
from latpred.tracing.tracer import Tracer
from latpred.zoo.candidates import traceable


class Segment(NamedTuple):
    """What one option does in one place.

    ops : as they were walked; of the calls before the first, only those made within the option. live : bytes alive
    after each, without those that were alive before the option. module_calls, python_calls : after the last op.
    size : bytes of the memory that it gives; None where that is its input's.
    """

    ops: tuple[Op, ...]
    live: tuple[Affine, ...]
    module_calls: int
    python_calls: int
    size: Affine | None


class Event(NamedTuple):
    """An op that all architectures have, or the place of a choice.

    segment : the op; None at the place of a choice. module_calls, python_calls : before it. death : the first event
    that no longer has the memory made here; None where it stays. source : the event that made the input of a choice;
    None where that was there before.
    """

    segment: Segment | None
    module_calls: int
    python_calls: int
    death: int | None
    source: int | None


@dataclass(frozen=True, slots=True)
class TracedOption:
    """The walks of one architecture, and what its choices did in the one that was watched."""

    graph: ModelGraph
    two: TracePass
    three: TracePass
    host: HostWork
    spans: list[Span]

    def new_bytes(self, op: int) -> Affine:
        """Bytes of an op's new memory."""
        at_two, at_three = (walk.entries[op].counts[NEW] for walk in (self.two, self.three))
        return Affine(3 * at_two - 2 * at_three, at_three - at_two)


class Watched(Tracer):
    """Walks a network whose choices tell a probe what they do.

    Parameters
    ----------
    meta_model : Twin
        Of the network.
    inputs : Inputs
        What it is called with.
    """

    def __init__(self, meta_model: MetaModule, inputs: Inputs) -> None:
        self.choices = [part for part in meta_model.module.modules() if isinstance(part, Choice)]
        paths = _paths(meta_model, self.choices)
        super().__init__(replace(meta_model, paths=paths), inputs, channels_last=False)
        self._probe = Probe(paths)
        self._passes: dict[int, TracePass] = {}
        self._watched: dict[int, tuple[HostWork, list[Span]]] = {}
        for choice in self.choices:
            choice.probe = self._probe

    def walk(self, batch: int, host: HostWork | None = None) -> TracePass:
        """One forward pass at one batch size; its choices must fit those of the passes before it."""
        self._probe.start(batch, host)
        done = super().walk(batch, host)
        self._probe.expected.setdefault(batch, self._probe.spans)
        self._passes[batch] = done
        if host is not None:
            self._watched[batch] = host, self._probe.spans
        return done

    def walked(self, decide: Callable[[Choice], int], name: str, precision: str | None) -> TracedOption:
        """All walks of one architecture.

        Raises
        ------
        TraceError
            When it cannot be walked, or its work is no line in batch.
        """
        self._probe.decide = decide
        graph = self.graph(name, precision, "contiguous")
        if graph.ops_at_one is not None:
            raise TraceError(
                "the network does other work at batch 1 than at 2 and 3, which is not put together; "
                "give latpred.trace each architecture as a whole"
            )
        two, three = self._passes[2], self._passes[3]
        far = self._far(())
        with self.alone():
            large = self._attempt(far) if far > 3 else None
        if large is not None and not in_line(two, three, large):
            raise TraceError(
                f"the network's work is no line in batch: at {far} it is another than at 2 and 3 say, which is not put "
                "together; give latpred.trace each architecture as a whole"
            )
        return TracedOption(graph, two, three, *self._watched[2])

    def common(self, first: TracedOption) -> tuple[list[Event], Place]:
        """What all architectures have, and the calls after the last event; from a walk without any option."""
        self._probe.blanks = [span.given for span in first.spans]
        host = HostWork(self._meta_model.paths)
        with self.alone():
            self.walk(2, host)
        self._probe.blanks = None
        return _events(host, self._probe.spans, first)


def segments(walks: list[TracedOption], place: int) -> dict[str, Segment]:
    """What each option does in one place."""
    known = walks[0].spans[place]
    found = {walked.spans[place].option: _segment(walked, walked.spans[place]) for walked in walks}
    for name, layer in zip(known.choice.names, known.choice.options, strict=True):
        if layer is None and known.taken != known.given:
            raise UsageError(
                f"the options of choice {known.choice.label!r} at {known.path!r} do not fit each other: {name!r} "
                f"leaves {shown(known.taken)} as it is, {known.option!r} gives {shown(known.given)}; "
                "what options give must be of one shape"
            )
        if layer is None:
            found[name] = Segment((), (), 0, 0, None)
    return found


def _segment(walked: TracedOption, span: Span) -> Segment:
    begin, end, made = span.begin, span.end, span.made
    fresh = made is not None and made >= begin.ops
    if not fresh and made != span.source:
        raise TraceError(
            f"option {span.option!r} of choice {span.choice.label!r} gives a tensor that it neither made nor was given"
        )
    ops = walked.graph.ops[begin.ops : end.ops]
    before = begin if not ops else NOWHERE
    if ops:
        calls = {"module_calls": ops[0].module_calls - begin.module_calls}
        calls["python_calls"] = ops[0].python_calls - begin.python_calls
        ops = (msgspec.structs.replace(ops[0], **calls), *ops[1:])
    return Segment(
        ops=ops,
        live=_live(walked, begin.ops, end.ops),
        module_calls=end.module_calls - before.module_calls,
        python_calls=end.python_calls - before.python_calls,
        size=walked.new_bytes(made) if made is not None and fresh else None,
    )


def _live(walked: TracedOption, begin: int, end: int) -> tuple[Affine, ...]:
    """Bytes alive after each op of a stretch, of what the stretch itself made."""
    change = [walked.new_bytes(op) for op in range(begin, end)]
    for birth, death in walked.host.deaths.items():
        if begin <= birth and death < end:
            change[death - begin] = plus(change[death - begin], walked.new_bytes(birth), -1)
    return tuple(accumulate(change, plus))


def _events(host: HostWork, spans: list[Span], first: TracedOption) -> tuple[list[Event], Place]:
    """Events of a walk in which each choice made nothing but the memory that it gives."""
    inside = {op for span in first.spans for op in range(span.begin.ops, span.end.ops)}
    shared = [op for op in range(len(first.two.entries)) if op not in inside]
    at = {span.begin.ops: span for span in spans}
    if len(shared) + len(spans) != len(host.modules):
        raise TraceError(ENTANGLED)
    events, left, rest = [], NOWHERE, iter(shared)
    for index in range(len(host.modules)):
        span, death = at.get(index), host.deaths.get(index)
        if span is None:
            calls = host.module_calls[index] - left.module_calls, host.python_calls[index] - left.python_calls
            events.append(Event(_alone(first, next(rest)), *calls, death, None))
            left = NOWHERE
        else:
            begin = span.begin
            calls = begin.module_calls - left.module_calls, begin.python_calls - left.python_calls
            events.append(Event(None, *calls, death, span.source))
            left = span.end
    return events, Place(0, host.module_calls[-1] - left.module_calls, host.python_calls[-1] - left.python_calls)


def _alone(walked: TracedOption, index: int) -> Segment:
    op, size = walked.graph.ops[index], walked.new_bytes(index)
    return Segment((msgspec.structs.replace(op, module_calls=0, python_calls=0),), (size,), 0, 0, size)


def _paths(meta_model: MetaModule, choices: list[Choice]) -> dict[int, str]:
    """Paths of modules as they are without choices: a layer stands where its choice does."""
    paths = dict(meta_model.paths)
    for choice in choices:
        for layer in choice.options:
            for inner, part in () if layer is None else layer.named_modules():
                paths[id(part)] = f"{paths[id(choice)]}.{inner}".strip(".")
    return paths


def plus(one: Affine, other: Affine, times: int = 1) -> Affine:
    """The sum of two lines, the second so many times."""
    return Affine(one.constant + times * other.constant, one.per_sample + times * other.per_sample)


ENTANGLED = (
    "the network does not go together from its layers: what it does around a choice depends on the option; "
    "give latpred.trace each architecture as a whole"
)


MOST_PIECES = 50_000  # runs of ops that architectures share
MOST_PATTERNS = 512  # combinations of which options make memory

Pattern = tuple[Affine | None, ...]
Owner = tuple[str, str] | None  # label and option, None for what all architectures have
_NOBODY = ("", "")


class Supernet:
    """All architectures of a network with `latpred.Choice`s in it, each as a graph in a fraction of a millisecond.

    The graph of an architecture is what `latpred.trace` gives of the network with the chosen layers in place of the
    choices. Only paths of modules may differ where an option is None, since layers behind it move up in a Sequential.

    Parameters
    ----------
    model : torch.nn.Module or callable
        With choices in it; or a function that builds it, which is called on the meta device, without initialisation.
    inputs, seq, image, precision
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
        When the network cannot be walked, or does not go together from its layers.

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
    ) -> None:
        network = traceable(model)
        if not isinstance(network, torch.nn.Module):
            raise UsageError(f"{model!r} is no network with choices; give an nn.Module or a function that builds one")
        if precision is not None:
            dtype_of(precision)  # which says when there is no such precision
        demand_one(inputs, seq, image)
        given = derived(network, seq, image) if inputs is None else from_example(inputs)
        watched = Watched(make_meta_module(network, DTYPES.get(precision or "")), given)
        self.choices = _options(watched.choices)
        self._weights = _weights(watched)
        rules = _architectures(watched.choices)
        walks = [watched.walked(rule, type(network).__name__, precision) for rule in rules]
        first = walks[0]
        self._graph = first.graph
        self._labels = [span.choice.label for span in first.spans]
        self._segments = [segments(walks, place) for place in range(len(self._labels))]
        self._events, self._closing = watched.common(first)
        self._bases: Recent[list[Affine]] = Recent(MOST_PATTERNS)
        self._pieces: dict[tuple[int, Affine, int, int], tuple[Op, ...]] = {}
        for walked in walks:
            if tuple(self._ops([span.option for span in walked.spans])) != walked.graph.ops:
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
        for label, options in self.choices.items():
            if chosen.get(label) not in options:
                raise UsageError(
                    f"choice {label!r} has no option {chosen[label]!r}; it has: {', '.join(options)}"
                    if label in chosen
                    else f"nothing was chosen for {label!r}; give one of: {', '.join(options)}"
                )
        if len(chosen) > len(self.choices):
            extra = next(label for label in chosen if label not in self.choices)
            raise UsageError(f"there is no choice {extra!r}; the network has: {', '.join(self.choices)}")
        weights = [self._weights[label, option] for label, option in chosen.items()]
        common = self._weights[None]
        return msgspec.structs.replace(
            self._graph,
            model=name or self._graph.model,
            parameters=common[0] + sum(each[0] for each in weights),
            parameter_bytes=common[1] + sum(each[1] for each in weights),
            ops=tuple(self._ops([chosen[label] for label in self._labels])),
        )

    def _ops(self, options: list[str]) -> list[Op]:
        """The ops of one architecture, by the option in each place."""
        chosen = [found[option] for found, option in zip(self._segments, options, strict=True)]
        pattern = tuple([segment.size for segment in chosen])
        bases = self._bases.get(pattern, lambda: self._alive_before(pattern))
        pieces = self._pieces if len(self._pieces) < MOST_PIECES else {}
        self._pieces = pieces
        ops: list[Op] = []
        places = iter(chosen)
        module_calls = python_calls = 0
        for (segment, more_module_calls, more_python_calls, _, _), base in zip(self._events, bases, strict=True):
            if segment is None:
                segment = next(places)
            module_calls += more_module_calls
            python_calls += more_python_calls
            if segment.ops:
                key = (id(segment), base, module_calls, python_calls)
                piece = pieces.get(key)
                if piece is None:
                    piece = pieces[key] = _moved(segment, base, module_calls, python_calls)
                ops += piece
                module_calls = python_calls = 0
            module_calls += segment.module_calls
            python_calls += segment.python_calls
        module_calls += self._closing.module_calls
        python_calls += self._closing.python_calls
        if module_calls or python_calls:
            ops.append(closing(ops[-1].live_bytes if ops else ZERO, module_calls, python_calls))
        return ops

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
                known = deaths[maker]
                deaths[maker] = None if known is None or event.death is None else max(known, event.death)
        change = [ZERO] * (len(events) + 1)
        change[0] = self._graph.input_bytes
        for index, size in made.items():
            change[index + 1] = plus(change[index + 1], size)
            death = deaths[index]
            if death is not None:
                change[death] = plus(change[death], size, -1)
        return list(accumulate(change[:-1], plus))


def _moved(segment: Segment, base: Affine, module_calls: int, python_calls: int) -> tuple[Op, ...]:
    """A segment's ops as an architecture has them."""
    replace, first = msgspec.structs.replace, segment.ops[0]
    calls = {"module_calls": first.module_calls + module_calls, "python_calls": first.python_calls + python_calls}
    ops = (replace(first, **calls), *segment.ops[1:])
    return tuple(replace(op, live_bytes=plus(base, live)) for op, live in zip(ops, segment.live, strict=True))


def _options(choices: list[Choice]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for choice in choices:
        if found.setdefault(choice.label, choice.names) != choice.names:
            raise UsageError(
                f"choices of label {choice.label!r} have different options: {', '.join(found[choice.label])} and "
                f"{', '.join(choice.names)}; give each its own label"
            )
    if not found:
        raise UsageError("the network has no latpred.Choice in it; latpred.trace takes it as it is")
    return found


def _architectures(choices: list[Choice]) -> list[Callable[[Choice], int]]:
    """Rules that choose an option's number: each option somewhere, and then options mixed."""
    layers = {id(choice): [n for n, layer in enumerate(choice.options) if layer is not None] for choice in choices}
    places = {id(choice): place for place, choice in enumerate(choices)}
    most = max(len(numbers) for numbers in layers.values())

    def same(number: int) -> Callable[[Choice], int]:
        return lambda choice: layers[id(choice)][min(number, len(layers[id(choice)]) - 1)]

    def mixed(choice: Choice) -> int:
        numbers = layers[id(choice)]
        return numbers[places[id(choice)] % len(numbers)]

    return [*(same(number) for number in range(most)), mixed]


def _weights(watched: Watched) -> dict[Owner, tuple[int, int]]:
    """Parameters, and bytes of parameters and buffers, of each option; under None of what is always there."""
    root: Any = watched.target()
    parts: dict[Owner, list[torch.nn.Module]] = {None: list(_around(root))}
    for choice in watched.choices:
        for name, layer in zip(choice.names, choice.options, strict=True):
            parts.setdefault((choice.label, name), []).extend([] if layer is None else layer.modules())
    owners: dict[int, Owner] = {}
    return {owner: _counted(owner, layers, owners) for owner, layers in parts.items()}


def _around(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A module and all within it that lies in no choice."""
    yield module
    if not isinstance(module, Choice):
        for child in module.children():
            yield from _around(child)


def _counted(owner: Owner, layers: list[torch.nn.Module], owners: dict[int, Owner]) -> tuple[int, int]:
    """Parameters and bytes of some layers, each once; `owners` says whose the tensors are that were counted before."""
    parameters, size = 0, 0
    for layer in layers:
        for tensor in (*layer._parameters.values(), *layer._buffers.values()):
            if tensor is None or owners.get(id(tensor), _NOBODY) == owner:
                continue
            if id(tensor) in owners:
                raise TraceError(
                    f"{_named(owner)} shares weights with {_named(owners[id(tensor)])}, so that they cannot be counted "
                    "apart; give each option weights of its own"
                )
            owners[id(tensor)] = owner
            parameters += tensor.numel() if isinstance(tensor, torch.nn.Parameter) else 0
            size += tensor.numel() * tensor.dtype.itemsize
    return parameters, size


def _named(owner: Owner) -> str:
    return "the network around the choices" if owner is None else f"option {owner[1]!r} of choice {owner[0]!r}"
