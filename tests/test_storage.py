"""Files are written whole or not at all, and locked by one process at a time; caches in memory stay small."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import stat
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from factories import graph, linear

from latpred import storage
from latpred.errors import BusyError, ProfileError, UsageError
from latpred.storage import IdentityCache, Recent


def test_a_file_is_written_with_its_folder_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.json"
    storage.write(path, b"old")
    path.chmod(0o640)
    storage.write(path, b"new", durable=False)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [*path.parent.iterdir()] == [path]


def test_a_file_is_written_though_its_folder_cannot_be_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    storage.write(tmp_path / "file.json", b"text")
    assert (tmp_path / "file.json").read_bytes() == b"text"


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


def test_links_lead_into_folders_that_are_made_and_those_to_themselves_are_replaced(tmp_path: Path) -> None:
    far, loop = tmp_path / "far.json", tmp_path / "loop.json"
    far.symlink_to(tmp_path / "new" / "file.json")
    loop.symlink_to(loop)
    for path in (far, loop):
        storage.write(path, b"text")
        with storage.result_file(path) as target:
            target.write_bytes(target.suffix.encode())
        assert path.read_bytes() == b".json"  # the target had its ending
    assert far.is_symlink()


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    link.symlink_to(file)
    storage.write(link, b"linked")
    assert (link.readlink(), file.read_bytes()) == (file, b"linked")
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as end:
        storage.write(pipe, b"piped")
        assert end.read() == b"piped"
    assert pipe.is_fifo()
    reader, writer = os.pipe()  # which has no name of its own, as that of a shell
    nameless = Path(f"/dev/fd/{writer}")
    storage.write(nameless, b"written ")
    with storage.result_file(nameless) as target:
        target.write_bytes(b"twice")
    os.close(writer)
    with open(reader, "rb") as end:
        assert end.read() == b"written twice"


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*: File name too long\. Name another file"):
        storage.demand_writable(tmp_path / ("a" * 300))


def test_a_name_that_is_as_long_as_it_can_be_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 250 + ".json")
    storage.write(path, b"one")
    with storage.result_file(path) as part:
        part.write_bytes(b"two")
    assert path.read_bytes() == b"two"


def test_where_data_and_cache_share_a_folder_data_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LATPRED_HOME", raising=False)
    for place in ("data", "cache"):
        monkeypatch.setattr(f"platformdirs.user_{place}_dir", lambda *_, **__: str(tmp_path))
    storage.write(storage.profiles_dir() / "cpu.json", b"{}")
    storage.write(storage.cache_dir() / "graphs" / "one", b"{}")
    assert storage.clear().files == 1
    assert [path.name for path in storage.documents(storage.profiles_dir())] == ["cpu.json"]


def test_a_cache_may_be_emptied_while_it_is_looked_at(latpred_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write(storage.cache_dir() / "graphs" / "one", b"{}")
    remove = shutil.rmtree

    def gone(path: Path) -> None:
        remove(path)
        raise FileNotFoundError(2, "No such file or directory")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", lambda path: gone(path.parent))
        assert storage.usage().files == 0
    storage.write(storage.cache_dir() / "graphs" / "one", b"{}")
    monkeypatch.setattr(shutil, "rmtree", gone)
    assert storage.clear().files == 1


def no_home(*_: object, **__: object) -> str:
    raise RuntimeError("could not determine the home directory")


@pytest.mark.parametrize("named", ["", "~nobody-of-this-name/latpred"])
def test_without_a_home_directory_the_variable_is_asked_for(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATPRED_HOME", named)
    for place in ("data", "cache"):
        monkeypatch.setattr(f"platformdirs.user_{place}_dir", no_home)
    for directory in (storage.data_dir, storage.cache_dir):
        with pytest.raises(ProfileError, match=r"home directory is not known\. .* with LATPRED_HOME=DIR"):
            directory()


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    with storage.locked(tmp_path / "lock", "the first"), pytest.raises(BusyError, match="busy here"):
        storage.locked(tmp_path / "lock", "busy here", 0.01).__enter__()
    with storage.locked(tmp_path / "lock", "free again"):
        pass


def test_a_file_system_without_locks_is_a_fault_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("filelock.FileLock.acquire", Mock(side_effect=NotImplementedError))
    with pytest.raises(OSError, match="locks no files"):
        storage.locked(tmp_path / "lock", "busy").__enter__()


class Value:
    """Something that can be seen to die."""


def test_a_value_is_made_once_for_each_object() -> None:
    cache: IdentityCache[object, Value] = IdentityCache()
    one, alike = graph(linear()), graph(linear())
    assert one == alike
    made = cache.get(one, lambda _: Value())
    assert cache.get(one, lambda _: Value()) is made
    assert cache.get(alike, lambda _: Value()) is not made


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
    with pytest.raises(ZeroDivisionError):
        cache.get("key", lambda: 1 // 0)
    assert cache.get("key", lambda: 7) == 7


def test_threads_share_one() -> None:
    cache: Recent[int] = Recent(most=3)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: cache.get(n % 7, lambda: n % 7), range(5000)))
    assert found == [n % 7 for n in range(5000)]
    assert len(cache._values) <= 3 + 4
