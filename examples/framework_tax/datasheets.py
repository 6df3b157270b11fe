"""What measured GPUs have in common, from which GPUs that nobody measured are predicted.

    python examples/framework_tax/datasheets.py measured.csv                            # how good is that?
    python examples/framework_tax/datasheets.py measured.csv -o models/datasheets.json  # and write it down

Each GPU of the table is left out with all its rows, and predicted from the others and its datasheet, on the middle of
the others' hosts: all that is known of a GPU that somebody else has. Then all GPUs are fitted together. Models of
torchvision and timm are traced, so both are needed where the table has any.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from latpred.accuracy.metrics import Errors
from latpred.calibration.published.fitted_profiles import shared_of, without_gpu
from latpred.calibration.published.joint_fit import problem
from latpred.calibration.published.leave_out import by_gpu

SOURCE = 'fitted to the latencies behind "The Framework Tax" (arXiv 2302.06117) on {gpus}; eager, torch 1.12'


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge, and write where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", help="measured latencies")
    parser.add_argument("-o", "--output", type=Path, help="where to write what the GPUs have in common")
    asked = parser.parse_args(arguments)
    fitted = problem(asked.table)
    holdout = without_gpu(fitted)
    print("a GPU left out, its host not known     cells  median     p90  within 10 %")
    for title, columns in (("all", ()), ("", ("device",)), ("", ("precision",))):
        for name, errors in holdout.errors(*columns).items():
            print(_line(title or name, errors))
    if asked.output:
        common = shared_of(fitted, holdout, by_gpu(fitted, 0), SOURCE.format(gpus=", ".join(sorted(fitted.gpus))))
        asked.output.write_bytes(msgspec.json.format(msgspec.json.encode(common), indent=1) + b"\n")
        print(f"written to {asked.output}")


def _line(name: str, errors: Errors) -> str:
    return f"{name:37} {errors.cells:6} {errors.median:7.1%} {errors.p90:7.1%} {errors.near:9.0%}"


if __name__ == "__main__":
    main()
