"""The verb that writes a page about models: report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from latpred.cli.options import (
    PROTOCOLS,
    Model,
    Way,
    batch_option,
    model_options,
    speech_options,
    way_options,
)
from latpred.cli.output import notice


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
    from latpred.cli.calibrating import ensure_profile
    from latpred.cli.explaining import demand_model
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
