"""Profiles from tables of latencies: known costs come back, and what was left out is predicted."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from publisheddata import GPUS, MODELS, captured, frame, graphs, key_of, products, scripted, solved, table, tower, truth
from torch import nn
from transformers import BertConfig, BertModel

from latpred import Predictor
from latpred.accuracy import metrics
from latpred.calibration.published import leave_out
from latpred.calibration.published.fitted_profiles import (
    NOT_TRIED,
    Accuracy,
    FittedNumbers,
    fit_profile,
    profile_of,
)
from latpred.calibration.published.joint_fit import Problem
from latpred.calibration.published.joint_fit import problem as problem_of
from latpred.calibration.published.latency_model import state_of
from latpred.calibration.published.leave_out import evaluate_left_out
from latpred.calibration.published.published_table import PublishedTable, read
from latpred.calibration.published.row_counts import as_run_by, family_of, group_of, weights_of
from latpred.errors import TableError, UnknownGpuError, UsageError
from latpred.profile import datasheet, gpus, store
from latpred.profile.document import DeviceProfile
from latpred.runtimes.legacy_torch import FUSED_CLASS, FUSED_FAMILY, TORCH_1_12, TORCH_2, as_run_in
from latpred.tracing import trace

Fit = tuple[Problem, np.ndarray]


@pytest.fixture(scope="module")
def fitted() -> Fit:
    return solved()


@pytest.fixture(scope="module")
def holdout(fitted: Fit) -> pd.DataFrame:
    """Every model predicted by a fit to the others."""
    return leave_out.by_column(fitted[0], "model")


def profile_from(
    rows: pd.DataFrame | PublishedTable, gpu: str | None = None, *, judge: bool = False, name: str | None = None
) -> DeviceProfile:
    """A GPU's profile, fitted to rows whose models are traced."""
    return fit_profile(rows, gpu, judge=judge, name=name, known=dict(graphs()))


def median(holdout: pd.DataFrame) -> float:
    return metrics.errors(holdout["predicted_s"], holdout["latency_s"]).median


def off(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Relative differences."""
    return np.abs(np.log(one / other))


def with_faster_kernels(problem: Problem, theta: np.ndarray) -> np.ndarray:
    """Parameters by which kernels are many times as fast as a datasheet allows."""
    faster = theta.copy()
    faster[[index for name, index in problem.parameters.names.items() if name[0] == "kernel"]] -= 3.0
    return faster


@pytest.mark.parametrize("held", [False, True])
def test_derivatives_are_those_of_the_latency_model(held: bool) -> None:
    problem, theta = truth()
    random = np.random.default_rng(0)
    here = (with_faster_kernels(problem, theta) if held else theta) + random.normal(0.0, 0.2, len(theta))
    for block in problem.blocks:
        slopes = state_of(block, here).slopes @ block.sums.toarray()
        step = random.normal(0.0, 1e-5, len(theta))
        change = (state_of(block, here + step).log_us - state_of(block, here - step).log_us) / 2
        np.testing.assert_allclose(slopes @ step[block.needed], change, atol=1e-9)


def test_known_latencies_and_hosts_come_back(fitted: Fit) -> None:
    problem, theta = fitted
    known, true = truth()
    errors = off(problem.predict(theta), known.predict(true))
    assert np.median(errors) < 0.015
    assert np.quantile(errors, 0.95) < 0.05
    names = problem.parameters.names
    for place in (f"{gpu} {precision}" for gpu in GPUS for precision in ("fp32", "fp16")):
        slow, fast = (
            theta[names["run", f"{place} {run}"]] + theta[names["run", f"{place} {run}", "image"]]
            for run in ("slow", "fast")
        )
        assert np.exp(slow - fast) == pytest.approx(2.0, rel=0.04)


def test_products_timed_by_themselves_tell_of_products_and_of_no_host(fitted: Fit) -> None:
    plain, theta = fitted
    gpu, rates, hosts = gpus.spec("rtx-8000"), [], []
    for slower in (1.0, 2.0):
        made, solved_theta = solved(products(slower))
        numbers = FittedNumbers(made, solved_theta)
        rates.append([numbers.kernel("gemm", gpu, "fp16", name)["compute"] for name in ("eager", "kernel")])
        hosts.append(numbers.host("gemm", "eager", gpu))
        alone = made.rows.runtime == "kernel"
        assert np.median(off(made.predict(solved_theta), np.exp(made.rows.log_us) / 1e6)[alone]) < 0.05
        assert set(made.thetas()) == {"eager"}
        assert list(profile_from(products(slower), "RTX-8000").runtimes) == ["eager"]
    in_networks, alone = np.divide(rates[1], rates[0])
    assert alone == pytest.approx(2.0, rel=0.15)
    assert 1.1 < in_networks < 0.95 * alone  # some of it may be what networks lack
    assert hosts == pytest.approx([FittedNumbers(plain, theta).host("gemm", "eager", gpu)] * 2, rel=0.02)
    with pytest.raises(TableError, match="'plain' is no matrix product"):
        problem_of(products(1.0).replace({"model": {"1024 x 1024": "plain"}}).query("runtime == 'kernel'"))


def test_passes_in_cuda_graphs_tell_what_short_kernels_take_and_of_no_host() -> None:
    gpu, floors, hosts = gpus.spec("rtx-8000"), [], []
    for slower in (1.0, 2.0):
        made, theta = solved(captured(slower))
        numbers = FittedNumbers(made, theta)
        families = made.families("cuda-graphs")
        floors.append([numbers.kernel(name, gpu, "fp32", "eager")["floor"] for name in sorted(families)])
        hosts.append(numbers.host("gemm", "eager", gpu))
        assert set(made.thetas()) == {"eager"}
        assert list(profile_from(captured(slower), "RTX-8000").runtimes) == ["eager"]
    assert np.max(np.divide(floors[1], floors[0])) > 1.5, (floors, families)
    assert hosts[1] == pytest.approx(hosts[0], rel=0.02)


def test_a_wild_row_moves_little(fitted: Fit) -> None:
    problem, theta = fitted
    wild = table()
    wild.loc[7, "latency_s"] *= 30
    other, moved = solved(wild)
    assert np.quantile(off(other.predict(moved), problem.predict(theta)), 0.99) < 0.04


def test_a_model_left_out_is_predicted(fitted: Fit, holdout: pd.DataFrame) -> None:
    assert len(holdout) == len(fitted[0].rows)
    assert median(holdout) < 0.06
    count, share = leave_out.knees(holdout)
    assert count > 10
    assert share > 0.9
    coverage = leave_out.coverage_by_regime(holdout)
    assert [one.rows > 0 for one in coverage.values()] == [True] * 3
    for one in coverage.values():
        assert 0.75 <= one.share <= 1.0
        assert 0 < one.width < 0.5


def test_a_fold_sees_nothing_of_what_it_is_judged_on(fitted: Fit, holdout: pd.DataFrame) -> None:
    rows = table()
    mine = (rows["model"] == "wide").to_numpy()
    rows.loc[mine, "latency_s"] *= np.linspace(0.5, 2.0, mine.sum())
    spoilt, _ = solved(rows)
    plain, changed = (
        one[one["model"] == "wide"]["predicted_s"].to_numpy() for one in (holdout, leave_out.by_column(spoilt, "model"))
    )
    np.testing.assert_allclose(plain, changed, rtol=1e-9)
    np.testing.assert_array_equal(leave_out.by_trees(fitted[0])[mine], leave_out.by_trees(spoilt)[mine])


def test_a_model_is_left_out_under_all_its_names(fitted: Fit) -> None:
    whole = table()
    broad = ((whole["model"] == "wide") & whole["run"].str.endswith("slow")).to_numpy()
    *body, head = tower(*MODELS["wide"]).children()
    other = nn.Sequential(*body, nn.Linear(head.in_features, 10))
    known = {key_of("broad", one): trace(other, torch.zeros(1, 3, 96, 96), precision=one) for one in ("fp32", "fp16")}
    holdouts, trees = [], []
    for factor in (1.0, 3.0):
        rows = whole.assign(model=whole["model"].where(~broad, "broad"))
        rows["latency_s"] *= np.where(broad, factor, 1.0)
        problem = problem_of(rows, graphs() | known)
        holdouts.append(leave_out.by_column(problem, "model"))
        trees.append(leave_out.by_trees(problem))
    assert set(holdouts[0]["architecture"]) == {*MODELS, "broad"} - {"wide"}
    left_out = [one[one["architecture"] == "broad"]["predicted_s"] for one in holdouts]
    assert len(left_out[0]) == (whole["model"] == "wide").sum()
    np.testing.assert_allclose(*left_out, rtol=1e-9)
    np.testing.assert_array_equal(*(one[whole["model"] == "wide"] for one in trees))


def test_an_architecture_is_known_by_what_it_multiplies_by() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "attn_implementation": "eager"}
    config = BertConfig(**sizes, num_hidden_layers=2)
    plain = trace(BertModel(config), torch.zeros(1, 16, dtype=torch.int64))
    config.vocab_size, config._attn_implementation = 9, "sdpa"
    again = trace(BertModel(config, add_pooling_layer=False), torch.zeros(1, 40, dtype=torch.int64), precision="fp16")
    config.num_hidden_layers = 3
    deeper = trace(BertModel(config), torch.zeros(1, 16, dtype=torch.int64))
    assert weights_of(plain) == weights_of(again) != weights_of(deeper)
    alone = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))  # all rows are samples: nothing but a head
    assert weights_of(trace(alone, torch.zeros(1, 8))) == ((2, 4, 1), (4, 8, 1))


def test_folds_do_not_depend_on_processes(fitted: Fit, holdout: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leave_out, "FEWEST_BESIDE", 1)
    beside = leave_out.by_column(fitted[0], "model")
    np.testing.assert_allclose(holdout["predicted_s"], beside["predicted_s"], rtol=1e-9)


def test_a_gpu_left_out_keeps_one_row_of_each_run(fitted: Fit) -> None:
    problem = fitted[0]
    none, some = (leave_out.by_column(problem, "gpu", shots=shots) for shots in (0, 3))
    assert len(none) == len(problem.rows) - len(set(problem.rows.run))
    assert set(none["batch"]) == set(problem.rows.batch)
    assert median(none) < 0.25
    assert len(some) < leave_out.DRAWS * len(none) * 0.6
    assert median(some) < median(none) + 0.02
    assert median(leave_out.by_column(problem, "run")) < 0.05


def test_regimes_are_named_where_the_measured_curve_shows_them() -> None:
    rows = pd.DataFrame({"batch": [1, 2, 4, 8, 16, 32], "latency_s": [1.0, 1.0, 1.02, 1.4, 3.1, 6.2]})
    rows = rows.assign(**dict.fromkeys(leave_out._CURVE, "same"), host_share=[0.9, 0.9, 0.9, 0.9, 0.1, 0.9])
    # The cell at the bend shows neither, nor does its flat neighbour; the last one is named wrongly.
    assert leave_out.regimes_named(rows) == (4, 0.75)
    assert leave_out.regimes_named(rows.iloc[:1])[0] == 0
    # Passes that were waited for are a curve of their own.
    waited = rows.assign(protocol="single", latency_s=9.0, host_share=0.9)
    assert leave_out.regimes_named(pd.concat([rows, waited])) == (10, 0.9)


def demand_same_clocks(profile_theta: Fit, predictor: Predictor, model: str, gpu: str, runtime: str) -> None:
    """A profile predicts the two clocks of the latency model that it was fitted from."""
    problem, theta = profile_theta
    rows = problem.rows
    for precision in ("fp32", "fp16"):
        curve = predictor.curve(graphs()[key_of(model, precision)], (1, 256), runtime=runtime, protocol="pipelined")
        there = (rows.gpu == gpu) & (rows.precision == precision) & (rows.runtime == runtime) & (rows.model == model)
        (block,) = (block for block in problem.blocks if there[block.rows].any())
        state, mine = state_of(block, theta), there[block.rows]
        for batch, compute_ms in zip((1, 256), curve.compute_ms, strict=True):
            device_us = state.device_us[mine & (rows.batch[block.rows] == batch)][0]
            assert compute_ms == pytest.approx(device_us / 1e3, rel=2e-3)
        assert state.host_us[mine].min() < curve.overhead_ms[0] * 1e3 < state.host_us[mine].max()


def test_a_profile_predicts_what_the_latency_model_does(fitted: Fit) -> None:
    problem, theta = fitted
    profile = profile_of(problem, {"eager": theta}, {"eager": Accuracy(0.05, 0.1, 0.2, "5 %")}, "RTX-8000")
    assert profile.acceptance.passed
    predictor = Predictor(store.load(store.save(profile)))
    demand_same_clocks(fitted, predictor, "wide", "RTX-8000", "eager")
    # Each GPU's four runs were on hosts of 0.8 and 1.6: from the middle of the others any is a factor of 2 away.
    assert profile.runtimes["eager"].host_spread == pytest.approx(np.log(2.0) / 1.645, rel=0.1)
    apart = 1.645 * profile.runtimes["eager"].host_spread
    curve = predictor.curve(graphs()[key_of("wide", "fp16")], (1, 256), protocol="pipelined")
    width = np.log(curve.interval_ms[0, 1] / curve.latency_ms[0])
    assert np.hypot(0.1, 0.7 * apart) < width <= 1.02 * np.hypot(0.1, apart)  # as far as the host rules
    assert curve.interval_ms[1, 1] / curve.latency_ms[1] == pytest.approx(np.exp(0.2), rel=0.02)


def test_no_kernel_of_the_fit_is_faster_than_in_predictions(fitted: Fit) -> None:
    faster = fitted[0], with_faster_kernels(*fitted)
    profile = profile_of(faster[0], {"eager": faster[1]}, {"eager": NOT_TRIED}, "RTX-8000")
    for model in ("wide", "thin"):
        demand_same_clocks(faster, Predictor(store.load(store.save(profile))), model, "RTX-8000", "eager")
    blocks = faster[0].blocks
    devices = [(state_of(block, theta).device_us) for block in blocks for theta in (fitted[1], faster[1])]
    assert all(fast.sum() < 0.6 * slow.sum() for slow, fast in zip(devices[::2], devices[1::2], strict=True))


def test_a_table_of_one_host_has_no_others_to_cover() -> None:
    alone = table()[lambda rows: rows["run"].str.endswith("fp32 fast")]
    single = profile_from(alone, "RTX-8000", name="mine")
    assert (single.name, single.machine.cpu) == ("mine", "a published host")
    assert single.runtimes["eager"].host_spread == 0.0  # the host is the table's, whoever asks
    # Those of another GPU tell how far apart they lie.
    beside = profile_from(pd.concat([alone, table().query("gpu == '2080Ti'")]).drop_duplicates(), "RTX-8000")
    assert beside.machine.cpu == "a published host"
    assert beside.runtimes["eager"].host_spread == pytest.approx(np.log(2.0) / 1.645, rel=0.1)


@pytest.mark.parametrize("batches", [(1, 4), (16, 256)])
def test_a_table_of_small_or_large_batches_alone_is_judged_by_them(batches: tuple[int, ...]) -> None:
    few = table()[lambda rows: rows["batch"].isin(batches) & rows["run"].str.endswith("fp32 fast")]
    fit = store.load(store.save(profile_from(few, "2080Ti", judge=True))).runtimes["eager"]
    assert 0.0 < fit.spread == fit.device_spread < 0.5


def test_a_gpu_is_chosen_by_any_of_its_names_and_its_profile_carries_no_row_of_the_table() -> None:
    profile = profile_from(table(), "rtx-2080ti")
    assert (profile.name, profile.machine.accelerator) == ("rtx-2080ti", "NVIDIA GeForce RTX 2080 Ti")
    own, whole = (table()["gpu"] == "2080Ti").sum(), len(table())
    assert profile.protocol["rows"] == f"{own:,} of this GPU (table), fitted together with {whole:,} of 2 GPUs"
    assert (profile.provenance, profile.protocol["era"]) == ("fitted from published measurements", TORCH_1_12)
    assert (profile.samples, profile.acceptance.passed) == ((), False)  # nobody judged it
    assert (profile.machine.cpu, profile.machine.stack["torch"]) == ("4 published hosts", "1.12.1")
    with pytest.raises(TableError, match=r"several GPUs; name one of: 2080Ti, RTX-8000"):
        profile_from(table())
    of_others = table().head(20).assign(gpu="t4", runtime="compile")
    for rows in (table(), pd.concat([table(), of_others]), table()[["model", "batch", "latency_s"]]):
        with pytest.raises((TableError, UnknownGpuError), match=r"'T4'; name one of: 2080Ti, RTX-8000 \(|name no GPU"):
            profile_from(rows, "T4")


def test_a_simpler_predictor_is_judged_where_it_has_models_to_be_fitted_to() -> None:
    whole = table()
    problem, _ = solved(whole[(whole["precision"] == "fp32") | whole["model"].isin(list(MODELS)[:2])])
    errors = evaluate_left_out(problem, "model").baselines["a + b x MACs"]
    assert errors.median > 0.0
    assert errors.cells == (problem.rows.precision == "fp32").sum()


def test_trees_take_any_number_of_runs() -> None:
    rows = pd.concat([table(), table()], ignore_index=True)
    problem, _ = solved(rows.assign(run=[f"run {number}" for number in range(len(rows))]))
    assert np.isfinite(leave_out.by_trees(problem)).all()


def test_trees_do_not_predict_the_only_model_in_eager() -> None:
    problem, _ = solved(table().query("model == 'wide'"), scripted(1.0).query("model != 'wide'"))
    assert np.isnan(leave_out.by_trees(problem)).all()
    assert leave_out.TREES not in evaluate_left_out(problem, "model").baselines


def test_the_only_scripted_model_left_out_is_predicted_from_eager() -> None:
    problem, _ = solved(table(), scripted(1.0).query("model == 'wide'"))
    holdout = leave_out.by_column(problem, "model")
    assert median(holdout[holdout["runtime"] == "torchscript"]) < 0.5
    assert not problem.weights(np.zeros(len(problem.rows), bool)).any()


def test_the_only_eager_model_left_out_is_predicted_from_scripted_ones() -> None:
    others = scripted(1.0).assign(run=table()["run"]).query("model != 'wide'")
    problem, _ = solved(table().query("model == 'wide'"), others)
    holdout = leave_out.by_column(problem, "model")
    assert median(holdout[holdout["runtime"] == "eager"]) < 0.5
    report = evaluate_left_out(solved(others)[0], "model").page().text()  # nothing of eager
    assert ("(all runtimes)" in report, "(eager)" in report) == (True, False)
    kernels = products(1.0).query("runtime == 'kernel'")
    assert set(solved(kernels, others.query("batch == 1"))[0].thetas()) == {"torchscript"}


def test_an_older_release_of_pytorch_has_kernels_of_its_own() -> None:
    rows = table().query("batch >= 32")  # where kernels set the pace
    older = rows.assign(stack="torch=1.10", run=rows["run"] + " older", latency_s=1.2 * rows["latency_s"])
    problem, theta = solved(rows, older)
    newer, then = np.split(problem.predict(theta), 2)
    assert np.median(then / newer) > 1.15
    numbers = FittedNumbers(problem, theta)
    of_conv = [numbers.kernel("conv", gpus.spec("RTX-8000"), "fp32", "eager", of) for of in ("1.12", "1.11")]
    assert of_conv[1]["compute"] > 1.1 * of_conv[0]["compute"]
    most = pd.concat([rows.query("batch == 32"), older], ignore_index=True)
    made, found = solved(most)
    known = FittedNumbers(made, found).kernel("conv", gpus.spec("RTX-8000"), "fp32", "eager", "1.11")["compute"]
    profile = profile_of(made, {"eager": found}, {"eager": NOT_TRIED}, "RTX-8000")
    assert 1.0 / profile.kernels["fp32"]["conv"].macs_per_us == pytest.approx(known, rel=1e-3)
    assert profile.machine.stack["torch"] == "1.10"


def test_what_cannot_be_left_out_is_said() -> None:
    one = table()
    problem, _ = solved(one[one["gpu"] == "2080Ti"])
    with pytest.raises(UsageError, match="one gpu only"):
        evaluate_left_out(problem, "gpu")
    with pytest.raises(UsageError, match="choose from: model, gpu, design, run, source, host"):
        evaluate_left_out(problem, "gpus")


def test_a_host_is_left_out_by_whatever_text_names_its_cpu() -> None:
    texts = ("EPYC 7742", "AMD EPYC 7742 64-Core Processor", "Xeon Gold 6132", "some machine", "")
    rows = table()[lambda rows: rows["batch"].isin((1, 256))]
    hosts_of = {run: texts[number % len(texts)] for number, run in enumerate(sorted(set(rows["run"])))}
    problem, _ = solved(rows.assign(host=rows["run"].map(hosts_of)))
    assert set(problem.rows.host) == {"EPYC 7742", "Xeon Gold 6132", ""}
    left_out = leave_out.by_column(problem, "host")
    assert set(left_out["host"]) == set(texts[:3])
    nameless, _ = solved(rows.assign(host="some machine"))
    with pytest.raises(UsageError, match="names no CPU that is known as a host"):
        evaluate_left_out(nameless, "host")


def test_the_report_names_what_is_worst_and_simpler_predictors(fitted: Fit) -> None:
    rows = len(fitted[0].rows)
    report = evaluate_left_out(fitted[0], "model")
    text = report.page().text()
    assert "a model left out, eager" in text
    assert "baseline a + b x MACs" in text
    alone = replace(report, coverage={"batch 1": leave_out.RegimeCoverage(5, np.nan, 0.1)})
    assert ("90 % interval" in text, "90 % interval" in alone.page().text()) == (True, False)
    assert set(report.by_model) == set(MODELS)
    assert "host" in report.by_class
    assert report.to_dict()["schema"] == "latpred.leave-out/1"
    assert len(report.cells) == rows
    assert report.baselines[leave_out.TREES].cells == report.baselines["a + b x MACs"].cells == rows
    assert 0.0 < report.figures["a model left out, eager"].median < report.baselines["a + b x MACs"].median
    nearest = evaluate_left_out(fitted[0], "gpu").baselines
    assert list(nearest) == [f"{leave_out.NEAREST}, 2080Ti as RTX-8000", f"{leave_out.NEAREST}, RTX-8000 as 2080Ti"]
    for errors in nearest.values():
        assert errors.cells == rows // 2
        assert 0.0 < errors.median < 0.5


def test_each_runtime_leaves_the_fit_of_eager_as_it_is(holdout: pd.DataFrame) -> None:
    both = leave_out.by_column(solved(table(), scripted(0.9))[0], "model")
    eager = both["runtime"] == "eager"
    np.testing.assert_allclose(both[eager]["predicted_s"], holdout["predicted_s"], rtol=1e-6)
    assert median(both[~eager]) < 0.15


def test_a_profile_predicts_torchscript_as_the_latency_model_does() -> None:
    both, theta = solved(table(), scripted(0.8))
    accuracies = {"eager": NOT_TRIED, "torchscript": Accuracy(0.2, 0.3, 0.4, "20 %")}
    profile = profile_of(both, dict.fromkeys(accuracies, theta), accuracies, "2080Ti")
    assert profile.acceptance.runtimes == {"torchscript": False}
    assert profile.protocol["leave-one-model-out, torchscript"] == "20 %"
    assert FUSED_FAMILY in profile.runtimes["torchscript"].kernels["fp32"]
    assert FUSED_FAMILY not in profile.kernels["fp32"]  # eager has no groups, and no row tells of them
    predictor = Predictor(store.load(store.save(profile)))
    demand_same_clocks((both, theta), predictor, "normed", "2080Ti", "torchscript")
    graph = graphs()[key_of("normed", "fp32")]
    eager, joined = (predictor.predict(graph, runtime=name, protocol="pipelined") for name in ("eager", "torchscript"))
    assert joined.costs.ops.sum() < eager.costs.ops.sum()


def test_rows_of_a_gpu_that_nvfuser_refuses_are_fitted_unfused() -> None:
    rows = table().assign(runtime="torchscript")
    problem, _ = solved(table(), rows, rows.assign(gpu="TitanX-Pascal", run=rows["run"] + " old"))
    keys = problem.cells.keys
    fusers = {(gpu, keys[cell].fuser) for gpu, cell in zip(problem.rows.gpu, problem.rows.cell, strict=True)}
    assert fusers >= {("TitanX-Pascal", "tensorexpr"), ("2080Ti", "nvfuser"), ("2080Ti", "")}
    assert ("TitanX-Pascal", "nvfuser") not in fusers
    groups = problem.cells.kernels[FUSED_FAMILY, ""].cell
    assert {keys[cell].fuser for cell in groups} == {"nvfuser"}  # no two pointwise ops follow each other


def test_torchscript_of_another_torch_is_left_out_of_a_profile() -> None:
    both = pd.concat([table(), scripted(1.0)]).assign(stack="torch=2.9.0")
    of_today = {key._replace(era=TORCH_2): graph for key, graph in graphs().items()}
    profile = fit_profile(both, "2080Ti", judge=False, known=of_today)
    assert list(profile.runtimes) == ["eager"]
    assert "rows of torchscript were left out" in profile.protocol["rows"]


def test_a_profile_does_not_say_where_files_of_models_lay() -> None:
    noted = replace(read(table()), notes=("2 rows are left out: no function f in /home/me/work/models.py",))
    profile = profile_from(noted, "2080Ti")
    assert profile.protocol["rows"].endswith("; 2 rows are left out: no function f in models.py")


def test_scripted_pointwise_kernels_are_one_and_engines_have_none() -> None:
    graph, halves = (as_run_in(TORCH_1_12, graphs()[key_of("normed", name)]) for name in ("fp32", "fp16"))
    gpu = gpus.spec("rtx-8000")
    plain, joined, engine = (as_run_by(name, graph, gpu) for name in ("eager", "torchscript", "tensorrt"))
    assert plain is graph
    assert joined.launches(4) == graph.launches(4) - 10  # each normalisation with its activation
    assert {op.family.partition(".")[0] for op in engine.ops} == {"conv", "pooling", "gemm"}
    assert [family_of(op) for op in joined.ops if op.host_class.startswith(FUSED_CLASS)] == [FUSED_FAMILY] * 10
    assert {op.host_class for op in as_run_by("torchscript", halves, gpu).ops if op.launches} == {
        *("conv.half.conv2d", "fused.half", "pooling.half.adaptive_avg_pool2d", "gemm.half.linear")
    }
    assert joined.macs(4) == engine.macs(4) == graph.macs(4)
    assert not any(op.python_calls or op.module_calls for op in joined.ops)
    assert joined.bytes(4) < graph.bytes(4)
    assert {family_of(op) for op in graph.ops if op.family.startswith("elementwise.")} == {"elementwise"}
    assert [group_of(name) for name in ("conv.3x3", "softmax", "gemm")] == ["convolutions", "memory-bound", "gemm"]


def unfitted(
    rows: pd.DataFrame | PublishedTable, factors: dict[str, float] | None = None, gpu: str = "RTX-8000"
) -> DeviceProfile:
    """A GPU's profile from a fit that found nothing but the factors of some runs, by the end of their names."""
    of_today = {key._replace(era=TORCH_2): graph for key, graph in graphs().items()}
    problem = problem_of(rows, graphs() | of_today)
    theta = problem.parameters.means
    for name, index in problem.parameters.names.items():
        if name[0] == "run" and len(name) == 2:
            theta[index] = np.log((factors or {}).get(name[1].split()[-1], 1.0))
    runtimes = sorted(set(problem.rows.runtime))
    return profile_of(problem, dict.fromkeys(runtimes, theta), dict.fromkeys(runtimes, NOT_TRIED), gpu)


@pytest.mark.parametrize(
    ("share", "era", "runtimes"),
    [(0.2, TORCH_1_12, ["eager", "torchscript"]), (0.4, TORCH_2, ["eager"]), (1.0, TORCH_2, ["eager"])],
)
def test_a_quarter_of_eager_rows_makes_a_profile_of_todays_pytorch(share: float, era: str, runtimes: list[str]) -> None:
    rows = frame().query("gpu == 'RTX-8000'").reset_index(drop=True)
    eager = rows.assign(stack=np.where(rows.index % 5 < 5 * share, "torch=2.9.0", "torch=1.12.1"))
    joined = scripted(1.0).query("gpu == 'RTX-8000' and batch == 1").assign(stack="torch=1.12.1")
    profile = unfitted(pd.concat([eager, joined], ignore_index=True))
    assert (profile.protocol["era"], sorted(profile.runtimes)) == (era, runtimes)
    assert profile.machine.stack == {"torch": "1.12.1" if era == TORCH_1_12 else "2.9.0"}


def test_scripted_rows_tell_of_kernels_where_a_source_has_few_others() -> None:
    rows = read(pd.concat([frame(), scripted(1.0)], ignore_index=True))
    place, of_eager, small = (rows.cells["device"], rows.cells["runtime"] == "eager", rows.cells["batch"] == 1)
    few = rows.where((of_eager & ((place == "2080Ti") | small) | ~of_eager).to_numpy())
    made = problem_of(few, dict(graphs()))
    told = made.table.cells[made.telling]
    assert (told["runtime"] == "eager").sum() == (few.cells["runtime"] == "eager").sum()
    assert set(told["device"][told["runtime"] == "torchscript"]) == {"RTX-8000"}
    alone = problem_of(rows.where((of_eager & (place == "2080Ti") | ~of_eager).to_numpy()), dict(graphs()))
    assert not alone.telling[alone.rows.runtime == "torchscript"].any()


def test_what_gpus_have_in_common_predicts_an_unmeasured_one(fitted: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = fitted[0]
    script = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "framework_tax" / "datasheets.py"))
    holdout = script["without_gpu"](problem)
    assert set(holdout["device"]) == set(GPUS)
    shared = script["shared_of"](problem, holdout, leave_out.by_column(problem, "gpu"), "made up")
    assert shared.error == pytest.approx(median(holdout), rel=1e-3)
    assert set(shared.kernels) == {datasheet.ANY, "7.0"}
    assert shared.kernels["7.0"]["conv.3x3"]["fp32"]["compute"] == pytest.approx(2.0, rel=0.3)
    # The hosts took 0.8 and 1.6 times what the prior says of the middle one.
    prior_us = np.exp(problem.parameters.means[problem.parameters.names["host", "conv"]] + 0.2)
    assert shared.dispatch.costs_us["conv"] == pytest.approx(1.2 * prior_us, rel=0.15)
    monkeypatch.setattr(datasheet, "shared", lambda: shared)
    profile = datasheet.profile_of(gpus.spec("t4"))
    assert profile.runtimes["eager"].spread > shared.dispatch.spread
    assert profile.runtimes["eager"].host_spread == shared.dispatch.host_spread > 0.3
    assert Predictor(profile).predict(next(iter(graphs().values())), batch=1).latency_ms > 0
