"""Reads tables of published latencies: brings their columns to those of a measurement table and refuses what cannot be.

Two forms are read: measurement tables (`latpred.tables.MEASURED`; what is missing is taken from its defaults), and the
form of the framework-tax measurements, recognised by its column "gpu": gpu, runtime, precision, model, batch,
input_size, input_kind ("seq_len" or "image_px"), latency_s and run, pipelined, of PyTorch 1.12.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from latpred import tables
from latpred.calibration.tablefit.names import MODELS
from latpred.eras import TORCH_1_12
from latpred.errors import TableError

NEEDED = ("gpu", "model", "batch", "latency_s", "run")
OPTIONAL: Mapping[str, str | int] = {
    "runtime": "eager",
    "precision": "fp32",
    "input_size": 0,
    "input_kind": "default",
    "protocol": "pipelined",
    "stack": "torch=1.12.1 cuda=11.6 transformers=4.9",
}
_KINDS = {"seq_len": "seq", "image_px": "image"}
SLOWEST_S = 60.0  # a forward pass of more is either a mistake of units or not what one asks latpred
_MILLISECONDS_AT_ONE = 0.5  # a median of batch 1 above this many seconds is one of milliseconds
CONTRADICTION = 10.0


@dataclass(frozen=True, slots=True)
class Table:
    """A table that can be fitted.

    Attributes
    ----------
    cells : DataFrame
        Columns of a measurement table; `device` names the GPU. Repeats of a cell in one run are their median.
    weight : ndarray
        Of each row: below 1 where repeats contradict each other.
    era : str
        What software ran it (see `latpred.eras`); "" is today's.
    notes : tuple of str
        What was found and done, as sentences.
    """

    cells: pd.DataFrame
    weight: np.ndarray
    era: str
    notes: tuple[str, ...]


def read(source: tables.Source) -> Table:
    """Read a table of latencies from a DataFrame or a CSV file (also gzipped).

    Raises
    ------
    TableError
        When columns are missing (with the nearest there are), a value is empty, not a number or impossible, or
        latencies look like milliseconds.

    Examples
    --------
    >>> row = {"gpu": "2080Ti", "model": "resnet18", "batch": 1, "latency_s": 0.003, "run": "a"}
    >>> read(pd.DataFrame([row])).cells[["device", "model", "protocol"]].iloc[0].tolist()
    ['2080Ti', 'torchvision:resnet18', 'pipelined']
    """
    frame = tables.load(source)
    if len(frame) == 0:
        raise TableError("The table has no rows. Give one with measured latencies.")
    published = "gpu" in frame.columns or "device" not in frame.columns
    outside = _mapped(frame) if published else tables.complete(frame)
    cells = tables.check(outside, tables.MEASURED)
    cells = cells[cells["status"] == tables.OK] if "status" in cells else cells
    _refuse_milliseconds(cells)
    merged, weight, notes = _without_repeats(cells.reset_index(drop=True))
    return Table(merged, weight, _era_of(merged), tuple(notes))


def _mapped(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns of a measurement table from those of a published one; others are dropped."""
    missing = [name for name in NEEDED if name not in frame.columns]
    if missing:
        raise TableError(f"The table lacks {_with_nearest(missing, [str(name) for name in frame.columns])}.")
    out = pd.DataFrame({name: frame[name] for name in NEEDED})
    for name, value in OPTIONAL.items():
        given = frame[name] if name in frame.columns else pd.Series([value] * len(frame), index=frame.index)
        out[name] = given.where(given.notna() & (given.astype(str) != ""), value)
    out["input_kind"] = out["input_kind"].map(lambda kind: _KINDS.get(str(kind), str(kind)))
    out["model"] = out["model"].map(lambda model: MODELS.get(str(model), str(model)))
    out = out.rename(columns={"gpu": "device"})
    out["machine"] = out["run"]
    out["spread_s"] = np.nan
    out["n"] = 1
    return out


def _with_nearest(missing: list[str], there: list[str]) -> str:
    said = []
    for name in missing:
        near = difflib.get_close_matches(name, there, n=1, cutoff=0.5)
        said.append(f"the column {name}" + (f" (nearest: {near[0]!r}, rename it)" if near else ""))
    return f"{', '.join(said)}. It needs {', '.join(NEEDED)}"


def _refuse_milliseconds(cells: pd.DataFrame) -> None:
    latency = cells["latency_s"].to_numpy(float)
    small = latency[cells["batch"].to_numpy() <= 2]
    typical = float(np.median(small)) if small.size else float(latency.min())
    if typical > _MILLISECONDS_AT_ONE or float(np.median(latency)) > SLOWEST_S:
        raise TableError(
            f"latency_s looks like milliseconds: a forward pass of the smallest batches takes {typical:.3g} s in the "
            "median. Divide the column by 1000."
        )


def _without_repeats(cells: pd.DataFrame) -> tuple[pd.DataFrame, np.ndarray, list[str]]:
    """One row for each cell of each run, less weight where rows contradict each other, and sentences about both."""
    keys = [key for key in tables.KEYS if key != "machine"]
    of_cell = cells.groupby(keys, sort=False)["latency_s"]
    contrary = (of_cell.transform("max") >= CONTRADICTION * of_cell.transform("min")).to_numpy()
    of_run = cells.groupby([*keys, "run"], sort=False)["latency_s"]
    first = (~cells.duplicated([*keys, "run"])).to_numpy()
    notes = []
    if not first.all():
        notes.append(f"{int((~first).sum())} rows repeat a cell of their run; the median of each cell counts once")
    if contrary.any():
        worst = cells[contrary].iloc[0]
        notes.append(
            f"{int(contrary.sum())} rows contradict others of their cell tenfold or more (the first: "
            f"{tables.cell_name(worst)}, run {worst['run']}); they count a tenth"
        )
    merged = cells.assign(latency_s=of_run.transform("median"))[first].reset_index(drop=True)
    return merged, np.where(contrary[first], 0.1, 1.0), notes


def _era_of(cells: pd.DataFrame) -> str:
    return TORCH_1_12 if bool(cells["stack"].str.contains(r"torch=1\.").any()) else ""
