"""The images of the documentation show what this version of latpred predicts."""

from __future__ import annotations

import json
import runpy
from itertools import chain
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "readme_figures.py"))


@pytest.mark.parametrize("name", EXAMPLE["FIGURES"])
def test_an_image_shows_what_is_predicted_now(name: str) -> None:
    with Image.open(IMAGES / f"{name}.png") as image:
        kept, about = json.loads(image.text["Description"]), image.text["Title"]
        assert image.width == pytest.approx(3.3 * 300, abs=1)
    figure = EXAMPLE["FIGURES"][name]()
    drawn = EXAMPLE["numbers"](figure)
    assert about == EXAMPLE["FIGURES"][name].__doc__
    assert [len(line) for line in drawn] == [len(line) for line in kept]
    message = "run: python examples/readme_figures.py"
    assert list(chain(*drawn)) == pytest.approx(list(chain(*kept)), rel=2e-3), message


def test_one_command_draws_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXAMPLE["main"].__globals__, "FIGURES", {"curve": EXAMPLE["curve"]})
    EXAMPLE["main"](["--out", str(tmp_path / "images")])
    assert (tmp_path / "images" / "curve.png").exists()
