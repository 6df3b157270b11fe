"""The paper's case studies: each script predicts from names, prints its numbers and writes its figure."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from latpred import tables
from latpred.accuracy import recording

FOLDER = Path(__file__).parent.parent / "examples" / "framework_tax"
SMALL = {
    "fig01_macs": ["--device", "epyc-shared", "--models", "resnet-18,mobilenet-v2,distilbert"],
    "fig03_device_time": ["--device", "rtx-8000", "--models", "resnet-18"],
    "fig04_runtimes": ["--device", "rtx-8000", "--models", "distilbert"],
    "fig05_lengths": ["--device", "rtx-8000"],
    "fig06_width_depth": ["--device", "rtx-8000"],
    "fig07_funnel": ["--device", "epyc-shared"],
    "fig08_efficient": ["--device", "rtx-8000", "--models", "distilbert,albert"],
    "fig09_devices": ["--device", "rtx-8000,rtx-3090", "--models", "resnet-18"],
    "fig10_vision_speech": ["--device", "rtx-8000", "--models", "resnet-18,vit-base-32,mobilenet-v2"],
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


def test_crosses_are_one_entry_of_the_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    monkeypatch.syspath_prepend(str(FOLDER))
    shared = runpy.run_path(str(FOLDER / "shared.py"))
    ax = Figure().subplots()
    for index in range(2):
        shared["draw"](ax, index, f"model {index}", [1, 8], [1.0, 2.0 + index])
        shared["over"](ax, index, [1, 8], [1.1, 2.2])
    shared["against"](ax, "batch", "two")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["model 0", "model 1", "measured"]


def test_a_figure_of_nothing_is_not_written(
    main: Callable[[str, list[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "none.png"
    with pytest.raises(SystemExit, match="nothing is left to draw"):
        main("fig04_runtimes", ["--device", "rtx-8000", "--models", "no-such-model", "-o", str(figure)])
    assert "no-such-model" in capsys.readouterr().out
    assert not figure.exists()


def test_measured_points_come_from_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    shared = runpy.run_path(str(FOLDER / "shared.py"))
    arguments = ["--device", "epyc-shared", "--recording", "epyc-shared-runtimes", "--batches", "1,4"]
    asked = shared["asked"]("", "x", arguments)
    batches, milliseconds = shared["measured"](asked, "blind/mistral")
    table = tables.merge_repeats(recording.load("epyc-shared-runtimes").table)
    first = table[(table["model"] == "blind/mistral") & (table["batch"] == 1) & (table["runtime"] == "eager")].iloc[0]
    assert batches == [1, 4]
    assert milliseconds[0] == pytest.approx(1e3 * first["latency_s"])
    assert shared["measured"](asked, "no such model") == ([], [])
    # Of a model that was measured at several lengths the usual one is drawn.
    same = {"model": "m", "runtime": "eager", "protocol": "single", "precision": "fp32"}
    cells = [(1, 128, 2e-3), (4, 128, 3e-3), (1, 512, 9e-3)]
    table = pd.DataFrame([{**same, "batch": b, "input_size": n, "latency_s": s} for b, n, s in cells])
    monkeypatch.setitem(shared["measured"].__globals__, "recorded", lambda name: table)
    assert shared["measured"](asked, "m") == ([1, 4], [2.0, 3.0])
    assert shared["measured"](asked, "m", input_size=512) == ([1], [9.0])
