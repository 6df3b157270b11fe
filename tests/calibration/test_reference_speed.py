"""Tempo: rows of a slow moment are evened out, visits in one set aside."""

from __future__ import annotations

import pytest

from latpred.calibration import tempo
from latpred.calibration.cells import Cell
from latpred.calibration.session import Row
from latpred.calibration.tempo import TEMPO
from latpred.calibration.timing import Timing


def timing(seconds: float) -> Timing:
    return Timing(seconds, seconds / 10, 5, True)


def row(
    seed: int, taken: float, beat: float | None, *, cold: int = 0, precision: str = "fp32", runtime: str = "eager"
) -> Row:
    timings = {"single": timing(taken)} | ({} if beat is None else {TEMPO: timing(beat)})
    cell = Cell("network", "encoder", {"seed": seed, "cold": cold}, precision, runtime)
    return Row(cell, timings, 0.1, calls_us=(taken * 1e6, taken * 2e6))


def singles(rows: list[Row]) -> list[float]:
    return [row.timings["single"].median_s for row in rows]


def test_a_slow_half_is_evened() -> None:
    # the machine was a quarter slower for two of five rows: the usual tempo is that of the other three
    rows = [row(0, 1.0, 0.4), row(1, 2.0, 0.4), row(2, 3.0, 0.4), row(3, 1.25, 0.5), row(4, 2.5, 0.5)]
    found = tempo.evened(rows)
    assert singles(found) == pytest.approx([1.0, 2.0, 3.0, 1.0, 2.0])
    assert found[3].calls_us == pytest.approx((1.0e6, 2.0e6))
    assert found[3].timings["single"].spread_s == pytest.approx(0.1)
    assert found[3].timings[TEMPO].median_s == pytest.approx(0.4)
    assert [row.cell for row in found] == [row.cell for row in rows]


def test_rows_are_never_evened_by_more_than_two() -> None:
    rows = [row(seed, 1.0, 0.4) for seed in range(3)] + [row(3, 6.0, 4.0), row(4, 1.0, 0.04)]
    assert singles(tempo.evened(rows))[3:] == pytest.approx([3.0, 2.0])


def test_other_work_between_the_passes_has_a_tempo_of_its_own() -> None:
    rows = [row(0, 1.0, 0.4), row(1, 1.0, 8.0, cold=1), row(2, 1.0, 2.0, precision="bf16")]
    rows.append(row(3, 1.0, 0.5, runtime="compile"))
    assert singles(tempo.evened(rows)) == pytest.approx([1.0] * 4)


def test_rows_without_a_tempo_stay_as_they_are() -> None:
    rows = [row(0, 1.0, None), row(1, 1.0, 0.4), row(2, 1.0, 0.8)]
    assert tempo.evened(rows)[0] == rows[0]
    assert tempo.evened([]) == []


@pytest.mark.parametrize(
    ("beats", "kept"),
    [
        ([1.0, 1.05, 0.95, 1.09, 1.0], [0, 1, 2, 3, 4]),  # all within a tenth
        ([1.0, 1.5, 1.0, 1.6, 1.0, 1.0], [0, 2, 4, 5]),
        ([2.0, 3.0, 2.5, 4.0], [0, 1, 2]),  # three in any case: those least far off
        ([3.0, 2.0, 4.0, 2.5, 5.0, 6.0, 7.0, 8.0], [0, 1, 2, 3]),  # half in any case
        ([9.0, 9.0], [0, 1]),
    ],
)
def test_steady_keeps_what_was_timed_at_the_usual_tempo(beats: list[float], kept: list[int]) -> None:
    timings = [timing(1.0 + index) for index in range(len(beats))]
    assert tempo.steady(timings, beats, usual=1.0) == [timings[index] for index in kept]


def test_a_metronome_always_does_the_same_work() -> None:
    metronome = tempo.Metronome()
    metronome.beat()
    first = metronome._product.clone()
    assert metronome.seconds() > 0
    assert bool((metronome._product == first).all())
    assert bool((first == metronome._factor @ metronome._factor).all())
