"""PassWatcher: what a forward pass makes the host do between its ops, and which memory is alive after each.

Python's profiler hook sees every Python function that is entered; entering `nn.Module._call_impl` is a module call.
Frames of the recorder do not count: it pauses the hook while it handles an op. Memory is followed through weak
references to storages, so no tensor lives longer for being watched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import CodeType, FrameType, MethodType
from typing import Any

import torch
from torch._library import simple_registry
from torch.multiprocessing.reductions import StorageWeakRef

from latpred.sandbox.own_thread import usual_call
from latpred.tracing.meta_module import ASKED, CODES
from latpred.tracing.op_record import OpRecord, leaves

_CALL: CodeType = torch.nn.Module._call_impl.__code__
_WRAPPER: CodeType = torch.nn.Module._wrapped_call_impl.__code__
_OTHERS = frozenset(map(id, (_WRAPPER, ASKED, *CODES)))  # Python that runs with a model and is not its own
# What torch asks in Python before it hands an op to a mode; there is no such question without one.
_LOOKUP: CodeType | None = getattr(getattr(simple_registry, "find_torch_dispatch_rule", None), "__code__", None)
_GONE: Callable[[int], bool] = torch.UntypedStorage._expired  # type: ignore[assignment]
# Setting the hook anew makes Python 3.12 and later instrument every function again; there a flag silences it instead.
CHEAP_HOOK = sys.version_info < (3, 12)


class PassWatcher:
    """Watches one pass.

    Attributes
    ----------
    modules : list[str]
        Path of the innermost module around each op.
    module_calls, python_calls : list[int]
        Calls since the previous op; one element more than there are ops, for what follows the last.
    deaths : dict[int, int]
        For each op that made memory that is gone before the end: the first op that no longer has it.
    """

    def __init__(self, paths: dict[int, str]) -> None:
        self.modules: list[str] = []
        self.module_calls: list[int] = []
        self.python_calls: list[int] = []
        self.deaths: dict[int, int] = {}
        self._alive: dict[int, list[StorageWeakRef]] = {}
        self._stack = [""]
        self._calls = [0, 0, 0]  # module calls, Python calls, whether the recorder is at work
        self._hook = _hook(paths, self._stack, self._calls)
        self._previous: Any = None

    def __enter__(self) -> PassWatcher:
        self._previous = sys.getprofile()
        sys.setprofile(self._hook)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._calls[1] -= 1  # this call
        if callable(self._previous):
            sys.setprofile(self._previous)
        elif self._previous is not None:  # cProfile's own object
            self._previous.enable()
        self._flush()

    def pause(self) -> None:
        """Stop counting: the recorder's own work begins."""
        if CHEAP_HOOK:
            sys.setprofile(None)
        calls = self._calls
        if not calls[2]:
            calls[1] -= 2  # this call and the one that made it
            calls[2] = 1

    def resume(self) -> None:
        """Go on counting."""
        self._calls[2] = 0
        if CHEAP_HOOK:
            sys.setprofile(self._hook)

    def forget(self, calls: int) -> None:
        """Take back Python calls that were not the model's, and this one."""
        self._calls[1] -= calls + 1

    def forget_module(self) -> None:
        """Take back a module call that was not the model's."""
        self._calls[0] -= 1

    def so_far(self) -> tuple[int, int, int]:
        """How many ops there were, and the module and Python calls since the last of them; to be asked in a pause."""
        return len(self.modules), self._calls[0], self._calls[1]

    def maker(self, tensor: torch.Tensor) -> int | None:
        """The op that made a tensor's memory; None for memory that was there before."""
        storage = _watched(tensor).cdata
        return next((op for op, alive in self._alive.items() if any(w.cdata == storage for w in alive)), None)

    def after(self, record: OpRecord, out: Any) -> None:
        """Note an op that was just handled, and the memory that went since the one before."""
        index = len(self.modules)
        self.modules.append(self._stack[-1])
        self._flush()
        # Asked of torch itself: dozens of storages are alive at each of hundreds of ops.
        gone = [birth for birth, watched in self._alive.items() if _GONE(watched[0].cdata)]
        for birth in gone:
            watched = self._alive[birth]
            while watched and _GONE(watched[0].cdata):
                del watched[0]
            if not watched:
                self.deaths[birth] = index
                del self._alive[birth]
        if record.new_bytes:
            watched = [_watched(tensor) for tensor in leaves(out)]
            if watched:
                self._alive[index] = watched

    def live_bytes(self, records: Sequence[OpRecord], input_bytes: int) -> list[int]:
        """Activation bytes alive just after each op, inputs included; of these very ops at any batch size."""
        change = [record.new_bytes for record in records]
        for birth, death in self.deaths.items():
            change[death] -= records[birth].new_bytes
        if change:
            change[0] += input_bytes
        return list(accumulate(change))

    def _flush(self) -> None:
        calls = self._calls
        self.module_calls.append(calls[0])
        self.python_calls.append(calls[1])
        calls[0] = calls[1] = 0


def _watched(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _hook(paths: dict[int, str], stack: list[str], calls: list[int]) -> Callable[[FrameType, str, Any], None]:
    """The profiler hook; a closure because it is called thousands of times in a pass.

    A module that the forward pass made itself is called as the model's are, without hooks on all modules that look on.
    """
    unhooked = usual_call()
    lent: list[torch.nn.Module] = []

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if calls[2]:
            return
        if event == "call":
            code = frame.f_code
            if code is _LOOKUP:
                calls[2] = 1
                if CHEAP_HOOK:
                    sys.setprofile(None)  # until the recorder has handled the op that is looked up
                return
            if code is _CALL:
                calls[0] += 1
                stack.append(paths.get(id(frame.f_locals["self"]), stack[-1]))
                if lent:
                    lent.pop().__dict__.pop("_call_impl", None)
                return
            if unhooked is not None and code is _WRAPPER:
                module = frame.f_locals["self"]
                if "_call_impl" not in module.__dict__:
                    module.__dict__["_call_impl"] = MethodType(unhooked, module)  # found, then taken away at once
                    lent.append(module)
                return
            caller = frame.f_back
            if id(code) not in _OTHERS and (caller is None or caller.f_code is not _CALL):
                calls[1] += 1
        elif event == "return" and frame.f_code is _CALL:
            stack.pop()

    return hook
