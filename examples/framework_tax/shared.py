"""What all figures of this folder share: the options, predictions, measured points, and the look.

Nothing here measures. Models go by name or are built from configurations, without weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import latpred
from latpred.errors import LatpredError
from latpred.plot import style
from latpred.profile import store
from latpred.runtimes.legacy_torch import attention_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from latpred.prediction.prediction import Curve

LEAST_SPAN = 5.0  # of the largest over the smallest latency that axes show
MEASURED = "measured"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Asked:
    """What was asked on the command line.

    Attributes
    ----------
    device, precision, protocol : str
        Where and how to predict; figure 9 takes several devices, joined by commas.
    batches : tuple of int
        Batch sizes of every curve.
    models : tuple of str
        In place of the figure's own models; empty for those.
    recording : str or None
        A recording to draw over the predictions.
    output : Path
        File of the figure.
    """

    device: str
    precision: str
    protocol: str
    batches: tuple[int, ...]
    models: tuple[str, ...]
    recording: str | None
    output: Path

    def models_or(self, *own: str) -> tuple[str, ...]:
        """The models asked for, else the figure's own."""
        return self.models or own

    @property
    def runtimes(self) -> tuple[str, ...]:
        """Those that the device's profile knows, eager first."""
        known = profile_of(self.device).runtimes
        return ("eager", *sorted(name for name in known if name != "eager"))


def asked(doc: str | None, name: str, arguments: Sequence[str] | None, **own: Any) -> Asked:
    """Read the command line of a figure; `own` are defaults that differ from the usual ones."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", default=own.get("device", "cpu"), help="cpu (this machine's profile), or any profile's name"
    )
    parser.add_argument("--precision", help="default: fp16 on a GPU whose profile has it, else fp32")
    parser.add_argument("--protocol", default=own.get("protocol", "single"), choices=("single", "pipelined"))
    parser.add_argument("--batches", default=",".join(map(str, own.get("batches", BATCHES))))
    parser.add_argument("--models", default="", help="names joined by commas, in place of the figure's own")
    parser.add_argument("--recording", help="folder or name of a recording, drawn over the predictions")
    parser.add_argument("-o", "--output", type=Path, help=f"default: {name}.png")
    given = parser.parse_args(arguments)
    known = [profile_of(device).kernels for device in given.device.split(",")]
    precision = given.precision or ("fp16" if all("fp16" in kernels for kernels in known) else "fp32")
    return Asked(
        device=given.device,
        precision=precision,
        protocol=given.protocol,
        batches=tuple(int(batch) for batch in given.batches.split(",")),
        models=tuple(model for model in given.models.split(",") if model),
        recording=given.recording,
        output=given.output or Path(f"{name}.png"),
    )


@lru_cache
def profile_of(device: str) -> Any:
    """The profile that a device's name finds."""
    return store.find(device)


def curve(what: Asked, model: Any, runtime: str = "eager", **given: Any) -> Curve:
    """Predicted latencies of a model at every batch size asked for."""
    batches = list(given.pop("batches", what.batches))
    given.setdefault("precision", what.precision)
    return latpred.predict(model, batches, runtime, device=what.device, protocol=what.protocol, **given)


def curves(what: Asked, wanted: Iterable[tuple[str, Any, str]], **given: Any) -> dict[str, Curve]:
    """Curves by label, of (label, model, runtime); one that cannot be predicted is said and left out."""
    found: dict[str, Curve] = {}
    for label, model, runtime in wanted:
        try:
            found[label] = curve(what, model, runtime, **given)
        except LatpredError as error:
            print(f"{label} is left out: {error}")
    if not found:
        raise SystemExit("nothing is left to draw")
    return found


def bert(device: str, width: int = 768, layers: int = 12, heads: int | None = None) -> Any:
    """BERT of another size on the meta device, its heads 64 wide, its attention that of the profile's software."""
    import torch
    import transformers

    config = transformers.BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads or width // 64,
        intermediate_size=4 * width,
        attn_implementation=attention_of(profile_of(device).protocol.get("era", "")),
    )
    with torch.device("meta"):
        return transformers.BertModel(config).eval()


@lru_cache
def recorded(name: str) -> pd.DataFrame:
    """The measured rows of a recording."""
    from latpred import tables
    from latpred.accuracy import recording

    table = tables.merge_repeats(recording.load(name).table)
    return table[table["status"] == tables.OK] if "status" in table else table


def measured(what: Asked, model: str, runtime: str = "eager", **columns: Any) -> dict[int, float]:
    """Measured milliseconds of a model by batch, empty where there is no recording or it lacks the model."""
    if what.recording is None:
        return {}
    table = recorded(what.recording)
    wanted = {"model": model, "runtime": runtime, "protocol": what.protocol, "precision": what.precision, **columns}
    keep = np.logical_and.reduce([table[name] == value for name, value in wanted.items()])
    found = table[keep]
    if "input_size" not in columns and len(found):  # of a model measured at several lengths, the one measured most
        found = found[found["input_size"] == found["input_size"].mode().iloc[-1]]
    rows = found[found["batch"].isin(what.batches)].sort_values("batch")
    return dict(zip(rows["batch"].tolist(), 1e3 * rows["latency_s"], strict=True))


@contextmanager
def panels(what: Asked, count: int = 1, height_in: float = 2.6) -> Iterator[list[Axes]]:
    """Axes of one figure, two in a row, which is written to the file asked for."""
    with style.in_style():
        columns = min(count, 2)
        rows = -(-count // columns)
        made: Figure = style.figure(style.COLUMN_IN * columns, height_in * rows)
        axes = list(made.subplots(rows, columns, squeeze=False).flat)
        for surplus in axes[count:]:
            surplus.remove()
        yield axes[:count]
        style.save(made, what.output)
    print(f"wrote {what.output}")


def over_batch(what: Asked, models: Sequence[str], text: str) -> None:
    """A figure of several models in eager over batch, and its numbers."""
    found = curves(what, [(model, model, "eager") for model in models])
    with panels(what) as (ax,):
        for index, (model, one) in enumerate(found.items()):
            draw(ax, index, model, one.batches, one.latency_ms)
            over(ax, index, measured(what, model))
        against(ax, "batch", title(what, text))
    table(["batch", *found], zip(what.batches, *(map(float, one.latency_ms) for one in found.values()), strict=True))


def draw(ax: Axes, index: int, label: str, x: Sequence[float], y: Sequence[float]) -> None:
    """One predicted line, in a look of its own."""
    ax.plot(
        x, y, label=label, color=style.LINES[index % len(style.LINES)],
        linestyle=style.DASHES[index % len(style.DASHES)], marker=style.MARKERS[index % len(style.MARKERS)],
    )  # fmt: skip


def over(ax: Axes, index: int, points: Mapping[float, float]) -> None:
    """Measured milliseconds, by x, over the predicted line of the same index: crosses."""
    if points:
        colour = style.LINES[index % len(style.LINES)]
        named = MEASURED in ax.get_legend_handles_labels()[1]
        ax.plot(
            list(points), list(points.values()), linestyle="", marker="x", markersize=5, color=colour,
            markeredgewidth=1.1, label=None if named else MEASURED,
        )  # fmt: skip


def against(ax: Axes, x: str, title: str) -> None:
    """Logarithmic axes, title and legend, once everything is drawn."""
    ax.set_xscale("log")
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    room = max(1.0, (LEAST_SPAN / (high / low)) ** 0.5)  # a flat line is to look flat
    ax.set_ylim(low / room, high * room)
    style.plain_ticks(ax.xaxis, ax.get_xlim())
    style.plain_ticks(ax.yaxis, ax.get_ylim())
    ax.set_xlabel(x)
    ax.set_ylabel("latency (ms)")
    ax.set_title(title)
    handles, labels = _measured_last(ax)
    if len(labels) > 3 or any(len(label) > 20 for label in labels):
        style.legend_below(ax, 0.42, handles=handles)
    elif labels:
        ax.legend(handles=handles)


def _measured_last(ax: Axes) -> tuple[list[Any], list[str]]:
    """What the legend holds; crosses of all colours are one entry, in black."""
    from matplotlib.lines import Line2D

    pairs = list(zip(*ax.get_legend_handles_labels(), strict=True))
    kept = [(handle, label) for handle, label in pairs if label != MEASURED]
    if len(kept) < len(pairs):
        kept.append((Line2D([], [], linestyle="", marker="x", color=style.BLACK, label=MEASURED), MEASURED))
    return [handle for handle, _ in kept], [label for _, label in kept]


def title(what: Asked, text: str) -> str:
    """A title that says where and how."""
    return f"{text}\n{profile_of(what.device).name}, {what.precision}, {what.protocol}"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print the numbers of a figure."""
    print("  ".join(f"{name:>14}" for name in head))
    for row in rows:
        print("  ".join(f"{cell:>14.3g}" if isinstance(cell, float) else f"{cell!s:>14}" for cell in row))
