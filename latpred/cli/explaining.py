"""The verb that compares runtimes and says what to change: explain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from latpred.cli.figures import draw, plot_option
from latpred.cli.options import (
    PROTOCOLS,
    Model,
    Output,
    Way,
    model_options,
    output_options,
    speech_options,
    way_options,
)
from latpred.cli.output import emit, notice


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
    from latpred.cli.calibrating import ensure_profile
    from latpred.explaining import explain as study

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
    from latpred.runtimes import onnx_file
    from latpred.tracing import trace

    if not onnx_file.is_file(model):
        trace(model, seq=given.seq, image=given.image, precision=given.precision)
