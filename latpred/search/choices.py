"""Choice: the place of a network where a search chooses between layers; and what is seen of it during a trace.

A choice behaves like the layer that is chosen. While a network is traced, a `ChoiceRecorder` notes where each of its
choices began and ended. What is made of that is `latpred.search.supernet`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from latpred.errors import TraceError, UsageError
from latpred.graph.graph import NO_CALLS, Calls
from latpred.sandbox.own_thread import uncounted
from latpred.tracing.trace_pass import PassWatcher

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Choice(torch.nn.Module):
    """One of several layers, which take the same tensor and give tensors of one shape.

    Parameters
    ----------
    label : str
        What is chosen by. Choices of one label take the same option.
    options : mapping of str to nn.Module or None, or nn.ModuleDict
        The layers by name. None is no layer at all, as in an nn.Sequential that goes without it.

    Attributes
    ----------
    chosen : str
        The option that `forward` runs, the first unless it is set to another.

    Examples
    --------
    >>> layer = Choice("kernel", {"3": torch.nn.Conv2d(4, 4, 3, padding=1), "5": torch.nn.Conv2d(4, 4, 5, padding=2)})
    >>> layer.chosen = "5"
    >>> layer(torch.zeros(1, 4, 8, 8)).shape
    torch.Size([1, 4, 8, 8])
    """

    def __init__(self, label: str, options: Mapping[str, torch.nn.Module | None] | torch.nn.ModuleDict) -> None:
        super().__init__()
        if not isinstance(options, Mapping | torch.nn.ModuleDict):
            raise UsageError(f"the options of choice {label!r} have no names; give a mapping of names to layers")
        for name, layer in options.items():
            if not isinstance(layer, torch.nn.Module | None):
                raise UsageError(f"option {name!r} of choice {label!r} is {layer!r}; give an nn.Module or None")
        if all(layer is None for layer in options.values()):
            raise UsageError(f"choice {label!r} has no layer to choose; give at least one nn.Module among its options")
        self.label = label
        self.names = tuple(options)
        self.chosen = self.names[0]
        self.options = torch.nn.ModuleList(options.values())  # type: ignore[arg-type]
        self.recorder: ChoiceRecorder | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the chosen layer makes of a tensor."""
        recorder = self.recorder
        if recorder is None:
            chosen: Any = self.options[self.names.index(self.chosen)]
            return x if chosen is None else chosen(x)
        # Nothing else may be called here: Python calls are being counted.
        layer = recorder.enter(self, x)
        return recorder.leave(x, layer(x))


class Place(NamedTuple):
    """Where in a pass: how many ops were before, and calls since the last of them."""

    ops: int
    calls: Calls


NOWHERE = Place(0, NO_CALLS)


class Span(NamedTuple):
    """One call of a choice: what it ran, and shape, strides and dtype of the tensors that it took and gave."""

    choice: Choice
    path: str
    option: str
    taken: Spec
    given: Spec
    begin: Place
    end: Place
    source: int | None  # the op that made the memory of what it took; None for memory that was there before
    made: int | None  # the same of what it gave


class ChoiceRecorder:
    """Notes what the choices of one network do in a pass."""

    def __init__(self, paths: dict[int, str]) -> None:
        self.blanks: list[Spec] | None = None  # for a pass without options: what each call gives, as new memory
        self.expected: dict[int, list[Span]] = {}  # by batch size: calls whose shapes must come again
        self.spans: list[Span] = []  # the calls of the latest pass
        self.batch = 0
        self._paths = paths
        self._watcher: PassWatcher | None = None
        self._open: list[tuple[Choice, int, Place, int | None]] = []

    def start(self, watcher: PassWatcher | None) -> None:
        self.spans, self._open, self._watcher = [], [], watcher

    @uncounted
    def enter(self, choice: Choice, tensor: torch.Tensor) -> Any:
        """Note where a choice begins, and give what it runs."""
        watcher = self._watcher
        if watcher is not None:
            watcher.pause()
        if self._open:
            raise UsageError(f"choice {choice.label!r} lies within another one; list their combinations as options")
        begin, source, number = NOWHERE, None, choice.names.index(choice.chosen)
        if watcher is not None:
            watcher.forget_module()  # an architecture has the layer where its choice is
            begin, source = Place(*watcher.so_far()), watcher.maker(tensor)
        self._open.append((choice, number, begin, source))
        layer: Any = choice.options[number] if self.blanks is None else _blank(self.blanks[len(self.spans)])
        if watcher is not None:
            watcher.resume()
        return layer

    @uncounted
    def leave(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Note where it ends, and pass on what it gave."""
        watcher = self._watcher
        if watcher is not None:
            watcher.pause()
        choice, number, begin, source = self._open.pop()
        if not isinstance(out, torch.Tensor):
            kind = type(out).__name__
            raise UsageError(f"option {choice.names[number]!r} of choice {choice.label!r} gives a {kind}, not a tensor")
        path = self._paths[id(choice)]
        end, made = NOWHERE, None
        if watcher is not None:
            end, made = Place(*watcher.so_far()), watcher.maker(out)
        span = Span(choice, path, choice.names[number], spec(tensor), spec(out), begin, end, source, made)
        self._check(span)
        self.spans.append(span)
        if watcher is not None:
            watcher.resume()
        return out

    def _check(self, span: Span) -> None:
        """Refuse what would make another network of what comes behind it."""
        if self.batch not in self.expected:
            return
        known = self.expected[self.batch]
        number = len(self.spans)
        if number >= len(known) or known[number].path != span.path:
            raise TraceError(f"the network calls its layers in another order once {span.path!r} has another option")
        before = known[number]
        for verb, ours, theirs in (("takes", span.taken, before.taken), ("gives", span.given, before.given)):
            if ours != theirs:
                raise UsageError(
                    f"the options of choice {span.choice.label!r} at {span.path!r} do not fit each other: "
                    f"{before.option!r} {verb} {shown(theirs)}, {span.option!r} {shown(ours)}; "
                    "what options give must be of one shape"
                )


def _blank(given: Spec) -> Callable[[torch.Tensor], Any]:
    shape, strides, dtype = given
    return lambda _: torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def spec(tensor: torch.Tensor) -> Spec:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def shown(given: Spec) -> str:
    """A spec as a sentence names it.

    >>> shown(spec(torch.zeros(2, 3)))
    '(2, 3) in float32 with strides (3, 1)'
    """
    shape, strides, dtype = given
    return f"{shape} in {str(dtype).rpartition('.')[2]} with strides {strides}"
