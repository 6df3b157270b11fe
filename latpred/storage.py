"""How files are written and locked: all of a file or nothing, and one process at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from latpred.errors import BusyError, UsageError


def demand_writable(path: str | os.PathLike[str]) -> None:
    """Make sure, before anything takes time, that a file that the user names can be made; else a UsageError."""
    wanted = Path(path).absolute()
    there = wanted if wanted.exists() else next(folder for folder in wanted.parents if folder.exists())
    if there == wanted and wanted.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder. Name a file.")
    if not os.access(there, os.W_OK) or (there != wanted and not there.is_dir()):
        raise UsageError(f"cannot write {path}: no permission to write {there}. Name another file.")


def write(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file, its folder first: a reader finds the old file or the new one, whatever happens.

    Where it need not be `durable`, a power cut soon after may still lose it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, part.open("wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable and os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def replacing(path: Path, ending: str = "") -> Iterator[Path]:
    """Give a hidden file beside a path, which takes the path's place where the block ends well, else is removed."""
    part = path.with_name(f".{path.name}.{token_hex(4)}.part{ending}")
    try:
        yield part
        if path.exists():
            shutil.copymode(path, part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def result_file(path: Path, advice: str = "Name another file.") -> Iterator[Path]:
    """Give the file to write in place of one that the user names; what goes wrong becomes a UsageError.

    The file has the ending of the one named. A pipe or a device, and a file in a folder that cannot be written, is
    written itself.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.resolve()
        if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
            yield target
        else:
            with replacing(target, target.suffix) as part:
                yield part
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}. {advice}") from error


@contextmanager
def locked(path: Path, busy: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a lock file; a BusyError with this sentence where another process holds it for longer than that."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        raise BusyError(busy) from None
    try:
        yield
    finally:
        lock.release()
