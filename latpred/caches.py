"""Caches that stay small: by an object's identity for as long as it lives, and of what was asked for most recently.

The first is for large frozen records whose hash would look at everything they hold, or that cannot be hashed at all.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

K = TypeVar("K")
V = TypeVar("V")


class IdentityCache(Generic[K, V]):
    """Values made once per living object.

    Keys must support weak references; values must not hold their key, or neither is ever freed. A cache that dies takes
    its values with it, whatever keys are left.
    """

    def __init__(self) -> None:
        self._values: dict[int, V] = {}

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """The value of a key, made if this object was not seen before."""
        identity = id(key)
        try:
            return self._values[identity]
        except KeyError:
            value = self._values[identity] = make(key)
            weakref.finalize(key, _drop, weakref.ref(self), identity).atexit = False
            return value

    def __len__(self) -> int:
        """Number of living keys."""
        return len(self._values)


def _drop(cache: weakref.ref[IdentityCache[K, V]], identity: int) -> None:
    living = cache()
    if living is not None:
        living._values.pop(identity, None)


class Recent(Generic[V]):
    """The values that were asked for most recently, at most so many. Threads may share one.

    Examples
    --------
    >>> squares = Recent(most=2)
    >>> [squares.get(n, lambda: n * n) for n in (1, 2, 3)], len(squares)
    ([1, 4, 9], 2)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, made where it is not there."""
        try:
            value = self._values[key]
        except KeyError:
            value = self._values[key] = make()
            if len(self._values) > self._most:
                with suppress(KeyError):
                    self._values.popitem(last=False)
            return value
        with suppress(KeyError):  # another thread dropped it meanwhile
            self._values.move_to_end(key)
        return value

    def __len__(self) -> int:
        """How many there are."""
        return len(self._values)


def hash_of(record: msgspec.Struct) -> int:
    """The hash of everything that a record holds besides dictionaries, which have none."""
    held = (getattr(record, name) for name in record.__struct_fields__)
    return hash((type(record), *(value for value in held if not isinstance(value, dict))))
