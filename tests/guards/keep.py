"""Writes the guards anew: `python tests/guards/keep.py` for all, or with the names of some.

`--check` writes nothing and traces every architecture in every runtime, which takes the tests too long. Look at the
difference before it is committed: a guard that changed says that latpred's answers changed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

NAMES = ("graphs", "predictions", "journals")


def main() -> None:
    """Write the guards that are named, in an empty home directory."""
    parser = argparse.ArgumentParser(description="Write the guards anew.")
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help="graphs, predictions, journals")
    parser.add_argument("--check", action="store_true", help="only say which graphs of all are no longer the same")
    parser.add_argument("--quick", action="store_true", help="print the graphs that every test run looks at")
    parser.add_argument("--measure", action="store_true", help="measure the simulated device's journal anew as well")
    parser.add_argument("--cpu", type=Path, metavar="JOURNAL", help="store this journal of a CPU (last.jsonl)")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import conftest  # noqa: F401  (one thread; torchvision's operators)

    from guards import graphs, journals, predictions

    if arguments.measure:
        journals.SIMULATED.unlink(missing_ok=True)
    if arguments.cpu is not None:
        journals.store_cpu(arguments.cpu)
    known = {"graphs": graphs, "predictions": predictions, "journals": journals}
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"LATPRED_HOME": home, "LATPRED_CALIBRATE": "never"}
        if arguments.quick:
            print(json.dumps(graphs.digests(quick=True)))
            return
        if arguments.check:
            sys.exit("\n".join(graphs.changed(graphs.digests(quick=False))) or None)
        for name in arguments.names or NAMES:
            known[name].keep()
            print(f"kept {name}")


if __name__ == "__main__":
    main()
