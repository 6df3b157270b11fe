"""The user's cache: what latpred keeps only because making it again takes a while. It can be deleted at any time.

Profiles and calibration journals are not in it (see `latpred.home`).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from latpred import home
from latpred.errors import CacheError


@dataclass(frozen=True, slots=True)
class Usage:
    """What the cache takes.

    Attributes
    ----------
    path : Path
        Its directory, which need not exist.
    files : int
        Files in it, at any depth.
    bytes : int
        Their sizes together.
    """

    path: Path
    files: int
    bytes: int


def usage() -> Usage:
    """Count the cache's files and bytes; a cache that was never made is empty."""
    folder = home.cache_dir()
    sizes = [file.lstat().st_size for file in folder.rglob("*") if file.is_file() or file.is_symlink()]
    return Usage(folder, len(sizes), sum(sizes))


def clear() -> Usage:
    """Delete the cache and say what it took.

    Raises
    ------
    CacheError
        When it cannot be deleted.
    """
    found = usage()
    if not found.path.exists():
        return found
    try:
        shutil.rmtree(found.path)
    except OSError as error:
        raise CacheError(
            f"cannot delete {error.filename or found.path}: {error.strerror or error}. "
            f"Make it writable, or choose another directory with {home.VARIABLE}=DIR."
        ) from error
    return found
