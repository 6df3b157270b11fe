"""The verb that says whether a profile still holds: check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from latpred.cli.options import Output, output_options, parse_seconds, parsed_by, speech_options
from latpred.cli.output import emit

if TYPE_CHECKING:
    from rich.console import Console

EXITS = {"holds": 0, "moved": 1, "unclear": 3}


@click.command(epilog="\b\nExample:\n  latpred check\n  latpred check --device cuda:0 --json")
@click.argument("profile", required=False)
@click.option("--device", "-d", help="cpu, cuda:0 or simulated.  [default: the profile's]")
@click.option(
    "--budget", metavar="TIME", callback=parsed_by(parse_seconds), help="Time to spend, as 25s.  [default: 25s]"
)
@output_options
@speech_options
@click.pass_context
def check(
    context: click.Context, profile: str | None, device: str | None, budget: float | None, output: Output
) -> None:
    """Say in half a minute whether a PROFILE of this machine still holds, after a new driver, torch or library.

    Times a few of the profile's own cells again. Exits with 0 when it holds, 1 when parts of it moved, and 3 when
    noise or other work leaves too little to tell by. Without PROFILE, this machine's own is checked.
    """
    from latpred.calibration.checking import BUDGET_S
    from latpred.calibration.checking import check as run
    from latpred.cli.progress import progress

    with progress("checking") as show:
        found = run(profile, device=device, budget_s=BUDGET_S if budget is None else budget, progress=show)

    def text(console: Console) -> None:
        found.print(console)

    emit(output, document=found.to_dict, rows=found.to_frame, text=text)
    context.exit(EXITS[found.verdict])
