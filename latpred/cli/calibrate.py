"""Verbs that make and check profiles: calibrate measures this machine, fit uses what was measured elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from latpred import host
from latpred.cli.options import (
    PRECISIONS,
    TABLES,
    Output,
    budget_option,
    given,
    output_options,
    profile_options,
    takes,
    verb,
)
from latpred.cli.output import GO_ON, emit, notice, progress
from latpred.cli.profiles import host_fields, show_profile, table_of
from latpred.errors import NoProfileError, UsageError
from latpred.progress import ProgressEvent
from latpred.query import DeviceQuery
from latpred.render import Page, Table

if TYPE_CHECKING:
    from latpred.calibration.measurement.validation import Shift
    from latpred.profile.document import DeviceProfile

SUITE = "blind"  # whose predictions are compared from one calibration to the next
_OF_HOSTS = {"host_only", "name", "as_json", "as_csv", "path"}  # options that go together
EXITS = {"holds": 0, "moved": 1, "unclear": 3}


@verb("latpred calibrate --quick", "latpred calibrate --device cuda:0 --budget 5m")
@click.option("--device", "-d", help="cpu, cuda:0 or simulated.  [default: the GPU if there is one, else cpu]")
@click.option("--quick", is_flag=True, help="One to three minutes: one precision, wider intervals.")
@budget_option("Time to spend, as 90s, 5m or 1h.  [default: 5m and what further runtimes take, or 50s with --quick]")
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
    multiple=True,
    default=("eager",),
    show_default=True,
    help="Names joined by commas, or all; may be given again. Added to a finished profile that lacks them, without "
    "measuring eager again.",
)
@takes("threads_to_measure")
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
def calibrate(
    device: str | None, runtimes: tuple[str, ...], repeat: int | None, host_only: bool, output: Output, **asked: Any
) -> None:
    """Measure this machine, and keep it as a profile.

    It times what ops and kernels cost, once per machine and device.
    """
    if host_only:
        for option in given(*click.get_current_context().params.keys() - _OF_HOSTS):
            raise UsageError(f"--host-only measures what dispatch costs on this host, and no more; leave out {option}.")
        _calibrate_host(asked["name"], output)
        return
    device = device or _default_device()
    asked |= {"runtimes": _runtimes(runtimes, device), "precisions": asked["precisions"] or None}
    if repeat is not None:
        _repeat(device, repeat, asked, output)
        return
    profile = _measure_profile(device, **asked)
    show_profile(profile, output)
    if not profile.acceptance.all_passed:
        click.get_current_context().exit(1)


def _runtimes(asked: Sequence[str], device: str) -> tuple[str, ...]:
    """Names of runtimes, each once; "all" leaves out those that cannot be had here, and says why."""
    from latpred.calibration.devices import open_device
    from latpred.calibration.runtime_calibration.calibrate_runtimes import ALL, offered

    names = tuple(dict.fromkeys(name.strip() for text in asked for name in text.split(",") if name.strip()))
    if names != (ALL,):
        return names
    able, reasons = offered(open_device(device))
    for name, reason in reasons.items():
        notice(f"leaving out {name}: {reason}")
    return tuple(able)


def _measure_profile(device: str, **asked: Any) -> DeviceProfile:
    """Calibrate with a progress display, which says every new error figure on a line of its own."""
    from latpred.calibration import calibrate as run

    errors: list[float] = []

    def said(at: ProgressEvent) -> None:
        if show is not None:
            show(at)
        if at.error is not None and at.error not in errors:
            errors.append(at.error)
            notice(f"after {at.done:.0f} s, {at.cells} cells: median error {at.error:.1%} on networks no fit saw")

    anew = " and ".join(given("fresh", "repeat"))  # with which the same command would measure everything again
    go_on = f"go on with the same command without {anew}" if anew else GO_ON
    with progress(f"calibrating {device}", go_on=go_on) as show:
        return run(device, progress=said, **asked)


def ensure_profile(query: DeviceQuery, runtimes: Sequence[str], *, yes: bool) -> None:
    """On a machine that has no profile, offer the quick calibration, or just run it.

    A misspelt runtime or host costs none. A profile that has to be measured in a certain way, or to know more runtimes
    than eager, is not offered: the error says how to make it.
    """
    from latpred.api import allowed, busy_note, demand_quick, profile_of
    from latpred.runtimes import get

    for name in runtimes:
        get(name)
    may_calibrate = allowed()  # a value that it does not know is an error whether or not there is a profile
    try:
        profile_of(query)
        return
    except NoProfileError as error:
        demand_quick(query, runtimes, error)
        if not (yes or may_calibrate):
            raise
        target, reason = str(query.device or _default_device()), str(error).partition(". ")[0]
        from latpred.calibration.devices import open_device

        open_device(target)  # of one that is not here nobody is asked, and nothing is announced
        if not (yes or _agreed(target)):
            raise
    takes = "which takes one to three minutes (latpred calibrate takes 5 to 10 and is more exact)"
    notice(f"{reason}; calibrating it now, {takes}{busy_note()}")
    _measure_profile(target, quick=True)


def _default_device() -> str:
    """What a machine without profiles is calibrated for: its GPU, else its CPU."""
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _agreed(target: str) -> bool:
    """Ask on a terminal; nobody to ask means yes."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    question = f"No profile of {target} on this machine yet. Calibrate it now (one to three minutes)?"
    return click.confirm(question, default=True, err=True)


def _calibrate_host(name: str | None, output: Output) -> None:
    """Measure this host's dispatch, keep it, and say what it costs."""
    from latpred.calibration.calibrator import calibrate_host
    from latpred.profile import host_profile

    host = calibrate_host(name) if name else calibrate_host()
    notice(f"saved {host_profile.path(host.name)}")
    costs = [{"class": key, "us": us} for key, us in sorted(host.dispatch.costs_us.items()) if "." not in key]
    emit(
        output,
        document=lambda: {"schema": "latpred.host/1", **host_fields(host), "costs_us": dict(host.dispatch.costs_us)},
        rows=lambda: costs,
        page=lambda: Page(
            f"{host.name}: {host.machine.cpu}, measured in {host.seconds:.0f} s",
            [
                table_of([{**row, "class": row["class"] or "any"} for row in costs], ("class", "us")),
                f"use it with: latpred predict MODEL --device NAME --host {host.name}",
            ],
        ),
    )


def _repeat(device: str, times: int, asked: dict[str, Any], output: Output) -> None:
    """Calibrate `times` times, each anew, and print the shifts between any two; the last profile stays."""
    from latpred.calibration.measurement.validation import repeat

    def calibrate_anew(number: int) -> DeviceProfile:
        notice(f"calibration {number} of {times}")
        return _measure_profile(device, **(asked | {"fresh": True}))

    shifts = repeat(calibrate_anew, times, SUITE)
    rows = [_shift_fields(shift) for shift in shifts]
    emit(
        output,
        document=lambda: {"schema": "latpred.repeat/1", "suite": SUITE, "shifts": rows},
        rows=lambda: rows,
        page=lambda: _shifts_page(shifts),
    )
    if not all(passed for shift in shifts for passed in shift.passed):
        click.get_current_context().exit(1)


def _shift_fields(shift: Shift) -> dict[str, Any]:
    return {
        "calibrations": f"{shift.first} to {shift.second}",
        "median": shift.median,
        "p90": shift.p90,
        "common": shift.common,
        "gates": ", ".join("passed" if passed else "failed" for passed in shift.passed),
        "models": shift.models,
        **{f"speed_{kind}": ratio for kind, ratio in shift.speed.items()},
    }


def _shifts_page(shifts: list[Shift]) -> Page:
    cells, speeds = [], []
    for shift in shifts:
        row = _shift_fields(shift)
        shares = (f"{shift.median:.1%}", f"{shift.p90:.1%}", f"x{shift.common:.3f}")
        cells.append((row["calibrations"], *shares, row["gates"]))
        speeds.append(f"{row['calibrations']}, reference times: {host.sentence(shift.speed)}")
    heads = ("calibrations", "median shift", "p90 shift", "all by", "gates")
    title = f'Shift of predictions of {shifts[0].models} models of the suite "{SUITE}" at equal speed of the machine:'
    return Page(title, [Table(heads, cells, left=("calibrations", "gates")), *speeds])


@verb(
    "latpred fit --raw calibration/cuda-0/ --name nvidia-h200",
    "latpred fit measured.csv --gpu RTX-8000 -o rtx-8000.json",
    "latpred fit published.csv --mapping mapping.json --gpu t4",
)
@TABLES
@takes("mapping")
@click.option(
    "--raw",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder of a calibration's journal, as it stands in LATPRED_HOME.",
)
@click.option("--gpu", metavar="NAME", help="Which GPU of a table.  [default: the only one]")
@click.option("--name", help="Name of the profile.  [default: the device's]")
@profile_options
def fit(
    sources: tuple[Path, ...],
    mapping: Path | None,
    raw: Path | None,
    gpu: str | None,
    name: str | None,
    path: Path | None,
    output: Output,
) -> None:
    """Fit a profile to a journal, or to tables of latencies.

    A journal is what a calibration leaves; the tables are of published latencies.
    """
    from latpred.calibration import fit_profile, fit_raw
    from latpred.profile import store

    if sources and raw is None:
        from latpred.calibration.published.published_table import read_all

        table = read_all(sources, mapping)
        for line in table.kept():
            notice(line)
        profile = fit_profile(table, gpu, name=name, progress=notice)
    elif raw is not None and not sources and mapping is None:
        if gpu is not None:
            raise UsageError("--gpu chooses of a table, and a journal is of one device; leave it out.")
        profile = fit_raw(raw, name=name)
        if path is None and name is None and store.file_of(profile.name).exists():
            raise UsageError(  # journals from elsewhere often have the name of a device that is also here, as "cpu"
                f"there is a profile {profile.name!r} already. Give this one another --name, or replace that one with "
                f"--name {profile.name}."
            )
    else:
        raise UsageError("Give either tables of latencies or --raw DIR with the journal of a calibration.")
    notice(f"saved {store.save(profile, path)}")
    show_profile(profile, output)
    if not profile.acceptance.passed:
        click.get_current_context().exit(1)


@verb("latpred check", "latpred check --device cuda:0 --json")
@click.argument("profile", required=False)
@click.option("--device", "-d", help="cpu, cuda:0 or simulated.  [default: the profile's]")
@budget_option("Time to spend, as 25s.  [default: 25s]")
@output_options
def check(profile: str | None, device: str | None, budget_s: float | None, output: Output) -> None:
    """Say in half a minute whether a PROFILE still holds.

    A few of the profile's own cells are timed again, as after a new driver, torch or library. Exits with 0 when it
    holds, 1 when parts of it moved, and 3 when noise or other work leaves too little to tell by. Without PROFILE, this
    machine's own is checked.
    """
    from latpred.calibration.measurement.drift_test import BUDGET_S
    from latpred.calibration.measurement.drift_test import check as run

    with progress("checking") as show:
        checked = run(profile, device=device, budget_s=BUDGET_S if budget_s is None else budget_s, progress=show)
    emit(output, document=checked.to_dict, rows=checked.to_frame, page=checked.page)
    click.get_current_context().exit(EXITS[checked.verdict])
