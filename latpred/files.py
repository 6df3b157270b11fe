"""Files that users name for results: whether they can be written, said before anything takes time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from latpred.errors import UsageError


def demand_writable(path: str | os.PathLike[str]) -> None:
    """Make sure that a file can be made there.

    Raises
    ------
    UsageError
        When its folder cannot be written, or it is a folder itself.
    """
    wanted = Path(path).absolute()
    there = wanted if wanted.exists() else next(folder for folder in wanted.parents if folder.exists())
    if there == wanted and wanted.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder. Name a file.")
    if not os.access(there, os.W_OK) or (there != wanted and not there.is_dir()):
        raise UsageError(f"cannot write {path}: no permission to write {there}. Name another file.")


@contextmanager
def writing(path: Path, advice: str = "Name another file.") -> Iterator[Path]:
    """Give a file to write, which then takes the place of the one at a path: all of it or nothing.

    What goes wrong is said as the user's to mend; the folder is made first.

    Raises
    ------
    UsageError
        When the file cannot be written; one that was there before is as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _beside(path.resolve()) as part:
            yield part
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}. {advice}") from error


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A file of the same ending in the same folder, renamed at the end; a pipe or a device is written itself."""
    if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
        yield target
        return
    part = target.with_name(f".{target.stem}.{token_hex(4)}.part{target.suffix}")
    try:
        yield part
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
