"""Forward hooks: which of them are part of a forward pass, and which only look on."""

from __future__ import annotations

import dis
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any


def running(hooks: OrderedDict[int, Callable[..., Any]]) -> OrderedDict[int, Callable[..., Any]]:
    """The hooks that change what a module gives; those that collect features or print are left out."""
    return OrderedDict((number, hook) for number, hook in hooks.items() if not looks_on(hook))


def looks_on(hook: Any) -> bool:
    """Whether a hook can only look on: it returns nothing, writes in place into no tensor, and is not torch's own.

    >>> looks_on(lambda module, args, out: None), looks_on(lambda module, args, out: 2 * out)
    (True, False)
    """
    while isinstance(hook, (partial, MethodType)):
        hook = hook.func if isinstance(hook, partial) else hook.__func__
    if not isinstance(hook, FunctionType):
        hook = vars(type(hook)).get("__call__")  # one that it inherits is rare, and then it runs
    if not isinstance(hook, FunctionType) or (hook.__module__ or "").partition(".")[0] == "torch":
        return False
    return not _returns(hook.__code__) and not any(_in_place(name) for name in hook.__code__.co_names)


def _in_place(name: str) -> bool:
    """Whether a method of this name writes into its tensor, as `add_`."""
    return name.endswith("_") and not name.startswith("_")


def _returns(code: CodeType) -> bool:
    """Whether a function may return anything but None."""
    steps = list(dis.get_instructions(code))
    for before, step in zip([None, *steps], steps, strict=False):
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return True
        if step.opname == "RETURN_VALUE" and not (
            before is not None and before.opname == "LOAD_CONST" and before.argval is None
        ):
            return True
    return False
