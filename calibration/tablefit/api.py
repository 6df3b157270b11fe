"""The calls of this package: profiles from a table, and what the law is worth when parts of the table are left out."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from latpred import tables
from latpred.calibration.tablefit import leaveout, reading
from latpred.calibration.tablefit.engines import SCRIPTED
from latpred.calibration.tablefit.fit import Known, Problem, problem
from latpred.calibration.tablefit.leaveout import Judged
from latpred.calibration.tablefit.published import Accuracy, Fitted, profile_of
from latpred.calibration.tablefit.report import LeaveOut, report_of
from latpred.calibration.tablefit.walks import Progress
from latpred.eras import TORCH_1_12
from latpred.errors import TableError, UsageError
from latpred.profile import DeviceProfile

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
        input_size, input_kind have defaults): see `latpred.calibration.tablefit.reading`.
    gpu : str, optional
        Which, as the table calls it; may be left out where it has one only.
    name : str, optional
        Of the profile; default: that of the GPU's datasheet.
    judge : bool
        Leave each model out in turn, to say what the profile is worth and how wide its intervals are.
    known : mapping, optional
        Walked models, by `latpred.calibration.tablefit.walks.WalkKey`.
    progress : callable, optional
        Told what is being done.

    Returns
    -------
    DeviceProfile
        Not saved yet; see `latpred.profiles.save`.

    Raises
    ------
    TableError, UnknownGpuError, UnknownModelError
        When the table cannot be used; the message says what to change in it.

    Examples
    --------
    >>> profile = fit_profile("measured.csv", gpu="RTX-8000")  # doctest: +SKIP
    """
    table = reading.read(source)
    wanted = _chosen(table, gpu)
    return fit_profiles(table, judge=judge, known=known, progress=progress, names={wanted: name}, only=(wanted,))[
        wanted
    ]


def fit_profiles(
    source: tables.Source | reading.Table,
    *,
    judge: bool = True,
    known: Known | None = None,
    progress: Progress | None = None,
    names: dict[str, str | None] | None = None,
    only: tuple[str, ...] | None = None,
) -> dict[str, DeviceProfile]:
    """As `fit_profile`, for every GPU of a table that has eager rows, by the table's name of it."""
    table = source if isinstance(source, reading.Table) else reading.read(source)
    whole = problem(_profiled(table), known=known, progress=progress)
    if progress is not None:
        progress("fitting")
    runtime = whole.law.rows.runtime
    thetas = whole.thetas()
    gpus = only or tuple(sorted(set(whole.law.rows.gpu[runtime == EAGER])))
    judged = leaveout.by_model(whole, progress, gpus) if judge else None
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
    if by not in leaveout.BY:
        raise UsageError(f"{by!r} cannot be left out; choose from: {', '.join(leaveout.BY)}.")
    whole = source if isinstance(source, Problem) else problem(source, known=known, progress=progress, partial=True)
    _demand_several(whole, by)
    if by == "model":
        parts = [leaveout.by_model(whole, progress)]
    elif by == "gpu":
        parts = [leaveout.by_gpu(whole, shots, progress) for shots in (0, leaveout.SHOTS)]
    else:
        parts = [leaveout.by_run(whole, progress)]
    return report_of(whole, by, parts)


def _profiled(table: reading.Table) -> reading.Table:
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


def _chosen(table: reading.Table, gpu: str | None) -> str:
    there = sorted(set(table.cells["device"].astype(str)))
    if gpu is None and len(there) == 1:
        return there[0]
    if gpu in there:
        return str(gpu)
    said = "The table has several GPUs" if gpu is None else f"The table has no GPU called {gpu!r}"
    raise TableError(f"{said}; name one of: {', '.join(there)} (--gpu NAME).")


def _worth(judged: Judged | None, gpu: str, runtime: str) -> Accuracy | None:
    """What was shown on one GPU in one runtime, where anything was; widths of intervals are those of all GPUs."""
    if judged is None:
        return None
    everywhere = judged.of(runtime)
    frame = everywhere.frame[everywhere.frame["device"] == gpu]
    if frame.empty:
        return None
    # A model is as far off on one GPU as on another: widths come from all, since each alone has few models.
    small, large = leaveout.accuracy(everywhere)[1:3]
    own = leaveout.accuracy(Judged(judged.title, frame.reset_index(drop=True)))
    return own._replace(small_batch=small, large_batch=large)


def _noted(profile: DeviceProfile, notes: str) -> DeviceProfile:
    return msgspec.structs.replace(profile, protocol={**profile.protocol, "rows": notes})
