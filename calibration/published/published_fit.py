"""The calls of this package: profiles from a table, and what the law is worth when parts of the table are left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latpred import tables
from latpred.accuracy import metrics
from latpred.calibration.published import leave_out, published_table
from latpred.calibration.published.fitted_profiles import (
    Accuracy,
    Fitted,
    Numbers,
    Place,
    dispatch,
    host_spread,
    profile_of,
)
from latpred.calibration.published.joint_fit import Known, Problem, problem
from latpred.calibration.published.leave_out import SMALL, LeftOut
from latpred.calibration.published.leave_out_report import LeaveOut, report_of
from latpred.calibration.published.published_table import Progress
from latpred.calibration.published.row_counts import SCRIPTED
from latpred.errors import TableError, UsageError
from latpred.graph.features import Floats
from latpred.ops.families import DIMS
from latpred.prediction.crossover import Z90
from latpred.profile import gpus
from latpred.profile.datasheet import ANY, GUESSES, STAND_INS, Shared, mode_of, short
from latpred.profile.document import DeviceProfile
from latpred.profile.gpus import Spec
from latpred.runtimes.legacy_torch import TORCH_1_12

EAGER = "eager"


def fit_profile(
    source: tables.Source,
    gpu: str | None = None,
    *,
    name: str | None = None,
    judge: bool = True,
    known: Known | None = None,
    progress: Progress | None = None,
) -> DeviceProfile:
    """Fit a profile of one GPU to a table of published latencies.

    All GPUs and runs of the table are fitted together: what they share is learnt from all of them. Eager is fitted by
    itself; rows of TorchScript, where they are of PyTorch 1.12, tell its own costs and leave the rest as eager has it.

    Parameters
    ----------
    source : DataFrame or path
        A measurement table, or one with the columns gpu, model, batch, latency_s and run (runtime, precision,
        input_size, input_kind have defaults): see `latpred.calibration.published.published_table`.
    gpu : str, optional
        Which, as the table calls it; may be left out where it has one only.
    name : str, optional
        Of the profile; default: that of the GPU's datasheet.
    judge : bool
        Leave each model out in turn, to say what the profile is worth and how wide its intervals are.
    known : mapping, optional
        Walked models, by `latpred.calibration.published.published_table.TraceKey`.
    progress : callable, optional
        Told what is being done.

    Returns
    -------
    DeviceProfile
        Not saved yet; see `latpred.profile.store.save`.

    Raises
    ------
    TableError, UnknownGpuError, UnknownModelError
        When the table cannot be used; the message says what to change in it.

    Examples
    --------
    >>> profile = fit_profile("measured.csv", gpu="RTX-8000")  # doctest: +SKIP
    """
    table = published_table.read(source)
    wanted = _chosen(table, gpu)
    return fit_profiles(table, judge=judge, known=known, progress=progress, names={wanted: name}, only=(wanted,))[
        wanted
    ]


def fit_profiles(
    source: tables.Source | published_table.Table,
    *,
    judge: bool = True,
    known: Known | None = None,
    progress: Progress | None = None,
    names: dict[str, str | None] | None = None,
    only: tuple[str, ...] | None = None,
) -> dict[str, DeviceProfile]:
    """As `fit_profile`, for every GPU of a table that has eager rows, by the table's name of it."""
    table = source if isinstance(source, published_table.Table) else published_table.read(source)
    whole = problem(_profiled(table), known=known, progress=progress)
    if progress is not None:
        progress("fitting")
    runtime = whole.law.rows.runtime
    thetas = whole.thetas()
    gpus = only or tuple(sorted(set(whole.law.rows.gpu[runtime == EAGER])))
    judged = leave_out.by_model(whole, progress, gpus) if judge else None
    found = {}
    for gpu in gpus:
        fits = {name: Fitted(theta, _worth(judged, gpu, name)) for name, theta in thetas.items()}
        found[gpu] = profile_of(whole, fits, gpu, (names or {}).get(gpu))
    notes = "; ".join(whole.table.notes)
    return {gpu: _noted(profile, notes) for gpu, profile in found.items()} if notes else found


def evaluate_left_out(
    source: tables.Source | Problem, by: str, *, known: Known | None = None, progress: Progress | None = None
) -> LeaveOut:
    """Predict every row of a table from a fit that did not see it.

    Rows of models that need a package which is not there are left out; the report's notes say which and how many.

    Parameters
    ----------
    source : DataFrame, path or Problem
        The table, or one that was set up already.
    by : {"model", "gpu", "run"}
        What is left out at a time.
    known, progress
        As for `fit_profile`.

    Raises
    ------
    UsageError
        When `by` is none of these, or the table has too few of them.
    TableError, UnknownGpuError, UnknownModelError
        As for `fit_profile`.
    """
    if by not in leave_out.BY:
        raise UsageError(f"{by!r} cannot be left out; choose from: {', '.join(leave_out.BY)}.")
    whole = source if isinstance(source, Problem) else problem(source, known=known, progress=progress, partial=True)
    _demand_several(whole, by)
    if by == "model":
        parts = [leave_out.by_model(whole, progress)]
    elif by == "gpu":
        parts = [leave_out.by_gpu(whole, shots, progress) for shots in (0, leave_out.SHOTS)]
    else:
        parts = [leave_out.by_run(whole, progress)]
    return report_of(whole, by, parts)


def _profiled(table: published_table.Table) -> published_table.Table:
    """Rows that profiles are fitted to: other runtimes have steps of their own, which a table does not tell.

    Except TorchScript of an era whose fusers are known.
    """
    runtime = table.cells["runtime"]
    if not (runtime == EAGER).any():
        raise TableError("The table has no rows of runtime eager, which profiles are fitted to. Add some.")
    used = runtime.isin((EAGER, *SCRIPTED) if table.era == TORCH_1_12 else (EAGER,)).to_numpy()
    others = sorted(set(runtime[~used]))
    notes = (f"rows of {', '.join(others)} were left out of the profile",) if others else ()
    return replace(
        table,
        cells=table.cells[used].reset_index(drop=True),
        weight=table.weight[used],
        notes=(*table.notes, *notes),
    )


def _demand_several(whole: Problem, by: str) -> None:
    rows = whole.law.rows
    values = {"model": whole.model, "gpu": rows.gpu, "run": rows.run}[by]
    if len(set(values)) < 2:
        raise UsageError(f"The table has one {by} only ({values[0]}): leaving it out leaves nothing to fit.")


def _chosen(table: published_table.Table, gpu: str | None) -> str:
    there = sorted(set(table.cells["device"].astype(str)))
    if gpu is None and len(there) == 1:
        return there[0]
    if gpu in there:
        return str(gpu)
    said = "The table has several GPUs" if gpu is None else f"The table has no GPU called {gpu!r}"
    raise TableError(f"{said}; name one of: {', '.join(there)} (--gpu NAME).")


def _worth(judged: LeftOut | None, gpu: str, runtime: str) -> Accuracy | None:
    """What was shown on one GPU in one runtime, where anything was; widths of intervals are those of all GPUs."""
    if judged is None:
        return None
    everywhere = judged.of(runtime)
    frame = everywhere.frame[everywhere.frame["device"] == gpu]
    if frame.empty:
        return None
    # A model is as far off on one GPU as on another: widths come from all, since each alone has few models.
    small, large = leave_out.accuracy(everywhere)[1:3]
    own = leave_out.accuracy(LeftOut(judged.title, frame.reset_index(drop=True)))
    return own._replace(small_batch=small, large_batch=large)


def _noted(profile: DeviceProfile, notes: str) -> DeviceProfile:
    return msgspec.structs.replace(profile, protocol={**profile.protocol, "rows": notes})


class Asked(NamedTuple):
    """A GPU that is on nobody's desk, and a precision: which together compute in one mode."""

    spec: Spec
    precision: str


def shared_of(problem: Problem, judged: LeftOut, hosts_known: LeftOut, source: str) -> Shared:
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


def left_out(problem: Problem) -> LeftOut:
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
    return LeftOut("a GPU left out, its host not known", pd.concat(parts, ignore_index=True))


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
    return replace(gpus.spec(like), name="", architecture=architecture)


def _regimes(judged: LeftOut) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    batch = judged.frame["batch"].to_numpy(np.int64)
    return batch <= SMALL, batch > SMALL


def _half_width(judged: LeftOut, rows: NDArray[np.bool_]) -> float:
    sizes: Floats = np.abs(judged.log_errors)[rows]
    return metrics.conformal(sizes)
