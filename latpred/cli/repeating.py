"""`calibrate --repeat`: calibrates several times and prints how far predictions move in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from latpred.cli.output import emit, notice
from latpred.speed import MEANINGS

if TYPE_CHECKING:
    import click
    from rich.console import Console

    from latpred.calibration.repeatability import Shift
    from latpred.cli.calibrating import Wanted
    from latpred.cli.options import Output
    from latpred.profile import DeviceProfile

SUITE = "blind"


def show_repeats(context: click.Context, wanted: Wanted, times: int, output: Output) -> None:
    """Calibrate `times` times, each anew, and print the shifts between any two; the last profile stays."""
    from latpred.calibration.repeatability import repeat
    from latpred.cli.calibrating import measure_profile

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
