"""Every runtime on a real GPU: skipped where there is none, or where what a runtime needs is not installed.

`pytest tests/gpu -m "not slow"` takes some three minutes; calibrating all runtimes, which is slow, seven more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch

import latpred
from latpred import runtimes, storage
from latpred.calibration import calibrate, measure, runtime_calibration
from latpred.calibration.devices import conditions, open_device
from latpred.calibration.devices.cuda import CudaDevice
from latpred.calibration.runtime_calibration import base
from latpred.calibration.session import Row
from latpred.calibration.timing import timer
from latpred.calibration.workloads import networks
from latpred.errors import RuntimeRefusalError
from latpred.profile import store
from latpred.profile.document import DeviceProfile
from latpred.runtimes import lowering
from latpred.runtimes.cuda_graphs import capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # PyTorch's compiler warns of products that could be in TF32
]

REPLAYED = ("cuda-graphs", "onnxruntime-cuda-graphs", "compile-reduce-overhead")
SPECS = tuple(networks.draw(seed, tiny=True) for seed in (0, 2))  # an encoder and a convolutional network
BUDGET_S = 420.0


def installed() -> list[str]:
    """Runtimes that can be built here."""
    return [name for name in runtimes.built_in() if lowering.lacking(name, "cuda") is None]


@pytest.fixture(scope="module")
def gpu() -> CudaDevice:
    """The first GPU."""
    device = open_device("cuda:0")
    assert isinstance(device, CudaDevice)
    return device


@pytest.fixture
def measuring() -> Iterator[None]:
    """What `calibrate` sets around its cells."""
    with conditions.stated():
        yield


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
@pytest.mark.parametrize("runtime", [name for name in runtimes.built_in() if name != "eager"])
def test_what_is_built_computes_what_eager_does(gpu: CudaDevice, measuring: None, runtime: str, spec) -> None:
    missing = lowering.lacking(runtime, "cuda")
    if missing is not None:
        pytest.skip(missing)
    model, inputs = networks.real_model(spec, "fp32", "cuda:0"), networks.real_inputs(spec, "fp32", "cuda:0")
    expected = runtimes.get("eager").build(model, inputs)()
    call = gpu.prepare_model(model, inputs, runtime)
    for _ in range(3):
        found = call()
    gpu.synchronize()
    first = found[0] if isinstance(found, (tuple, list)) else found
    if hasattr(first, "numpy") and not isinstance(first, torch.Tensor):  # onnxruntime's own values
        first = torch.from_numpy(first.numpy()).to("cuda:0")
    if isinstance(first, torch.Tensor):
        assert torch.allclose(first.float(), expected.float(), rtol=1e-2, atol=1e-3)


def test_replays_read_their_inputs_where_they_were_captured(gpu: CudaDevice, measuring: None) -> None:
    layer, x = torch.nn.Linear(64, 64).to("cuda:0").eval(), torch.randn(4, 64, device="cuda:0")
    call = gpu.prepare_model(layer, (x,), "cuda-graphs")
    x.copy_(torch.randn_like(x))
    assert torch.allclose(call(), layer(x), atol=1e-4)


def test_a_wait_is_refused_and_leaves_the_gpu_as_it_was(gpu: CudaDevice, measuring: None) -> None:
    x = torch.ones(4, device="cuda:0")
    before = torch.cuda.current_stream(gpu.torch_device)
    with pytest.raises(RuntimeRefusalError, match=r"cannot be captured into a CUDA graph: .*captur"):
        capture(lambda: x.sum().item(), gpu.torch_device)
    assert torch.cuda.current_stream(gpu.torch_device) == before
    assert gpu.time_replayed(lambda: x.sum().item(), 2) is None
    assert torch.rand(8, device="cuda:0").std() > 0  # the generator knows that the capture is over
    torch.manual_seed(0)
    graph, output = capture(lambda: x + 1, gpu.torch_device)
    graph.replay()
    gpu.synchronize()
    assert torch.equal(output, x + 1)


def test_a_replay_is_issued_faster_than_its_kernels(gpu: CudaDevice, measuring: None) -> None:
    spec = SPECS[0]
    model, inputs = networks.real_model(spec, "fp32", "cuda:0"), networks.real_inputs(spec, "fp32", "cuda:0")
    issued = {
        name: timer.issue(gpu, gpu.prepare_model(model, inputs, name), timer.Plan(loops=1)).median_s
        for name in ("eager", "cuda-graphs")
    }
    assert issued["cuda-graphs"] < 0.3 * issued["eager"]


def test_what_is_traced_as_captured_can_be_captured(gpu: CudaDevice, measuring: None) -> None:
    from latpred.zoo import names

    built = names.build("squeezebert-uncased", device="cuda:0")
    traced = lowering.trace_for_runtime("squeezebert-uncased", runtime="cuda-graphs", target="cuda")
    assert traced.syncs() == 0
    gpu.prepare_model(built.model.eval(), built.inputs(2, "cuda:0"), "cuda-graphs")()
    gpu.synchronize()


def test_gap_of_a_graph_is_plausible(gpu: CudaDevice, measuring: None) -> None:
    calibrator = runtime_calibration.get("cuda-graphs")
    rows = [
        Row(cell, dict(calibrator.measure(cell, gpu).timings), 1.0)
        for cell in islice(calibrator.cells(gpu, "fp32"), len(base.LENGTHS))
    ]
    taken = [row.timings["replayed"].median_s for row in rows]
    assert taken == sorted(taken)
    assert 0 <= base.node_gap_us(rows, 0.0, "cuda-graphs") < 20


@pytest.fixture(scope="module")
def calibrated(gpu: CudaDevice, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceProfile]:
    """A short calibration of every runtime that is here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(storage.VARIABLE, str(tmp_path_factory.mktemp("calibrated")))
        yield calibrate(gpu, budget_s=BUDGET_S, precisions=("fp32",), runtimes="all")


@pytest.mark.slow
def test_runtimes_that_are_here_are_calibrated(calibrated: DeviceProfile) -> None:
    assert set(installed()) <= calibrated.runtimes.keys(), calibrated.acceptance.checks
    for name, fit in calibrated.runtimes.items():
        assert all(0 <= us < 1000 for us in fit.costs_us.values()), name
        assert all(0.2 < scale < 5 for scale in fit.kernel_scales.values()), name
        assert (fit.gap_us is not None) == (name in REPLAYED)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", runtimes.built_in())
def test_every_runtime_is_predicted(gpu: CudaDevice, calibrated: DeviceProfile, runtime: str) -> None:
    if runtime not in calibrated.runtimes:
        pytest.skip(f"{runtime} is not installed here")
    from latpred.prediction.predictor import Predictor

    table = measure(["distilbert-base-uncased", "resnet-18"], [1, 16], device=gpu, runtime=runtime, repeats=2)
    assert (table["status"] == "ok").all(), table["status"].tolist()
    predictor, errors = Predictor(calibrated), []
    for row in table.itertuples():
        graph = lowering.trace_for_runtime(row.model, runtime=runtime, target="cuda", precision="fp32")
        predicted_ms = predictor.predict(graph, row.batch, runtime=runtime).latency_ms
        errors.append(abs(predicted_ms / (row.latency_s * 1e3) - 1))
    assert float(np.median(errors)) < 0.3
    store.save(calibrated)
    assert latpred.predict("resnet-18", runtime=runtime, device="cuda:0").latency_ms > 0


def test_a_profiler_sees_as_many_kernels_in_a_replay_as_in_eager(gpu: CudaDevice, measuring: None) -> None:
    spec = SPECS[0]
    model, inputs = networks.real_model(spec, "fp16", "cuda:0"), networks.real_inputs(spec, "fp16", "cuda:0")
    eager, replayed = (gpu.profile(gpu.prepare_model(model, inputs, name)) for name in ("eager", "cuda-graphs"))
    if not eager.kernels:
        pytest.skip("a profiler may not look at this GPU")
    assert eager.launches == networks.graph(spec, "fp16").launches(spec.batch)
    assert replayed.kernels == eager.kernels >= eager.launches
    assert replayed.launches == 0
