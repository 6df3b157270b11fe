"""Where multiply-adds mislead: a plain random search, drawn as predicted latency against multiply-adds.

    python examples/macs_mislead.py --out macs_mislead.png                     # encoders on a Quadro RTX 8000
    python examples/macs_mislead.py --space residual --device cpu --precision fp32 --batches 1,16

Where the framework rules, a network of ten times the multiply-adds takes the same time, and one of as many may take
ten times as long: the ringed pair is the worst there is. Where compute rules, multiply-adds are a fair guide.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter
from spaces import SPACES

import latpred

LABEL = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}
ALIKE = 1.1  # multiply-adds within this factor count as equal
# Blue and orange tell apart in every kind of colour vision; filled and open, dark and light do without colour.
STYLES = {
    "the framework rules": {"marker": "s", "facecolors": "none", "edgecolors": "#E69F00", "s": 26, "linewidths": 1.3},
    "the device rules": {"marker": "o", "color": "#0B4F8A", "s": 20, "linewidths": 0},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw candidates, predict them, and save the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", choices=SPACES, default="encoders")
    parser.add_argument("--device", default="rtx-8000")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--candidates", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="macs_mislead.png")
    asked = parser.parse_args(arguments)
    space, batches = SPACES[asked.space], [int(batch) for batch in asked.batches.split(",")]

    rng = random.Random(asked.seed)
    choices = [{name: rng.choice(values) for name, values in space.CHOICES.items()} for _ in range(asked.candidates)]
    table = latpred.predict_many(
        (space.candidate(**choice) for choice in choices),
        batch=batches,
        device=asked.device,
        precision=asked.precision,
        **space.INPUT,
    )
    figure, axes = plt.subplots(1, len(batches), figsize=(4.8 * len(batches), 4.2), squeeze=False, layout="constrained")
    for batch, panel in zip(batches, axes[0], strict=True):
        part = table[table["batch"] == batch]
        found = latpred.agreement(part["macs"], part["latency_ms"])
        pair = worst_pair(part)
        draw(panel, part, pair, f"batch {batch}: Kendall tau {found.kendall:.2f}")
        print(f"batch {batch}: Kendall tau of multiply-adds {found.kendall:.2f}, Spearman {found.spearman:.2f}")
        for row in pair.itertuples():
            print(f"  {row.macs / 1e9:9.2f} GMACs {row.latency_ms:9.2f} ms   {choices[row.candidate]}")
    axes[0][0].set_ylabel("predicted latency (ms)")
    handles = [axes[0][0].scatter([], [], label=label, **style) for label, style in STYLES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(f"{asked.candidates} random {asked.space} on {asked.device}, {asked.precision}, eager", fontsize=11)
    figure.savefig(asked.out, dpi=150)
    print(asked.out)


def worst_pair(table: pd.DataFrame) -> pd.DataFrame:
    """The two candidates of about equal multiply-adds whose latencies are furthest apart."""
    ordered = table.sort_values("macs").reset_index(drop=True)
    worst, pair = 0.0, ordered.iloc[:2]
    for position, row in ordered.iterrows():
        alike = ordered.iloc[position:][lambda rest, most=row["macs"] * ALIKE: rest["macs"] <= most]
        slowest, fastest = alike["latency_ms"].idxmax(), alike["latency_ms"].idxmin()
        ratio = ordered.loc[slowest, "latency_ms"] / ordered.loc[fastest, "latency_ms"]
        if ratio > worst:
            worst, pair = ratio, ordered.loc[[fastest, slowest]]
    return pair


def draw(panel: Any, table: pd.DataFrame, pair: pd.DataFrame, title: str) -> None:
    """One scatter plot, with the pair ringed."""
    framework = table["regime"] == "framework-bound"
    for part, style in zip((table[framework], table[~framework]), STYLES.values(), strict=True):
        panel.scatter(part["macs"] / 1e9, part["latency_ms"], **style)
    panel.scatter(pair["macs"] / 1e9, pair["latency_ms"], s=150, facecolors="none", edgecolors="black", linewidths=1.4)
    panel.plot(pair["macs"] / 1e9, pair["latency_ms"], color="black", linewidth=1, linestyle=":")
    low, high = pair["latency_ms"]
    middle = (pair["macs"].iloc[0] / 1e9, (low * high) ** 0.5)
    panel.annotate(f"{high / low:.1f} x", middle, xytext=(8, 0), textcoords="offset points", bbox=LABEL, fontsize=9)
    panel.set(xscale="log", yscale="log", xlabel="multiply-adds (GMACs)")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if axis is panel.yaxis else (1,)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    panel.set_title(title, fontsize=10)
    panel.grid(color="0.9", linewidth=0.6)
    panel.set_axisbelow(True)


if __name__ == "__main__":
    main()
