"""The accuracy report: figures worked out by hand, what it says about rows that do not match, and its forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tabledata import measured, predicted

from latpred import tables
from latpred.accuracy import comparison
from latpred.errors import TableError

BATCHES = (1, 2, 4, 8, 16)
MODELS = ("bert", "resnet", "vit", "t5")


def truth_cells() -> list[tuple[str, int, float]]:
    """Model i at batch b takes max(i + 1, b / 2) seconds, i from 0."""
    return [(m, b, max(i + 1.0, b / 2)) for i, m in enumerate(MODELS) for b in BATCHES]


def off_by(share: float, **columns: object) -> pd.DataFrame:
    return predicted([(m, b, (1 + share) * y) for m, b, y in truth_cells()], **columns)


def test_a_perfect_prediction() -> None:
    report = comparison.compare(off_by(0.0), measured(truth_cells(), repeat_ratio=1.01))
    assert report.overall.median == 0
    assert report.overall.near == 1
    assert report.rank.tau == 1
    assert report.knee.median == report.crossover.median == 1
    assert report.shortfalls() == ()


def test_a_uniform_error_keeps_order_and_curves() -> None:
    report = comparison.compare(off_by(0.5), measured(truth_cells(), repeat_ratio=1.01))
    assert report.overall.median == pytest.approx(0.5)
    assert report.overall.bias == pytest.approx(0.5)
    assert report.overall.near == 0
    assert report.rank.tau == 1
    assert report.knee.median == pytest.approx(1)
    assert report.shortfalls() == ("median error is 0.5, the target 0.08", "p90 error is 0.5, the target 0.2")


def test_groups_and_pairs_by_hand() -> None:
    report = comparison.compare(off_by(0.1), measured(truth_cells(), repeat_ratio=1.01))
    assert list(report.by_batch) == ["1", "2", "4", "8", "16"]
    assert report.by_decade["1-9"].cells == 16
    assert report.by_decade["10-99"].cells == 4
    assert report.by_model["vit"].cells == 5
    assert report.by_runtime["eager"].models == 4
    # batches 1 and 2: six distinct pairs each; batch 4: 2, 2, 3, 4; batch 8: 4, 4, 4, 4; batch 16: all 8
    assert {b: r.pairs for b, r in report.rank_by_batch.items()} == {"1": 6, "2": 6, "4": 5, "8": 0, "16": 0}
    assert report.rank.pairs == 17
    assert report.noise.p90 == pytest.approx(0.01)


def test_swapped_models_cost_order_at_their_batch() -> None:
    cells = [(m, b, {("bert", 1): 2.0, ("resnet", 1): 1.0}.get((m, b), y)) for m, b, y in truth_cells()]
    report = comparison.compare(predicted(cells), measured(truth_cells(), repeat_ratio=1.01))
    assert report.rank_by_batch["1"].tau == pytest.approx(4 / 6)
    assert report.rank_by_batch["2"].tau == 1
    assert report.shortfalls() == ("lowest Kendall tau of a batch is 0.667, the target 0.95",)


def test_interval_coverage_regime_and_measured_clocks() -> None:
    guess = off_by(0.0, low_s=0.0, high_s=3.5, overhead_s=2.0, compute_s=lambda t: t["batch"] / 2.0, regime="framework")
    real = measured(
        truth_cells(), overhead_s=1.0, compute_s=lambda t: t["batch"] / 2.0, regime=["framework"] * 15 + ["compute"] * 5
    )
    report = comparison.compare(guess, real)
    inside = sum(y <= 3.5 for _, _, y in truth_cells())
    assert report.coverage.share == pytest.approx(inside / 20)
    assert report.regime == 0.75
    assert report.crossover.basis == "measured overhead and compute"
    assert report.crossover.median == pytest.approx(2.0)  # batch 4 predicted, 2 measured


def test_small_batches_have_errors_of_their_own() -> None:
    report = comparison.compare(off_by(0.2), measured(truth_cells()))
    assert report.small_by_runtime["eager"].cells == sum(batch <= 8 for _, batch, _ in truth_cells())
    assert "batch 1 to 8" in report.text()


def test_kernels_of_a_captured_graph_are_held_against_those_of_eager() -> None:
    cells = [("bert", 1, 2.0), ("vit", 1, 3.0)]
    found = {"eager": ["150", "90"], "cuda-graphs": ["150", "91"]}
    guess, real = (
        pd.concat([table(cells, runtime=name, **more(name)) for name in found], ignore_index=True)
        for table, more in ((predicted, lambda _: {}), (measured, lambda name: {"x_kernels": found[name]}))
    )
    count = comparison.compare(guess, real).launches["cuda-graphs"]
    assert (count.models, count.exact, count.near) == (2, 0.5, 1.0)
    assert "Kernels replayed against eager's, cuda-graphs: exact in 50.0 %" in comparison.compare(guess, real).text()


def test_speed_ups_over_eager_by_runtime() -> None:
    def both(factor: float, table: Callable[..., pd.DataFrame]) -> pd.DataFrame:
        faster = [(m, b, y / factor) for m, b, y in truth_cells()]
        return pd.concat([table(truth_cells()), table(faster, runtime="torchscript")], ignore_index=True)

    report = comparison.compare(both(2.0, predicted), both(1.6, measured))
    assert report.speedups["torchscript"].cells == 20
    assert report.speedups["torchscript"].median == pytest.approx(0.25)
    assert report.speedups["torchscript"].near == 0
    assert "Speed-up over eager within 15 %: torchscript 0.0 % of 20 cells." in report.text(200)
    assert comparison.compare(off_by(0.0), measured(truth_cells())).speedups == {}


def test_walked_launches_against_profiled_ones() -> None:
    profiled = measured(truth_cells(), launches=[100.0] * 5 + [99.0] * 5 + [np.nan] * 10)
    report = comparison.compare(off_by(0.0, launches=100), profiled)
    assert report.launches["eager"].models == 2
    assert report.launches["eager"].exact == 0.5
    assert report.launches["eager"].worst == pytest.approx(1 / 99)
    assert "eager: exact in 50.0 % of cells of 2 models, within 2 % in 100.0 %" in report.text(200)


def test_noise_falls_back_to_the_spread() -> None:
    report = comparison.compare(off_by(0.0), measured(truth_cells(), spread_s=lambda t: 0.02 * t["latency_s"]))
    assert report.noise.median == pytest.approx(0.04)
    assert "not kept apart" in report.noise.source


def test_baselines_stand_beside_the_prediction() -> None:
    work = {"macs": lambda t: t["latency_s"] * 1e9, "bytes": lambda t: t["latency_s"] * 1e6, "launches": 100}
    report = comparison.compare(off_by(0.1, **work), measured(truth_cells()), reasons={"runtime_estimator": "no CUDA"})
    scores = {score.name: score for score in report.baselines}
    linear = scores["flops_linear"].errors
    assert linear is not None
    assert linear.median == pytest.approx(0, abs=1e-9)  # its MACs are the latency by construction
    assert scores["runtime_estimator"].reason == "no CUDA"
    assert "is not available: no CUDA." in " ".join(report.text(200).split())


def test_rows_without_partner_are_named() -> None:
    report = comparison.compare(off_by(0.0), measured(truth_cells()[1:]))
    assert report.only_predicted == ("bert batch 1 eager fp32 cpu single",)
    assert "Predicted but not measured (1):\n  bert batch 1 eager fp32 cpu single" in report.text()


def test_nothing_in_common() -> None:
    with pytest.raises(
        TableError, match=r"No cell is in both tables\. Predicted: bert batch 1 .*; measured: bert batch 1"
    ):
        comparison.compare(off_by(0.0), measured(truth_cells(), runtime="torchscript"))


@pytest.mark.parametrize(
    ("share", "said"),
    [(1000.0, "predicted latencies are about 1,001 times the other table's, as if they were in milliseconds"),
     (2e-6 - 1, "measured latencies are about 500,000 times the other table's, as if they were in microseconds"),
     (20.0, ""), (-0.9, "")],
)  # fmt: skip
def test_a_table_in_another_unit_is_told(share: float, said: str) -> None:
    notes = comparison.compare(off_by(share), measured(truth_cells())).notes
    assert [note for note in notes if "as if" in note] == ([f"The {said}: latency_s is in seconds."] if said else [])


def test_csv_gives_the_same_report(tmp_path: Path) -> None:
    guess, real = off_by(0.1, low_s=0.5, high_s=9.0), measured(truth_cells(), repeat_ratio=1.02)
    tables.write(guess, tmp_path / "p.csv")
    tables.write(real, tmp_path / "m.csv")
    from_files = comparison.compare(tmp_path / "p.csv", tmp_path / "m.csv")
    assert from_files.text() == comparison.compare(guess, real).text()


def test_report_as_json_and_frame() -> None:
    report = comparison.compare(off_by(0.1), measured(truth_cells()))
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert document["schema"] == "latpred.accuracy/1"
    assert document["overall"]["median"] == pytest.approx(0.1)
    assert document["regime"] is None
    frame = report.to_frame()
    np.testing.assert_allclose(frame["error"], 0.1)
    frame["error"] = 0.0
    assert report.to_frame()["error"].iloc[0] == pytest.approx(0.1)


def test_text_leads_with_the_verdict() -> None:
    first = str(comparison.compare(off_by(0.05), measured(truth_cells()))).splitlines()[0]
    assert first == "20 cells of 4 models: median error 5.0 %, p90 5.0 %, 100.0 % within 10 %, bias +5.0 %"
