"""Files are written whole or not at all, and locked by one process at a time; caches in memory stay small."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from factories import graph, linear

from latpred import storage
from latpred.errors import BusyError
from latpred.storage import IdentityCache, Recent


def test_a_file_is_written_with_its_folder_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.json"
    storage.write(path, b"old")
    path.chmod(0o640)
    storage.write(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [*path.parent.iterdir()] == [path]


def test_a_result_is_written_at_once_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "result.txt"
    path.write_text("old")
    path.chmod(0o640)
    with storage.result_file(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)
    with suppress(KeyboardInterrupt), storage.result_file(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


def test_a_link_stays_a_link_and_a_pipe_is_written_itself(tmp_path: Path) -> None:
    file, link = tmp_path / "new" / "file.json", tmp_path / "link.json"
    link.symlink_to(file)
    storage.write(link, b"linked")
    assert (link.readlink(), file.read_bytes()) == (file, b"linked")
    reader, writer = os.pipe()
    with storage.result_file(Path(f"/dev/fd/{writer}")) as target:
        target.write_bytes(b"written")
    os.close(writer)
    with open(reader, "rb") as end:
        assert end.read() == b"written"


def test_where_data_and_cache_share_a_folder_data_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LATPRED_HOME", raising=False)
    for place in ("data", "cache"):
        monkeypatch.setattr(f"platformdirs.user_{place}_dir", lambda *_, **__: str(tmp_path))
    storage.write(storage.profiles_dir() / "cpu.json", b"{}")
    storage.write(storage.cache_dir() / "graphs" / "one", b"{}")
    assert storage.clear().files == 1
    assert [path.name for path in storage.documents(storage.profiles_dir())] == ["cpu.json"]


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    with storage.locked(tmp_path / "lock", "the first"), pytest.raises(BusyError, match="busy here"):
        storage.locked(tmp_path / "lock", "busy here").__enter__()
    with storage.locked(tmp_path / "lock", "free again"):
        pass


class Value:
    """Something that can be seen to die."""


def test_a_value_is_made_once_for_each_object() -> None:
    cache: IdentityCache[object, Value] = IdentityCache()
    one, alike = graph(linear()), graph(linear())
    assert one == alike
    made = cache.get(one, lambda _: Value())
    assert cache.get(one, lambda _: Value()) is made
    assert cache.get(alike, lambda _: Value()) is not made


def test_what_was_asked_for_longest_ago_is_dropped() -> None:
    made: list[int] = []
    cache: Recent[int] = Recent(most=2)

    def value(key: int) -> int:
        return cache.get(key, lambda: made.append(key) or key)

    assert [value(key) for key in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]
    with pytest.raises(ZeroDivisionError):
        cache.get("key", lambda: 1 // 0)
    assert cache.get("key", lambda: 7) == 7


def test_threads_share_one() -> None:
    cache: Recent[int] = Recent(most=3)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: cache.get(n % 7, lambda: n % 7), range(5000)))
    assert found == [n % 7 for n in range(5000)]
    assert len(cache._values) <= 3 + 4
