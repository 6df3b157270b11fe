"""Files that users name for results: whether they can be written, said before anything takes time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
def writing(path: Path) -> Iterator[None]:
    """Within it, what goes wrong with a file is said as the user's to mend; its folder is made first.

    Raises
    ------
    UsageError
        When the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}. Name another file.") from error
