"""Writes down what the GPUs of a table have in common, for GPUs that nobody measured, and judges that.

A GPU is left out with all its rows, and predicted on the middle of the other GPUs' hosts, as a datasheet's profile
predicts. Only numbers of the fit are written, no row of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latpred import metrics, specs
from latpred.calibration.tablefit.fit import Problem
from latpred.calibration.tablefit.leaveout import SMALL, Judged
from latpred.calibration.tablefit.parameters import EAGER
from latpred.calibration.tablefit.published import Numbers, Place, dispatch, host_spread
from latpred.datasheet import ANY, GUESSES, STAND_INS, Shared, short
from latpred.features import Floats
from latpred.landmarks import Z90
from latpred.ops.families import DIMS
from latpred.promised import mode_of
from latpred.specs import Spec


class Asked(NamedTuple):
    """A GPU that is on nobody's desk, and a precision: which together compute in one mode."""

    spec: Spec
    precision: str


def shared_of(problem: Problem, judged: Judged, hosts_known: Judged, source: str) -> Shared:
    """What the GPUs of a table have in common.

    Parameters
    ----------
    problem : Problem
        The table and its law; its rows of eager are fitted.
    judged : Judged
        From `left_out`.
    hosts_known : Judged
        GPUs left out whose hosts one row of each run tells: errors that have nothing to do with the host.
    source : str
        What the numbers come from, in a sentence.
    """
    eager = problem.law.rows.runtime == EAGER
    numbers = Numbers(problem, problem.solve(eager).theta)
    architectures = sorted({gpu.architecture for gpu in problem.law.gpus.values()})
    families = sorted({*problem.law.families(EAGER), *DIMS} - {*STAND_INS, *GUESSES})
    known = hosts_known.of(EAGER)
    small, large = (_half_width(known, rows) for rows in _regimes(known))
    # Most GPUs that nobody measured have tensor cores.
    place = Place(_nameless("a100", ANY), [_middle(problem, numbers, eager)])
    host = dispatch(problem, numbers, EAGER, place, None)
    return Shared(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        source=source,
        kernels={
            architecture: {
                family: {
                    mode_of(asked.spec, asked.precision, family): {
                        slot: short(share)
                        for slot, share in numbers.reached(family, asked.spec, asked.precision).items()
                    }
                    for asked in _asked(architecture)
                }
                for family in families
            }
            for architecture in (ANY, *architectures)
        },
        dispatch=msgspec.structs.replace(
            host,
            spread=short(small / Z90),
            busy_spread=short(large / Z90),
            host_spread=host_spread(problem, numbers),
        ),
        knee=short(numbers.knee),
        error=float(f"{judged.errors()['all'].median:.4g}"),
    )


def left_out(problem: Problem) -> Judged:
    """Eager rows of each GPU, predicted from the other GPUs, its datasheet, and the middle of the others' hosts."""
    rows = problem.law.rows
    eager = rows.runtime == EAGER
    parts = []
    for gpu in sorted(set(rows.gpu[eager])):
        mine, others = eager & (rows.gpu == gpu), eager & (rows.gpu != gpu)
        theta = problem.solve(others).theta.copy()
        middle = np.log(_middle(problem, Numbers(problem, theta), others))
        for run in sorted(set(rows.run[mine]) - set(rows.run[others])):
            theta[problem.law.parameters.names["run", str(run)]] = middle
        predicted = np.exp(problem.law.predict(theta)[mine]) / 1e6
        parts.append(problem.table.cells[mine].assign(predicted_s=predicted))
    return Judged("a GPU left out, its host not known", pd.concat(parts, ignore_index=True))


def _middle(problem: Problem, numbers: Numbers, used: NDArray[np.bool_]) -> float:
    """Factor of the middle host among rows."""
    rows = problem.law.rows
    where = sorted(set(zip(rows.run[used], rows.group[used], strict=True)))
    return float(np.median([numbers.run(str(run), str(group)) for run, group in where]))


def _asked(architecture: str) -> Iterator[Asked]:
    """GPUs of an architecture that have no name, so that nothing of a single GPU takes part; one for each mode."""
    for like, precisions in (("titan-x-pascal", ("fp32", "fp16")), ("a100", ("tf32", "fp16"))):
        for precision in precisions:
            yield Asked(_nameless(like, architecture), precision)


def _nameless(like: str, architecture: str) -> Spec:
    """A GPU's datasheet without what the fit knows of it alone."""
    return replace(specs.spec(like), name="", architecture=architecture)


def _regimes(judged: Judged) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    batch = judged.frame["batch"].to_numpy(np.int64)
    return batch <= SMALL, batch > SMALL


def _half_width(judged: Judged, rows: NDArray[np.bool_]) -> float:
    sizes: Floats = np.abs(judged.log_errors)[rows]
    return metrics.conformal(sizes)
