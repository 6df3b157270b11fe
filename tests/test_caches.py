"""Caches that stay small: by identity for as long as a key lives, and of what was asked for most recently."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from factories import graph, linear

from latpred.storage import IdentityCache, Recent


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


def test_a_value_dies_with_its_cache() -> None:
    cache: IdentityCache[object, Value] = IdentityCache()
    key = graph(linear())
    value = weakref.ref(cache.get(key, lambda _: Value()))
    del cache
    gc.collect()
    assert value() is None
    del key  # whose death nobody waits for any more
    gc.collect()


def test_what_was_asked_for_longest_ago_is_dropped() -> None:
    made: list[int] = []
    cache: Recent[int] = Recent(most=2)

    def value(key: int) -> int:
        return cache.get(key, lambda: made.append(key) or key)

    assert [value(key) for key in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]
    assert len(cache) == 2
    with pytest.raises(ZeroDivisionError):
        cache.get("key", lambda: 1 // 0)
    assert cache.get("key", lambda: 7) == 7


def test_threads_share_one() -> None:
    cache: Recent[int] = Recent(most=3)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: cache.get(n % 7, lambda: n % 7), range(5000)))
    assert found == [n % 7 for n in range(5000)]
    assert len(cache) <= 3 + 4
