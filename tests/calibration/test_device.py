"""Live devices by name; the CPU; and what of a GPU can be checked without one."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch

from latpred.calibration.cells import Cell
from latpred.calibration.devices import conditions, cuda, open_device
from latpred.calibration.devices.cpu import CpuDevice
from latpred.calibration.devices.cuda import CudaDevice
from latpred.calibration.timing import timer
from latpred.cli import doctor
from latpred.errors import DeviceError

NO_DEVICES = ("tpu", "", "cuda:x", "cudax", "nvidia-h200", "CPU", 0, None, torch.device("meta"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, "Use device='cpu', 'cuda:0' or 'simulated'") for name in NO_DEVICES),
        *((name, "no CUDA device here: .*Use device='cpu', or the name of a profile") for name in ("cuda", "cuda:3")),
    ],
)
def test_a_device_that_is_not_here_says_which_are(name, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=said):
        open_device(name)


def test_gpu_number_out_of_range_says_which_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match=r"there is no cuda:5: this machine has cuda:0 to cuda:1"):
        CudaDevice(5)


def test_cpu_describes_itself():
    device = open_device("cpu")
    info = device.info()
    assert isinstance(device, CpuDevice)
    assert (info.name, info.kind, info.asynchronous) == ("cpu", "cpu", False)
    assert info.memory_bytes > 2**28
    assert device.machine().threads == torch.get_num_threads()
    assert device.precisions()[0] == "fp32"
    assert device.time_replayed(lambda: None, 1) is None


def test_cpu_cells_are_timed_for_real():
    device = CpuDevice()
    cells = Cell("dispatch", "add", {"rows": 4, "cols": 8}), Cell("kernel", "gemm", {"m": 512, "n": 512, "k": 512})
    with torch.inference_mode():
        small, large = (timer.single(device, device.prepare(cell), timer.QUICK) for cell in cells)
    assert large.median_s > 3 * small.median_s > 0


def test_cpu_cell_that_does_not_fit_is_out_of_memory_and_other_errors_stay_what_they_are():
    with pytest.raises(MemoryError, match="can't allocate memory"):
        CpuDevice().prepare(Cell("kernel", "add", {"rows": 2**40, "cols": 64}))
    with pytest.raises(MemoryError, match="bad_alloc"), CpuDevice().errors():
        raise ValueError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc")  # of no class of PyTorch's
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), CpuDevice().errors():
        torch.ones(2, 3) @ torch.ones(2, 3)


class HalfCuda(CudaDevice):
    """What times on a GPU without one: calls that take the host as long to issue as their heads say."""

    def __init__(self, issue_us=1.0):
        self.torch_device, self.name = torch.device("cuda", 0), "cuda:0"
        self._heads_us, self._replay, self.heads = WeakKeyDictionary(), None, []
        self.issue_us = issue_us

    def _behind_head(self, call, count, head_us):
        self.heads.append(head_us)
        return 1e-6 * count, head_us > count * self.issue_us


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB.\nSee the documentation"), MemoryError),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), MemoryError),
        (RuntimeError("CUDA error: out of memory"), MemoryError),
        (ValueError("bfc_arena.cc onnxruntime::BFCArena::AllocateRawInternal Failed to allocate"), MemoryError),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with USE_CUDA_DSA"), DeviceError),
        # Of one call: they stay what they are.
        (RuntimeError("\"addmm\" not implemented for 'Half'"), RuntimeError),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), RuntimeError),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(handle)`"), RuntimeError),
        (RuntimeError("CUDA error: invalid configuration argument"), RuntimeError),
        (RuntimeError("CUDA error: operation failed due to a previous error during capture"), RuntimeError),
    ],
)
def test_errors_of_cuda_say_in_one_line_what_they_are(error, kind):
    with pytest.raises(kind) as raised, HalfCuda().errors():
        raise error
    first = str(error).splitlines()[0]
    lost = f"cuda:0 failed: {first}. After such an error a process cannot use the GPU any more: run the same command"
    assert raised.type is kind
    assert str(raised.value).startswith(lost if kind is DeviceError else first)
    assert "\n" not in str(raised.value)
    assert error in (raised.value, raised.value.__cause__)


def call():
    return None


def test_a_queue_is_timed_behind_a_head_that_outlasts_its_issue():
    device = HalfCuda(issue_us=50.0)
    assert device.time_queued(call, 16) == pytest.approx(16e-6)
    assert device.heads == [240.0, 960.0]
    device.time_queued(call, 16)
    assert device.heads[2:] == [960.0]  # what was long enough before
    device.heads.clear()
    for _ in range(2):
        device.time_queued(lambda: None, 16)  # each lies where the one before lay
    assert device.heads == [240.0, 960.0] * 2


def test_a_replay_is_captured_once_and_timed_behind_such_a_head_too(monkeypatch):
    captures = []

    def capture(*given):
        captures.append(given)
        return SimpleNamespace(replay=lambda: None), None

    monkeypatch.setattr(cuda, "capture", capture)
    device = HalfCuda(issue_us=500.0)
    for _ in range(2):
        assert device.time_replayed(call, 64) == pytest.approx(1e-6)
    assert captures == [(call, device.torch_device, 64)]
    assert device.heads[:2] == [200.0, 800.0]


def test_tf32_is_what_convolutions_use_and_matrix_products_when_asked_for():
    device, backends = HalfCuda(), torch.backends
    with conditions.stated():
        backends.cudnn.rnn.fp32_precision = "ieee"  # as a user may have set it
        for precision in ("tf32", "fp32", "fp16"):
            device.use_precision(precision)
            said = [place.fp32_precision for place in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]
            assert said == ["tf32" if precision == "tf32" else "ieee", "tf32", "tf32"]
            assert backends.cuda.matmul.allow_tf32 == (precision == "tf32")


def test_what_keeps_libraries_from_tf32_is_an_error_where_there_is_any(monkeypatch):
    device = HalfCuda()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    with conditions.stated():
        for major, refused in ((8, ("fp32", "tf32")), (7, ())):
            device._properties = SimpleNamespace(major=major)
            for precision in ("fp32", "tf32", "fp16"):
                expected = pytest.raises(DeviceError, match="unset NVIDIA_TF32_OVERRIDE")
                with expected if precision in refused else nullcontext():
                    device.use_precision(precision)


@pytest.mark.parametrize(
    ("built", "lacking"),
    [
        (["sm_75", "sm_80", "sm_86"], ""),
        (["sm_75", "compute_80"], ""),
        (["sm_90", "sm_90a", "compute_120"], "only for sm_90, sm_90a, compute_120"),
        (["sm_75", "sm_89"], "whose compute capability is 8.6, only for sm_75, sm_89"),
        ([], ""),
    ],
)
def test_a_gpu_that_pytorch_was_not_built_for_is_found(built, lacking, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "RTX 3090")
    said = cuda.unsupported(0)
    assert said.startswith("this PyTorch has no kernels for the RTX 3090") == bool(lacking)
    assert lacking in said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    if lacking:
        with pytest.raises(DeviceError, match=r"no kernels for the RTX 3090.*Install one"):
            CudaDevice(0)
    for library, well in ((ModuleType("pynvml"), ("ok", "")), (None, ("note", "python -m pip install nvidia-ml-py"))):
        monkeypatch.setitem(sys.modules, "pynvml", library)  # without which nothing sees what else the GPU does
        finding = doctor._cuda()
        assert (finding.verdict, finding.advice) == (("note", cuda.OTHER_BUILD) if lacking else well)
