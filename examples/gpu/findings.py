"""The findings of "The Framework Tax" on one GPU: what was measured, and the prediction over it.

    python examples/gpu/findings.py --device nvidia-h200 -o FOLDER RECORDING...

Everything comes from recordings and is predicted from the graphs in them: nothing is traced, and no GPU is needed.
Lines are predictions, crosses what was measured. A finding whose cells were not measured is named and left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from latpred import profiles, recording
from latpred.errors import LatpredError
from latpred.plot import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from latpred.profile import DeviceProfile

BERT, FUNNEL, FNET = "bert-base-uncased", "funnel", "fnet-base"
TOKENS = 128
EFFICIENT = (BERT, "distilbert-base-uncased", "squeezebert-uncased", "albert-base-v2", "mobilebert")
PREFERRED = ("fp16", "fp32")
SIDES = {"predicted": "", "measured": "x"}
Panel = tuple[str, str, Mapping[str, pd.DataFrame]]  # title, column along x, rows by label


def cells(folders: Sequence[Path], profile: DeviceProfile) -> pd.DataFrame:
    """Every cell of the recordings in both protocols, predicted beside measured, in milliseconds."""
    parts = [recording.load(folder).replay(profile).to_frame() for folder in folders]
    found = pd.concat(parts, ignore_index=True)
    for side in SIDES:
        found[f"ms_{side}"] = 1e3 * found[f"latency_s_{side}"]
        for name in ("overhead", "compute"):
            column = f"{name}_s_{side}"
            found[f"{name}_ms_{side}"] = 1e3 * found[column] if column in found else np.nan
    return found


def usual(found: pd.DataFrame) -> pd.DataFrame:
    """Single forward passes in the precision that the study is about."""
    precision = next(one for one in (*PREFERRED, *found["precision"]) if one in set(found["precision"]))
    chosen = (found["precision"] == precision) & (found["protocol"] == "single")
    return found[chosen].sort_values(["batch", "input_size"])


def of(found: pd.DataFrame, model: str, runtime: str = "eager", **columns: Any) -> pd.DataFrame:
    """Rows of a model in a runtime."""
    keep = (found["model"] == model) & (found["runtime"] == runtime)
    for name, value in columns.items():
        keep &= found[name] == value
    return found[keep]


def ordinary(found: pd.DataFrame) -> pd.DataFrame:
    """Rows of the usual number of tokens, where there are tokens."""
    return found[(found["input_kind"] != "seq") | (found["input_size"] == TOKENS)]


def multiply_adds(found: pd.DataFrame) -> list[Panel]:
    """Figure 1: multiply-adds do not tell latency."""
    eager = found[(found["runtime"] == "eager") & ~found["model"].str.startswith("bert-w")]
    eager = eager.assign(gigamacs=eager["macs"] / eager["batch"] / 1e9)
    eager = ordinary(eager)
    sizes = sorted({1, int(eager["batch"].max())}) if len(eager) else []
    at = {size: eager[eager["batch"] == size] for size in sizes}
    return [(f"eager, batch {size}", "gigamacs", dict(iter(rows.groupby("model")))) for size, rows in at.items()]


def device_time(found: pd.DataFrame) -> list[Panel]:
    """Figure 3: the space between kernel time and latency is the tax."""
    panels: list[Panel] = []
    for model in (BERT, "resnet-50"):
        rows = ordinary(of(found, model))
        kernels = rows.assign(ms_predicted=rows["compute_ms_predicted"], ms_measured=rows["compute_ms_measured"])
        panels.append((model, "batch", {"latency": rows, "device alone": kernels}))
    return panels


def runtimes_compared(found: pd.DataFrame) -> list[Panel]:
    """Figure 4: runtimes over batch and over sequence length."""
    names = list(dict.fromkeys(found["runtime"]))
    return [
        (f"{BERT}, {TOKENS} tokens", "batch", {name: of(found, BERT, name, input_size=TOKENS) for name in names}),
        (f"{BERT}, batch 1", "input_size", {name: of(found, BERT, name, batch=1) for name in names}),
    ]


def graphs_and_lengths(found: pd.DataFrame) -> list[Panel]:
    """Figure 5: a captured graph serves one length, so that shorter inputs are padded to it."""
    own = of(found, BERT, batch=1)
    panel = {"eager, own length": own}
    for length in (TOKENS, 512):
        graph = of(found, BERT, "cuda-graphs", batch=1, input_size=length)
        if len(graph):
            padded = own[own["input_size"] <= length]
            same = {f"ms_{side}": float(graph[f"ms_{side}"].iloc[0]) for side in SIDES}
            panel[f"graph, padded to {length}"] = padded.assign(**same)
    return [(f"{BERT}, batch 1", "input_size", panel)]


def widths_and_depths(found: pd.DataFrame) -> list[Panel]:
    """Figure 6: below the crossover width is free; every layer costs."""
    shapes = found["model"].str.extract(r"^bert-w(?P<width>\d+)-l(?P<layers>\d+)$").astype(float)
    named = found.assign(width=shapes["width"], layers=shapes["layers"])
    named = named[named["runtime"] == "eager"].dropna(subset=["width", "layers"])
    panels: list[Panel] = []
    for along, fixed, value in (("width", "layers", 12), ("layers", "width", 768)):
        rows = named[named[fixed] == value].sort_values(along)
        lines = {f"batch {size}": part for size, part in rows.groupby("batch")}
        panels.append((f"BERT, {fixed} {value}", along, lines))
    return panels


def over_batch(text: str, ways: Mapping[str, tuple[str, str]]) -> Callable[[pd.DataFrame], list[Panel]]:
    """A figure of (model, runtime) by label over batch."""

    def panels(found: pd.DataFrame) -> list[Panel]:
        return [(text, "batch", {label: ordinary(of(found, *way)) for label, way in ways.items()})]

    return panels


FIGURES: dict[str, Callable[[pd.DataFrame], list[Panel]]] = {
    "fig1_macs": multiply_adds,
    "fig3_device_time": device_time,
    "fig4_runtimes": runtimes_compared,
    "fig5_graphs_and_lengths": graphs_and_lengths,
    "fig6_width_depth": widths_and_depths,
    "fig7_funnel": over_batch("Funnel against BERT, eager", {"BERT": (BERT, "eager"), "Funnel": (FUNNEL, "eager")}),
    "fig8_efficient": over_batch("efficient variants, eager", {name: (name, "eager") for name in EFFICIENT}),
    "fnet": over_batch(
        "architecture against runtime",
        {"FNet, eager": (FNET, "eager"), "BERT, eager": (BERT, "eager"), "BERT, onnxruntime": (BERT, "onnxruntime")},
    ),
}


def table_1(found: pd.DataFrame) -> list[tuple[str, float, float]]:
    """Table 1: what four times the batch or tokens, or twice the width, takes over BERT at batch 1."""
    first = of(found, BERT, batch=1, input_size=TOKENS)
    others = {
        "batch 4": of(found, BERT, batch=4, input_size=TOKENS),
        "512 tokens": of(found, BERT, batch=1, input_size=512),
        "width 1536": of(found, "bert-w1536-l12", batch=1),
    }
    if first.empty:
        return []
    return [
        (name, *(float(rows[f"ms_{side}"].iloc[0] / first[f"ms_{side}"].iloc[0]) for side in SIDES))  # type: ignore[misc]
        for name, rows in others.items()
        if len(rows)
    ]


def table_3(found: pd.DataFrame) -> list[tuple[str, float, float, float, float]]:
    """Table 3: each runtime at batch 1, and the share of the time that the device is busy."""
    rows = found[(found["model"] == BERT) & (found["batch"] == 1) & (found["input_size"] == TOKENS)]
    return [
        (
            str(row.runtime),
            row.ms_predicted,
            row.ms_measured,
            min(row.compute_ms_predicted / row.ms_predicted, 1.0),
            min(row.compute_ms_measured / row.ms_measured, 1.0),
        )
        for row in rows.itertuples()
    ]


def drawn(panels: Sequence[Panel]) -> Figure | None:
    """A figure of those panels that have something in them."""
    filled = [(title, x, {label: r for label, r in rows.items() if len(r)}) for title, x, rows in panels]
    filled = [panel for panel in filled if len(panel[2]) > 0]
    if not filled:
        return None
    made = style.figure(style.COLUMN_IN * len(filled), 3.1)
    for ax, (title, x, rows) in zip(made.subplots(1, len(filled), squeeze=False).flat, filled, strict=True):
        for index, (label, part) in enumerate(rows.items()):
            _curve(ax, index, label, part, x)
        _finish(ax, x, title)
    return made


def _curve(ax: Axes, index: int, label: str, rows: pd.DataFrame, x: str) -> None:
    look: dict[str, Any] = {"color": style.LINES[index % 7], "marker": style.MARKERS[index % 7]}
    hollow = {} if index < 7 else {"mfc": "none"}
    ax.plot(rows[x], rows["ms_predicted"], label=label, linestyle=style.DASHES[index % 6], **look, **hollow)
    ax.plot(rows[x], rows["ms_measured"], linestyle="", marker="x", markersize=5, color=look["color"], mew=1.1)


def _finish(ax: Axes, x: str, title: str) -> None:
    ax.set_xscale("log")
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    room = max(1.0, (5.0 / (high / low)) ** 0.5)  # a flat line is to look flat
    ax.set_ylim(low / room, high * room)
    style.plain_ticks(ax.xaxis, ax.get_xlim())
    style.plain_ticks(ax.yaxis, ax.get_ylim())
    ax.set_xlabel({"gigamacs": "gigaMACs per sample", "input_size": "tokens"}.get(x, x))
    ax.set_ylabel("latency (ms)")
    ax.set_title(title)
    style.legend_below(ax, 0.34)


def learning(profile: DeviceProfile) -> Figure | None:
    """Error on networks that no fit saw against the seconds that calibration had taken."""
    if not profile.learning:
        return None
    made = style.figure(style.COLUMN_IN, 2.4)
    ax = made.subplots()
    ax.plot([one.seconds for one in profile.learning], [100 * one.error for one in profile.learning], marker="o")
    ax.set_xlabel("seconds of calibration")
    ax.set_ylabel("median error (%)")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_title(f"{profile.name}, networks that no fit saw")
    return made


def agreement(folders: Sequence[Path], found: pd.DataFrame, name: str) -> float:
    """Median difference between the predictions of two calibrations, on cells that both predict."""
    keys = ["model", "input_size", "precision", "runtime", "protocol", "batch"]
    other = cells(folders, profiles.find(name))
    both = found.merge(other, on=keys, suffixes=("", "_again"))
    return float((both["ms_predicted_again"] / both["ms_predicted"] - 1).abs().median())


def say(found: pd.DataFrame) -> None:
    """Print both tables."""
    print("Table 1, times BERT at batch 1     predicted   measured")
    for name, predicted, measured in table_1(found):
        print(f"{name:34} {predicted:9.2f} {measured:10.2f}")
    print("Table 3, BERT at batch 1        predicted ms  measured ms  busy predicted  measured")
    for runtime, predicted, measured, busy, seen in table_3(found):
        print(f"{runtime:31} {predicted:12.3f} {measured:12.3f} {busy:14.0%} {seen:9.0%}".replace("nan%", "   -"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables and write a figure for every finding that was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path, help="folders; those that are not there are skipped")
    parser.add_argument("--device", required=True, help="name of the profile")
    parser.add_argument("--again", help="name of a second profile of the same machine, to hold against the first")
    parser.add_argument("-o", "--output", type=Path, default=Path(), help="folder of the figures")
    asked = parser.parse_args(arguments)
    profile = profiles.find(asked.device)
    folders = [folder for folder in asked.recordings if (folder / recording.MANIFEST).exists()]
    whole = cells(folders, profile)
    found = usual(whole)
    say(found)
    if asked.again:
        print(f"Predictions of both calibrations differ by {agreement(folders, whole, asked.again):.1%} in the median.")
    with style.in_style():
        made = {"calibration": learning(profile), **{name: drawn(panels(found)) for name, panels in FIGURES.items()}}
        for name, figure in made.items():
            if figure is None:
                print(f"{name}: not measured")
            else:
                print(f"wrote {style.save(figure, asked.output / f'{name}.png')}")


if __name__ == "__main__":
    try:
        main()
    except LatpredError as error:
        sys.exit(f"latpred: {error}")
