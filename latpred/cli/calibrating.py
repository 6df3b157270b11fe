"""Verbs that make profiles: calibrate measures this machine, fit uses samples taken elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from latpred.cli.context import State
from latpred.cli.options import Output, output_options, parse_seconds, parsed_by, speech_options
from latpred.cli.output import emit, notice

if TYPE_CHECKING:
    from latpred.profile import DeviceProfile


@click.command(epilog="\b\nExample:\n  latpred calibrate --quick\n  latpred calibrate --device cuda:0 --budget 5m")
@click.option("--device", "-d", help="cpu, cuda:0 or simulated.  [default: the GPU if there is one, else cpu]")
@click.option("--quick", is_flag=True, help="Under a minute, and less exact.")
@click.option(
    "--budget",
    metavar="TIME",
    default="5m",
    show_default=True,
    callback=parsed_by(parse_seconds),
    help="Time to spend at most, as 90s, 5m or 1h.",
)
@click.option("--fresh", is_flag=True, help="Measure everything anew instead of going on where it was stopped.")
@output_options
@speech_options
@click.pass_context
def calibrate(
    context: click.Context, device: str | None, quick: bool, budget: float, fresh: bool, output: Output
) -> None:
    """Measure what ops and kernels cost on this machine, and keep it as a profile. Once per machine and device."""
    profile = measure_profile(context, device or default_device(), quick=quick, budget_s=budget, fresh=fresh)
    show_profile(profile, output)
    if not profile.acceptance.passed:
        context.exit(1)


def measure_profile(context: click.Context, device: str, *, quick: bool, budget_s: float, fresh: bool) -> DeviceProfile:
    """Calibrate with a progress display; Ctrl-C keeps what was measured."""
    from latpred.calibration import calibrate as run
    from latpred.cli.progress import progress

    context.ensure_object(State).resumable = True
    with progress(f"calibrating {device}") as show:
        profile = run(device, quick=quick, budget_s=budget_s, fresh=fresh, progress=show)
    context.ensure_object(State).resumable = False
    return profile


def profile_for(context: click.Context, device: str | None, *, yes: bool) -> DeviceProfile:
    """The profile to predict with; on a machine that has none, the quick calibration is offered, or just run.

    Raises
    ------
    ProfileError
        When there is none and the offer was declined, or the one there is cannot be read.
    """
    from latpred import profiles
    from latpred.errors import NoProfileError

    try:
        return profiles.find(device)
    except NoProfileError as error:
        target = device or default_device()
        if not (yes or _agreed(target)):
            raise
        notice(f"latpred: {str(error).partition('. ')[0]}; calibrating {target} now (--quick, about a minute)")
    return measure_profile(context, target, quick=True, budget_s=60.0, fresh=False)


def default_device() -> str:
    """What a machine without profiles is calibrated for: its GPU, else its CPU."""
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def show_profile(profile: DeviceProfile, output: Output) -> None:
    """Print a profile, as `profiles show` does."""
    import pandas as pd

    from latpred import profile_text
    from latpred.profile_codec import to_document

    emit(
        output,
        document=lambda: {"schema": "latpred.profile/1", "profile": to_document(profile)},
        rows=lambda: pd.DataFrame(profile_text.kernel_rows(profile)),
        text=lambda console: profile_text.describe(profile, console),
    )


def _agreed(target: str) -> bool:
    """Ask on a terminal; nobody to ask means yes."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    question = f"No profile of {target} on this machine yet. Calibrate it now (about a minute)?"
    return click.confirm(question, default=True, err=True)
