"""Files are written whole or not at all, and locked by one process at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from latpred import storage
from latpred.errors import BusyError


def test_a_file_is_written_with_its_folder_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.json"
    storage.write(path, b"old")
    path.chmod(0o640)
    storage.write(path, b"new", durable=False)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [*path.parent.iterdir()] == [path]


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    with storage.locked(tmp_path / "lock", "the first"), pytest.raises(BusyError, match="busy here"):
        storage.locked(tmp_path / "lock", "busy here", 0.01).__enter__()
    with storage.locked(tmp_path / "lock", "free again"):
        pass
