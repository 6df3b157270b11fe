"""What every test shares: a home directory of its own, one thread, and torchvision where only its Python works."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
import torch

from latpred import ops
from latpred.ops import families
from latpred.runtimes import graph_store

TORCHVISION_OPS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _declare_torchvision_ops() -> torch.library.Library | None:
    """Declare torchvision's operators where its binary does not load.

    A torchvision built for CUDA next to a torch built without cannot load its extension, and then `import torchvision`
    fails over operators that no model here calls.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    for extension in Path(found.origin).parent.glob("_C*.so"):  # it has other names in other versions
        with suppress(OSError):
            torch.ops.load_library(str(extension))
            return None
    library = torch.library.Library("torchvision", "DEF")
    for schema in TORCHVISION_OPS:
        library.define(schema)
    return library


NOBODY = 65534

KEPT_ALIVE = _declare_torchvision_ops()
HOMES = count()
FROZEN = {"modules": 0}

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _packages_are_no_garbage(request: pytest.FixtureRequest) -> None:
    """What imports left is looked through once, and by no later collection: half a million objects take long."""
    if hasattr(request.module, "settings"):  # of the process, one of which counts what is so kept
        gc.unfreeze()
        FROZEN["modules"] = 0
    elif len(sys.modules) > 1.05 * FROZEN["modules"]:
        FROZEN["modules"] = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def latpred_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory, so that no test reads or writes the user's profiles, journals or cache."""
    home = tmp_path_factory.mktemp(f"home-{next(HOMES)}", numbered=False)  # to number it, all others are looked at
    monkeypatch.setenv("LATPRED_HOME", str(home))
    monkeypatch.setenv("LATPRED_CALIBRATE", "never")  # a missing profile is an error, not half a minute of measuring
    monkeypatch.setattr(graph_store, "BUILT_IN", ops.generation())  # formulas of earlier tests do not count
    return home


@pytest.fixture
def own_formulas() -> Iterator[None]:
    """Cost formulas that a test registers are gone after it."""
    before, count = dict(families._FORMULAS), ops.generation()
    yield
    families._FORMULAS.clear()
    families._FORMULAS.update(before)
    families._REGISTERED[count:] = [""] * (ops.generation() - count + 1)  # caches of their results can tell


@pytest.fixture
def calibrated() -> None:
    """A profile of this machine's CPU."""
    from profiledata import profile

    from latpred.profile import store

    store.save(profile())


@contextmanager
def _home_of_mode(mode: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home directory with something in its cache, and of a mode that counts even for tests that run as root."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        (home / "cache" / "graphs").mkdir(parents=True)
        folders = (home / "cache", home)
        for folder in folders:
            folder.chmod(mode)
        monkeypatch.setenv("LATPRED_HOME", name)
        root = os.geteuid() == 0
        if root:
            os.seteuid(NOBODY)
        yield home
        if root:
            os.seteuid(0)
        for folder in reversed(folders):
            folder.chmod(0o755)


@pytest.fixture
def read_only_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home directory that cannot be written."""
    with _home_of_mode(0o555, monkeypatch) as home:
        yield home


@pytest.fixture
def shut_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home directory that cannot be looked into."""
    with _home_of_mode(0o000, monkeypatch) as home:
        yield home
