"""The figures of "The Framework Tax" for any device with a profile; README.md says what each of them shows.

    python examples/framework_tax/figures.py fig06_width_depth --device rtx-8000

Nothing here measures. Models go by name or are built from configurations, without weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from scipy.stats import kendalltau
from torch import nn

import latpred
from latpred import Lengths, tables
from latpred.accuracy import recording
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
        Where and how to predict; fig09_devices takes several devices, joined by commas.
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

    @property
    def runtimes(self) -> tuple[str, ...]:
        """Those that the device's profile knows, eager first."""
        known = profile_of(self.device).runtimes
        return ("eager", *sorted(name for name in known if name != "eager"))


def asked(arguments: Sequence[str] | None = None) -> tuple[Callable[[Asked], None], Asked]:
    """Read the command line: which figure, and of what."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=FIGURES, metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--device", help="cpu (this machine's profile, the default), or any profile's name")
    parser.add_argument("--precision", help="default: fp16 on a GPU whose profile has it, else fp32")
    parser.add_argument("--protocol", choices=("single", "pipelined"), help="default: single")
    parser.add_argument("--batches", help=f"default: {','.join(map(str, BATCHES))}")
    parser.add_argument("--models", default="", help="names joined by commas, in place of the figure's own")
    parser.add_argument("--recording", help="folder or name of a recording, drawn over the predictions")
    parser.add_argument("-o", "--output", type=Path, help="default: FIGURE.png")
    given = parser.parse_args(arguments)
    own = DEFAULTS.get(given.figure, {})
    device = given.device or own.get("device", "cpu")
    known = [profile_of(name).kernels for name in device.split(",")]
    what = Asked(
        device=device,
        precision=given.precision or ("fp16" if all("fp16" in kernels for kernels in known) else "fp32"),
        protocol=given.protocol or own.get("protocol", "single"),
        batches=tuple(map(int, given.batches.split(","))) if given.batches else own.get("batches", BATCHES),
        models=tuple(model for model in given.models.split(",") if model),
        recording=given.recording,
        output=given.output or Path(f"{given.figure}.png"),
    )
    return FIGURES[given.figure], what


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


def panel_of_each(what: Asked, *models: str) -> Iterator[tuple[Axes, str]]:
    """A panel for each model asked for, else for each of these."""
    models = what.models or models
    with panels(what, len(models)) as axes:
        yield from zip(axes, models, strict=True)


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


def latencies(label: str, one: Curve) -> None:
    """Print the numbers of one curve."""
    table([label, "ms"], zip(one.batches, map(float, one.latency_ms), strict=True))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print the numbers of a figure."""
    print("  ".join(f"{name:>14}" for name in head))
    for row in rows:
        print("  ".join(f"{cell:>14.3g}" if isinstance(cell, float) else f"{cell!s:>14}" for cell in row))


WORK_MODELS = (
    *("bert-base", "distilbert", "squeezebert", "albert", "fnet", "electra-small", "mobilebert"),
    *("resnet-18", "resnet-50", "resnet-101", "mobilenet-v2", "efficientnet-b0", "vit-base-32"),
)


def fig01_macs(what: Asked) -> None:
    """Multiply-adds against latency. At batch 1 on a GPU, one says next to nothing about the other.

    Draw a panel for the smallest and one for the largest batch.
    """
    models = what.models or WORK_MODELS
    found = curves(what, [(model, model, "eager") for model in models])
    giga = {model: latpred.trace(model).macs(1) / 1e9 for model in found}
    batches = (what.batches[0], what.batches[-1])
    with panels(what, 2) as axes:
        for ax, batch in zip(axes, batches, strict=True):
            at = list(what.batches).index(batch)
            x = [giga[model] for model in found]
            y = [float(one.latency_ms[at]) for one in found.values()]
            for index, (one, two) in enumerate(zip(x, y, strict=True)):
                colour = style.LINES[index % 7]
                fill = colour if index < 7 else "none"  # the second seven are hollow
                marker = style.MARKERS[index % 7]
                ax.plot(one, two, linestyle="", marker=marker, ms=5, color=colour, mfc=fill)
            for index, model in enumerate(found):
                points = measured(what, model)
                over(ax, index, {giga[model]: points[batch]} if batch in points else {})
            tau = kendalltau(x, y).statistic
            against(ax, "gigaMACs per sample", title(what, f"batch {batch}, Kendall tau {tau:.2f}"))
            table(["model", "GMACs", f"ms at {batch}"], [(m, a, b) for m, a, b in zip(found, x, y, strict=True)])
        axes[0].figure.legend(axes[0].lines[: len(found)], list(found), loc="outside lower center", ncols=5)


def fig03_device_time(what: Asked) -> None:
    """What the device computes for against what the user waits for. The space between is the framework's tax.

    Draw a panel for each model: latency and device time over batch.
    """
    for ax, model in panel_of_each(what, "bert-base-uncased", "resnet-50"):
        found = curve(what, model)
        busy = [point.latency_ms * point.device_busy for point in found]
        draw(ax, 0, "latency", found.batches, found.latency_ms)
        draw(ax, 1, "device computing", found.batches, busy)
        ax.fill_between(found.batches, busy, found.latency_ms, color=style.ORANGE, alpha=0.25, label="tax")
        over(ax, 0, measured(what, model))
        against(ax, "batch", title(what, model))
        rows = [(p.batch, p.latency_ms, b, f"{p.device_busy:.0%}") for p, b in zip(found, busy, strict=True)]
        table([model[:14], "latency ms", "device ms", "busy"], rows)


SEQUENCE_LENGTHS = (16, 32, 64, 128, 256, 512)


def fig04_runtimes(what: Asked) -> None:
    """Runtimes over batch, and over sequence length at batch 1. They differ where the framework bounds latency.

    Draw latency over batch and over sequence length for each runtime of the device's profile.
    """
    model = (what.models or ("bert-base-uncased",))[0]
    found = curves(what, [(runtime, model, runtime) for runtime in what.runtimes])
    first = what.batches[0]
    lengths = [length for length in SEQUENCE_LENGTHS if length <= 128 * max(1, len(what.batches) // 2)]
    with panels(what, 2) as (left, right):
        for index, (runtime, one) in enumerate(found.items()):
            draw(left, index, runtime, one.batches, one.latency_ms)
            over(left, index, measured(what, model, runtime, input_size=128))
            took = [curve(what, model, runtime, seq=length, batches=[first]).latency_ms[0] for length in lengths]
            draw(right, index, runtime, lengths, took)
            known = {length: measured(what, model, runtime, input_size=length) for length in lengths}
            over(right, index, {length: ms[first] for length, ms in known.items() if first in ms})
            latencies(runtime[:14], one)
        against(left, "batch", title(what, model))
        against(right, "tokens", title(what, f"{model}, batch {first}"))


UNEQUAL_LENGTHS = Lengths(mean=20.92, std=10.18, padded_to=128)
EXECUTIONS = (
    ("padded, eager", "padded", "eager"),
    ("nested, eager", "nested", "eager"),
    ("padded, graph", "padded", "cuda-graphs"),
)


def fig05_lengths(what: Asked) -> None:
    """Sequences of unequal lengths. Padding wastes device time; graphs need it, and win where the host is slow.

    Lengths are the paper's: 20.92 tokens in the mean, 10.18 of standard deviation, padded to 128.
    """
    model = encoder()
    with panels(what) as (ax,):
        for index, (label, execution, runtime) in enumerate(EXECUTIONS):
            if runtime in what.runtimes:
                one = curve(what, model, runtime, lengths=UNEQUAL_LENGTHS, execution=execution)
                draw(ax, index, label, one.batches, one.latency_ms)
                latencies(label[:14], one)
        against(ax, "batch", title(what, "encoder of BERT's size, mean 21 tokens"))


def encoder(width: int = 768, layers: int = 12) -> nn.TransformerEncoder:
    """An encoder that torch can run nested, on the meta device."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True, activation="gelu")
        return nn.TransformerEncoder(layer, layers).eval()


WIDTHS = (128, 256, 512, 768, 1024, 1536, 2048)
DEPTHS = (1, 2, 4, 8, 12, 16, 24)


def fig06_width_depth(what: Asked) -> None:
    """BERT made wider, and deeper. Below the crossover width costs nothing; every layer always costs.

    Draw latency over width at 12 layers, and over depth at width 768, a line for each batch.
    """
    wide = [curve(what, bert(what.device, width=width)) for width in WIDTHS]
    deep = [curve(what, bert(what.device, layers=layers)) for layers in DEPTHS]
    with panels(what, 2) as (left, right):
        for ax, sizes, found, name in ((left, WIDTHS, wide, "w{}-l12"), (right, DEPTHS, deep, "w768-l{}")):
            known = {size: measured(what, f"bert-{name.format(size)}") for size in sizes}
            for index, batch in enumerate(what.batches):
                took = [float(one.latency_ms[index]) for one in found]
                draw(ax, index, f"batch {batch}", sizes, took)
                over(ax, index, {size: ms[batch] for size, ms in known.items() if batch in ms})
                table([name, f"ms at {batch}"], zip(sizes, took, strict=True))
        against(left, "width", title(what, "BERT, 12 layers"))
        against(right, "layers", title(what, "BERT, width 768"))


def fig07_funnel(what: Asked) -> None:
    """Funnel against BERT. Fewer multiply-adds in more operations: the host pays for each of those.

    Draw both over batch, and print their work.
    """
    models = what.models or ("bert-base-uncased", "funnel-transformer-small")
    for model in models:
        graph = latpred.trace(model)
        print(f"{model}: {graph.macs(8) / 8e9:.2f} GMACs per sample at batch 8, {graph.launches(8)} launches")
    over_batch(what, models, "Funnel against BERT")


EFFICIENT = (
    "bert-base-uncased",
    "distilbert-base-uncased",
    "squeezebert-uncased",
    "albert-base-v2",
    "mobilebert-uncased",
)


def fig08_efficient(what: Asked) -> None:
    """Efficient variants of BERT. Fewer operations help at batch 1, fewer multiply-adds at large batches.

    Draw all over batch.
    """
    over_batch(what, what.models or EFFICIENT, "efficient variants")


DEVICES = "titan-x-pascal,rtx-2080ti,rtx-8000,rtx-a6000"


def fig09_devices(what: Asked) -> None:
    """One model on several devices. The faster the device, the longer the framework bounds it.

    Draw a panel for each model, a line for each device, and print the crossovers.
    """
    devices = what.device.split(",")
    for ax, model in panel_of_each(what, "bert-base-uncased", "resnet-50"):
        rows = []
        for index, device in enumerate(devices):
            one = curve(replace(what, device=device), model)
            draw(ax, index, device, one.batches, one.latency_ms)
            rows.append((device, float(one.latency_ms[0]), str(one.crossover.batch)))
        against(ax, "batch", f"{model}\n{what.precision}, {what.protocol}")
        table([model[:14], "first ms", "crossover"], rows)


VISION_SPEECH = ("resnet-50", "mobilenet-v2", "vit-base-32", "wavlm-base")


def fig10_vision_speech(what: Asked) -> None:
    """Runtimes on images and speech. Networks of many small operations gain most from a leaner runtime.

    Draw a panel for each model, a line for each runtime of the device's profile.
    """
    for ax, model in panel_of_each(what, *VISION_SPEECH):
        found = curves(what, [(runtime, model, runtime) for runtime in what.runtimes])
        for index, (runtime, one) in enumerate(found.items()):
            draw(ax, index, runtime, one.batches, one.latency_ms)
            over(ax, index, measured(what, model, runtime))
        against(ax, "batch", title(what, model))
        rows = [(runtime, float(one.latency_ms[0]), float(one.latency_ms[-1])) for runtime, one in found.items()]
        table([model[:14], "first ms", "last ms"], rows)


PROMPT, NEW = 128, 16


def fig11_generation(what: Asked) -> None:
    """GPT-2 generates 16 tokens. Each further token is framework-bound up to batches at which the first is not.

    Draw the time to the first token, of each further one and of all over batch.
    """
    model = (what.models or ("gpt2",))[0]
    found = latpred.predict_generation(
        model, PROMPT, NEW, list(what.batches), device=what.device, precision=what.precision
    )
    lines = {
        "first token": [point.first_token_ms for point in found],
        "each further token": [point.per_token_ms or float("nan") for point in found],
        f"all {NEW}": [point.latency_ms for point in found],
        "of that, dispatch": [point.overhead_ms for point in found],
    }
    with panels(what) as (ax,):
        for index, (label, took) in enumerate(lines.items()):
            draw(ax, index, label, what.batches, took)
        against(ax, "batch", title(what, f"{model}, {PROMPT} tokens of prompt"))
    table(["batch", *lines], zip(what.batches, *lines.values(), strict=True))


def fig12_precision(what: Asked) -> None:
    """Number formats. Half the bits shorten the device's time, not that of a host that is slower still.

    Draw a panel for each model, a line for each precision that the device's profile knows.
    """
    for ax, model in panel_of_each(what, "bert-base-uncased", "resnet-50"):
        for index, precision in enumerate(sorted(profile_of(what.device).kernels)):
            one = curve(what, model, precision=precision)
            draw(ax, index, precision, one.batches, one.latency_ms)
            over(ax, index, measured(what, model, precision=precision))
            latencies(f"{precision} {model}"[:14], one)
        against(ax, "batch", f"{model}\n{profile_of(what.device).name}, {what.protocol}")


ARCHITECTURES = (("bert-base-uncased", "eager"), ("fnet-base", "eager"), ("bert-base-uncased", "onnxruntime"))


def fig13_fnet(what: Asked) -> None:
    """A better architecture against a better runtime: FNet in eager against BERT in ONNX Runtime.

    Draw the three over batch; a runtime that the device's profile lacks is left out.
    """
    ways = {f"{model} in {runtime}": (model, runtime) for model, runtime in ARCHITECTURES if runtime in what.runtimes}
    found = curves(what, [(label, *way) for label, way in ways.items()])
    with panels(what) as (ax,):
        for index, (label, one) in enumerate(found.items()):
            draw(ax, index, label, one.batches, one.latency_ms)
            over(ax, index, measured(what, *ways[label]))
            latencies(label, one)
        against(ax, "batch", title(what, "architecture against runtime"))


FIGURES = {
    figure.__name__: figure
    for figure in (
        *(fig01_macs, fig03_device_time, fig04_runtimes, fig05_lengths, fig06_width_depth, fig07_funnel),
        *(fig08_efficient, fig09_devices, fig10_vision_speech, fig11_generation, fig12_precision, fig13_fnet),
    )
}
DEFAULTS: dict[str, dict[str, Any]] = {  # where they are not the usual ones
    "fig01_macs": {"batches": (1, 64)},
    "fig06_width_depth": {"batches": (1, 8, 32)},
    "fig09_devices": {"device": DEVICES, "protocol": "pipelined"},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the figure that was asked for."""
    figure, what = asked(arguments)
    figure(what)


if __name__ == "__main__":
    main()
