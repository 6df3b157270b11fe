"""Adaptation: known factors are found again, what it bought is honest, and rows that make no sense are refused."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import factories
import msgspec
import numpy as np
import pandas as pd
import profiledata
import pytest
import torch
from numpy.typing import NDArray

import latpred
from latpred import host
from latpred.accuracy import adaptation
from latpred.accuracy.adaptation import LEVELS, NONE
from latpred.accuracy.predicted import GraphKey
from latpred.cli import main
from latpred.errors import ProfileError, TableError, UnknownModelError, UsageError
from latpred.fit.corrections import MODULE, Factors, Fit, LatencyModel, Row, corrected
from latpred.graph.graph import ModelGraph
from latpred.host import Slowdown
from latpred.ops.families import nearest
from latpred.prediction.clocks import Z90
from latpred.prediction.predictor import Predictor
from latpred.profile import datasheet, gpus, store
from latpred.profile.document import ADAPTED, Acceptance, DeviceProfile, SizeCorrection
from latpred.search.spaces import fbnet

FEW_SHOT = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "few_shot.py"))
TRUTH = Factors({"": 1.6, "gemm": 1.9}, {"": 0.7, "elementwise": 0.9})
SYNCHRONOUS = factories.profile(factories.device(kind="cpu", asynchronous=False))
CLOCKED = factories.profile()
SLOW = msgspec.structs.replace(SYNCHRONOUS, usual={"dispatch": 1.2, "product": 2.0, "elementwise": 2.0, "cache": 2.0})
OWN_KERNELS = factories.profile(
    SYNCHRONOUS.device,
    runtimes={
        "eager": factories.dispatch(
            kernels={"fp32": {"gemm": factories.kernel_fit("gemm", macs_per_us=3e6)}},
            kernel_scales={"": 0.5, "gemm": 9.0},
        )
    },
)


def architectures(count: int, seed: int = 0) -> list[ModelGraph]:
    """Random towers of linear layers, sums and views."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(count):
        width, depth = int(draw.integers(2, 12)) * 64, int(draw.integers(1, 7))
        sums, views = int(draw.integers(0, 5)), int(draw.integers(0, 5))
        layer = [factories.linear(32, width), *[factories.add(4096 * width)] * sums, *[factories.view()] * views]
        found.append(factories.graph(*layer * depth, model=f"tower {number}"))
    return found


def latencies(profile: DeviceProfile, graphs: Sequence[ModelGraph], batch: int, protocol: str = "single") -> np.ndarray:
    predictor = Predictor(profile)
    return np.array([predictor.predict(graph, batch, protocol=protocol).latency_ms for graph in graphs])


def measured(
    profile: DeviceProfile,
    graphs: Sequence[ModelGraph],
    *,
    factors: Factors = TRUTH,
    noise: float = 0.0,
    protocol: str = "single",
    batches: Sequence[int] = (1, 16),
    seed: int = 1,
) -> pd.DataFrame:
    """What a device whose costs are the profile's times the factors would show."""
    truth, draw = corrected(profile, "eager", factors), np.random.default_rng(seed)
    rows = [
        {"model": graph, "batch": batch, "latency_ms": ms * np.exp(noise * draw.normal()), "protocol": protocol}
        for batch in batches
        for graph, ms in zip(graphs, latencies(truth, graphs, batch, protocol), strict=True)
    ]
    return pd.DataFrame(rows)


def off(
    profile: DeviceProfile, truth: np.ndarray, graphs: Sequence[ModelGraph], batch: int = 1, protocol: str = "single"
) -> float:
    """Median error of a profile."""
    return float(np.median(np.abs(latencies(profile, graphs, batch, protocol) / truth - 1)))


@pytest.mark.parametrize(
    ("profile", "protocol"),
    [(SYNCHRONOUS, "single"), (CLOCKED, "single"), (CLOCKED, "pipelined"), (OWN_KERNELS, "single")],
)
def test_known_factors_are_found_again(profile: DeviceProfile, protocol: str) -> None:
    graphs = architectures(30)
    found = latpred.adapt(profile, measured(profile, graphs[:10], protocol=protocol))
    assert repr(found) == found.text()
    truth = corrected(profile, "eager", TRUTH)
    for batch in (1, 4, 64):
        want = latencies(truth, graphs[10:], batch, protocol)
        before, after = (off(one, want, graphs[10:], batch, protocol) for one in (profile, found.profile))
        assert after < 0.03 < 0.1 < before
    (record,) = found.runtimes
    assert (record.validated, record.architectures, record.rows) == (True, 10, 20)
    assert record.bought.after.median < 0.03 < record.bought.before.median


@pytest.mark.parametrize("profile", [SYNCHRONOUS, CLOCKED])
def test_rows_of_slow_moments_are_brought_to_the_profiles_speed(profile: DeviceProfile) -> None:
    graphs = [factories.graph(*[factories.view()] * 20 * n, model=f"views {n}") for n in range(1, 11)]
    told = host.COLUMN.format(host.DISPATCH)
    known = msgspec.structs.replace(profile, speed={host.DISPATCH: 100.0})
    rows = measured(known, graphs, factors=Factors({}, {}))
    slower = Predictor(known, slowdown=host.slowdown({"dispatch": 1}, {"dispatch": 2}, asynchronous=profile is CLOCKED))
    slow_ms = [slower.predict(row.model, row.batch).latency_ms for row in rows.itertuples()]
    rows = rows.assign(latency_ms=slow_ms, **{told: 200.0})
    assert latpred.adapt(known, rows).runtimes[0].level == NONE
    assert latpred.adapt(known, rows.drop(columns=told)).runtimes[0].level == "one factor"


def test_a_slower_host_is_slower_from_cold_caches_too() -> None:
    cold = msgspec.structs.replace(SYNCHRONOUS.runtimes["eager"], cold_costs_us={"gemm": 9.0, "": 4.0}, cold_bytes=1e5)
    cold = msgspec.structs.replace(cold, attribute_read_us=0.3)
    profile = msgspec.structs.replace(SYNCHRONOUS, runtimes={"eager": cold})
    slower = corrected(profile, "eager", Factors({"": 2.0}, {}))
    (graph,) = architectures(1)
    overhead_ms = [Predictor(each).predict(graph, 8).overhead_ms for each in (profile, slower)]
    assert overhead_ms[1] == pytest.approx(2.0 * overhead_ms[0])
    assert slower.runtimes["eager"].attribute_read_us == 0.6


@pytest.mark.parametrize(("runtime", "prefix"), [("eager", ""), ("torchscript", "node."), ("compile", "kernel.")])
def test_a_kind_that_shares_the_cost_of_others_gets_its_own(runtime: str, prefix: str) -> None:
    before = store.load("epyc-genoa")
    after = corrected(before, runtime, Factors({"": 1.0, "mine": 2.0, MODULE: 3.0}, {})).runtimes[runtime]
    costs = before.runtimes[runtime].costs_us
    assert nearest(after.costs_us, f"{prefix}mine.first") == 2.0 * nearest(costs, f"{prefix}mine.first") > 0.0
    assert nearest(after.costs_us, f"{prefix}other") == nearest(costs, f"{prefix}other")
    assert not any(MODULE in name for name in after.costs_us)


def test_a_power_of_the_kernels_times_is_found_again(tmp_path: Path) -> None:
    graphs = architectures(30)
    steeper = Factors({}, {"": 0.5}, (SizeCorrection("time", 0.3, 2.0, 1e-9, 1e9),))
    fresh = factories.profile(factories.device(kind="cpu", asynchronous=False, fresh_bytes_per_us=1e3))
    sums = {"elementwise": factories.kernel_fit("elementwise", macs_per_us=0.0)}
    own = factories.profile(SYNCHRONOUS.device, runtimes={"eager": factories.dispatch(kernels={"fp32": sums})})
    for profile in (SYNCHRONOUS, CLOCKED, SLOW, fresh, own):
        found = latpred.adapt(profile, measured(profile, graphs[:10], factors=steeper))
        (record,) = found.runtimes
        assert record.level.startswith("classes and sizes")
        (size_correction,) = (one for one in record.factors.size_corrections if one.of == "time")
        assert size_correction.exponent == pytest.approx(0.3, abs=0.07)
        assert "device times go with time^+0." in found.text()
        new = store.load(store.save(found.profile, tmp_path / "tilted.json"))
        want = latencies(corrected(profile, "eager", steeper), graphs[10:], 16)
        before, after = (off(one, want, graphs[10:], 16) for one in (profile, new))
        assert after < 0.03 < 0.09 < before
        again = latpred.adapt(new, measured(new, graphs[:10], factors=steeper)).profile.runtimes["eager"]
        assert again.size_corrections[: len(record.factors.size_corrections)] == record.factors.size_corrections


def test_convolutions_of_other_windows_and_channels_take_other_factors() -> None:
    profile = profiledata.profile()
    size_corrections = SizeCorrection("window", 0.5, 9.0, 1.0, 25.0), SizeCorrection("channels", 0.5, 16.0, 16.0, 64.0)
    size_corrected = corrected(profile, "eager", Factors({}, {}, size_corrections))
    for kernel, channels, factor in ((3, 16, 1.0), (1, 16, 1 / 3), (5, 64, 10 / 3), (7, 256, 10 / 3)):
        model = torch.nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False)
        graph = latpred.trace(model, (torch.zeros(1, channels, 16, 16),))
        before, after = (Predictor(one).predict(graph, 1).compute_ms for one in (profile, size_corrected))
        assert after / before == pytest.approx(factor, rel=0.01), (kernel, channels)


def cells(count: int) -> tuple[list[ModelGraph], np.ndarray]:
    """Networks of one space, each a stem and some of three operations, and a one beside how many of each these are."""
    counts = np.random.default_rng(4).integers(0, 12, (count, 3))
    layers = factories.linear(64, 512), factories.add(8192), factories.view()
    graphs = [
        factories.graph(
            *[factories.linear(256, 128), factories.add(4096)] * 2,
            *(op for layer, number in zip(layers, own, strict=True) for op in [layer] * int(number)),
            model=f"cell {index}",
        )
        for index, own in enumerate(counts)
    ]
    return graphs, np.column_stack([np.ones(count), counts])


@pytest.mark.parametrize(("profile", "batch"), [(SYNCHRONOUS, 1), (SYNCHRONOUS, 64), (CLOCKED, 1), (CLOCKED, 256)])
def test_adapting_is_no_worse_than_the_simplest_fits_to_the_same_rows(profile: DeviceProfile, batch: int) -> None:
    """One factor, and a linear fit of op counts, which is exact in such a space but for what the clocks hide."""
    graphs, counts = cells(40)
    factors = Factors({"": 2.5, "gemm": 3.5}, {"": 0.4, "gemm": 0.8}, (SizeCorrection("time", 0.2, 2.0, 1e-9, 1e9),))
    table = measured(profile, graphs, factors=factors, noise=0.003, batches=(batch,))
    truth = latencies(corrected(profile, "eager", factors), graphs, batch)
    before, shown = latencies(profile, graphs, batch), table["latency_ms"].to_numpy()
    worse, after = [], []
    for seed in range(8):
        order = np.random.default_rng(seed).permutation(40)
        own, rest = order[:10], order[10:]
        adapted = latpred.adapt(profile, table.iloc[own])
        line = np.linalg.lstsq(counts[own] / shown[own, None], np.ones(10), rcond=None)[0]
        simple = (np.exp(np.median(np.log(shown[own] / before[own]))) * before[rest], counts[rest] @ line)
        least = min(np.median(np.abs(one / truth[rest] - 1)) for one in simple)
        after.append(off(adapted.profile, truth[rest], [graphs[i] for i in rest], batch))
        worse.append(after[-1] > least + 0.002)
    assert sum(worse) <= 1
    assert np.median(after) < 0.01
    assert max(after) < off(profile, truth, graphs, batch)


@pytest.mark.parametrize(
    ("device", "precision", "batch", "slowdown"),
    [
        ("epyc-shared", "fp32", 1, None),
        ("epyc-shared", "fp32", 16, None),
        ("epyc-shared", "fp32", 16, Slowdown(1.1, 1.9, 1.2)),
        ("h100-shared", "fp16", 1, None),  # whose host takes longer for half precision
    ],
)
def test_without_factors_rows_are_predicted(device: str, precision: str, batch: int, slowdown: Slowdown | None) -> None:
    """Of a CPU whose usual moments are slower than its full speed, which is given memory anew at the larger batch."""
    predictor, model = Predictor(store.load(device), slowdown=slowdown), [torch.nn.Conv2d(n, 64, 3) for n in (3, 64)]
    graph = latpred.trace(torch.nn.Sequential(*model), image=112, precision=precision)
    rows = [Row(0, graph, batch, "single", predictor.predict(graph, batch).latency_ms * 1e3, 0.0)]
    assert LatencyModel(predictor, rows, "eager").unchanged().left_out == pytest.approx([0.0], abs=1e-9)


def test_a_profile_that_is_right_stays_as_it_is() -> None:
    graphs = architectures(10)
    found = latpred.adapt(CLOCKED, measured(CLOCKED, graphs, factors=Factors({}, {}), noise=0.05))
    assert found.runtimes[0].level == NONE
    assert latencies(found.profile, graphs, 8) == pytest.approx(latencies(CLOCKED, graphs, 8), rel=1e-12)
    assert "corrected none" in found.profile.protocol[ADAPTED]


@pytest.mark.parametrize(
    ("one", "mean", "chosen"),
    [(0.02, 0.08, NONE), (0.04, 0.08, "one"), (0.04, 0.09, "mean"), (0.02, 0.09, "mean"), (0.1, 0.09, "one")],
)
def test_one_factor_gains_half_its_standard_error_at_least_and_the_mean_one_and_a_half(
    one: float, mean: float, chosen: str
) -> None:
    noise = 0.1 * np.array([1, -1, 1, -1])  # whose standard error is 0.058

    def fit(level: str, gain: NDArray[np.float64]) -> Fit:
        return Fit(level, Factors({}, {}), 0.5 - gain)

    model = mock.Mock(spec=LatencyModel)
    model.unchanged.return_value = fit(NONE, np.zeros(4))
    model.fit.side_effect = lambda levels: fit("mean", mean + noise) if levels is LEVELS else fit("one", one + noise)
    assert adaptation._fits(model, np.arange(4))[1].level == chosen


def test_rows_that_agree_on_a_small_difference_correct_it() -> None:
    graphs, slower = architectures(10), Factors({"": 1.004}, {"": 1.004})
    found = latpred.adapt(CLOCKED, measured(CLOCKED, graphs, factors=slower))
    assert latencies(found.profile, graphs, 8) == pytest.approx(1.004 * latencies(CLOCKED, graphs, 8), rel=5e-4)


def test_errors_left_out_are_those_of_fits_without_the_architecture() -> None:
    graphs = architectures(6)
    table = measured(CLOCKED, graphs, noise=0.05)
    rows = [Row(graphs.index(r.model), r.model, r.batch, "single", r.latency_ms * 1e3, 0.0) for r in table.itertuples()]
    predictor = Predictor(CLOCKED)
    left_out = LatencyModel(predictor, rows, "eager").fit(LEVELS).left_out
    for held in range(6):
        others = [row for row in rows if row.architecture != held]
        numbered = [row._replace(architecture=row.architecture - (row.architecture > held)) for row in others]
        factors = LatencyModel(predictor, numbered, "eager").fit(LEVELS).factors
        without = Predictor(corrected(CLOCKED, "eager", factors))
        for row, error in zip(rows, left_out, strict=True):
            if row.architecture == held:
                honest = np.log(row.latency_us / 1e3 / without.predict(row.graph, row.batch).latency_ms)
                assert error == pytest.approx(honest, abs=0.02)


def test_a_family_s_correction_reaches_scales_of_its_formats_and_kinds() -> None:
    names = ("conv.3x3", "bf16.conv.channels_last.pointwise", "conv", "gemm", "")
    scaled = factories.dispatch(kernel_scales=dict.fromkeys(names, 2.0))
    profile = factories.profile(runtimes={"eager": scaled})
    scales = corrected(profile, "eager", Factors({}, {"": 0.5, "conv": 1.5})).runtimes["eager"].kernel_scales
    assert [scales[name] for name in names] == [3.0, 3.0, 3.0, 1.0, 1.0]


def test_the_profile_says_what_was_done_to_it(tmp_path: Path) -> None:
    profile = factories.profile(
        SYNCHRONOUS.device, runtimes={"eager": factories.dispatch(), "torchscript": factories.dispatch(fixed_us=1.0)}
    )
    found = latpred.adapt(profile, measured(profile, architectures(10), noise=0.02))
    new = store.load(store.save(found.profile, tmp_path / "adapted.json"))
    assert new.name == "example-adapted"
    assert new.created == profile.created
    assert new.runtimes["torchscript"] == profile.runtimes["torchscript"]
    assert "from example on" in new.protocol[ADAPTED]
    assert "20 rows of 10 architectures" in new.protocol[ADAPTED]
    assert "unchanged, for want of rows: torchscript" in found.text()
    assert "unchanged, for want of rows" in found._repr_html_()
    assert found.text().splitlines()[1].startswith("runtime  rows")
    assert found.to_dict()["runtimes"][0]["level"] == found.runtimes[0].level
    assert found.to_frame()["rows"].tolist() == [20]


def test_intervals_of_a_far_profile_shrink_to_what_the_rows_vouch_for() -> None:
    """A datasheet's interval is wide; eight architectures at four batches say how far its correction is off."""
    profile = factories.profile(
        CLOCKED.device, runtimes={"eager": factories.dispatch(spread=0.35, busy_spread=0.35, host_spread=0.35)}
    )
    graphs, inside, widths = architectures(28), [], []
    for seed in range(6):
        table = measured(profile, graphs, noise=0.05, batches=(1, 4, 16, 64), seed=seed)
        first = table["model"].map(graphs.index).to_numpy() < 8
        adapted = latpred.adapt(profile, table[first])
        assert adapted.runtimes[0].interval
        predictor = Predictor(adapted.profile)
        for row in table[~first].itertuples():
            prediction = predictor.predict(row.model, row.batch)
            low, high = prediction.interval_ms
            inside.append(low <= row.latency_ms <= high)
            widths.append(np.log(high / prediction.latency_ms))
    assert 0.85 <= np.mean(inside) <= 0.99  # one of the eight alone tells of some factors, and errs when left out
    assert np.median(widths) < 0.2


@pytest.mark.parametrize(("op_us", "told"), [(1.0, False), (1e6, True)])
def test_rows_that_wait_for_one_clock_alone_leave_the_other_as_unknown_as_it_was(op_us: float, told: bool) -> None:
    fit = factories.dispatch(costs_us={"": op_us}, spread=0.35, busy_spread=0.35, host_spread=0.35)
    profile = factories.profile(CLOCKED.device, runtimes={"eager": fit})
    new = latpred.adapt(profile, measured(profile, architectures(12))).profile.runtimes["eager"]
    assert new.host_spread == (0.0 if told else 0.35)
    known, unknown = (new.spread, new.device_spread) if told else (new.device_spread, new.spread)
    assert known < 0.25 < unknown == 0.35


def test_errors_left_out_replace_those_of_a_gate_that_failed_as_far_as_rows_told() -> None:
    fits = {"eager": factories.dispatch(spread=0.1), "torchscript": factories.dispatch(spread=0.1)}
    gate = Acceptance(False, {"p90 error of ordinary models": "100.0%: failed"}, ())
    given, graphs = msgspec.structs.replace(factories.profile(runtimes=fits), acceptance=gate), architectures(12)
    table = measured(given, graphs, batches=(1, 2**16))
    both, busy = (latpred.adapt(given, rows).profile for rows in (table, table[table["batch"] > 1]))
    for batch in (1, 2**16):
        point = Predictor(both).predict(graphs[0], batch)
        assert point.interval_ms[1] / point.latency_ms < 1.1
    unknown = busy.runtimes["eager"].spread, both.runtimes["torchscript"].spread
    assert unknown == pytest.approx([np.log(2) / Z90] * 2)


def test_whose_host_it_is_stays_in_doubt_where_no_row_told() -> None:
    given, graphs = store.load("rtx-8000"), architectures(3)
    busy, told = (latpred.adapt(given, measured(given, graphs, batches=(batch,))).profile for batch in (2**16, 1))

    def said(profile: DeviceProfile, runtime: str) -> bool:
        prediction = Predictor(profile).predict(graphs[0], 1, runtime=runtime)
        return any("name yours with --host" in caveat for caveat in prediction.provenance.caveats)

    assert (said(busy, "eager"), said(told, "eager"), said(told, "torchscript")) == (True, False, True)


@pytest.mark.parametrize("count", [1, 3])
def test_a_correction_that_nothing_vouches_for_is_said_and_widens_the_interval(count: int) -> None:
    given, graphs, factor = profiledata.profile(), architectures(count + 1), 33.0
    table = measured(given, graphs[:count], factors=Factors({"": factor}, {"": factor}), batches=(1,))
    adapted = latpred.adapt(given, table).profile
    ratio = latencies(adapted, graphs, 4) / latencies(given, graphs, 4)
    assert ratio == pytest.approx([ratio[0]] * len(graphs))  # one factor on everything
    assert 5.0 < ratio[0] < 1.001 * factor
    before, after = (Predictor(profile).predict(graphs[-1], 1) for profile in (given, adapted))
    assert after.interval_ms[0] < before.latency_ms * 1.05 < after.interval_ms[1]
    start = f"corrected by {count} measured architecture{'s' * (count > 1)},"
    caveats = [caveat for caveat in after.provenance.caveats if caveat.startswith(start)]
    assert "nothing vouches" in caveats[0]
    assert "add rows of others" in caveats[0]
    assert "left out" not in adapted.protocol[ADAPTED]
    assert "nothing vouches for it" in adapted.protocol[ADAPTED]
    assert after.provenance.source == "measured, adapted"


def test_a_row_that_is_given_three_times_tells_no_more_than_once() -> None:
    given, graphs = profiledata.profile(), architectures(3)
    once = measured(given, graphs, noise=0.05)
    one, thrice = (latpred.adapt(given, rows) for rows in (once, pd.concat([once] * 3)))
    assert (thrice.runtimes, thrice.profile.runtimes) == (one.runtimes, one.profile.runtimes)


def test_rows_of_one_batch_say_nothing_of_others_and_what_to_add_is_said() -> None:
    graphs, given = architectures(10), profiledata.profile()
    for batches, said in (((4,), True), ((4, 16), False)):
        found = latpred.adapt(given, measured(given, graphs, batches=batches))
        assert found.runtimes[0].validated
        caveats = Predictor(found.profile).predict(graphs[0], 1).provenance.caveats
        lacking = [caveat for caveat in caveats if caveat.startswith("corrected by rows of batch 4 alone")]
        assert len(lacking) == said
        assert all("add rows of another batch" in caveat for caveat in lacking)
        assert ("batch 4 alone" in found.text()) == said
    unchanged = latpred.adapt(given, measured(given, graphs, factors=Factors({}, {}), batches=(4,)))
    assert unchanged.runtimes[0].level == NONE
    assert not any("batch 4" in said for said in Predictor(unchanged.profile).predict(graphs[0], 1).provenance.caveats)
    assert "add architectures" in unchanged.text()


def test_few_rows_that_were_left_out_widen_the_interval_to_their_largest_error() -> None:
    graphs, given = architectures(6), profiledata.profile()
    adapted = latpred.adapt(given, measured(given, graphs, noise=0.6))
    (record,) = adapted.runtimes
    assert (record.validated, record.interval) == (True, False)
    narrow, wide = (Predictor(profile).predict(graphs[0], 1) for profile in (given, adapted.profile))
    assert wide.interval_ms[1] / wide.interval_ms[0] > 1.5 * narrow.interval_ms[1] / narrow.interval_ms[0]
    assert not any("vouches" in caveat for caveat in wide.provenance.caveats)


def test_rows_may_be_models_names_or_a_file(tmp_path: Path) -> None:
    profile = profiledata.profile()
    layers = [torch.nn.Conv2d(3, 64 * n, 3) for n in range(1, 5)]
    rows = [(layer, 2, "eager", "fp32", 20.0) for layer in layers]
    found = latpred.adapt(profile, rows)
    assert found.runtimes[0].architectures == 4
    built = [{"model": lambda n=n: torch.nn.Conv2d(3, 64 * n, 3), "batch": 2, "latency_s": 0.02} for n in range(1, 5)]
    again = latpred.adapt(profile, pd.DataFrame(built))
    assert again.runtimes[0].bought == found.runtimes[0].bought
    halves = [{"model": layer.half(), "batch": 2, "latency_s": 0.02} for layer in layers]
    with pytest.raises(ProfileError, match="no kernels in fp16"):
        latpred.adapt(profile, halves)
    table = pd.DataFrame({"model": ["resnet18", "resnet50"], "batch": 1, "latency_ms": 5.0})
    table.to_csv(tmp_path / "rows.csv", index=False)
    assert latpred.adapt(profile, tmp_path / "rows.csv").runtimes[0].architectures == 2
    older = latpred.adapt("rtx-8000", [(layers[0], 2, "torchscript", "fp32", 0.5)])  # of PyTorch 1.12
    assert [record.runtime for record in older.runtimes] == ["torchscript"]


def test_models_that_are_alike_are_one_architecture() -> None:
    for built in (lambda: architectures(2), lambda: [torch.nn.Conv2d(3, 64 * n, 3) for n in (1, 2)]):
        rows = [(model, batch, "eager", "fp32", 20.0) for batch in (1, 32) for model in built()]
        (record,) = latpred.adapt(profiledata.profile(), rows).runtimes
        assert (record.architectures, record.rows, record.validated) == (2, 4, False)


def test_a_model_is_traced_at_the_size_of_its_row() -> None:
    given, model, sizes = profiledata.profile(), torch.nn.Conv2d(3, 64, 3), (32, 64, 96, 128)
    takes = [Predictor(given).predict(latpred.trace(model, image=size)).latency_ms for size in sizes]
    rows = pd.DataFrame({"model": [model] * 4, "batch": 1, "input_kind": "image", "input_size": sizes})
    (record,) = latpred.adapt(given, rows.assign(latency_ms=takes)).runtimes
    assert (record.architectures, record.validated) == (1, False)  # one size tells nothing of other models
    assert record.bought.before.p90 == pytest.approx(0.0, abs=1e-6)
    slower = latpred.adapt(given, rows.assign(latency_ms=[1.5 * ms for ms in takes])).profile.runtimes["eager"]
    assert slower.untested == 1
    assert slower.spread > np.log(1.4) / Z90 > given.runtimes["eager"].spread
    with pytest.raises(TableError, match="input_size 32 with the input_kind default"):
        latpred.adapt(given, rows.drop(columns="input_kind").assign(latency_ms=takes))


def test_a_graph_keeps_its_own_memory_format() -> None:
    last = [msgspec.structs.replace(graph, memory_format="channels_last") for graph in GRAPHS]
    assert latpred.adapt(SYNCHRONOUS, measured(SYNCHRONOUS, last)).runtimes[0].rows == len(ROWS)


def test_a_name_whose_graph_is_given_is_not_traced() -> None:
    rows = pd.DataFrame({"model": "mine", "batch": 1, "latency_ms": latencies(SYNCHRONOUS, GRAPHS[:1], 1)})
    found = latpred.adapt(SYNCHRONOUS, rows, graphs={GraphKey("mine", "default", 0, "fp32"): GRAPHS[0]})
    assert found.runtimes[0].bought.before.median == 0.0


GRAPHS = architectures(4)
ROWS = measured(SYNCHRONOUS, GRAPHS)
HALF = msgspec.structs.replace(GRAPHS[0], precision="fp16")


@pytest.mark.parametrize(
    ("table", "kind", "message"),
    [
        (ROWS.rename(columns={"latency_ms": "time"}), TableError, "lacks latency_s.* mean nothing to latpred: time"),
        (ROWS.iloc[:0], TableError, "no measured row"),
        (ROWS.assign(latency_ms=-1.0), TableError, "latency_s"),
        (ROWS.assign(latency_ms="12 ms"), TableError, "'12 ms' as latency_s in row 1"),
        (ROWS.assign(latency_s=1.0), TableError, "Keep one column"),
        (ROWS.rename(columns={"latency_ms": "latency_s"}), UsageError, "check the unit"),
        (ROWS.assign(device="rtx-8000"), UsageError, "rows of rtx-8000"),
        (ROWS.assign(gpu="rtx-8000"), UsageError, "rows of rtx-8000"),
        (ROWS.assign(runtime="torchscript"), ProfileError, "no dispatch costs"),
        (ROWS.assign(runtime="ritual"), UsageError, "ritual"),
        (ROWS.assign(precision="bf16"), ProfileError, "bf16"),
        (ROWS.assign(model=[HALF] * len(ROWS), precision="fp32"), UsageError, "traced in fp16"),
        (ROWS.assign(input_size=64), TableError, "input_size 64, and its graph was traced at 128"),
        (ROWS.assign(memory_format="channels_last"), UsageError, "traced in the contiguous format"),
        ([("a", 1)], TableError, r"Row 1 has 2 values. Give \(model, batch"),
        ([3], TableError, "Row 1 is 3"),
        (ROWS.assign(model="mine"), UnknownModelError, r"called 'mine'.* table.assign\(model=table.model.map\(models"),
        (ROWS.assign(low_s=1.0, high_s=2.0), TableError, "low_s and high_s. It is a predicted one"),
        (3, UsageError, "no table"),
    ],
)
def test_what_makes_no_sense_is_refused(table: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        latpred.adapt(SYNCHRONOUS, table)


@pytest.mark.parametrize("name", [SYNCHRONOUS.name, "cpu", "a100"])
def test_the_corrected_profile_takes_the_name_of_no_other(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}' is the name of a device, or of the profile that is corrected"):
        latpred.adapt(SYNCHRONOUS, ROWS, name=name)


def test_the_row_that_the_others_contradict_is_named() -> None:
    graphs = architectures(8)
    rows = measured(SYNCHRONOUS, graphs, factors=Factors({}, {}))
    assert "what the others make of it" not in latpred.adapt(SYNCHRONOUS, rows).text()
    wrong = (rows.batch == 16) & (rows.model == graphs[3])
    told = latpred.adapt(SYNCHRONOUS, rows.assign(latency_ms=rows.latency_ms.where(~wrong, 3 * rows.latency_ms)))
    assert "eager: tower 3 at batch 16 took 3 times what the profile predicts: check that row" in told.text()
    few = rows[rows.model.isin(graphs[:3])]
    told = latpred.adapt(SYNCHRONOUS, few.assign(latency_ms=few.latency_ms.where(few.model != graphs[2], 900.0)))
    assert "eager: tower 2 at batch 1 took" in told.text()


def test_rows_that_failed_and_columns_that_nobody_knows_are_told() -> None:
    table = ROWS.assign(status=["OK", "timeout"] * (len(ROWS) // 2), dtype="fp16")
    found = latpred.adapt(SYNCHRONOUS, table)
    failed = f"rows left out, since their status is not ok: {len(ROWS) // 2}, as 'timeout'"
    assert found.notes == (failed, "columns that mean nothing to latpred, not used: dtype")
    assert found.text().splitlines()[-2:] == [*found.notes]
    with pytest.raises(TableError, match="no measured row; rows left out, since their status is not ok: 8, as 'late'"):
        latpred.adapt(SYNCHRONOUS, ROWS.assign(status="late"))


def test_a_gpu_goes_by_any_of_its_names_and_its_adapted_datasheet_is_called_that() -> None:
    profile = datasheet.profile_of(gpus.spec("a100"))
    rows = measured(profile, GRAPHS, batches=(1,))
    both = pd.concat([rows.assign(device=name, run=name) for name in ("A100-SXM4-80GB", "a100")])
    found = latpred.adapt(profile, both)
    assert found.runtimes[0].rows == len(rows)
    said = repr(Predictor(found.profile).predict(GRAPHS[0]))
    assert "a100-adapted (a100, made from its datasheet " in said
    assert " ago, adapted)" in said
    assert datasheet.CAVEAT not in said
    assert datasheet.ADAPTED_CAVEAT in said


def test_an_adapted_profile_is_used_only_when_named() -> None:
    own = profiledata.profile()
    store.save(own)
    adapted = latpred.adapt(own, [(torch.nn.Conv2d(3, 64, 3), 1, "eager", "fp32", 5.0)])
    store.save(adapted.profile)
    assert store.find("cpu").name == "cpu"
    assert store.find("cpu-adapted").name == "cpu-adapted"


def test_the_command_writes_a_profile_that_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.save(profiledata.profile())
    table, target = tmp_path / "measured.csv", tmp_path / "adapted.json"
    pd.DataFrame({"model": ["resnet18", "resnet34", "resnet50"], "batch": 1, "latency_ms": [90, 180, 210]}).to_csv(
        table, index=False
    )
    assert main(["adapt", str(table), "--device", "cpu", "-o", str(target)], standalone_mode=False) in (None, 0)
    shown = capsys.readouterr().out
    assert "eager: 3 architectures, 3 rows; corrected: one factor" in shown
    assert "left out" not in shown.partition("eager:")[2]
    assert main(["predict", "resnet18", "--device", str(target)], standalone_mode=False) in (None, 0)
    predicted = capsys.readouterr().out
    assert " ago, adapted)" in predicted
    assert "caveat: corrected by 3 measured architectures, too few to leave one out" in predicted
    assert main(["profiles", "show", str(target)], standalone_mode=False) in (None, 0)
    assert "left out" not in capsys.readouterr().out
    adapted = latpred.predict("resnet18", device=str(target)).latency_ms
    assert abs(adapted - 90) < abs(latpred.predict("resnet18", device="cpu").latency_ms - 90)
    assert main(["adapt", str(table), "--device", "cpu", "-o", "report.csv"], standalone_mode=False) == 2
    assert "where the profile goes" in capsys.readouterr().err


def test_clocks_that_one_start_has_the_wrong_way_round_are_told_apart() -> None:
    graphs, _ = FEW_SHOT["drawn"](fbnet, FEW_SHOT["NETWORKS"])
    takes, draw = FEW_SHOT["truth_of"]("titan-x-pascal"), np.random.default_rng(40)
    order = draw.permutation(len(graphs))
    measured, others = ([graphs[number] for number in part] for part in (order[:10], order[10:30]))
    latency_s = np.array([takes(graph, 32) for graph in measured]) * np.exp(0.003 * draw.normal(size=10))
    rows = pd.DataFrame({"model": measured, "batch": 32, "latency_s": latency_s, "spread_s": 0.003 * latency_s})
    adapted = latpred.adapt(datasheet.profile_of(gpus.spec("rtx-3090")), rows).profile
    truth = np.array([takes(graph, 32) for graph in others])
    assert np.median(np.abs(FEW_SHOT["seconds"](Predictor(adapted), others, 32) / truth - 1)) < 0.02


@pytest.mark.parametrize("batch", [1, 16, 65536])
def test_one_factor_is_one_where_rows_contradict_each_other(batch: int) -> None:
    rows = measured(CLOCKED, architectures(3), factors=Factors({}, {}), batches=(batch,))
    found = latpred.adapt(CLOCKED, rows.assign(latency_ms=rows.latency_ms * [2.0, 1.0, 2.0])).runtimes[0]
    factors = {*found.factors.host.values(), *found.factors.kernel.values()}
    assert (found.level, len(factors)) == ("one factor", 1)
    assert 0.99 < min(factors) < 2.01
