"""The verb that predicts text generation: generate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from latpred.cli.options import MODEL_PRECISIONS, Output, batch_option, output_options, speech_options
from latpred.cli.output import emit
from latpred.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from latpred.generation import GenerationCurve


@click.command(
    epilog="\b\nExample:\n"
    "  latpred generate gpt2 --prompt 128 --new-tokens 16 --batch 1-128:2x\n"
    "  latpred generate llama-3.2-1b --prompt 512 --new-tokens 64 --device rtx-8000"
)
@click.argument("model")
@click.option("--prompt", type=click.IntRange(1), default=128, show_default=True, help="Tokens of each prompt.")
@click.option(
    "--new-tokens", type=click.IntRange(1), default=16, show_default=True, help="Tokens to generate for each."
)
@batch_option("1")
@click.option("--precision", type=click.Choice(MODEL_PRECISIONS), help="Number format.  [default: the model's own]")
@click.option(
    "--device",
    "-d",
    help="cpu, cuda:0, simulated, or a profile's name or file.  [default: this machine's own profile]",
)
@click.option("--runtime", default="eager", show_default=True, help="What runs the forward passes of the decode steps.")
@click.option("--measure", is_flag=True, help="Run it on this machine as well, and print measured beside predicted.")
@click.option("--yes", "-y", is_flag=True, help="Calibrate without asking on a machine that has no profile.")
@output_options
@speech_options
@click.pass_context
def generate(
    context: click.Context,
    model: str,
    prompt: int,
    new_tokens: int,
    batches: tuple[int, ...],
    precision: str | None,
    device: str | None,
    runtime: str,
    measure: bool,
    yes: bool,
    output: Output,
) -> None:
    """Predict how long MODEL takes to generate text: its first token, each further one, and all of them.

    MODEL is the name of a decoder (gpt2, llama-3.2-1b), or a file and the function in it that builds a transformers
    model with a generate() (models.py:build).
    """
    from latpred import runtimes as known
    from latpred.cli.calibrating import ensure_profile
    from latpred.generating import predict_generation
    from latpred.tracing.decoders import decoder

    known.get(runtime)
    decoder(model)  # a misspelt model must not cost a calibration
    ensure_profile(context, device, runtimes=(runtime,), yes=yes)
    curve = predict_generation(model, prompt, new_tokens, batches, runtime, device=device, precision=precision)
    if measure:
        _measured(curve, model, live_device(device), output)
        return
    emit(output, document=curve.to_dict, rows=curve.to_frame, text=lambda console: print_generation(curve, console))


def live_device(device: str | None) -> str:
    """What to measure on: the device that was named, else the one whose profile was."""
    from latpred import profiles

    if device is not None and device.partition(":")[0] in profiles.LIVE_KINDS:
        return device
    return profiles.find(device).device.kind


def _measured(curve: GenerationCurve, model: str, device: str, output: Output) -> None:
    """Run what was predicted, and show both."""
    from latpred.calibration.generating import beside, measure_generation
    from latpred.cli.progress import progress

    first = curve[0]
    if first.runtime != "eager":
        raise UsageError(
            f"Text generation is measured in eager, not in {first.runtime}; leave out --measure or --runtime."
        )
    with progress("measuring") as show:
        table = measure_generation(
            model,
            first.prompt,
            first.new_tokens,
            [point.batch for point in curve],
            device=device,
            precision=first.precision,
            progress=show,
        )
    joined = beside(curve, table)
    emit(
        output,
        document=lambda: {**curve.to_dict(), "measured": joined.to_dict("records")},
        rows=lambda: joined,
        text=lambda console: _print_both(curve, joined, console),
    )


def _print_both(curve: GenerationCurve, joined: pd.DataFrame, console: Console) -> None:
    from rich.table import Table

    from latpred.units import format_duration

    print_generation(curve, console)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("batch", "what", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=True)
    for row in joined.to_dict("records"):
        cells = (str(row["batch"]), row["what"], format_duration(row["predicted_s"]))
        if row["status"] == "ok":
            table.add_row(*cells, format_duration(row["measured_s"]), f"{row['error']:+.1%}")
        else:
            table.add_row(*cells, row["status"], "-")
    console.print(table)


def print_generation(curve: GenerationCurve, console: Console) -> None:
    """Print what was asked, the table, provenance and caveats."""
    from rich.table import Table

    from latpred.generation import HEAD, row, title

    console.print(title(curve[0]), style="bold", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in HEAD:
        table.add_column(name, justify="left" if name == "regime" else "right", no_wrap=True)
    for point in curve:
        table.add_row(*row(point))
    console.print(table, soft_wrap=True)
    if any(point.fits is False for point in curve):
        console.print("* needs more memory than the device has")
    provenance = curve[0].provenance
    console.print(f"profile: {provenance.profile}, {provenance.source}", markup=False, soft_wrap=True)
    for caveat in provenance.caveats:
        console.print(f"caveat: {caveat}", markup=False, soft_wrap=True)
