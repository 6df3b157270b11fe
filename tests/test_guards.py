"""Nothing that latpred answers changes unnoticed: graphs, predictions and fitted profiles.

What users call stands in docs/api.md and docs/cli.md, and `test_docs.py` compares it. After a change on purpose:
`python tests/guards/keep.py`, and read the difference.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from guards import graphs, journals, predictions

EXACT = 1e-10  # processors of two makers differ by 6e-12
VARIANCES = ("/amplitude", "/noise")  # of the log of kernel times: small numbers, which an optimiser finds


def test_graphs_are_the_same_to_the_byte() -> None:
    script = Path(graphs.__file__).with_name("keep.py")  # what other tests did to this process would show in the graphs
    command = [sys.executable, str(script), "--quick"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    found = graphs.decoded(printed)
    assert found.keys() == {str(road) for road in graphs.ROADS}
    changed = graphs.changed(found)
    if torch.backends.cpu.get_cpu_capability() != "AVX512":  # onnxruntime lays channels out in blocks of another width
        changed = [line for line in changed if " in onnxruntime on cpu " not in line]
    assert changed == []


@pytest.mark.parametrize("source", predictions.SOURCES)
def test_predictions_are_the_same(source: str) -> None:
    kept, found = predictions.kept()[source], predictions.present(source)
    assert kept
    assert kept.keys() == found.keys()
    for key, numbers in kept.items():
        assert found[key] == pytest.approx(numbers, rel=EXACT, abs=0.0), key


@pytest.mark.parametrize("journal", journals.JOURNALS, ids=lambda journal: journal.name.partition(".")[0])
def test_stored_journals_give_the_same_profiles(journal: Path, tmp_path: Path) -> None:
    found = journals.document(journals.fitted(journal, tmp_path))
    # The command that measures anew gives the profile's name only on the machine that it is of.
    changed = [line for line in differences(journals.kept(journal), found) if not line.startswith("/acceptance/advice")]
    assert changed == []


def differences(kept: Any, found: Any, place: str = "") -> list[str]:
    """Where two documents differ, numbers by more than solvers leave open (profiles hold four decimals, six digits)."""
    if isinstance(kept, dict) and isinstance(found, dict):
        return [
            line
            for name in sorted(kept.keys() | found.keys())
            for line in differences(kept.get(name), found.get(name), f"{place}/{name}")
        ]
    if isinstance(kept, list) and isinstance(found, list) and len(kept) == len(found):
        pairs = zip(kept, found, strict=True)
        return [line for at, pair in enumerate(pairs) for line in differences(*pair, f"{place}/{at}")]
    numbers = isinstance(kept, int | float) and isinstance(found, int | float)
    rel_tol, abs_tol = (0.01, 0.0) if place.endswith(VARIANCES) else (4e-5, 2e-4)
    same = math.isclose(kept, found, rel_tol=rel_tol, abs_tol=abs_tol) if numbers else kept == found
    return [] if same else [f"{place}: {kept} is now {found}"]


def test_a_difference_is_named() -> None:
    assert differences({"a": [1.0, 2.0]}, {"a": [1.0, 2.1], "b": 0}) == ["/a/1: 2.0 is now 2.1", "/b: None is now 0"]
    assert differences({"noise": 1e-4}, {"noise": 2e-4}) == ["/noise: 0.0001 is now 0.0002"]
