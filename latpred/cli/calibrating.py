"""Verbs that make profiles: calibrate measures this machine, fit uses samples taken elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from latpred.cli.context import State
from latpred.cli.options import (
    PRECISIONS,
    Output,
    Way,
    output_options,
    parse_seconds,
    parsed_by,
    speech_options,
    threads_option,
)
from latpred.cli.output import emit, notice

if TYPE_CHECKING:
    from latpred.calibration.campaign import Progress
    from latpred.cli.progress import Show
    from latpred.profile import DeviceProfile


class Wanted(NamedTuple):
    """What is to be calibrated, and with how much effort."""

    device: str
    quick: bool = False
    budget_s: float | None = None
    precisions: tuple[str, ...] = ()
    fresh: bool = False
    name: str | None = None
    runtimes: tuple[str, ...] = ("eager",)
    threads: int | None = None
    cudnn_benchmark: bool = False


class Moment(NamedTuple):
    """One moment of a calibration, as a progress display takes it."""

    done: float
    total: float
    label: str
    left_s: float


@click.command(epilog="\b\nExample:\n  latpred calibrate --quick\n  latpred calibrate --device cuda:0 --budget 5m")
@click.option("--device", "-d", help="cpu, cuda:0 or simulated.  [default: the GPU if there is one, else cpu]")
@click.option("--quick", is_flag=True, help="Under a minute: one precision, wider intervals.")
@click.option(
    "--budget",
    metavar="TIME",
    callback=parsed_by(parse_seconds),
    help="Time to spend, as 90s, 5m or 1h.  [default: 5m, with --quick 40s]",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(PRECISIONS),
    help="Number format; may be given again.  [default: those the device does well]",
)
@click.option(
    "--runtimes",
    metavar="NAMES",
    default="eager",
    show_default=True,
    help="Names joined by commas, or all. Added to a finished profile that lacks them, without measuring eager again.",
)
@threads_option
@click.option("--cudnn-benchmark", is_flag=True, help="Measure with cudnn's autotuning of convolutions on.")
@click.option("--fresh", is_flag=True, help="Measure everything anew instead of going on where it was stopped.")
@click.option("--name", help="Name of the profile.  [default: the device's, as in cpu or cpu-2-threads]")
@click.option(
    "--repeat",
    type=click.IntRange(2),
    metavar="N",
    help="Calibrate N times, each anew, and print how far predictions of a suite of models move in between.",
)
@click.option("--host-only", is_flag=True, help="Seconds: only what dispatch costs on this host, for --host.")
@output_options
@speech_options
@click.pass_context
def calibrate(
    context: click.Context,
    device: str | None,
    quick: bool,
    budget: float | None,
    precisions: tuple[str, ...],
    runtimes: str,
    threads: int | None,
    cudnn_benchmark: bool,
    fresh: bool,
    name: str | None,
    repeat: int | None,
    host_only: bool,
    output: Output,
) -> None:
    """Measure what ops and kernels cost on this machine, and keep it as a profile. Once per machine and device."""
    if host_only:
        from latpred.cli.sheets import measure_host

        measure_host(name, output)
        return
    target = device or default_device()
    names = _runtimes(runtimes, target)
    wanted = Wanted(target, quick, budget, precisions, fresh, name, names, threads, cudnn_benchmark)
    if repeat is not None:
        from latpred.cli.repeating import show_repeats

        show_repeats(context, wanted, repeat, output)
        return
    profile = measure_profile(context, wanted)
    show_profile(profile, output)
    if not (profile.acceptance.passed and all(profile.acceptance.runtimes.values())):
        context.exit(1)


@click.command(
    epilog="\b\nExample:\n  latpred fit --raw calibration/cuda-0/ --name nvidia-h200\n"
    "  latpred fit measured.csv --gpu RTX-8000 -o rtx-8000.json"
)
@click.argument("table", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--raw",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder of a calibration's journal, as it stands in LATPRED_HOME.",
)
@click.option("--gpu", metavar="NAME", help="Which GPU of a table.  [default: the only one]")
@click.option("--name", help="Name of the profile.  [default: the device's]")
@output_options
@speech_options
@click.pass_context
def fit(
    context: click.Context, table: Path | None, raw: Path | None, gpu: str | None, name: str | None, output: Output
) -> None:
    """Fit a profile from a calibration's journal, or from a TABLE of published latencies, and keep it."""
    from latpred.errors import UsageError

    if (table is None) == (raw is None):
        raise UsageError("Give either a TABLE of latencies or --raw DIR with the journal of a calibration.")
    if table is not None:
        from latpred.cli.tablefitting import fit_from_table

        profile, output = fit_from_table(table, gpu, name, output), replace(output, path=None)
    else:
        assert raw is not None
        profile = _fit_raw(raw, name)
    show_profile(profile, output)
    if not profile.acceptance.passed:
        context.exit(1)


def _fit_raw(raw: Path, name: str | None) -> DeviceProfile:
    from latpred import profiles
    from latpred.calibration import fit_raw

    profile = fit_raw(raw, name=name)
    _refuse_to_replace_anothers(profile)
    notice(f"saved {profiles.save(profile)}")
    return profile


def measure_profile(context: click.Context, wanted: Wanted) -> DeviceProfile:
    """Calibrate with a progress display; Ctrl-C keeps what was measured."""
    from latpred.calibration import calibrate as run
    from latpred.cli.progress import progress

    state = context.ensure_object(State)
    state.resumable = True
    with progress(f"calibrating {wanted.device}") as show:
        profile = run(
            wanted.device,
            quick=wanted.quick,
            budget_s=wanted.budget_s,
            precisions=wanted.precisions or None,
            runtimes=wanted.runtimes,
            fresh=wanted.fresh,
            name=wanted.name,
            threads=wanted.threads,
            cudnn_benchmark=wanted.cudnn_benchmark,
            progress=None if show is None else _shown_by(show),
        )
    state.resumable = False
    return profile


def _runtimes(text: str, device: str) -> tuple[str, ...]:
    """Names of runtimes; "all" leaves out those that cannot be had here, and says why."""
    from latpred.calibration.device import open_device
    from latpred.calibration.studying import ALL, offered

    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if names != (ALL,):
        return names
    able, reasons = offered(open_device(device))
    for name, reason in reasons.items():
        notice(f"leaving out {name}: {reason}")
    return tuple(able)


def _shown_by(show: Show) -> Callable[[Progress], None]:
    """Translate a calibration's progress; a new error figure is also said on a line of its own."""
    said: list[float] = []

    def told(at: Progress) -> None:
        show(Moment(at.seconds, at.budget_s, at.label, max(0.0, at.budget_s - at.seconds)))
        if at.error is not None and at.error not in said:
            said.append(at.error)
            notice(f"after {at.seconds:.0f} s, {at.cells} cells: median error {at.error:.1%} on networks no fit saw")

    return told


def ensure_profile(
    context: click.Context,
    device: str | None,
    way: Way | None = None,
    *,
    runtimes: tuple[str, ...] = (),
    yes: bool,
) -> None:
    """On a machine that has no profile, offer the quick calibration, or just run it.

    A profile that has to be measured in a certain way, or to know more runtimes than eager, is not offered: the error
    says how to make it. Of two processes that find no profile the second waits for the first.
    """
    from latpred import firsttime, profiles
    from latpred.errors import NoProfileError

    asked: dict[str, Any] = {} if way is None else {"threads": way.threads, "cudnn_benchmark": way.cudnn_benchmark}
    find = partial(profiles.find, device, **asked)
    allowed = firsttime.allowed()  # a value that it does not know is an error whether or not there is a profile
    try:
        find()
        return
    except NoProfileError as error:
        target, reason = device or default_device(), str(error).partition(". ")[0]
        others = ",".join(name for name in runtimes if name != "eager")
        if others:
            raise NoProfileError(
                f"{reason}. Make one that knows {others} with: latpred calibrate --device {target} --runtimes {others}"
            ) from None
        if (way is not None and way.asked) or not (yes or (allowed and _agreed(target))):
            raise

    def calibrate() -> None:
        takes = "which takes under a minute (latpred calibrate takes 5 and is more exact)"
        notice(f"{reason}; calibrating it now, {takes}{firsttime.busy_note()}")
        measure_profile(context, Wanted(target, quick=True))

    firsttime.calibrate_once(find, calibrate, notice)


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


def _refuse_to_replace_anothers(profile: DeviceProfile) -> None:
    """Journals from elsewhere often have the name of a device that is also here, as "cpu"."""
    from latpred import profiles
    from latpred.errors import UsageError

    for entry in profiles.listing():
        known = entry.profile
        if entry.source != "user" or entry.name != profile.name or known is None:
            continue
        theirs, own = known.machine, profile.machine
        if (theirs.hostname_hash, theirs.machine_id) != (own.hostname_hash, own.machine_id):
            raise UsageError(f"there is a profile {entry.name!r} of another machine already; give this one a --name.")


def _agreed(target: str) -> bool:
    """Ask on a terminal; nobody to ask means yes."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    question = f"No profile of {target} on this machine yet. Calibrate it now (about a minute)?"
    return click.confirm(question, default=True, err=True)
