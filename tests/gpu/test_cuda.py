"""A GPU calibrated for real, and every runtime on it: skipped where there is none, or where what one needs is missing.

`pytest tests/gpu -m "not slow"` takes some four minutes; calibrating all runtimes, which is slow, seven more. What the
device object does without a GPU is in test_device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
import torch

import latpred
from latpred import runtimes, storage
from latpred.calibration import calibrate, cells, measure, session
from latpred.calibration.cells import Cell
from latpred.calibration.devices import conditions, open_device
from latpred.calibration.devices.cuda import CudaDevice
from latpred.calibration.session import Row, directory, read_journal
from latpred.calibration.timing import timer
from latpred.calibration.workloads import networks
from latpred.errors import RuntimeRefusalError
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.profile.document import DeviceProfile
from latpred.runtimes import lowering
from latpred.runtimes.cuda_graphs import capture
from latpred.tracing import trace
from latpred.zoo import names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # PyTorch's compiler warns of products that could be in TF32
]

BUDGET_S, ALL_RUNTIMES_S = 70.0, 420.0
GEMM = {"m": 2048, "n": 2048, "k": 2048}
MODELS = ("distilbert-base-uncased", "gpt2", "resnet-18", "resnet-50", "vit-base-patch32-224")
REPLAYED = ("cuda-graphs", "onnxruntime-cuda-graphs", "compile-reduce-overhead")
SPECS = tuple(networks.draw(seed, tiny=True) for seed in (0, 2))  # an encoder and a convolutional network


def median_error(
    profile: DeviceProfile, gpu: CudaDevice, precisions: Sequence[str], batches: list[int], runtime: str = "eager"
) -> float:
    """Of latencies that a profile predicts, as a share of those that are measured."""
    predictor, errors = Predictor(profile), []
    for precision in precisions:
        options = {"runtime": runtime, "precision": precision}
        table = measure(["distilbert-base-uncased", "resnet-18"], batches, device=gpu, repeats=2, **options)
        assert (table["status"] == "ok").all(), table["status"].tolist()
        for row in table.itertuples():
            graph = lowering.trace_for_runtime(row.model, target="cuda", **options)
            predicted_ms = predictor.predict(graph, row.batch, runtime=runtime).latency_ms
            errors.append(abs(predicted_ms / (row.latency_s * 1e3) - 1))
    return float(np.median(errors))


@pytest.fixture(scope="module")
def gpu() -> CudaDevice:
    """The first GPU."""
    device = open_device("cuda:0")
    assert isinstance(device, CudaDevice)
    return device


@pytest.fixture(scope="module")
def calibrated(gpu: CudaDevice, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DeviceProfile, list[Row]]]:
    """A short calibration in two precisions, and its journal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(storage.VARIABLE, str(tmp_path_factory.mktemp("calibrated")))
        found = calibrate(gpu, budget_s=BUDGET_S, precisions=("fp32", "fp16"))
        assert store.find("cuda:0").sha256
        yield found, read_journal(directory(gpu.name) / session.LAST)[1]


@pytest.fixture
def measuring() -> Iterator[None]:
    """What `calibrate` sets around its cells."""
    with conditions.stated():
        yield


def test_short_calibration_passes_its_gate(gpu: CudaDevice, calibrated: tuple[DeviceProfile, list[Row]]) -> None:
    found, _ = calibrated
    assert found.acceptance.passed, found.acceptance.checks
    usual = {"gemm", "bmm", "conv", "attention", "norm", "softmax", "elementwise", "copy"}
    assert usual <= found.kernels["fp16"].keys()
    assert usual <= found.kernels["fp32"].keys()
    if torch.cuda.get_device_capability(gpu.torch_device) >= (7, 0):  # tensor cores
        assert found.kernels["fp16"]["gemm"].macs_per_us > found.kernels["fp32"]["gemm"].macs_per_us


def test_few_cells_fail_and_none_ends_the_calibration(calibrated: tuple[DeviceProfile, list[Row]]) -> None:
    _, rows = calibrated
    failed = {row.cell.key: row.error for row in rows if row.error}
    assert len(failed) <= 0.05 * len(rows), failed


def test_calibrated_profile_predicts_a_model(gpu: CudaDevice, calibrated: tuple[DeviceProfile, list[Row]]) -> None:
    assert median_error(calibrated[0], gpu, ("fp32", "fp16"), [1, 32]) < 0.25


@pytest.mark.parametrize("name", MODELS)
def test_traced_launches_are_those_that_the_profiler_sees(gpu: CudaDevice, measuring: None, name: str) -> None:
    built = names.build(name, device="cuda:0")
    seen = gpu.profiled_launches(gpu.prepare_model(built.model, built.inputs(2, "cuda:0"), "eager"))
    assert trace(name).launches(2) == pytest.approx(seen, rel=0.02)


def test_queued_time_does_not_depend_on_how_long_the_host_takes_to_issue(gpu: CudaDevice, measuring: None) -> None:
    call = gpu.prepare(Cell("kernel", "gemm", GEMM))
    once_s = timer.queued(gpu, call).median_s

    def dawdling() -> None:
        until = time.perf_counter() + 3 * once_s
        while time.perf_counter() < until:
            pass
        call()

    assert timer.queued(gpu, dawdling).median_s == pytest.approx(once_s, rel=0.05)


def test_out_of_memory_is_reported_and_survived(gpu: CudaDevice, measuring: None) -> None:
    with pytest.raises(MemoryError):
        gpu.prepare(Cell("memory", "bandwidth", {"bytes": gpu.info().memory_bytes * 2}))
    gpu.prepare(Cell("memory", "bandwidth", {"bytes": 2**20}))()


def test_convolutions_use_tf32_in_fp32_too_whatever_the_process_has_set(gpu: CudaDevice) -> None:
    if "tf32" not in gpu.precisions():
        pytest.skip("this GPU has no TF32")
    dims = {"batch": 32, "c_in": 256, "c_out": 256, "size": 56, "kernel": 3, "stride": 1, "groups": 1}
    taken, backends = {}, torch.backends
    backends.cudnn.conv.fp32_precision = "ieee"
    try:
        with conditions.stated(device=gpu):
            for precision in ("fp32", "tf32"):
                taken[precision] = timer.queued(gpu, gpu.prepare(Cell("kernel", "conv", dims, precision))).median_s
        assert backends.cudnn.conv.fp32_precision == "ieee"
    finally:
        backends.cudnn.conv.fp32_precision = "tf32"
    assert taken["fp32"] == pytest.approx(taken["tf32"], rel=0.1)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "tf32"])
def test_every_op_runs_in_every_precision_or_says_why_not(gpu: CudaDevice, measuring: None, precision: str) -> None:
    if precision not in gpu.precisions():
        pytest.skip(f"this GPU does not do {precision}")
    refused = {}
    for cell in cells.dispatch_cells():
        call = gpu.prepare(msgspec.structs.replace(cell, kind="kernel", precision=precision))
        try:
            with gpu.errors():
                call()
                gpu.synchronize()
        except RuntimeError as error:  # what a precision lacks; a lost device would be a DeviceError, and fail here
            refused[cell.name] = str(error)
    assert len(refused) <= 3, refused
    if precision == "fp32":
        assert refused == {}


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
    found = found.get_outputs() if hasattr(found, "get_outputs") else found  # of onnxruntime's binding
    first = found[0] if isinstance(found, (tuple, list)) else found
    if not isinstance(first, torch.Tensor):  # onnxruntime's own values
        first = torch.from_numpy(first.numpy()).to("cuda:0")
    assert torch.allclose(first.float(), expected.float(), rtol=1e-2, atol=1e-3)


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


def test_what_is_traced_as_captured_can_be_captured(gpu: CudaDevice, measuring: None) -> None:
    name = "distilbert-base-uncased"  # with transformers 5.17 it makes a mask while it is captured
    built = names.build(name, device="cuda:0")
    traced = lowering.trace_for_runtime(name, runtime="cuda-graphs", target="cuda")
    assert traced.syncs() == 0
    gpu.prepare_model(built.model.eval(), built.inputs(2, "cuda:0"), "cuda-graphs")()
    gpu.synchronize()


@pytest.fixture(scope="module")
def all_calibrated(gpu: CudaDevice, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceProfile]:
    """A short calibration of every runtime that is here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(storage.VARIABLE, str(tmp_path_factory.mktemp("calibrated")))
        yield calibrate(gpu, budget_s=ALL_RUNTIMES_S, precisions=("fp32",), runtimes="all")


@pytest.mark.slow
def test_runtimes_that_are_here_are_calibrated(all_calibrated: DeviceProfile) -> None:
    here = {name for name in runtimes.built_in() if lowering.lacking(name, "cuda") is None}
    assert here <= all_calibrated.runtimes.keys(), all_calibrated.acceptance.checks
    for name, fit in all_calibrated.runtimes.items():
        assert all(0 <= us < 1000 for us in fit.costs_us.values()), name
        assert all(0.2 < scale < 5 for scale in fit.kernel_scales.values()), name
        assert (fit.gap_us is not None) == (name in REPLAYED)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", runtimes.built_in())
def test_every_runtime_is_predicted(gpu: CudaDevice, all_calibrated: DeviceProfile, runtime: str) -> None:
    if runtime not in all_calibrated.runtimes:
        pytest.skip(f"{runtime} is not installed here")
    assert median_error(all_calibrated, gpu, ("fp32",), [1, 16], runtime) < 0.3
    store.save(all_calibrated)
    assert latpred.predict("resnet-18", runtime=runtime, device="cuda:0").latency_ms > 0


def test_a_profiler_sees_the_launches_of_eager_and_none_in_a_replay(gpu: CudaDevice, measuring: None) -> None:
    spec = SPECS[0]
    model, inputs = networks.real_model(spec, "fp16", "cuda:0"), networks.real_inputs(spec, "fp16", "cuda:0")
    calls = (gpu.prepare_model(model, inputs, name) for name in ("eager", "cuda-graphs"))
    eager, replayed = map(gpu.profiled_launches, calls)
    if not eager:
        pytest.skip("a profiler may not look at this GPU")
    # A profiler now and then sees an op more in one of its passes.
    assert eager == pytest.approx(networks.graph(spec, "fp16").launches(spec.batch), rel=0.02)
    assert replayed == 0
