"""The verb that compares runtimes and says what to change: explain."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from latpred.cli.options import (
    PROTOCOLS,
    Model,
    Output,
    Target,
    Way,
    batch_option,
    model_options,
    output_options,
    speech_options,
    target_options,
    way_options,
)
from latpred.cli.output import draw, emit, notice, plot_option
from latpred.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from latpred.prediction.timeline import ForwardPass


@click.command(
    epilog="\b\nExample:\n"
    "  latpred explain bert-base-uncased --batch 1\n"
    "  latpred explain resnet18 --batch 8 --runtime onnxruntime --json\n"
    "  latpred explain resnet18 --plot runtimes.png"
)
@click.argument("model")
@click.option("--batch", "-b", type=click.IntRange(1), default=1, show_default=True, help="Batch size.")
@model_options
@click.option(
    "--device", "-d", help="cpu, cuda:0 or simulated, a profile's name or file, or a GPU's name.  [default: as predict]"
)
@click.option("--host", help="Another host, as for predict.")
@click.option(
    "--runtime", "runtimes", multiple=True, help="Compare this with eager; may be given again.  [default: all]"
)
@click.option("--protocol", type=click.Choice(PROTOCOLS), default="single", show_default=True, help="As for predict.")
@way_options
@click.option("--yes", "-y", is_flag=True, help="Calibrate without asking on a machine that has no profile.")
@plot_option
@output_options
@speech_options
@click.pass_context
def explain(
    context: click.Context,
    model: str,
    batch: int,
    model_input: Model,
    device: str | None,
    host: str | None,
    runtimes: tuple[str, ...],
    protocol: str,
    way: Way,
    yes: bool,
    plot: Path | None,
    output: Output,
) -> None:
    """Compare runtimes for MODEL: what each takes, where the time goes, how far it can grow, what to change.

    MODEL is what `latpred predict` takes. A runtime that brings its own tools takes seconds the first time it meets a
    model.
    """
    from latpred import runtimes as known
    from latpred.cli.calibrate import ensure_profile
    from latpred.explanation.explain import explain as study

    for name in runtimes:
        known.get(name)  # a misspelt one must not cost a calibration, nor must a misspelt model
    demand_model(model, model_input)
    ensure_profile(context, device, way, runtimes=runtimes, yes=yes)
    found = study(
        model,
        batch,
        runtimes=runtimes or None,
        seq=model_input.seq,
        image=model_input.image,
        device=device,
        host=host,
        precision=model_input.precision,
        memory_format=way.memory_format,
        threads=way.threads,
        cudnn_benchmark=way.cudnn_benchmark,
        protocol=protocol,
        progress=lambda name: notice(f"asking {name} what it makes of {model}"),
    )

    def text(console: Any) -> None:
        console.print(repr(found), markup=False, highlight=False, soft_wrap=True)

    emit(output, document=found.to_dict, rows=found.to_frame, text=text)
    draw(plot, found.plot)


def demand_model(model: str, given: Model) -> None:
    """Make sure that a model can be walked."""
    from latpred.runtimes.onnx import onnx_file
    from latpred.tracing import trace

    if not onnx_file.is_file(model):
        trace(model, seq=given.seq, image=given.image, precision=given.precision)


@click.command(
    epilog="\b\nExample:\n"
    "  latpred timeline bert-base-uncased --device rtx-8000 -o trace.json\n"
    "  latpred timeline resnet18 --batch 8 --plot clocks.png"
)
@click.argument("model")
@click.option("--batch", "-b", type=click.IntRange(1), default=1, show_default=True, help="Batch size.")
@model_options
@target_options
@way_options
@click.option("--yes", "-y", is_flag=True, help="Calibrate without asking on a machine that has no profile.")
@plot_option
@output_options
@speech_options
@click.pass_context
def timeline(
    context: click.Context,
    model: str,
    batch: int,
    model_input: Model,
    target: Target,
    way: Way,
    yes: bool,
    plot: Path | None,
    output: Output,
) -> None:
    """Follow host and device through one forward pass of MODEL: every dispatch, every kernel, and the gaps between.

    -o trace.json writes a trace that https://ui.perfetto.dev and chrome://tracing open; --plot draws it.
    """
    from latpred.cli.calibrate import ensure_profile
    from latpred.cli.predict import walked
    from latpred.prediction.find import predictor_of
    from latpred.prediction.timeline import forward_pass
    from latpred.query import DeviceQuery

    if target.protocol != "single":
        raise UsageError("A timeline is of one forward pass that is waited for; leave out --protocol.")
    runtimes = (target.runtime,)
    ensure = partial(ensure_profile, context, target.device, way, runtimes=runtimes, yes=yes)
    graph = walked(model, model_input, target, way, ensure=ensure)
    predictor = predictor_of(DeviceQuery(target.device, target.host, way.threads, way.cudnn_benchmark))
    found = forward_pass(predictor, graph, batch, runtime=target.runtime)

    def text(console: Console) -> None:
        _print(found, console)

    emit(output, document=found.to_dict, rows=found.to_frame, text=text)
    if plot is not None:
        from latpred.plot import two_clocks

        draw(plot, lambda: two_clocks(found))


def _print(found: ForwardPass, console: Console) -> None:
    from rich.table import Table

    from latpred.prediction.timeline import DEVICE, HOST, WAIT
    from latpred.units import format_duration

    point, gaps = found.prediction, found.gaps
    about = f"{point.model}, batch {point.batch}, {point.precision}, {point.runtime} on {point.device}"
    console.print(f"{about}: {format_duration(point.latency_ms / 1e3)}", style="bold", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("clock", "spans", "busy", "of the latency"):
        table.add_column(name, justify="left" if name == "clock" else "right", no_wrap=True)
    for name in (HOST, DEVICE):
        count = sum(span.kind != WAIT for span in found.row(name))
        busy_us = found.busy_us(name)
        share = busy_us / 1e3 / point.latency_ms if point.latency_ms else 0.0
        table.add_row(name, str(count), format_duration(busy_us / 1e6), f"{share:.1%}")
    console.print(table)
    total, longest = (format_duration(us / 1e6) for us in gaps)
    console.print(f"between kernels the device idles for {total}, at most {longest} at a time", soft_wrap=True)


@click.command(
    epilog="\b\nExample:\n"
    "  latpred report bert-base-uncased -o bert.html\n"
    "  latpred report resnet18 mobilenet_v2 --device rtx-8000 -o two.html"
)
@click.argument("models", nargs=-1, required=True)
@click.option(
    "--output",
    "-o",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The file to write.",
)
@batch_option("1-256:2x")
@model_options
@click.option("--device", "-d", help="As for explain.  [default: as predict]")
@click.option("--host", help="Another host, as for predict.")
@click.option(
    "--runtime", "runtimes", multiple=True, help="Show this beside eager; may be given again.  [default: all]"
)
@click.option("--protocol", type=click.Choice(PROTOCOLS), default="single", show_default=True, help="As for predict.")
@way_options
@click.option("--yes", "-y", is_flag=True, help="Calibrate without asking on a machine that has no profile.")
@speech_options
@click.pass_context
def report(
    context: click.Context,
    models: tuple[str, ...],
    path: Path,
    batches: tuple[int, ...],
    model_input: Model,
    device: str | None,
    host: str | None,
    runtimes: tuple[str, ...],
    protocol: str,
    way: Way,
    yes: bool,
) -> None:
    """Write one HTML file about MODELS: answer, figures, runtimes, what is free, what to change, how far to trust it.

    The file needs no network. Runtimes are compared at the smallest of the batch sizes.
    """
    from latpred import runtimes as known
    from latpred.cli.calibrate import ensure_profile
    from latpred.report import demand_packages, gather, write
    from latpred.storage import demand_writable

    demand_packages()
    demand_writable(path)
    for name in runtimes:
        known.get(name)
    for model in models:
        demand_model(model, model_input)
    ensure_profile(context, device, way, runtimes=runtimes, yes=yes)
    asked: dict[str, Any] = {
        "runtimes": runtimes or None,
        "seq": model_input.seq,
        "image": model_input.image,
        "precision": model_input.precision,
        "device": device,
        "host": host,
        "memory_format": way.memory_format,
        "threads": way.threads,
        "cudnn_benchmark": way.cudnn_benchmark,
        "protocol": protocol,
    }
    parts = []
    for number, model in enumerate(models, 1):
        notice(f"predicting {model} ({number} of {len(models)})")
        said = _asking(model)
        parts.append(gather(model, batches, progress=said, **asked))
    notice(f"wrote {write(parts, path)}")


def _asking(model: str) -> Any:
    return lambda name: notice(f"asking {name} what it makes of {model}")
