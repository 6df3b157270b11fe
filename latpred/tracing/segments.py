"""Segments: the walks of a network with choices, cut at the borders of the choices.

What is cut is what `latpred.tracing.supernet` puts together again: segments, which belong to one option in one place,
and events, which all architectures have in common. Calls and memory that cross a border are told apart here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import msgspec

from latpred.errors import TraceError, UsageError
from latpred.graph import Line, ModelGraph, Op
from latpred.tracing.choices import NOWHERE, Choice, Place, Probe, Span, shown
from latpred.tracing.hostwork import NEW, HostWork
from latpred.tracing.inputs import Inputs
from latpred.tracing.lines import Pass, in_line
from latpred.tracing.tracer import Tracer
from latpred.tracing.twin import Twin


class Segment(NamedTuple):
    """What one option does in one place.

    ops : as they were walked; of the calls before the first, only those made within the option. live : bytes alive
    after each, without those that were alive before the option. module_calls, python_calls : after the last op.
    size : bytes of the memory that it gives; None where that is its input's.
    """

    ops: tuple[Op, ...]
    live: tuple[Line, ...]
    module_calls: int
    python_calls: int
    size: Line | None


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
class Walked:
    """The walks of one architecture, and what its choices did in the one that was watched."""

    graph: ModelGraph
    two: Pass
    three: Pass
    host: HostWork
    spans: list[Span]

    def new_bytes(self, op: int) -> Line:
        """Bytes of an op's new memory."""
        at_two, at_three = (walk.entries[op].counts[NEW] for walk in (self.two, self.three))
        return Line(3 * at_two - 2 * at_three, at_three - at_two)


class Watched(Tracer):
    """Walks a network whose choices tell a probe what they do.

    Parameters
    ----------
    twin : Twin
        Of the network.
    inputs : Inputs
        What it is called with.
    """

    def __init__(self, twin: Twin, inputs: Inputs) -> None:
        self.choices = [part for part in twin.module.modules() if isinstance(part, Choice)]
        paths = _paths(twin, self.choices)
        super().__init__(replace(twin, paths=paths), inputs, channels_last=False)
        self._probe = Probe(paths)
        self._passes: dict[int, Pass] = {}
        self._watched: dict[int, tuple[HostWork, list[Span]]] = {}
        for choice in self.choices:
            choice.probe = self._probe

    def walk(self, batch: int, host: HostWork | None = None) -> Pass:
        """One forward pass at one batch size; its choices must fit those of the passes before it."""
        self._probe.start(batch, host)
        done = super().walk(batch, host)
        self._probe.expected.setdefault(batch, self._probe.spans)
        self._passes[batch] = done
        if host is not None:
            self._watched[batch] = host, self._probe.spans
        return done

    def walked(self, decide: Callable[[Choice], int], name: str, precision: str | None) -> Walked:
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
        return Walked(graph, two, three, *self._watched[2])

    def common(self, first: Walked) -> tuple[list[Event], Place]:
        """What all architectures have, and the calls after the last event; from a walk without any option."""
        self._probe.blanks = [span.given for span in first.spans]
        host = HostWork(self._twin.paths)
        with self.alone():
            self.walk(2, host)
        self._probe.blanks = None
        return _events(host, self._probe.spans, first)


def segments(walks: list[Walked], place: int) -> dict[str, Segment]:
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


def _segment(walked: Walked, span: Span) -> Segment:
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


def _live(walked: Walked, begin: int, end: int) -> tuple[Line, ...]:
    """Bytes alive after each op of a stretch, of what the stretch itself made."""
    change = [walked.new_bytes(op) for op in range(begin, end)]
    for birth, death in walked.host.deaths.items():
        if begin <= birth and death < end:
            change[death - begin] = plus(change[death - begin], walked.new_bytes(birth), -1)
    return tuple(accumulate(change, plus))


def _events(host: HostWork, spans: list[Span], first: Walked) -> tuple[list[Event], Place]:
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


def _alone(walked: Walked, index: int) -> Segment:
    op, size = walked.graph.ops[index], walked.new_bytes(index)
    return Segment((msgspec.structs.replace(op, module_calls=0, python_calls=0),), (size,), 0, 0, size)


def _paths(twin: Twin, choices: list[Choice]) -> dict[int, str]:
    """Paths of modules as they are without choices: a layer stands where its choice does."""
    paths = dict(twin.paths)
    for choice in choices:
        for layer in choice.options:
            for inner, part in () if layer is None else layer.named_modules():
                paths[id(part)] = f"{paths[id(choice)]}.{inner}".strip(".")
    return paths


def plus(one: Line, other: Line, times: int = 1) -> Line:
    """The sum of two lines, the second so many times."""
    return Line(one.constant + times * other.constant, one.per_sample + times * other.per_sample)


ENTANGLED = (
    "the network does not go together from its layers: what it does around a choice depends on the option; "
    "give latpred.trace each architecture as a whole"
)
