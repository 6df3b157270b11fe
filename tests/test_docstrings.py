"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import latpred
import latpred.calibration

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def names(package: ModuleType) -> list[str]:
    """A package and its modules, at any depth."""
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [package.__name__, *(module.name for module in found if not module.name.startswith("latpred.models"))]


MODULES = sorted({*names(latpred), *names(latpred.calibration)})


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=OPTIONS)
    assert found.failed == 0
