"""What latpred keeps: files, in one place that everything which reads or writes asks, and values in memory.

`LATPRED_HOME` overrides both directories, for clusters, containers and tests. Nothing here creates anything unasked.
There are two small caches in memory: `IdentityCache` goes by the identity of objects that are costly or impossible to
hash, for as long as they live; `Recent` keeps what was asked for most recently.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Generic, TypeVar

import msgspec
import platformdirs

from latpred.errors import BusyError, CacheError, LatpredError, ProfileError, UsageError

VARIABLE = "LATPRED_HOME"
SUFFIX = ".json"  # of profiles of devices and hosts
LONGEST = 255  # bytes of a file's name


def data_dir() -> Path:
    """Directory of what must be kept: profiles and the journals of calibrations under way."""
    return _directory(platformdirs.user_data_dir)


def cache_dir() -> Path:
    """Directory of what can be made again at any time, and of nothing else: a user may have one folder for both."""
    return _directory(platformdirs.user_cache_dir, "cache")


def profiles_dir() -> Path:
    return data_dir() / "profiles"


def _directory(usual: Callable[..., str], within: str = "") -> Path:
    """A directory within the one that the environment names, else the system's usual one."""
    named = os.environ.get(VARIABLE, "").strip()
    base = os.path.expanduser(named) if named else usual("latpred", appauthor=False)
    return Path(base).absolute() / within


def unusable(doing: str, error: OSError, wanted: str = "it writable") -> str:
    """What is said where one of latpred's own files cannot be used."""
    return f"cannot {doing}: {error.strerror or error}. Make {wanted}, or choose another directory with {VARIABLE}=DIR."


def demand_writable(path: str | os.PathLike[str]) -> None:
    """Make sure, before anything takes time, that a file that the user names can be made; else a UsageError."""
    wanted = Path(path).absolute()
    there = wanted if wanted.exists() else next(folder for folder in wanted.parents if folder.exists())
    if there == wanted and wanted.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder. Name a file.")
    if there != wanted and not there.is_dir():
        raise UsageError(f"cannot write {path}: {there} is a file, not a folder. Name another file.")
    if not os.access(there, os.W_OK):
        raise UsageError(f"cannot write {path}: no permission to write {there}. Name another file.")


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, its folder first."""
    with replacing(path) as part, part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def save_document(path: Path, data: bytes, error: type[LatpredError]) -> Path:
    """Write a file of the user's own directory; an `error` says what to do where that fails."""
    try:
        write(path, data)
    except OSError as cause:
        raise error(unusable(f"write {path}", cause, f"{path.parent} writable")) from cause
    return path


def documents(folder: Path) -> list[Path]:
    """JSON files of a folder by name, hidden ones left out."""
    names = _names_in(folder, ProfileError)
    return sorted(folder / name for name in names if name.endswith(SUFFIX) and not name.startswith("."))


def _names_in(folder: Path, error: type[LatpredError]) -> list[str]:
    """Names in one of the user's folders, none where it is not there; an `error` where it cannot be looked into."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as cause:
        raise error(unusable(f"look into {folder}", cause, "it readable")) from cause


def document_path(folder: Path, name: str, kind: str, example: str, error: type[LatpredError]) -> Path:
    """The file of a folder that a document of this name is kept in; an `error` for what is no name."""
    if not name or name != Path(name).name or name.startswith(".") or "\0" in name:
        raise error(f"{name!r} cannot name a {kind}: use letters, digits, dots and dashes, as in {example}.")
    if name.endswith(SUFFIX):
        raise error(f"{name!r} cannot name a {kind}: it is the name of a file. Leave out {SUFFIX}, as in {example}.")
    if len(f"{name}{SUFFIX}".encode(errors="replace")) > LONGEST:
        raise error(f"{name!r} cannot name a {kind}: it is too long. Use a shorter one, as {example}.")
    return folder / f"{name}{SUFFIX}"


def is_path(source: str | os.PathLike[str]) -> bool:
    """Whether a document is given by its path, and not by its name."""
    return not isinstance(source, str) or source.endswith(SUFFIX) or os.sep in source


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a hidden file with the ending of a path, which takes its place where the block ends well, else is removed.

    A link goes on pointing to what is written, and folders are made. A pipe, a device or a folder is given itself.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{token_hex(4)}.part{target.suffix}")
    try:
        yield part
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def result_file(path: Path) -> Iterator[Path]:
    """Give the file to write in place of one that the user names; what goes wrong becomes a UsageError."""
    try:
        with replacing(path) as part:
            yield part
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}. Name another file.") from error


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file; a BusyError with this sentence where another process holds it.

    An OSError says that it cannot be locked.
    """
    from filelock import FileLock, Timeout

    try:
        held = FileLock(path).acquire(timeout=0.0)
    except Timeout:
        raise BusyError(busy) from None
    with held:
        yield


@dataclass(frozen=True, slots=True)
class Usage:
    """What the cache takes: its directory, which need not exist, the files in it at any depth, their sizes together."""

    path: Path
    files: int
    bytes: int


def usage() -> Usage:
    """Count the cache's files and bytes; a cache that was never made is empty."""
    folder = cache_dir()
    files = folder.rglob("*") if _names_in(folder, CacheError) else ()
    sizes = [file.lstat().st_size for file in files if file.is_symlink() or not file.is_dir()]
    return Usage(folder, len(sizes), sum(sizes))


def clear() -> Usage:
    """Empty the cache and say what it took; its directory stays, which may be a link or a mounted volume."""
    before = usage()
    try:
        for name in _names_in(before.path, CacheError):
            path = before.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(unusable(f"delete {error.filename or before.path}", error)) from error
    return before


K = TypeVar("K")
V = TypeVar("V")


class IdentityCache(Generic[K, V]):
    """Values made once per living object, which they must not hold, or neither is ever freed."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[V, weakref.ref[K]]] = {}

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """The value of a key, made if this object was not seen before."""
        identity, values = id(key), self._values
        try:
            return values[identity][0]
        except KeyError:
            value = make(key)
            values[identity] = value, weakref.ref(key, lambda _: values.pop(identity, None))
            return value


class Recent(Generic[V]):
    """The values that were asked for most recently, at most so many. Threads may share one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, made where it is not there."""
        with suppress(KeyError):
            value = self._values[key]
            self._values.move_to_end(key)
            return value
        value = self._values[key] = make()
        if len(self._values) > self._most:
            with suppress(KeyError):  # another thread dropped it meanwhile
                self._values.popitem(last=False)
        return value


def hash_of(record: msgspec.Struct) -> int:
    """The hash of everything that a record holds besides dictionaries, which have none."""
    held = (getattr(record, name) for name in record.__struct_fields__)
    return hash((type(record), *(value for value in held if not isinstance(value, dict))))
