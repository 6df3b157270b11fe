"""Verbs that make profiles: calibrate measures this machine, fit uses samples taken elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from latpred.cli.main import State
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
from latpred.host import MEANINGS

if TYPE_CHECKING:
    from rich.console import Console

    from latpred.calibration.calibrator import Progress
    from latpred.calibration.repeatability import Shift
    from latpred.cli.progress_bar import Show
    from latpred.profile.document import DeviceProfile


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
        from latpred.cli.output import measure_host

        measure_host(name, output)
        return
    target = device or default_device()
    names = _runtimes(runtimes, target)
    wanted = Wanted(target, quick, budget, precisions, fresh, name, names, threads, cudnn_benchmark)
    if repeat is not None:
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
        profile, output = fit_from_table(table, gpu, name, output), replace(output, path=None)
    else:
        assert raw is not None
        profile = _fit_raw(raw, name)
    show_profile(profile, output)
    if not profile.acceptance.passed:
        context.exit(1)


def _fit_raw(raw: Path, name: str | None) -> DeviceProfile:
    from latpred.calibration import fit_raw
    from latpred.profile import store

    profile = fit_raw(raw, name=name)
    _refuse_to_replace_anothers(profile)
    notice(f"saved {store.save(profile)}")
    return profile


def measure_profile(context: click.Context, wanted: Wanted) -> DeviceProfile:
    """Calibrate with a progress display; Ctrl-C keeps what was measured."""
    from latpred.calibration import calibrate as run
    from latpred.cli.progress_bar import progress

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
    from latpred.calibration.devices.base import open_device
    from latpred.calibration.runtime_calibration.each_runtime import ALL, offered

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
    from latpred.errors import NoProfileError
    from latpred.prediction import find as firsttime
    from latpred.profile import store

    asked: dict[str, Any] = {} if way is None else {"threads": way.threads, "cudnn_benchmark": way.cudnn_benchmark}
    find = partial(store.find, device, **asked)
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

    from latpred.profile.codec import to_document
    from latpred.render import profile_text

    emit(
        output,
        document=lambda: {"schema": "latpred.profile/1", "profile": to_document(profile)},
        rows=lambda: pd.DataFrame(profile_text.kernel_rows(profile)),
        text=lambda console: profile_text.describe(profile, console),
    )


def _refuse_to_replace_anothers(profile: DeviceProfile) -> None:
    """Journals from elsewhere often have the name of a device that is also here, as "cpu"."""
    from latpred.errors import UsageError
    from latpred.profile import store

    for entry in store.listing():
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


SUITE = "blind"


def show_repeats(context: click.Context, wanted: Wanted, times: int, output: Output) -> None:
    """Calibrate `times` times, each anew, and print the shifts between any two; the last profile stays."""
    from latpred.calibration.repeatability import repeat

    def calibrate(number: int) -> DeviceProfile:
        notice(f"calibration {number} of {times}")
        return measure_profile(context, wanted._replace(fresh=True))

    shifts = repeat(calibrate, times, SUITE)
    rows = [_row(shift) for shift in shifts]

    def text(console: Console) -> None:
        _print(rows, console)

    emit(
        output,
        document=lambda: {"schema": "latpred.repeat/1", "suite": SUITE, "shifts": rows},
        rows=lambda: _frame(rows),
        text=text,
    )


def _row(shift: Shift) -> dict[str, Any]:
    first, second = shift.passed
    return {
        "calibrations": f"{shift.first} to {shift.second}",
        "median": shift.median,
        "p90": shift.p90,
        "common": shift.common,
        "gates": f"{'passed' if first else 'failed'}, {'passed' if second else 'failed'}",
        **{f"speed_{kind}": ratio for kind, ratio in shift.speed.items()},
    }


def _frame(rows: list[dict[str, Any]]) -> Any:
    import pandas as pd

    return pd.DataFrame(rows)


def _print(rows: list[dict[str, Any]], console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("calibrations", "median shift", "p90 shift", "all by", "gates"):
        table.add_column(name, justify="left" if name in ("calibrations", "gates") else "right")
    for row in rows:
        table.add_row(
            row["calibrations"], f"{row['median']:.1%}", f"{row['p90']:.1%}", f"x{row['common']:.3f}", row["gates"]
        )
    console.print(f'Shift of predictions of the suite "{SUITE}" at equal speed of the machine:')
    console.print(table)
    for row in rows:
        speeds = [f"{said} x{row[f'speed_{kind}']:.2f}" for kind, said in MEANINGS.items() if f"speed_{kind}" in row]
        console.print(f"{row['calibrations']}, reference times: {', '.join(speeds)}")


def fit_from_table(table: Path, gpu: str | None, name: str | None, output: Output) -> DeviceProfile:
    """Fit one GPU of a table; the profile goes to the output's path, else among the user's own."""
    from latpred.calibration import fit_profile
    from latpred.profile import store

    profile = fit_profile(table, gpu, name=name, progress=notice)
    notice(f"saved {store.save(profile, output.path)}")
    return profile


def show_left_out(table: Path, by: str, output: Output) -> None:
    """Leave parts of a table out in turn and say how far off predictions of them are."""
    from latpred.calibration.published.published_fit import evaluate_left_out

    report = evaluate_left_out(table, by, progress=notice)

    def text(console: Console) -> None:
        console.print(report.text(), markup=False, highlight=False, soft_wrap=True)

    emit(output, document=report.to_dict, rows=report.to_frame, text=text)


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
    from latpred.calibration.measurement.profile_check import BUDGET_S
    from latpred.calibration.measurement.profile_check import check as run
    from latpred.cli.progress_bar import progress

    with progress("checking") as show:
        found = run(profile, device=device, budget_s=BUDGET_S if budget is None else budget, progress=show)

    def text(console: Console) -> None:
        found.print(console)

    emit(output, document=found.to_dict, rows=found.to_frame, text=text)
    context.exit(EXITS[found.verdict])
