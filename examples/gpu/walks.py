"""Walk every model of the studies for every runtime ahead of time, so that a GPU that is paid for does not wait for it.

    python examples/gpu/walks.py --seconds 600

Needs no GPU, but the same versions of torch, transformers and onnxruntime as where the GPU is: walks are kept under
$LATPRED_HOME/cache and found by them. The most valuable come first; what is kept already takes next to no time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

from latpred.calibration.subjects import Subject
from latpred.calibration.suite_paper import PLANS, plan
from latpred.errors import LatpredError
from latpred.runtimes.walking import walked_by


def wanted(plans: Sequence[str], runtimes: Sequence[str]) -> Iterator[tuple[Subject, str, str]]:
    """Subject, precision and runtime of each walk, each once: what runtimes share is walked for one of them."""
    seen: set[tuple[str, int, str, str]] = set()
    stages = [(number, stage) for name in plans for number, stage in enumerate(plan(name).stages)]
    for _, stage in sorted(stages, key=lambda one: one[0]):
        for one in stage.settings:
            key = (one.subject.name, one.subject.input_size, one.precision, walked_by(one.runtime))
            if key not in seen and (not runtimes or one.runtime in runtimes):
                seen.add(key)
                yield one.subject, one.precision, one.runtime


def main(arguments: Sequence[str] | None = None) -> None:
    """Walk until all is done or the seconds are spent, and say what each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no walk later than this")
    parser.add_argument("--plans", default="heldout,paper", help=f"of {', '.join(PLANS)}, joined by commas")
    parser.add_argument("--runtimes", default="", help="only these, joined by commas")
    asked = parser.parse_args(arguments)
    begun = time.monotonic()
    for subject, precision, runtime in wanted(asked.plans.split(","), [r for r in asked.runtimes.split(",") if r]):
        start = time.monotonic()
        if start - begun > asked.seconds:
            print("out of time; the same command again goes on here")
            return
        try:
            subject.walk(precision, runtime, "cuda")
            said = ""
        except LatpredError as error:
            said = f"  {error}"
        except KeyboardInterrupt:
            print("interrupted; the same command again goes on here")
            sys.exit(130)
        print(
            f"{time.monotonic() - start:7.1f} s  {subject.name}@{subject.input_size} {precision} {runtime}{said}",
            flush=True,
        )


if __name__ == "__main__":
    try:
        main()
    except LatpredError as error:
        sys.exit(f"latpred: {error}")
