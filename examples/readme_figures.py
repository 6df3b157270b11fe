"""The figures of the README and the documentation, from profiles and a recording that ship with latpred.

    python examples/readme_figures.py --out docs/images

Each image carries the numbers it shows (PNG text "Description"), so that a test can tell when it is out of date.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import latpred
from latpred import plot
from latpred.accuracy import recording
from latpred.api import predictor_of
from latpred.prediction.timeline import forward_pass
from latpred.profile import store
from latpred.query import DeviceQuery
from latpred.runtimes.legacy_torch import traced_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GPU, CPU = "rtx-8000", "epyc-shared"
MODEL, RECORDING = "bert-base-uncased", "epyc-shared-varied"


def curve() -> Figure:
    """BERT-base in eager PyTorch: predicted latency against batch, and where the host stops setting it."""
    predicted = latpred.predict(
        MODEL, batch=[1, 2, 4, 8, 16, 32, 64, 128], device=GPU, precision="fp16", protocol="pipelined"
    )
    ax = plot.blank()
    plot.curve(predicted, ax)
    return plot.figure_of(ax)


def accuracy() -> Figure:
    """Predictions against measurements of models that no fit saw, on the machine they were measured on."""
    ax = plot.blank(3.0)
    plot.agreement(recording.load(RECORDING).replay(store.find(CPU)), ax)
    return plot.figure_of(ax)


def clocks() -> Figure:
    """The two clocks of one forward pass: the device waits for the host."""
    predictor = predictor_of(DeviceQuery(GPU))
    with traced_for(predictor.profile.protocol["era"]):
        graph = latpred.trace(MODEL, precision="fp16")
    return plot.two_clocks(forward_pass(predictor, graph))


FIGURES = {"curve": curve, "accuracy": accuracy, "clocks": clocks}


def numbers(figure: Figure) -> list[list[float]]:
    """Everything that is drawn as a line or as points, four digits each."""
    lines = [line for ax in figure.axes for line in ax.get_lines()]
    return [[float(f"{value:.4g}") for value in line.get_xydata().ravel()] for line in lines]


def main(arguments: list[str] | None = None) -> None:
    """Draw all figures."""
    parser = argparse.ArgumentParser(description="Draw the README's figures.")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    folder = parser.parse_args(arguments).out
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        figure = draw()
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=300, metadata={"Description": json.dumps(numbers(figure)), "Title": draw.__doc__})
        print(path)


if __name__ == "__main__":
    main()
