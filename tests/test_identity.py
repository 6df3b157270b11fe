"""A cache by identity lets go of what it holds when the key dies, and when it dies itself."""

from __future__ import annotations

import gc
import weakref

from factories import graph, linear

from latpred.identity import IdentityCache


class Value:
    """Something that can be seen to die."""


def test_a_value_is_made_once_for_each_object() -> None:
    cache: IdentityCache[object, Value] = IdentityCache()
    one, alike = graph(linear()), graph(linear())
    assert one == alike
    made = cache.get(one, lambda _: Value())
    assert cache.get(one, lambda _: Value()) is made
    assert cache.get(alike, lambda _: Value()) is not made
    assert len(cache) == 2


def test_a_value_dies_with_its_key() -> None:
    cache: IdentityCache[object, Value] = IdentityCache()
    key = graph(linear())
    value = weakref.ref(cache.get(key, lambda _: Value()))
    assert value() is not None
    del key
    gc.collect()
    assert value() is None
    assert len(cache) == 0


def test_a_value_dies_with_its_cache() -> None:
    cache: IdentityCache[object, Value] = IdentityCache()
    key = graph(linear())
    value = weakref.ref(cache.get(key, lambda _: Value()))
    del cache
    gc.collect()
    assert value() is None
    del key  # whose death nobody waits for any more
    gc.collect()
