"""What a process has set while it measures, and that it is put back."""

from __future__ import annotations

import cProfile
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from profiledata import machine, profile
from smallmodels import default_dtype

from latpred.calibration.cells import Cell
from latpred.calibration.devices import conditions
from latpred.calibration.devices.cpu import CpuDevice
from latpred.calibration.devices.cuda import CudaDevice
from latpred.calibration.workloads import networks, single_ops
from latpred.errors import DeviceError, UsageError
from latpred.profile import store

BACKENDS: Any = torch.backends
CUDNN: Any = BACKENDS.cudnn
MATMUL, CONV, RNN = BACKENDS.cuda.matmul, CUDNN.conv, CUDNN.rnn
ONEDNN = (BACKENDS.mkldnn.matmul, BACKENDS.mkldnn.conv, BACKENDS.mkldnn.rnn)
GPU = CudaDevice.__new__(CudaDevice)  # of which nothing is asked but to set what float32 is multiplied in


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Each test leaves the process as it found it."""
    allowed = MATMUL.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    for place in (BACKENDS, CUDNN, *ONEDNN):
        place.fp32_precision = "none"
    MATMUL.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed


def test_measurements_run_in_inference_mode_without_autocast_and_autotuning() -> None:
    torch.backends.cudnn.benchmark = True
    with torch.autocast("cpu"):
        with conditions.stated():
            assert torch.is_inference_mode_enabled()
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.backends.cudnn.benchmark
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
    with pytest.raises(KeyboardInterrupt), conditions.stated():
        raise KeyboardInterrupt
    assert torch.backends.cudnn.benchmark
    assert not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_no_debugger_or_profiler_watches_what_is_timed() -> None:
    def called() -> None: ...

    before, tracer, profiler = sys.gettrace(), Mock(return_value=None), cProfile.Profile()
    sys.settrace(tracer)
    try:
        with profiler:
            with conditions.stated():
                called()
            called()
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert [call.args[0].f_code for call in tracer.call_args_list].count(called.__code__) == 1
    assert [entry.callcount for entry in profiler.getstats() if entry.code is called.__code__] == [1]
    with torch.profiler.profile(), pytest.raises(UsageError, match="PyTorch's profiler is on"), conditions.stated():
        pass


@pytest.mark.parametrize("before", [True, False])
def test_tf32_is_forgotten_afterwards(before: bool) -> None:
    MATMUL.allow_tf32 = torch.backends.cudnn.allow_tf32 = before
    with conditions.stated():
        GPU.use_precision("fp32" if before else "tf32")
    assert MATMUL.allow_tf32 is before
    assert torch.backends.cudnn.allow_tf32 is before


def test_tf32_set_through_the_newer_interface_comes_back() -> None:
    CONV.fp32_precision = "ieee"  # the older interface now refuses to be read: convolutions and RNNs differ
    MATMUL.fp32_precision = "tf32"
    with conditions.stated():
        GPU.use_precision("fp32")
        assert [place.fp32_precision for place in (MATMUL, CONV, RNN)] == ["ieee", "tf32", "tf32"]
    assert MATMUL.fp32_precision == "tf32"
    assert CONV.fp32_precision == "ieee"


def float32() -> list[str]:
    """How float32 is multiplied, as PyTorch says it by the older interface and by the newer one."""
    said = [place.fp32_precision for place in (BACKENDS, CUDNN, MATMUL, CONV, RNN, *ONEDNN)]
    with suppress(RuntimeError):
        said.append(torch.get_float32_matmul_precision())
    return said


@pytest.mark.parametrize(
    "reduce",
    [
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(BACKENDS, "fp32_precision", "bf16"),
        lambda: setattr(ONEDNN[1], "fp32_precision", "bf16"),
    ],
)
def test_a_cpu_multiplies_float32_in_full_inside_and_as_before_outside(reduce: Callable[[], None]) -> None:
    reduce()
    before = float32()
    with conditions.stated():
        assert {place.fp32_precision for place in ONEDNN} <= {"none", "ieee"}
        GPU.use_precision("fp32")
    assert float32() == before
    BACKENDS.fp32_precision = "ieee"  # what followed this one still does
    reduced = [place.fp32_precision for place in ONEDNN if place.fp32_precision != "ieee"]
    assert len(reduced) == ("bf16" not in before[0] and before[5:8] != ["none"] * 3)


def test_generated_networks_are_of_the_usual_dtype_and_no_generator_moves() -> None:
    with default_dtype(torch.float64):
        generator = torch.get_rng_state()
        with conditions.stated():
            assert torch.ones(1).dtype == torch.float32
            torch.rand(1)
        with conditions.stated(dtype=None):  # as a user's own model expects
            assert torch.ones(1).dtype == torch.float64
        call = single_ops.build(Cell("memory", "read", {"bytes": 4096}), CpuDevice.torch_device)
        assert call.__self__.nbytes == 4096  # type: ignore[attr-defined]
        networks._graph.cache_clear()
        networks.graph(networks.draw(0, tiny=True))
        assert torch.equal(torch.get_rng_state(), generator)
        assert torch.get_default_dtype() == torch.float64


def test_the_gpu_that_is_measured_is_the_current_one_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    @contextmanager
    def current(place: torch.device) -> Iterator[None]:
        said.append(str(place))
        yield
        said.append("as before")

    generators: dict[str, str] = {}
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda place: f"drawn on {place}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, place: generators.update({str(place): state}))
    device: Any = SimpleNamespace(torch_device=torch.device("cuda", 1))
    with conditions.stated(device=device):
        assert said == ["cuda:1"]
    assert generators == {"cuda:1": "drawn on cuda:1"}
    with conditions.stated(device=CpuDevice()):
        pass
    assert said == ["cuda:1", "as before"]


def test_a_gpu_that_is_lost_says_so_though_its_generator_cannot_be_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Mock(side_effect=RuntimeError("CUDA error: unspecified launch failure"))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lost)
    device: Any = SimpleNamespace(torch_device=torch.device("cuda", 0))
    with pytest.raises(DeviceError, match="cuda:0 failed"), conditions.stated(device=device):
        raise DeviceError("cuda:0 failed.")


def test_deterministic_algorithms_and_libraries_that_are_off_are_not_what_is_measured() -> None:
    def said() -> tuple[bool, ...]:
        modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        off = not CUDNN.enabled, not BACKENDS.mkldnn.enabled
        return *modes, CUDNN.deterministic, BACKENDS.mkldnn.deterministic, *off

    torch.use_deterministic_algorithms(True, warn_only=True)
    CUDNN.deterministic = BACKENDS.mkldnn.deterministic = True
    CUDNN.enabled = BACKENDS.mkldnn.enabled = False
    try:
        with conditions.stated():
            assert said() == (False,) * 6
        assert said() == (True,) * 6
    finally:
        torch.use_deterministic_algorithms(False)
        CUDNN.deterministic = BACKENDS.mkldnn.deterministic = False
        CUDNN.enabled = BACKENDS.mkldnn.enabled = True


def test_subnormal_numbers_are_flushed_inside_only() -> None:
    def kept() -> bool:
        return bool((torch.full((8,), 1e-39) * 0.5).any())

    assert kept()
    with conditions.stated():
        assert not kept()
    assert kept()


def test_threads_and_autotuning_hold_while_measuring_and_no_longer() -> None:
    before = torch.get_num_threads()
    options = conditions.Options(threads=before + 1, cudnn_benchmark=True)
    with conditions.stated(options):
        assert torch.get_num_threads() == before + 1
        assert torch.backends.cudnn.benchmark
        assert options.settings("cpu") == {"threads": before + 1, "cudnn_benchmark": True}
        assert options.settings("cuda").keys() == {"threads", "cudnn_benchmark", "float32"}
    assert torch.get_num_threads() == before
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        (conditions.Options(threads=0), "cpu", "threads=0 is not a number of threads"),
        (conditions.Options(threads=2), "cuda", "threads are the CPU's, and cuda is none"),
        (conditions.Options(cudnn_benchmark=True), "cpu", "cudnn is CUDA's, and cpu has none"),
    ],
)
def test_options_that_a_device_does_not_have(options: conditions.Options, kind: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        options.checked(kind)


def test_a_profile_says_how_it_was_measured() -> None:
    info = msgspec.structs.replace(profile().device, kind="cuda")
    on, off = conditions.Options(cudnn_benchmark=True), conditions.Options()
    for options in (on, off):
        measured = profile(device=info, protocol=options.protocol("cuda", "cuda:0"))
        assert store.cudnn_benchmarked(measured) == options.cudnn_benchmark
        assert "convolutions and RNNs in TF32" in measured.protocol["float32"]
        assert conditions.Options.of(measured) == options
    assert conditions.Options(threads=2).protocol("cpu", "cpu") == {"threads": "2, as asked for"}
    assert off.protocol("cpu", "cpu") == {}
    assert conditions.Options.of(profile()) == conditions.Options(threads=1)
    other = profile(machine=machine(threads=torch.get_num_threads() + 1, cpu="Other"))
    as_measured, as_here = (conditions.changes(other, CpuDevice(), way) for way in (conditions.Options.of(other), off))
    assert [said.partition(" is ")[0] for said in as_measured][:1] == ["the host CPU"]
    assert ["threads" in " ".join(said) for said in (as_measured, as_here)] == [False, True]
    # Which of several GPUs it was, whatever name it has.
    assert store.live_name(profile("lab", device=info, protocol=off.protocol("cuda", "cuda:1"))) == "cuda:1"
    assert [on.named("h200"), off.named("cpu")] == ["h200-cudnn-benchmark", "cpu"]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_large_blocks_are_kept_by_the_process() -> None:
    """In a process of its own, since the allocator remembers for ever."""
    script = """
import resource, torch
from latpred.calibration.cells import Cell
from latpred.calibration.devices import conditions

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        blocks = [torch.ones(24 << 20, dtype=torch.uint8) for _ in range(2)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with conditions.stated():
    faults()
    faults()  # what the first round left may lie so that one block more has to be had
    print(faults(), resource.getpagesize())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    faults, page_bytes = map(int, done.stdout.split())
    touched = 4 * 2 * (24 << 20) // page_bytes  # what giving every block back would cost
    assert faults < touched / 4
