"""Examples import each other as scripts do: from the directory they lie in."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def run_as_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the directory of the examples first on the path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
