"""Walk: one forward pass of a model without computing it, recorded op by op.

Floating-point tensors live on the meta device; integers and booleans stay real on the CPU, so that masks and index
arithmetic run and the values that Python reads are right. The walk keeps what each call amounts to (`entry.Entry`);
how a call is handled is `handlers`' business, what Python does between calls `hostwork`'s, and what the walks of
several batch sizes have in common `lines`'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from latpred.tracing.entry import CACHE, Entry
from latpred.tracing.handlers import HANDLERS
from latpred.tracing.hostwork import HostWork
from latpred.tracing.opinfo import Kind, describe

_NO_OPTIONS: dict[str, Any] = {}
_HANDLERS = tuple(HANDLERS[kind] for kind in Kind)  # by number: a dict would ask the kind for its hash at every op


class Walk(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops issued while it is active.

    Parameters
    ----------
    host : HostWork or None
        Watches the Python between the ops and the memory they hold, at some cost.

    Attributes
    ----------
    entries : list[Entry]
        One for each op, in order.
    nested : list[bool]
        Whether another op issued it, rather than Python.
    current : str
        Name of the op being handled, "" between ops.
    stale : set[int]
        Storages of real tensors whose values are no longer known.
    generator : torch.Generator
        Gives the random numbers that the walk needs.
    value : tuple of int and Tensor, or None
        The last value that was made a tensor of, and the position of its entry.
    """

    def __init__(self, host: HostWork | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self.nested: list[bool] = []
        self.current = ""
        self.stale: set[int] = set()
        self.value: tuple[int, torch.Tensor] | None = None
        self.known, self.infos = CACHE.tables()
        self.generator = torch.Generator().manual_seed(0)
        self._host = host
        self._depth = 0
        self._inner = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler, seconds of work, to keep this mode out of compiled code.
        return False

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        host = self._host
        if host is None or self._depth:
            return self._handle(func, args, kwargs or _NO_OPTIONS)
        host.pause()
        try:
            return self._handle(func, args, kwargs or _NO_OPTIONS)
        finally:
            host.resume()

    def _handle(self, func: OpOverload[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        info = self.infos.get(func)
        if info is None:
            info = self.infos[func] = describe(func)
        self.current = info.name
        out = _HANDLERS[info.kind](self, func, info, args, options)
        self.current = ""
        return out

    @property
    def within(self) -> bool:
        """Whether what is handled is part of another op."""
        return self._depth > 0

    def record(self, entry: Entry, out: Any) -> Any:
        """Keep one op's entry and pass its result on."""
        self.entries.append(entry)
        if self._depth:
            self.nested.append(self._inner > 0)
            self._inner += 1
        else:
            self.nested.append(False)
        if self._host is not None:
            self._host.after(entry, out)
        return out

    def inside(self, function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Call a function whose own ops are recorded as parts of the current one."""
        if not self._depth:
            self._inner = 0
        self._depth += 1
        try:
            with self:
                return function(*args, **options)
        finally:
            self._depth -= 1
