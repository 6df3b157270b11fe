"""What measured GPUs have in common, from which GPUs that nobody measured are predicted, and profiles of the measured.

    python examples/framework_tax/datasheets.py measured.csv                            # how good is that?
    python examples/framework_tax/datasheets.py measured.csv -o latpred/models/datasheets.json  # and write it down
    python examples/framework_tax/datasheets.py TABLES --mapping examples/published/mapping.json --models 300 \
        -o latpred/models/datasheets.json --profiles latpred/models/profiles

Each GPU of the tables is left out with all its rows, and predicted from the others and its datasheet, on the middle of
the others' hosts: all that is known of a GPU that somebody else has. Then all GPUs are fitted together. Models of
torchvision and timm are traced, so both are needed where the tables have any.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from latpred import tables
from latpred.accuracy.metrics import Errors
from latpred.calibration.published import published_table
from latpred.calibration.published.fitted_profiles import fit_profiles, shared_of, without_gpu
from latpred.calibration.published.joint_fit import problem
from latpred.calibration.published.leave_out import by_gpu
from latpred.calibration.published.published_table import PRODUCT, Graphs, PublishedTable
from latpred.calibration.published.row_counts import ALONE, EAGER, SCRIPTED
from latpred.profile import gpus, store

SOURCE = "fitted to published latencies of {sources} on {gpus}; eager"
FRAMEWORK_TAX = {"measured": "JaredFern/Framework-Tax"}  # a table that names no source has its file's name
FEWEST_ROWS = 2  # of a GPU in eager, below which it gets no profile


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge, and write where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", help="measured latencies")
    parser.add_argument("--mapping", help="what the columns of tables of another form mean")
    parser.add_argument("-o", "--output", type=Path, help="where to write what the GPUs have in common")
    parser.add_argument("--models", type=int, help="of a source with more models, so many drawn at random")
    parser.add_argument("--profiles", type=Path, help="a folder for the profile of each GPU")
    asked = parser.parse_args(arguments)
    table = _read(asked.tables, asked.mapping, asked.models)
    graphs: Graphs = {}
    runtimes = table.cells["runtime"].isin((EAGER, ALONE, *SCRIPTED)).to_numpy()
    fitted = problem(table.where(runtimes), graphs, partial=True)
    holdout = without_gpu(fitted)
    print("a GPU left out, its host not known     cells  median     p90  within 10 %")
    for title, columns in (("all", ()), ("", ("device",)), ("", ("precision",))):
        for name, errors in holdout.errors(*columns).items():
            print(_line(title or name, errors))
    if asked.output:
        names = {
            "sources": ", ".join(sorted(set(fitted.rows.source))),
            "gpus": ", ".join(sorted(spec.name for spec in fitted.gpus.values())),
        }
        common = shared_of(fitted, holdout, by_gpu(fitted, 0), SOURCE.format(**names))
        asked.output.write_bytes(msgspec.json.format(msgspec.json.encode(common), indent=1) + b"\n")
        print(f"written to {asked.output}")
    if asked.profiles:
        table = replace(
            fitted.table, notes=(_said(fitted.table, asked.models),) if asked.models else fitted.table.notes
        )
        for profile in fit_profiles(table, graphs=graphs, only=_with_eager(table)).values():
            print(f"written to {store.save(profile, asked.profiles / f'{profile.name}.json')}")


def _read(paths: Sequence[str], mapping: str | None, models: int | None) -> PublishedTable:
    table = published_table.read_all(paths, mapping)
    table = replace(table, cells=table.cells.replace({tables.SOURCE: FRAMEWORK_TAX}))
    return table.sample(models) if models else table


def _said(table: PublishedTable, models: int) -> str:
    """What a profile says of a sample, in place of every model that was left out."""
    used = table.cells["model"][table.cells["input_kind"] != PRODUCT].nunique()
    return f"of larger sources {models} models each were drawn at random; {used} models could be traced"


def _with_eager(table: PublishedTable) -> list[str]:
    """GPUs with enough rows in eager, at the clocks of their datasheets."""
    counts = table.cells["device"][table.cells["runtime"] == EAGER].value_counts()
    return sorted(name for name in counts.index[counts >= FEWEST_ROWS] if gpus.spec(name).name in gpus.names())


def _line(name: str, errors: Errors) -> str:
    return f"{name:37} {errors.cells:6} {errors.median:7.1%} {errors.p90:7.1%} {errors.near:9.0%}"


if __name__ == "__main__":
    main()
