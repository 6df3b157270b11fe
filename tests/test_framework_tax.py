"""The paper's case studies: each script predicts from names, prints its numbers and writes its figure."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from latpred import recording, tables

FOLDER = Path(__file__).parent.parent / "examples" / "framework_tax"
SMALL = {
    "fig01_macs": ["--device", "xeon-shared", "--models", "resnet-18,mobilenet-v2,distilbert"],
    "fig03_device_time": ["--device", "rtx-8000", "--models", "resnet-18"],
    "fig04_runtimes": ["--device", "rtx-8000", "--models", "distilbert"],
    "fig05_lengths": ["--device", "rtx-8000"],
    "fig06_width_depth": ["--device", "rtx-8000"],
    "fig07_funnel": ["--device", "xeon-shared"],
    "fig08_efficient": ["--device", "rtx-8000", "--models", "distilbert,albert"],
    "fig09_devices": ["--device", "rtx-8000,rtx-3090", "--models", "resnet-18"],
    "fig10_vision_speech": ["--device", "xeon-shared", "--models", "resnet-18,vit-base-32,mobilenet-v2"],
    "fig11_generation": ["--device", "rtx-8000"],
    "fig12_precision": ["--device", "rtx-8000", "--models", "resnet-18"],
    "fig13_fnet": ["--device", "rtx-8000"],
}


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, list[str]], None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name, arguments: runpy.run_path(str(FOLDER / f"{name}.py"))["main"](arguments)


def test_every_script_is_tried_and_listed() -> None:
    scripts = {path.stem for path in FOLDER.glob("fig*.py")}
    listed = (FOLDER / "README.md").read_text()
    assert scripts == set(SMALL)
    assert all(f"python examples/framework_tax/{name}.py" in listed for name in scripts)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # FNet in fp16
@pytest.mark.parametrize("name", SMALL)
def test_a_script_prints_numbers_and_writes_a_figure(
    name: str, main: Callable[[str, list[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / f"{name}.png"
    main(name, [*SMALL[name], "--batches", "1,8", "-o", str(figure)])
    assert figure.stat().st_size > 5_000
    said = capsys.readouterr().out.splitlines()
    assert f"wrote {figure}" in said
    numbers = [cell for line in said for cell in line.split() if cell.replace(".", "").isdigit()]
    assert len(numbers) >= 4


def test_measured_points_come_from_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    shared = runpy.run_path(str(FOLDER / "shared.py"))
    asked = shared["asked"]("", "x", ["--device", "xeon-shared", "--recording", "xeon-shared", "--batches", "1,8"])
    batches, milliseconds = shared["measured"](asked, "cpu/bert")
    table = tables.merge_repeats(recording.load("xeon-shared").table)
    first = table[(table["model"] == "cpu/bert") & (table["batch"] == 1)].iloc[0]
    assert batches == [1, 8]
    assert milliseconds[0] == pytest.approx(1e3 * first["latency_s"])
    assert shared["measured"](asked, "no such model") == ([], [])
