"""The examples about searching run, and show what they say they show."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from profiledata import profile

import latpred
from latpred.profile import store


def found_ratio(text: str) -> float:
    (ratio,) = re.findall(r"a limit on latency found (\d+\.\d\d) x the parameters", text)
    return float(ratio)


def grown(text: str, title: str) -> list[float]:
    """Parameters, multiply-adds and latency as multiples of the reference's."""
    (line,) = re.findall(rf"^{title} .*$", text, flags=re.MULTILINE)
    return [float(number) for number in re.findall(r"(\d+\.\d\d) x", line)]


@pytest.mark.parametrize(("space", "trials", "least"), [("encoders", 30, 1.5), ("residual", 2, 1.0)])
def test_on_a_gpu_width_is_free_and_a_limit_on_latency_finds_it(
    space: str, trials: int, least: float, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    from search import main

    main(["--space", space, "--trials", str(trials)])
    text = capsys.readouterr().out
    wider, deeper = grown(text, "twice as wide"), grown(text, "twice as deep")
    assert wider[0] > 3.5  # parameters
    assert wider[2] < 1.05  # latency
    assert deeper[2] > 1.7
    assert found_ratio(text) >= least


def test_winners_are_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    import search
    from spaces import encoders

    store.save(profile())
    tiny = {"depth": (1, 2), "width": (32, 64), "heads": (2,)}
    monkeypatch.setattr(encoders, "CHOICES", tiny)
    monkeypatch.setattr(encoders, "REFERENCE", {"depth": 1, "width": 32, "heads": 2})
    monkeypatch.setattr(encoders, "INPUT", {"seq": 8})
    monkeypatch.setattr(search, "REPEATS", 1)
    search.main(["--device", "cpu", "--precision", "fp32", "--trials", "4", "--measure"])
    with pytest.raises(SystemExit):  # which a GPU's predictions say nothing of
        search.main(["--device", "rtx-8000", "--precision", "fp32", "--trials", "4", "--measure"])
    lines = capsys.readouterr().out.partition("on this machine's CPU")[2].splitlines()[1:]
    titles = [
        "the reference",
        "twice as wide",
        "twice as deep",
        "the most within its latency",
        "the most within its mu",
    ]
    assert [line[: len(title)] for line, title in zip(lines, titles, strict=True)] == titles
    assert all(re.search(r"\d+\.\d\d ms +\d+\.\d\d x +\d+\.\d\d ms +\d+\.\d\d x$", line) for line in lines)


def test_noise_of_passes_tells_how_well_anything_can_rank() -> None:
    from rank_check import at_best, between_halves
    from scipy.stats import kendalltau

    draw = np.random.default_rng(0)
    truth = draw.normal(size=2000)
    passes = np.exp(truth[:, None] + draw.normal(size=(2000, 6)))
    halves = between_halves(passes[:300])
    reached = kendalltau(truth, np.median(passes, axis=1)).statistic
    assert halves < 0.7 < reached
    assert at_best(halves) == pytest.approx(reached, abs=0.03)


def test_rank_check_measures_resumes_and_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    import pandas as pd
    import rank_check
    from spaces import encoders, residual

    from latpred.calibration.timing.timer import Plan

    store.save(profile())
    monkeypatch.setattr(rank_check, "RUNTIMES", ("eager",))
    monkeypatch.setattr(rank_check, "VISIT", Plan(least=3, most=3, budget_s=0.01, warmup_s=0.0))
    monkeypatch.setattr(encoders, "TINY", {"depth": (1,), "width": (16, 32, 64), "heads": (2,)})
    monkeypatch.setattr(residual, "TINY", {**residual.TINY, "width": (4, 8)})
    asked = ["--candidates", "3", "--passes", "3", "--shots", "2", "--draws", "2", "--out", str(tmp_path)]
    rank_check.main(asked)
    report = capsys.readouterr().out
    line = r"^(encoders|residual) +eager +(1|16) +3( +(-?\d\.\d{3}|nan)){6}( +\d+\.\d%){3}$"
    assert len(re.findall(line, report, re.MULTILINE)) == 4
    assert len(re.findall(r"of 2 by more than a median's noise", report)) == 2
    cells = pd.read_parquet(tmp_path / "cells.parquet")
    assert len(cells) == 12
    assert (cells["n"] == 3).all()
    assert cells[["latency_s", "predicted_s", "spread_s", "macs", "parameters", "modules"]].gt(0).to_numpy().all()

    monkeypatch.setattr(latpred, "measure", lambda *_, **__: pytest.fail("measured again"))
    rank_check.main(asked)
    assert capsys.readouterr().out == report
    rank_check.main([*asked[:-2], "--replay", str(tmp_path)])
    assert capsys.readouterr().out == report
