"""Profiles from tables of latencies: known costs are found again, and what was left out is predicted."""

from __future__ import annotations

import msgspec
import numpy as np
import pandas as pd
import pytest
from tablefitdata import GPUS, MODELS, graphs, solved, table, truth

from latpred import Predictor
from latpred.calibration.published import leave_out
from latpred.calibration.published.fitted_profiles import Accuracy, Fitted, profile_of
from latpred.calibration.published.joint_fit import Problem
from latpred.calibration.published.latency_model import evaluate, local_gradients
from latpred.calibration.published.parameters import Builder
from latpred.calibration.published.priors import Hyperparameters
from latpred.calibration.published.published_fit import (
    evaluate_left_out,
    fit_profile,
    fit_profiles,
    left_out,
    shared_of,
)
from latpred.calibration.published.published_table import TraceKey
from latpred.calibration.published.row_counts import as_run_by, family_of
from latpred.errors import TableError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.profile import datasheet, store
from latpred.profile import gpus as specs
from latpred.profile.datasheet import log_promise
from latpred.runtimes.legacy_torch import FUSED, GROUP


@pytest.fixture(scope="module")
def fitted() -> tuple[Problem, np.ndarray]:
    return solved()


def test_derivatives_are_those_of_the_law() -> None:
    made, theta = truth()
    random = np.random.default_rng(0)
    here = theta + random.normal(0.0, 0.2, len(theta))
    for block in made.law.blocks:
        slopes = local_gradients(block, evaluate(block, here, derivatives=True)) @ block.lead.toarray()
        step = random.normal(0.0, 1e-5, len(theta))
        change = (evaluate(block, here + step).log_us - evaluate(block, here - step).log_us) / 2
        np.testing.assert_allclose(slopes @ step, change, atol=1e-9)


def test_tensor_cores_at_half_rate_are_more_than_half_as_fast() -> None:
    half, full = specs.spec("rtx-3090"), specs.spec("rtx-a6000")
    for mode, least, most in (("fp16", 1.3, 1.7), ("tf32", 1.3, 1.7), ("fp32", 1.05, 1.15)):
        slower = np.exp(log_promise(half, mode, "compute") - log_promise(full, mode, "compute"))
        assert least < slower < most
    assert full.peak_macs_per_us("fp16") > 2.1 * half.peak_macs_per_us("fp16")


def test_known_latencies_are_found_again(fitted: tuple[Problem, np.ndarray]) -> None:
    made, theta = fitted
    known, true = truth()
    errors = np.abs(made.law.predict(theta) - known.law.predict(true))
    assert np.median(errors) < 0.015
    assert np.quantile(errors, 0.95) < 0.05


def test_hosts_are_told_apart(fitted: tuple[Problem, np.ndarray]) -> None:
    made, theta = fitted
    names = made.law.parameters.names
    for gpu in GPUS:
        for precision in ("fp32", "fp16"):
            slow, fast = (
                theta[names["run", f"{gpu} {precision} {run}"]]
                + theta[names["run", f"{gpu} {precision} {run}", "image"]]
                for run in ("slow", "fast")
            )
            assert np.exp(slow - fast) == pytest.approx(2.0, rel=0.04)


def test_a_wild_row_moves_little(fitted: tuple[Problem, np.ndarray]) -> None:
    made, theta = fitted
    wild = table()
    wild.loc[7, "latency_s"] *= 30
    other, moved = solved(wild)
    assert np.quantile(np.abs(other.law.predict(moved) - made.law.predict(theta)), 0.99) < 0.04


def test_a_model_left_out_is_predicted(fitted: tuple[Problem, np.ndarray]) -> None:
    judged = leave_out.by_model(fitted[0])
    assert len(judged.frame) == len(fitted[0].model)
    assert judged.errors()["all"].median < 0.06
    count, share = leave_out.knees(judged)
    assert count > 10
    assert share > 0.9


def test_a_fold_sees_nothing_of_what_it_is_judged_on(fitted: tuple[Problem, np.ndarray]) -> None:
    """Spoiling a model's rows must not change what is predicted of it."""
    spoilt = table()
    mine = spoilt["model"] == "wide"
    spoilt.loc[mine, "latency_s"] *= np.linspace(0.5, 2.0, int(mine.sum()))
    other, _ = solved(spoilt)
    found = [leave_out.by_model(each).frame for each in (fitted[0], other)]
    plain, changed = (frame[frame["model"] == "wide"]["predicted_s"].to_numpy() for frame in found)
    np.testing.assert_allclose(plain, changed, rtol=1e-9)


def test_folds_in_processes_are_what_they_are_one_after_the_other(
    fitted: tuple[Problem, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = leave_out.by_model(fitted[0])
    monkeypatch.setattr(leave_out, "FEWEST_BESIDE", 1)
    beside = leave_out.by_model(fitted[0])
    np.testing.assert_allclose(alone.frame["predicted_s"], beside.frame["predicted_s"], rtol=1e-9)


def test_only_models_of_a_gpu_are_left_out_where_nothing_else_is_asked() -> None:
    rows = table()
    made, _ = solved(rows[(rows["gpu"] == "2080Ti") | (rows["model"] != "wide")])
    judged = leave_out.by_model(made, gpus=("RTX-8000",))
    assert set(judged.frame["model"]) == set(MODELS) - {"wide"}


def test_a_gpu_left_out_keeps_one_row_of_each_run(fitted: tuple[Problem, np.ndarray]) -> None:
    made = fitted[0]
    none, some = leave_out.by_gpu(made, 0), leave_out.by_gpu(made, 3)
    assert len(none.frame) == len(made.model) - len(set(made.law.rows.run))
    assert set(none.frame["batch"]) == set(made.batch)
    assert none.errors()["all"].median < 0.25
    assert len(some.frame) < leave_out.DRAWS * len(none.frame) * 0.6
    assert some.errors()["all"].median < none.errors()["all"].median + 0.02


def test_a_run_left_out_is_predicted_from_its_host_factor(fitted: tuple[Problem, np.ndarray]) -> None:
    assert leave_out.by_run(fitted[0]).errors()["all"].median < 0.05


def test_intervals_hold_nine_in_ten(fitted: tuple[Problem, np.ndarray]) -> None:
    coverage = leave_out.conformal(leave_out.by_model(fitted[0]))
    assert [one.rows > 0 for one in coverage.values()] == [True] * 3
    for one in coverage.values():
        assert 0.75 <= one.share <= 1.0
        assert 0 < one.width < 0.5


def test_a_profile_predicts_what_the_law_does(fitted: tuple[Problem, np.ndarray]) -> None:
    made, theta = fitted
    fits = {"eager": Fitted(theta, Accuracy(0.05, 0.1, 0.2, "5 %"))}
    profile = profile_of(made, fits, "RTX-8000", "some-gpu")
    assert profile.acceptance.passed
    predictor = Predictor(store.load(store.save(profile)))
    host, device = made.law.clocks(theta)
    for precision in ("fp32", "fp16"):
        graph = graphs()[TraceKey("wide", "image", 96, precision)]
        plain = predictor.curve(_unrewritten(graph, "wide"), (1, 256), protocol="pipelined")
        rows = (made.law.rows.gpu == "RTX-8000") & (made.law.rows.precision == precision) & (made.model == "wide")
        for batch, compute in zip((1, 256), plain.compute_ms, strict=True):
            assert compute == pytest.approx(device[rows & (made.batch == batch)][0] / 1e3, rel=2e-3)
        assert host[rows].min() < plain.overhead_ms[0] * 1e3 < host[rows].max()
    apart = 1.645 * profile.runtimes["eager"].host_spread
    width = np.log(plain.interval_ms[0, 1] / plain.latency_ms[0])
    assert np.hypot(0.1, 0.7 * apart) < width <= 1.02 * np.hypot(0.1, apart)  # as far as the host rules
    assert plain.interval_ms[1, 1] / plain.latency_ms[1] == pytest.approx(np.exp(0.2), rel=0.02)


def test_intervals_cover_the_hosts_of_a_table(fitted: tuple[Problem, np.ndarray]) -> None:
    """Each GPU's four runs were on hosts of 0.8 and 1.6: from the middle of the others any is a factor of 2 away."""
    made, theta = fitted
    profile = profile_of(made, {"eager": Fitted(theta)}, "RTX-8000", "some-gpu")
    assert profile.runtimes["eager"].host_spread == pytest.approx(np.log(2.0) / 1.645, rel=0.1)
    assert profile.machine.cpu == "4 published hosts"
    alone = table()[lambda rows: rows["run"].str.endswith("fp32 fast")]
    single = fit_profile(alone, "RTX-8000", judge=False, known=dict(graphs()))
    assert single.runtimes["eager"].host_spread == 0.0  # the host is the table's, whoever asks
    assert single.machine.cpu == "a published host"


def test_widths_are_those_of_all_gpus() -> None:
    found = fit_profiles(table(), known=dict(graphs()))
    widths = {(fit.spread, fit.busy_spread) for one in found.values() for fit in one.runtimes.values()}
    assert len(widths) == 1
    assert len({one.protocol["leave-one-model-out"] for one in found.values()}) == len(GPUS)


def test_library_calls_in_half_precision_cost_more_where_there_are_tensor_cores() -> None:
    builder = Builder(Hyperparameters())
    for gpu, terms in (("rtx-8000", 2), ("titan-x-pascal", 1)):
        assert len(builder.host("conv.half", "eager", specs.spec(gpu))) == terms
    pascal = specs.spec("titan-x-pascal")
    assert builder.host("conv.half", "eager", pascal) == builder.host("conv", "eager", pascal)
    assert len(builder.host("gemm.half", "eager", pascal)) == 2  # no library looks for an algorithm there


def _unrewritten(graph: ModelGraph, name: str) -> ModelGraph:
    """The walk before it was rewritten for the era: the predictor does that by itself."""
    import torch
    from tablefitdata import _tower

    from latpred.tracing import trace

    return trace(_tower(*MODELS[name]), torch.zeros(1, 3, 96, 96), precision=graph.precision)


def test_profiles_carry_no_row_of_the_table() -> None:
    found = fit_profiles(table(), judge=False, known=dict(graphs()))
    assert list(found) == sorted(GPUS)
    for profile in found.values():
        assert profile.provenance == "fitted from published measurements"
        assert profile.samples == ()
        assert not profile.acceptance.passed  # nobody judged it
        assert profile.protocol["era"] == "torch-1.12"
        assert msgspec.structs.asdict(profile)["machine"].stack["torch"] == "1.12.1"


def test_a_gpu_is_chosen_by_its_name_in_the_table() -> None:
    with pytest.raises(TableError, match=r"several GPUs; name one of: 2080Ti, RTX-8000"):
        fit_profile(table(), known=dict(graphs()))
    with pytest.raises(TableError, match=r"no GPU called 'T4'; name one of"):
        fit_profile(table(), "T4", known=dict(graphs()))


def test_what_cannot_be_left_out_is_said() -> None:
    one = table()
    made, _ = solved(one[one["gpu"] == "2080Ti"])
    with pytest.raises(UsageError, match="one gpu only"):
        evaluate_left_out(made, "gpu")
    with pytest.raises(UsageError, match="choose from: model, gpu, run"):
        evaluate_left_out(made, "gpus")


def test_the_report_names_what_is_worst(fitted: tuple[Problem, np.ndarray]) -> None:
    report = evaluate_left_out(fitted[0], "model")
    text = report.text()
    assert "a model left out, eager" in text
    assert "baseline a + b x MACs" in text
    assert set(report.by_model) == set(MODELS)
    assert "host" in report.by_class
    assert report.to_dict()["schema"] == "latpred.leave-out/1"
    assert len(report.to_frame()) == len(fitted[0].model)
    latpred, simple = report.figures["a model left out, eager"], report.baselines["a + b x MACs"]
    assert latpred.median < simple.median


def test_scripted_rows_leave_alone_what_eager_rows_tell() -> None:
    scripted = table().assign(runtime="torchscript", run=lambda rows: rows["run"] + " scripted")
    scripted["latency_s"] *= 1.5
    both, joint = solved(pd.concat([table(), scripted], ignore_index=True))
    found, names = both.thetas(), both.law.parameters.names
    groups = {FUSED, GROUP}  # which only TorchScript has
    levels = ("kernel", "gpu", "host")
    shared = [index for name, index in names.items() if name[0] in levels and groups.isdisjoint(name)]
    moved, together = (np.abs(other - found["eager"])[shared].max() for other in (found["torchscript"], joint))
    assert moved < 0.02
    assert together > 5 * moved


def test_each_runtime_leaves_the_fit_of_eager_as_it_is() -> None:
    scripted = table().assign(runtime="torchscript", run=lambda rows: rows["run"] + " scripted")
    scripted["latency_s"] *= 0.9
    both, _ = solved(pd.concat([table(), scripted], ignore_index=True))
    judged = leave_out.by_model(both)
    alone = leave_out.by_model(solved()[0])
    eager = judged.of("eager").frame
    np.testing.assert_allclose(eager["predicted_s"], alone.frame["predicted_s"], rtol=1e-6)
    assert judged.of("torchscript").errors()["all"].median < 0.15


def test_a_profile_predicts_torchscript_as_the_law_does() -> None:
    scripted = table().assign(runtime="torchscript", run=lambda rows: rows["run"] + " scripted")
    scripted["latency_s"] *= 0.8
    both, theta = solved(pd.concat([table(), scripted], ignore_index=True))
    fits = {"eager": Fitted(theta), "torchscript": Fitted(theta, Accuracy(0.2, 0.3, 0.4, "20 %"))}
    profile = profile_of(both, fits, "2080Ti", "some-gpu")
    assert profile.acceptance.runtimes == {"torchscript": False}
    assert profile.protocol["leave-one-model-out, torchscript"] == "20 %"
    assert GROUP in profile.runtimes["torchscript"].kernels["fp32"]
    assert GROUP not in profile.kernels["fp32"]  # eager has no groups, and no row tells of them
    predictor = Predictor(store.load(store.save(profile)))
    host, device = both.law.clocks(theta)
    rows = (both.law.rows.gpu == "2080Ti") & (both.law.rows.runtime == "torchscript") & (both.model == "normed")
    for precision in ("fp32", "fp16"):
        graph = _unrewritten(graphs()[TraceKey("normed", "image", 96, precision)], "normed")
        curve = predictor.curve(graph, (1, 256), runtime="torchscript", protocol="pipelined")
        mine = rows & (both.law.rows.precision == precision)
        for batch, compute in zip((1, 256), curve.compute_ms, strict=True):
            assert compute == pytest.approx(device[mine & (both.batch == batch)][0] / 1e3, rel=2e-3)
        assert host[mine].min() < curve.overhead_ms[0] * 1e3 < host[mine].max()
        eager = predictor.predict(graph, 1, protocol="pipelined")
        assert curve.points[0].costs.ops.sum() < eager.costs.ops.sum()


def test_rows_of_a_gpu_that_nvfuser_refuses_are_fitted_unfused() -> None:
    rows = table().assign(runtime="torchscript")
    older = rows.assign(gpu="TitanX-Pascal", run=rows["run"] + " old")
    made, _ = solved(pd.concat([table(), rows, older], ignore_index=True))
    rows_of, keys = made.law.rows, made.law.cells.keys
    fusers = {(gpu, keys[cell].fuser) for gpu, cell in zip(rows_of.gpu, rows_of.cell, strict=True)}
    assert fusers >= {("TitanX-Pascal", "tensorexpr"), ("2080Ti", "nvfuser"), ("2080Ti", "")}
    assert ("TitanX-Pascal", "nvfuser") not in fusers
    groups = made.law.cells.kernels[GROUP].cell
    assert {made.law.cells.keys[cell].fuser for cell in groups} == {"nvfuser"}  # no two pointwise ops follow each other


def test_torchscript_of_another_era_is_left_out_of_a_profile() -> None:
    scripted = table().assign(runtime="torchscript", run=lambda rows: rows["run"] + " scripted")
    both = pd.concat([table(), scripted]).assign(stack="torch=2.3.0")
    profile = fit_profile(both, "2080Ti", judge=False, known=dict(graphs()))
    assert list(profile.runtimes) == ["eager"]
    assert "rows of torchscript were left out" in profile.protocol["rows"]


def test_scripted_pointwise_kernels_are_one_and_engines_have_none() -> None:
    graph = graphs()[TraceKey("normed", "image", 96, "fp32")]
    halves = graphs()[TraceKey("normed", "image", 96, "fp16")]
    gpu = specs.spec("rtx-8000")
    plain, scripted, engine = (as_run_by(name, graph, gpu) for name in ("eager", "torchscript", "tensorrt"))
    assert plain is graph
    assert scripted.launches(4) == graph.launches(4) - 10  # each normalisation with its activation
    assert {op.family.partition(".")[0] for op in engine.ops} == {"conv", "pooling", "gemm", "elementwise"} - {
        "elementwise"
    }
    groups = [op for op in scripted.ops if op.host_class.startswith(FUSED)]
    assert len(groups) == 10
    assert {family_of(op) for op in groups} == {GROUP}
    assert {op.host_class for op in as_run_by("torchscript", halves, gpu).ops if op.launches} == {
        *("conv.half.conv2d", "fused.half", "pooling.half.adaptive_avg_pool2d", "gemm.half.linear")
    }
    assert scripted.macs(4) == engine.macs(4) == graph.macs(4)
    assert not any(op.python_calls or op.module_calls for op in scripted.ops)
    assert scripted.bytes(4) < graph.bytes(4)


def test_simpler_predictors_are_judged_on_the_same_rows(fitted: tuple[Problem, np.ndarray]) -> None:
    made = fitted[0]
    models = leave_out.for_models(made, leave_out.by_model(made))
    assert models[leave_out.TREES].cells == len(made.model)
    assert models["a + b x MACs"].cells == len(made.model)
    gpus = leave_out.for_gpus(made)
    assert list(gpus) == [f"{leave_out.NEAREST}, 2080Ti as RTX-8000", f"{leave_out.NEAREST}, RTX-8000 as 2080Ti"]
    assert gpus[f"{leave_out.NEAREST}, 2080Ti as RTX-8000"].cells == len(made.model) // 2
    assert 0.0 < gpus[f"{leave_out.NEAREST}, 2080Ti as RTX-8000"].median < 0.5


def test_trees_see_nothing_of_a_model_that_is_left_out(fitted: tuple[Problem, np.ndarray]) -> None:
    spoilt = table()
    mine = spoilt["model"] == "wide"
    spoilt.loc[mine, "latency_s"] *= np.linspace(0.5, 2.0, int(mine.sum()))
    plain, changed = (leave_out.by_trees(each)[fitted[0].model == "wide"] for each in (fitted[0], solved(spoilt)[0]))
    np.testing.assert_array_equal(plain, changed)


def test_what_gpus_have_in_common_predicts_one_that_nobody_measured(fitted: tuple[Problem, np.ndarray]) -> None:
    made, _ = fitted
    judged = left_out(made)
    assert set(judged.frame["device"]) == set(GPUS)
    found = shared_of(made, judged, leave_out.by_gpu(made, 0), "made up")
    assert found.error == pytest.approx(judged.errors()["all"].median, rel=1e-3)
    assert set(found.kernels) == {datasheet.ANY, "Turing"}
    assert found.kernels["Turing"]["conv.3x3"]["fp32"]["compute"] == pytest.approx(2.0, rel=0.3)
    # The hosts took 0.8 and 1.6 times what is believed of the middle one.
    believed = np.exp(made.law.parameters.means[made.law.parameters.names["host", "conv"]] + 0.2)
    assert found.dispatch.costs_us["conv"] == pytest.approx(1.2 * believed, rel=0.15)
    profile = datasheet.profile_of(specs.spec("t4"), found)
    assert profile.runtimes["eager"].spread > found.dispatch.spread
    assert profile.runtimes["eager"].host_spread == found.dispatch.host_spread > 0.3
    assert Predictor(profile).predict(next(iter(graphs().values())), batch=1).latency_ms > 0
