"""Where latpred keeps its files: one place that everything which reads or writes asks.

`LATPRED_HOME` overrides both directories, for clusters, containers and tests. Nothing here creates anything.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

VARIABLE = "LATPRED_HOME"


def data_dir() -> Path:
    """Directory of what must be kept: profiles and the journals of calibrations under way."""
    return _override() or Path(platformdirs.user_data_dir("latpred", appauthor=False))


def cache_dir() -> Path:
    """Directory of what can be made again at any time."""
    override = _override()
    return override / "cache" if override else Path(platformdirs.user_cache_dir("latpred", appauthor=False))


def profiles_dir() -> Path:
    """Directory of this user's device profiles."""
    return data_dir() / "profiles"


def _override() -> Path | None:
    value = os.environ.get(VARIABLE, "").strip()
    return Path(value).expanduser().absolute() if value else None
