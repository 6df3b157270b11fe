"""A cache keyed by an object's identity that lets go of an entry when the object dies.

For large frozen records whose hash would walk everything they hold, or that cannot be hashed at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

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
