"""What measured GPUs have in common, from which GPUs that nobody measured are predicted.

    python examples/framework_tax/datasheets.py measured.csv                            # how good is that?
    python examples/framework_tax/datasheets.py measured.csv -o models/datasheets.json  # and write it down
    python examples/framework_tax/datasheets.py measured.csv timm_gpu.csv --mapping examples/published/mapping.json

Each GPU of the tables is left out with all its rows, and predicted from the others and its datasheet, on the middle of
the others' hosts: all that is known of a GPU that somebody else has. Then all GPUs are fitted together. Models of
torchvision and timm are traced, so both are needed where the tables have any.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from latpred.accuracy.metrics import Errors
from latpred.calibration.published import published_table
from latpred.calibration.published.fitted_profiles import shared_of, without_gpu
from latpred.calibration.published.joint_fit import problem
from latpred.calibration.published.leave_out import by_gpu

SOURCE = "fitted to published latencies of {sources} on {gpus}; eager"


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge, and write where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", help="measured latencies")
    parser.add_argument("--mapping", help="what the columns of tables of another form mean")
    parser.add_argument("-o", "--output", type=Path, help="where to write what the GPUs have in common")
    parser.add_argument("--models", type=int, help="of a source with more models, so many drawn at random")
    asked = parser.parse_args(arguments)
    table = published_table.read_all(asked.tables, asked.mapping)
    fitted = problem(table.sample(asked.models) if asked.models else table)
    holdout = without_gpu(fitted)
    print("a GPU left out, its host not known     cells  median     p90  within 10 %")
    for title, columns in (("all", ()), ("", ("device",)), ("", ("precision",))):
        for name, errors in holdout.errors(*columns).items():
            print(_line(title or name, errors))
    if asked.output:
        names = {"sources": ", ".join(sorted(set(fitted.rows.source))), "gpus": ", ".join(sorted(fitted.gpus))}
        common = shared_of(fitted, holdout, by_gpu(fitted, 0), SOURCE.format(**names))
        asked.output.write_bytes(msgspec.json.format(msgspec.json.encode(common), indent=1) + b"\n")
        print(f"written to {asked.output}")


def _line(name: str, errors: Errors) -> str:
    return f"{name:37} {errors.cells:6} {errors.median:7.1%} {errors.p90:7.1%} {errors.near:9.0%}"


if __name__ == "__main__":
    main()
