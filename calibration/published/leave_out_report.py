"""The report of `latpred evaluate TABLE --leave-out`: figures as a record, as a table of cells, and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from latpred.accuracy.metrics import Errors
from latpred.calibration.published import leave_out
from latpred.calibration.published.joint_fit import Problem
from latpred.calibration.published.leave_out import Coverage, LeftOut
from latpred.calibration.published.parameters import EAGER

SCHEMA = "latpred.leave-out/1"
# How often the law was changed and judged by leaving out models of the framework-tax table before it was as it is.
FORMS_TRIED = 128
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """What leaving out models, GPUs or runs showed.

    Attributes
    ----------
    by : str
        "model", "gpu" or "run".
    figures : Mapping[str, Errors]
        Errors by test and runtime.
    baselines : Mapping[str, Errors]
        Of simpler predictors, on the eager rows, a model or a GPU left out.
    knees : tuple[int, float]
        Curves that bend, and the share of knees within a factor of two.
    coverage : Mapping[str, Coverage]
        Of 90 % intervals, by regime.
    by_model, by_class : Mapping[str, Errors]
        Eager rows by model, and by what takes most of the slower clock.
    cells : DataFrame
        Every predicted row.
    notes : tuple of str
        About the table and the law.
    """

    by: str
    figures: Mapping[str, Errors]
    baselines: Mapping[str, Errors]
    knees: tuple[int, float]
    coverage: Mapping[str, Coverage]
    by_model: Mapping[str, Errors]
    by_class: Mapping[str, Errors]
    cells: pd.DataFrame
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON; what could not be computed is None."""
        errors = {
            name: {key: _errors(value) for key, value in getattr(self, name).items()}
            for name in ("figures", "baselines", "by_model", "by_class")
        }
        return {
            "schema": SCHEMA,
            "left_out": self.by,
            **errors,
            "knees": {"curves": self.knees[0], "within_factor_2": _known(self.knees[1])},
            "coverage": {
                name: {key: _known(v) for key, v in one._asdict().items()} for name, one in self.coverage.items()
            },
            "notes": list(self.notes),
        }

    def to_frame(self) -> pd.DataFrame:
        """Predicted and measured latency of every row that was left out."""
        return self.cells

    def text(self) -> str:
        """The report for people."""
        lines = [_line("", "rows", "median", "p90", "within 10 %")]
        lines += [_row(name, errors) for name, errors in self.figures.items()]
        lines += [_row(f"baseline {name}", errors) for name, errors in self.baselines.items()]
        if np.isfinite(self.knees[1]):
            lines += ["", f"knee within a factor of 2: {self.knees[1]:.0%} of {self.knees[0]} curves that bend (eager)"]
        for name, one in self.coverage.items():
            if one.rows:
                lines.append(
                    f"90 % interval, {name}: holds {one.share:.1%} of {one.rows} rows (x/÷ {np.exp(one.width):.2f})"
                )
        for title, groups in (("worst models", self.by_model), ("by what is slowest", self.by_class)):
            lines += ["", _line(title, "rows", "median", "p90", "within 10 %")]
            worst = sorted(groups.items(), key=lambda item: -item[1].median)
            lines += [_row(name, errors) for name, errors in worst[:_SHOWN]]
        return "\n".join([*lines, "", *(f"Note: {note}" for note in self.notes)]) + "\n"


def report_of(problem: Problem, by: str, parts: list[LeftOut]) -> LeaveOut:
    """Put figures together from rows that were left out; the first part is looked at closely."""
    figures: dict[str, Errors] = {}
    for part in parts:
        for name, errors in part.errors("runtime").items():
            figures[f"{part.title}, {name}"] = errors
        if len(set(part.frame["precision"])) > 1:
            for name, errors in part.errors("runtime", "precision").items():
                figures[f"{part.title}, {name}"] = errors
    eager = parts[0].of(EAGER) if (parts[0].frame["runtime"] == EAGER).any() else parts[0]
    slowest = problem.slowest(eager.frame)
    return LeaveOut(
        by=by,
        figures=figures,
        baselines=_baselines(problem, by, eager),
        knees=leave_out.knees(eager),
        coverage=leave_out.conformal(eager),
        by_model=eager.errors("model"),
        by_class=LeftOut("", eager.frame.assign(slowest=slowest)).errors("slowest"),
        cells=pd.concat([part.frame.assign(left_out=part.title) for part in parts], ignore_index=True),
        notes=(
            *problem.table.notes,
            f"{FORMS_TRIED} forms of the law were judged on the framework-tax table by leaving out models.",
        ),
    )


def _baselines(problem: Problem, by: str, eager: LeftOut) -> dict[str, Errors]:
    """Simpler predictors of eager rows, where there are any to compare with."""
    if not (problem.law.rows.runtime == EAGER).any():
        return {}
    if by == "model":
        return leave_out.for_models(problem, eager)
    return leave_out.for_gpus(problem) if by == "gpu" else {}


def _errors(errors: Errors) -> dict[str, Any]:
    return {name: _known(value) for name, value in asdict(errors).items()}


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _row(name: str, errors: Errors) -> str:
    return _line(name, str(errors.cells), f"{errors.median:.1%}", f"{errors.p90:.1%}", f"{errors.near:.0%}")


def _line(name: str, *cells: str) -> str:
    return f"{name:58s}" + "".join(f"{cell:>12s}" for cell in cells)
