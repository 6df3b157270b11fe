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
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd

from latpred import tables
from latpred.accuracy.metrics import Errors, conformal, errors
from latpred.calibration.published import published_table
from latpred.calibration.published.fitted_profiles import (
    NOT_TRIED,
    FittedNumbers,
    dispatch,
    fit_profiles,
    host_spread,
)
from latpred.calibration.published.joint_fit import Mask, Problem, problem
from latpred.calibration.published.leave_out import SMALL, by_column, errors_by, tells_hosts
from latpred.calibration.published.parameters import DEVIATING
from latpred.calibration.published.published_table import PRODUCT, Graphs, PublishedTable
from latpred.calibration.published.row_counts import EAGER, NO_HOST, SCRIPTED
from latpred.graph.features import UNEVEN
from latpred.ops.families import DIMS
from latpred.prediction.clocks import Z90
from latpred.profile import gpus, store
from latpred.profile.datasheet import ANY, GUESSES, STAND_INS, Shared, log_promise, mode_of, short
from latpred.profile.gpus import Spec

SOURCE = "fitted to published latencies of {sources} on {gpus}; eager"
FRAMEWORK_TAX = {"measured": "JaredFern/Framework-Tax"}  # a table that names no source has its file's name
UNEVEN_GROUPS = f"conv_grouped.{UNEVEN}"  # no family of its own in contiguous images, which datasheets are of alone
SEED = 1  # of the models that are drawn
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
    runtimes = table.cells["runtime"].isin((EAGER, *NO_HOST, *SCRIPTED)).to_numpy()
    fitted = problem(table.where(runtimes), graphs, partial=True)
    holdout = without_gpu(fitted)
    print("a GPU left out, its host not known     cells  median     p90  within 10 %")
    for column in ("all", "device", "precision"):
        for name, of_group in errors_by(holdout.assign(all="all"), column).items():
            print(_line(name, of_group))
    if asked.output:
        names = {
            "sources": ", ".join(sorted(set(fitted.rows.source))),
            "gpus": ", ".join(sorted(spec.name for spec in fitted.gpus.values())),
        }
        common = shared_of(fitted, holdout, by_column(fitted, "gpu"), SOURCE.format(**names))
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
    return sample(table, models) if models else table


def sample(table: PublishedTable, models: int) -> PublishedTable:
    """A table with at most so many models of each source, drawn at random, but always the same."""
    model, source = (table.cells[name].astype(str) for name in ("model", tables.SOURCE))
    model = model.str.rpartition(":")[2]  # whatever file builds it
    keep = np.ones(len(model), bool)
    for one in sorted(set(source)):
        names = sorted(set(model[source == one]))
        if len(names) > models:
            drawn = np.random.default_rng(SEED).choice(names, models, replace=False)
            keep &= (source != one) | np.isin(model, drawn)
    return table.where(keep)


def _said(table: PublishedTable, models: int) -> str:
    """What a profile says of a sample, in place of every model that was left out."""
    used = table.cells["model"][table.cells["input_kind"] != PRODUCT].str.rpartition(":")[2].nunique()
    return f"of larger sources {models} models each were drawn at random; {used} models could be traced"


def _with_eager(table: PublishedTable) -> list[str]:
    """GPUs with enough rows in eager, at the clocks of their datasheets."""
    counts = table.cells["device"][table.cells["runtime"] == EAGER].value_counts()
    return sorted(name for name in counts.index[counts >= FEWEST_ROWS] if gpus.spec(name) in gpus.SPECS)


def without_gpu(fitted: Problem) -> pd.DataFrame:
    """Eager rows of each GPU, predicted from the other GPUs, its datasheet, and the middle of the others' hosts."""
    rows, names = fitted.rows, fitted.parameters.names
    eager = rows.runtime == EAGER
    parts = []
    for gpu in sorted(set(rows.gpu[eager])):
        mine, others = eager & (rows.gpu == gpu), eager & (rows.gpu != gpu)
        theta = fitted.solve(fitted.telling & (rows.gpu != gpu))
        told = _unnamed_hosts(fitted) & others
        middle = np.log(np.median(FittedNumbers(fitted, theta).host_factors(told if told.any() else others)))
        for run in sorted(set(rows.run[mine & (rows.host == "")]) - set(rows.run[others])):
            theta[names["run", run]] = middle - theta[names["middle host",]]
        parts.append(fitted.table.cells[mine].assign(predicted_s=fitted.predict(theta)[mine]))
    return pd.concat(parts)


def _unnamed_hosts(problem: Problem) -> Mask:
    """Eager rows that tell hosts which nobody names; all eager rows where there are none."""
    eager = problem.rows.runtime == EAGER
    told: Mask = eager & tells_hosts(problem) & (problem.rows.host == "")
    return told if told.any() else eager


def shared_of(fitted: Problem, holdout: pd.DataFrame, hosts_known: pd.DataFrame, source: str) -> Shared:
    """What the GPUs of a table have in common, from its rows of eager.

    `holdout` is from `without_gpu`; `hosts_known` are GPUs left out whose hosts one row of each run tells, so that its
    errors have nothing to do with the host. `source` says in a sentence what the numbers come from.
    """
    theta, names = fitted.solve(fitted.telling), fitted.parameters.names
    numbers = FittedNumbers(fitted, theta)
    designs = {gpu.design: gpu.compute_capability for gpu in fitted.gpus.values()}
    families = sorted({*fitted.families(EAGER), *DIMS} - {*STAND_INS, *GUESSES, UNEVEN_GROUPS})
    known = hosts_known[hosts_known["runtime"] == EAGER]
    small = known["batch"].to_numpy() <= SMALL
    sizes = np.abs(np.log(known["predicted_s"] / known["latency_s"]).to_numpy())
    # Most GPUs that nobody measured have tensor cores.
    middle = float(np.median(numbers.host_factors(_unnamed_hosts(fitted))))
    limited = {slot: names.get(("power limited", slot)) for slot in DEVIATING}
    return Shared(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        source=source,
        kernels={
            design: {family: _reached(numbers, capability, family) for family in families}
            for design, capability in sorted({ANY: (0, 0), **designs}.items())
        },
        dispatch=msgspec.structs.replace(
            dispatch(fitted, numbers, EAGER, _nameless("a100", (0, 0)), middle, NOT_TRIED),
            spread=short(conformal(sizes[small]) / Z90),
            busy_spread=short(conformal(sizes[~small]) / Z90),
            host_spread=host_spread(fitted, numbers),
        ),
        clock_exponent=short(numbers.clock_exponent),
        error=float(f"{errors(holdout['predicted_s'], holdout['latency_s']).median:.4g}"),
        power_limited={slot: 1.0 if at is None else short(float(np.exp(theta[at]))) for slot, at in limited.items()},
    )


def _reached(numbers: FittedNumbers, capability: tuple[int, int], family: str) -> dict[str, dict[str, float]]:
    """By mode and slot, what kernels of a family reach on GPUs of a compute capability; one GPU for each mode."""
    reached = {}
    for like, precisions in (("titan-x-pascal", ("fp32", "fp16")), ("a100", ("tf32", "fp16"))):
        spec = _nameless(like, capability)
        for precision in precisions:
            mode = mode_of(spec, precision, family)
            reached[mode] = {
                slot: short(number / float(np.exp(log_promise(spec, mode, slot))))
                for slot, number in numbers.kernel(family, spec, precision, EAGER).items()
            }
    if not family.startswith("conv") and "compute" in reached["tf32"]:
        # No table has products in TF32. In each cycle they take as many bytes as those in half precision.
        reached["tf32"]["compute"] = max(reached[mode]["compute"] for mode in ("tf32", "fp16"))
    return reached


def _nameless(like: str, capability: tuple[int, int]) -> Spec:
    """A GPU's datasheet without its name, so that nothing that the fit knows of a single GPU takes part."""
    return msgspec.structs.replace(gpus.spec(like), name="", compute_capability=capability)


def _line(name: str, errors: Errors) -> str:
    return f"{name:37} {errors.cells:6} {errors.median:7.1%} {errors.p90:7.1%} {errors.near:9.0%}"


if __name__ == "__main__":
    main()
