"""Every runtime calibrated on the simulated device: its true costs come back, and networks never seen are predicted."""

from __future__ import annotations

import random
from itertools import islice

import msgspec
import pytest
from factories import bare, graph, perfect

from latpred.calibration import runtime_calibration
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec, TrueCosts
from latpred.calibration.runtime_calibration.calibrate_runtimes import fit_with_spread
from latpred.calibration.workloads import networks
from latpred.graph.graph import ModelGraph
from latpred.prediction.predictor import Predictor
from latpred.prediction.pricing import host_cost
from latpred.profile.document import DispatchFit
from latpred.runtimes import lowering

COSTS = TrueCosts()
CELLS = int(1.4 * 26)
SEED = 11
# Of a runtime with a stream of its own only latencies can be timed, which tell less of single kernels.
FROM_OUTSIDE = ("onnxruntime",)
FAMILIES = ("elementwise", "norm", "copy", "softmax")
# What each runtime's steps are called, by what they compute; "view" launches nothing.
CLASSES = {
    "torchscript": {name: f"node.{name}.Some" for name in (*FAMILIES, "view")},
    "onnxruntime": {name: f"node.{name}.Some" for name in (*FAMILIES, "view")},
    "compile": dict.fromkeys(FAMILIES, "kernel.extern.some") | {"generated": "kernel.generated"},
    "cuda-graphs": {name: f"{name}.some" for name in (*FAMILIES, "view")},
}
CLASSES["onnxruntime-cuda-graphs"] = CLASSES["onnxruntime"]
CLASSES["compile-reduce-overhead"] = CLASSES["compile"]


def network(runtime: str, seed: int, *, tiny: bool) -> ModelGraph:
    """A small network as a runtime has it."""
    rng, classes = random.Random(seed), CLASSES[runtime]
    ops = [bare("guards")] if "generated" in classes else []
    for _ in range(rng.randint(15, 45)):
        family = rng.choice(list(classes))
        numel = 8 if tiny else int(10 ** rng.uniform(4, 6.5))
        ops.append(bare(classes[family]) if family == "view" else bare(classes[family], family, numel))
    traced_by = lowering.traced_by(runtime)
    return graph(*ops, model=f"net{seed}", runtime=traced_by, target="cuda", parameter_bytes=0)


@pytest.fixture(scope="module", params=list(CLASSES))
def calibrated(request: pytest.FixtureRequest) -> tuple[str, DispatchFit]:
    """A runtime, and the costs that its calibrator finds with its first cells, on networks made by hand."""
    runtime = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(networks, "graph_in", lambda spec, *_: network(runtime, spec.seed, tiny=spec.tiny))
        calibrator = runtime_calibration.get(runtime, SimulatedDevice(SimulatedSpec(seed=SEED)))
        cells = islice(calibrator.cells_in(["fp32"]), CELLS)
        rows = [calibrator.measure(cell) for cell in cells]
        fit, errors = fit_with_spread(calibrator, rows, perfect(COSTS))
    assert len(errors) >= 5
    return runtime, fit


def test_host_costs_and_gaps_of_graphs_come_back(calibrated: tuple[str, DispatchFit]) -> None:
    runtime, fit = calibrated
    true = COSTS.runtimes[runtime]
    assert fit.spread == pytest.approx(0.02, abs=0.015)  # of holdouts, which no fit saw
    if runtime == "torchscript":  # no network takes such a step, whose models take hundreds of them
        assert 0 < fit.costs_us["node.interpreter"] < 0.5
    if true.replay_us is None:
        assert fit.gap_us is None
    else:
        assert fit.gap_us == pytest.approx(COSTS.node_gap_us, abs=0.05)
        guards_us = true.dispatch("guards") if "generated" in CLASSES[runtime] else 0.0
        found_us = fit.fixed_us + fit.costs_us["replay"] + (host_cost(fit, "guards") if guards_us else 0.0)
        assert found_us == pytest.approx(true.call_us + true.replay_us + guards_us, rel=0.03)
        return
    for name in set(CLASSES[runtime].values()):
        assert host_cost(fit, name) == pytest.approx(true.dispatch(name), rel=0.06), name
    guards_us = host_cost(fit, "guards") - true.dispatch("guards") if "guards" in fit.costs_us else 0.0
    assert fit.fixed_us + guards_us == pytest.approx(true.call_us, abs=3.0)


def test_factors_on_kernels_and_times_of_those_eager_lacks_come_back(calibrated: tuple[str, DispatchFit]) -> None:
    runtime, fit = calibrated
    true, off = COSTS.runtimes[runtime], 0.06 if runtime in FROM_OUTSIDE else 0.04
    for family in FAMILIES:
        assert fit.kernel_scales[family] == pytest.approx(true.factor(family), rel=off), family
    if "generated" not in CLASSES[runtime]:
        assert fit.kernels == {}
        return
    own, law = fit.kernels["fp32"]["generated"], COSTS.kernel("generated")
    assert own.floor_us == pytest.approx(law.floor_us, rel=0.1)
    assert own.activation_bytes_per_us == pytest.approx(COSTS.activation_bytes_per_us * law.memory, rel=0.1)


def test_networks_that_were_never_seen_are_predicted_within_three_percent(calibrated: tuple[str, DispatchFit]) -> None:
    (runtime, fit), whole = calibrated, perfect(COSTS)
    known = msgspec.structs.replace(whole, runtimes={**whole.runtimes, runtime: fit})
    predictor, simulated = Predictor(known), SimulatedDevice()
    for seed in range(1000, 1008):
        net = network(runtime, seed, tiny=seed % 2 == 0)
        for batch in (1, 4, 32):
            for protocol in ("single", "pipelined"):
                found = predictor.predict(net, batch, runtime=runtime, protocol=protocol).latency_ms
                true_ms = simulated.true_latency_s(net, batch, runtime, protocol) * 1e3
                assert found == pytest.approx(true_ms, rel=0.03), (seed, batch, protocol)


def test_chains_are_replayed_once_and_not_in_every_precision() -> None:
    calibrator = runtime_calibration.get("cuda-graphs", SimulatedDevice())
    cells = list(islice(calibrator.cells_in(["fp16", "fp32", "bf16"]), 9))
    assert [cell.kind for cell in cells] == ["clock"] * 5 + ["network"] * 4
    assert [cell.precision for cell in cells[5:]] == ["fp16", "fp16", "fp16", "fp32"]
