"""The verb that follows both clocks through one forward pass: timeline."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from latpred.cli.figures import draw, plot_option
from latpred.cli.options import (
    Model,
    Output,
    Target,
    Way,
    model_options,
    output_options,
    speech_options,
    target_options,
    way_options,
)
from latpred.cli.output import emit
from latpred.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from latpred.forward import ForwardPass


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
    from latpred.cli.calibrating import ensure_profile
    from latpred.cli.predicting import walked
    from latpred.finding import located, predictor_of
    from latpred.forward import forward_pass

    if target.protocol != "single":
        raise UsageError("A timeline is of one forward pass that is waited for; leave out --protocol.")
    runtimes = (target.runtime,)
    ensure = partial(ensure_profile, context, target.device, way, runtimes=runtimes, yes=yes)
    graph = walked(model, model_input, target, way, ensure=ensure)
    predictor = predictor_of(located(target.device, target.host, way.threads, way.cudnn_benchmark))
    found = forward_pass(predictor, graph, batch, runtime=target.runtime)

    def text(console: Console) -> None:
        _print(found, console)

    emit(output, document=found.to_dict, rows=found.to_frame, text=text)
    if plot is not None:
        from latpred.plot import two_clocks

        draw(plot, lambda: two_clocks(found))


def _print(found: ForwardPass, console: Console) -> None:
    from rich.table import Table

    from latpred.forward import DEVICE, HOST, WAIT
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
