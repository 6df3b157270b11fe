"""What `fit TABLE` and `evaluate TABLE --leave-out` do: profiles from published latencies, and what they are worth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from latpred.cli.output import emit, notice

if TYPE_CHECKING:
    from rich.console import Console

    from latpred.cli.options import Output
    from latpred.profile import DeviceProfile


def fit_from_table(table: Path, gpu: str | None, name: str | None, output: Output) -> DeviceProfile:
    """Fit one GPU of a table; the profile goes to the output's path, else among the user's own."""
    from latpred import profiles
    from latpred.calibration import fit_profile

    profile = fit_profile(table, gpu, name=name, progress=notice)
    notice(f"saved {profiles.save(profile, output.path)}")
    return profile


def show_left_out(table: Path, by: str, output: Output) -> None:
    """Leave parts of a table out in turn and say how far off predictions of them are."""
    from latpred.calibration.tablefit.api import evaluate_left_out

    report = evaluate_left_out(table, by, progress=notice)

    def text(console: Console) -> None:
        console.print(report.text(), markup=False, highlight=False, soft_wrap=True)

    emit(output, document=report.to_dict, rows=report.to_frame, text=text)
