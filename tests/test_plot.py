"""Figures draw the numbers they are given, in every odd case, and say what is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest
from explanationdata import explanation, prediction
from factories import add, device, graph, linear, profile
from reportdata import EAGER, FITS
from tabledata import measured, predicted

from latpred import plot
from latpred.accuracy import comparison
from latpred.errors import TableError
from latpred.graph.graph import ModelGraph
from latpred.plot import breakdown, style
from latpred.plot.curves import points, regions, span_of
from latpred.prediction.prediction import Curve
from latpred.prediction.predictor import Predictor
from latpred.prediction.timeline import forward_pass
from latpred.tables import KEYS

NET = graph(*[op for _ in range(8) for op in (linear(4, 256), add(256))])


def predictor(**changes: object) -> Predictor:
    return Predictor(profile(device(**changes), FITS, {"eager": EAGER}))


def curve(*batches: int, net: ModelGraph = NET, **changes: object) -> Curve:
    return predictor(**changes).curve(net, batches)


def labels(ax: object) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]  # type: ignore[attr-defined]


def line(ax: object, label: str) -> np.ndarray:
    (found,) = [one for one in ax.get_lines() if one.get_label() == label]  # type: ignore[attr-defined]
    return np.asarray(found.get_ydata())


def test_a_curve_shows_its_numbers_in_the_order_of_the_batches() -> None:
    from matplotlib import pyplot

    found = curve(1, 4, 16, 64, 256)
    ax = curve(256, 1, 16, 4, 64).plot()
    pyplot.close(ax.get_figure())
    assert line(ax, "predicted latency") == pytest.approx(found.latency_ms)
    assert line(ax, "overhead (host)") == pytest.approx(found.overhead_ms)
    assert line(ax, "compute (device)") == pytest.approx(found.compute_ms)
    batch, low, high = found.crossover
    assert f"crossover {batch} (90 %: {low} to {high})" in labels(ax)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert {"framework-bound", "compute-bound"} <= {text.get_text() for text in ax.texts}
    assert ax.get_figure().get_size_inches()[0] == style.COLUMN_IN
    first, second = regions(found, span_of(found.batches))
    assert (first.regime, second.regime) == ("framework-bound", "compute-bound")
    assert first.high == second.low == found.crossover_batch


def test_a_curve_without_a_crossover_and_one_that_exceeds_the_memory() -> None:
    still = graph(*[add(8, read_bytes=add(8).read_bytes._replace(per_sample=0)) for _ in range(3)])
    ax = curve(1, 2, 4, net=still).plot(plot.blank())
    assert not [name for name in labels(ax) if name.startswith("crossover")]
    assert [text.get_text() for text in ax.texts] == ["framework-bound"]
    found = curve(1, 4096, memory_bytes=2**20)
    assert line(found.plot(plot.blank()), "exceeds the memory") == pytest.approx(found.latency_ms[1:])


def test_measured_points_from_numbers_and_from_a_table() -> None:
    found = curve(1, 8)
    seconds = found.to_frame()[[*KEYS, "latency_s"]].assign(latency_s=[0.001, 0.002])
    table = seconds.assign(spread_s=1e-5, n=3, run="a", stack="")
    for source in ({8: 2.0, 1: 1.0}, table):
        ax = found.plot(plot.blank(), measured=source)
        assert "measured" in labels(ax)
        (drawn,) = [one for one in ax.get_lines() if one.get_marker() == "D"]
        assert np.asarray(drawn.get_ydata()) == pytest.approx([1.0, 2.0])
    with pytest.raises(TableError, match="Nothing was measured of example-net"):
        found.plot(plot.blank(), measured=table.assign(model="another"))


@pytest.mark.parametrize(
    ("name", "other"),
    [("input_size", 64), ("input_kind", "image"), ("memory_format", "channels_last"), ("attention", "eager")],
)
def test_points_of_other_inputs_are_not_drawn_over_a_curve(name: str, other: object) -> None:
    found = curve(1, 8)
    table = found.to_frame()[[*KEYS, "latency_s"]].assign(latency_s=[0.001, 0.002])
    table = table.assign(spread_s=1e-5, n=3, run="a", stack="", memory_format="contiguous", attention="")
    unlike = table.assign(**{name: other, "latency_s": 0.1})
    assert points(pd.concat([table, unlike]), found.setting)[1] == [1.0, 2.0]
    assert points(table.assign(input_kind="default", input_size=0), found.setting)[1] == [1.0, 2.0]
    with pytest.raises(TableError, match=f"; the table has it at {unlike.input_kind[0]} {unlike.input_size[0]}"):
        points(unlike, found.setting)


def test_several_curves_are_told_apart_by_what_differs() -> None:
    one, other = curve(1, 8), curve(1, 8, name="other")
    ax = plot.latencies([one, other], plot.blank())
    assert labels(ax) == ["example", "other"]
    assert len({(item.get_linestyle(), item.get_marker()) for item in ax.get_lines()}) == 2
    turned = curve(1, 8, net=msgspec.structs.replace(NET, memory_format="channels_last"))
    assert labels(plot.latencies([one, turned], plot.blank())) == ["fp32", "fp32, channels_last"]


def test_runtimes_and_shares_of_an_explanation() -> None:
    above, below = explanation(prediction("eager", 10.0), prediction("compile", 8.0)).plot().axes
    assert [text.get_text() for text in above.get_yticklabels()] == ["compile", "eager"]
    assert [bar.get_width() for bar in above.containers[0]] == [8.0, 10.0]
    rows = ["compile host", "compile device", "eager host", "eager device"]
    assert [text.get_text() for text in below.get_yticklabels()] == rows
    drawn = sum(bar.get_width() for bars_of in below.containers for bar in bars_of)
    assert drawn == pytest.approx(2 * sum(share.overhead_ms + share.compute_ms for share in prediction().breakdown))


def test_many_classes_share_the_last_colour_and_the_class_other_counts_once() -> None:
    point = curve(8)[0]
    costs = {"names": (*"abcdefghij", "other"), "ops": np.ones(11, int), "host_us": np.arange(11.0)}
    many = replace(point, costs=point.costs._replace(**costs, device_us=np.arange(11.0)))
    names = breakdown.largest([many])
    assert names == ["other", *"jihgfe", breakdown.OTHERS]
    assert breakdown.times(many, breakdown.OTHERS, names) == pytest.approx((0.006, 0.006))
    assert len(set(style.looks(names).values())) == len(names)
    drawn = sum(sum(breakdown.times(many, name, names)) for name in names)
    assert drawn == pytest.approx(sum(share.overhead_ms + share.compute_ms for share in many.breakdown))


def test_a_validation_shows_every_cell() -> None:
    cells = [(model, batch, 0.01 * batch) for model in ("bert", "resnet") for batch in (1, 2, 4)]
    guess = predicted([(model, batch, 1.1 * seconds) for model, batch, seconds in cells])
    report = comparison.compare(guess, measured(cells))
    figure = report.plot()
    (cloud,) = [one for one in figure.axes[0].get_lines() if one.get_label() == "cell"]
    assert sorted(cloud.get_ydata()) == pytest.approx(sorted(guess["latency_s"] * 1e3))
    assert {text.get_text() for text in figure.axes[-1].get_yticklabels()} == {"bert", "resnet"}
    assert report._repr_html_().count("<table>") == 4
    assert str(report).startswith("6 cells of 2 models: median error 10.0 %")


def test_a_long_name_leaves_its_box_room() -> None:
    name = "/home/somebody/project/networks.py:picture"
    cells = [(name, batch, 0.01 * batch) for batch in (1, 8)]
    figure = comparison.compare(predicted(cells), measured(cells)).plot()
    figure.draw_without_rendering()  # warns where axes collapse
    (label,) = figure.axes[-1].get_yticklabels()
    assert label.get_text().startswith("…")
    assert name.endswith(label.get_text()[1:])


def test_two_clocks_in_whole_and_close() -> None:
    found = forward_pass(predictor(), graph(*[op for _ in range(30) for op in (linear(4, 64), add(256))]))
    figure = plot.two_clocks(found)
    whole, close = (ax.get_xlim() for ax in figure.axes)
    assert whole[1] == pytest.approx(found.prediction.latency_ms)
    inside = [one for one in found.row("device") if close[0] <= one.start_us / 1e3 and one.end_us / 1e3 <= close[1]]
    assert len(inside) >= 36
    assert {"gemm", "elementwise", "waiting"} <= {text.get_text() for text in figure.legends[0].get_texts()}


@pytest.mark.parametrize("batches", [(1,), tuple(range(1, 201))], ids=["one", "200"])
def test_the_same_figure_gives_the_same_file(batches: tuple[int, ...], tmp_path: Path) -> None:
    files = []
    (tmp_path / "b.svg").symlink_to(tmp_path / "blob")
    for name in ("a", "b"):
        ax = curve(*batches).plot(plot.blank())
        assert len(line(ax, "predicted latency")) == len(batches)
        files.append(plot.save(plot.figure_of(ax), tmp_path / f"{name}.svg").read_bytes())
    assert files[0] == files[1]
    assert len(files[0]) > 1000
