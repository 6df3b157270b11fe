"""The accuracy report: figures worked out by hand, what it says about rows that do not match, and its forms."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from tabledata import measured, predicted

from latpred.accuracy.accuracy_report import Report
from latpred.accuracy.comparison import compare
from latpred.errors import TableError

BATCHES = (1, 2, 4, 8, 16)
MODELS = ("bert", "resnet", "vit", "t5")
# Model i at batch b takes max(i + 1, b / 2) seconds, i from 0.
CELLS = [(m, b, max(i + 1.0, b / 2)) for i, m in enumerate(MODELS) for b in BATCHES]


def off_by(share: float, **columns: object) -> pd.DataFrame:
    return predicted([(m, b, (1 + share) * y) for m, b, y in CELLS], **columns)


def report(share: float = 0.0, **columns: object) -> Report:
    """Of predictions that are off by a share, against the truth with other columns."""
    return compare(off_by(share), measured(CELLS, **columns))


@pytest.mark.parametrize(("share", "near"), [(0.0, 1.0), (0.5, 0.0)])
def test_a_uniform_error_keeps_order_and_curves(share: float, near: float) -> None:
    found = report(share, repeat_ratio=1.01)
    assert (found.overall.median, found.overall.bias) == (pytest.approx(share), pytest.approx(share))
    assert (found.overall.near, found.rank.tau) == (near, 1)
    assert found.knee.median == pytest.approx(1)
    assert found.crossover.median == pytest.approx(1)
    missed = ("median error is 0.5, the target 0.08", "p90 error is 0.5, the target 0.2")
    assert found.shortfalls() == (missed if share else ())


def test_a_gpu_goes_by_any_of_its_names() -> None:
    guess = off_by(0.25, device="h100")
    found = compare(guess, measured(CELLS, device="nvidia-h100-80gb-hbm3"))
    assert (found.overall.cells, found.overall.median) == (len(CELLS), pytest.approx(0.25))
    with pytest.raises(TableError, match="No cell is in both tables"):
        compare(guess, measured(CELLS, device="nvidia-h200"))
    both = pd.concat([guess, off_by(0.1, device="nvidia-h100-80gb-hbm3")])  # as from a profile and from a datasheet
    found = compare(both, measured(CELLS, device="nvidia-h100-80gb-hbm3"))
    assert found.overall.median == pytest.approx(0.1)


def test_groups_and_pairs_by_hand() -> None:
    found = report(0.1, repeat_ratio=1.01)
    assert list(found.by_batch) == ["1", "2", "4", "8", "16"]
    assert (found.by_model["vit"].cells, found.by_runtime["eager"].models) == (5, 4)
    # batches 1 and 2: six distinct pairs each; batch 4: 2, 2, 3, 4; batch 8: 4, 4, 4, 4; batch 16: all 8
    assert {b: r.pairs for b, r in found.rank_by_batch.items()} == {"1": 6, "2": 6, "4": 5, "8": 0, "16": 0}
    assert found.rank.pairs == 17
    assert found.noise.p90 == pytest.approx(0.01)


def test_a_long_name_of_a_model_cuts_no_error_short() -> None:
    name = f"/home/somebody/{'project/' * 8}models.py:build"
    cells = [(name, batch, 0.1) for batch in BATCHES]
    shown = compare(predicted(cells), measured(cells)).text(80)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_swapped_models_cost_order_at_their_batch() -> None:
    cells = [(m, b, {("bert", 1): 2.0, ("resnet", 1): 1.0}.get((m, b), y)) for m, b, y in CELLS]
    found = compare(predicted(cells), measured(CELLS, repeat_ratio=1.01))
    assert found.rank_by_batch["1"].tau == pytest.approx(4 / 6)
    assert found.rank_by_batch["2"].tau == 1
    assert found.shortfalls() == ("lowest Kendall tau of a batch is 0.667, the target 0.95",)


def test_interval_coverage_regime_and_measured_clocks() -> None:
    guess = off_by(0.0, low_s=0.0, high_s=3.5, overhead_s=2.0, compute_s=lambda t: t["batch"] / 2.0, regime="framework")
    regimes = ["framework"] * 15 + ["compute"] * 5
    found = compare(guess, measured(CELLS, overhead_s=1.0, compute_s=lambda t: t["batch"] / 2.0, regime=regimes))
    assert found.coverage.share == pytest.approx(sum(y <= 3.5 for _, _, y in CELLS) / 20)
    assert found.regime == 0.75
    assert found.crossover.basis == "measured overhead and compute"
    assert found.crossover.median == pytest.approx(2.0)  # batch 4 predicted, 2 measured


def test_speed_ups_over_eager_by_runtime() -> None:
    def both(factor: float, table: Callable[..., pd.DataFrame]) -> pd.DataFrame:
        faster = [(m, b, y / factor) for m, b, y in CELLS]
        return pd.concat([table(CELLS), table(faster, runtime="torchscript")], ignore_index=True)

    found = compare(both(2.0, predicted), both(1.6, measured))
    speedups = found.speedups["torchscript"]
    assert (speedups.cells, speedups.median, speedups.near) == (20, pytest.approx(0.25), 0)
    assert "Speed-up over eager within 15 %: torchscript 0.0 % of 20 cells." in found.text(200)
    assert report().speedups == {}


def test_traced_launches_against_profiled_ones() -> None:
    profiled = measured(CELLS, launches=[100.0] * 5 + [99.0] * 5 + [np.nan] * 10)
    found = compare(off_by(0.0, launches=100), profiled)
    launches = found.launches["eager"]
    assert (launches.models, launches.exact, launches.worst) == (2, 0.5, pytest.approx(1 / 99))
    assert "eager: exact in 50.0 % of cells of 2 models, within 2 % in 100.0 %" in found.text(200)


def test_noise_of_cells_that_were_measured_several_times_is_that_of_their_medians() -> None:
    table = measured([("bert", 1, 0.010), ("bert", 1, 0.012)], run=["r1", "r2"])
    noise = compare(predicted([("bert", 1, 0.011)]), table).noise
    assert noise.median == pytest.approx(0.2)
    assert noise.source == "the repeats of each cell"


def test_noise_falls_back_to_the_spread_of_what_was_timed_more_than_once() -> None:
    found = report(spread_s=lambda t: 0.02 * t["latency_s"])
    assert found.noise.median == pytest.approx(0.04)
    assert "not kept apart" in found.noise.source
    once = report(spread_s=0.0, n=1)
    assert once.noise.cells == 0
    assert "Repeat noise was not measured" in once.text(200)


def test_baselines_stand_beside_the_prediction() -> None:
    work = {"macs": lambda t: t["latency_s"] * 1e9, "bytes": lambda t: t["latency_s"] * 1e6, "launches": 100}
    found = compare(off_by(0.1, **work), measured(CELLS), reasons={"runtime_estimator": "no CUDA"})
    scores = {score.name: score for score in found.baselines}
    linear = scores["flops_linear"].errors
    assert linear is not None
    assert linear.median == pytest.approx(0, abs=1e-9)  # its MACs are the latency by construction
    assert scores["runtime_estimator"].reason == "no CUDA"
    said = " ".join(found.text(200).split())
    assert "is not available: no CUDA." in said
    assert "; latpred's profile needs none of them." in said  # but may have been adapted to them


def test_rows_without_partner_are_named() -> None:
    found = compare(off_by(0.0), measured(CELLS[1:]))
    assert found.only_predicted == ("bert seq 16 batch 1 eager fp32 cpu single",)
    assert "Predicted but not measured (1):\n  bert seq 16 batch 1 eager fp32 cpu single" in found.text()
    with pytest.raises(TableError, match=r"No cell is in both tables\. Predicted: bert seq 16 .*; measured: bert seq"):
        report(runtime="torchscript")


def test_a_table_in_which_nothing_was_measured_says_why() -> None:
    failed = ["not reached in the time budget"] * (len(CELLS) - 1) + ["out of memory."]
    why = r"no measured cell has a latency: not reached in the time budget, out of memory\. Measure again"
    with pytest.raises(TableError, match=why):
        report(status=failed, latency_s=float("nan"))


@pytest.mark.parametrize(
    ("share", "said"),
    [(1000.0, "predicted latencies are about 1,001 times the other table's, as if they were in milliseconds"),
     (2e-6 - 1, "measured latencies are about 500,000 times the other table's, as if they were in microseconds"),
     (20.0, ""), (-0.9, "")],
)  # fmt: skip
def test_a_table_in_another_unit_is_told(share: float, said: str) -> None:
    notes = [note for note in report(share).notes if "as if" in note]
    assert notes == ([f"The {said}: latency_s is in seconds."] if said else [])


def test_report_as_text_json_and_frame() -> None:
    found = report(0.1)
    said = "20 cells of 4 models: median error 10.0 %, p90 10.0 %, 100.0 % within 10 %, bias +10.0 %\n"
    assert found.text().startswith(said)
    assert "Kendall tau" in found.text()
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["schema"] == "latpred.accuracy/1"
    assert document["overall"]["median"] == pytest.approx(0.1)
    assert document["regime"] is None
    assert document["baselines"][0]["errors"] is None
    frame = found.to_frame()
    np.testing.assert_allclose(frame["error"], 0.1)
    frame["error"] = 0.0
    assert found.to_frame()["error"].iloc[0] == pytest.approx(0.1)
