"""What a process must have set for its measurements to mean what predictions say they mean; it is put back afterwards.

Nothing is measured here. TF32 is the device's to set, by precision: see `Device.use_precision`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch

from latpred.calibration.devices.base import Device
from latpred.errors import DeviceError, UsageError
from latpred.profile.document import BENCHMARK, CUDNN, FLOAT32, OPENED, THREADS, DeviceProfile
from latpred.profile.store import cudnn_benchmarked, mismatch
from latpred.query import checked_threads
from latpred.sandbox.own_thread import no_autocast, unwatched

_LARGEST_KEPT_BYTES = (32 << 20) - 8192  # with the allocator's own bookkeeping, just within what it learns from
_BACKENDS: Any = torch.backends  # carry no types, as the next two
_CUDNN, _ONEDNN = _BACKENDS.cudnn, _BACKENDS.mkldnn
_OF_CPU: Sequence[Any] = (_ONEDNN.matmul, _ONEDNN.conv, _ONEDNN.rnn)
# What holds how an op multiplies float32; general before special, which follows it where it says nothing itself.
_PLACES: Sequence[Any] = (_CUDNN, _BACKENDS.cuda.matmul, _CUDNN.conv, _CUDNN.rnn, *_OF_CPU)
_AS_PYTORCH = "matrix products in full, convolutions and RNNs in TF32 where the GPU has it: PyTorch's default"


class Options(NamedTuple):
    """What a measurement may set otherwise than it was."""

    threads: int | None = None  # that an op may use; None leaves it as it is
    cudnn_benchmark: bool = False  # whether cudnn times its convolutions when it meets a shape, and keeps the fastest

    @classmethod
    def of(cls, profile: DeviceProfile) -> Options:
        """As a profile was measured."""
        threads = profile.machine.threads if profile.device.kind == "cpu" else None
        return cls(threads, cudnn_benchmarked(profile))

    def checked(self, kind: str) -> Options:
        """The same; a UsageError says what of it a kind of device does not have."""
        threads = checked_threads(self.threads)
        if threads is not None and kind != "cpu":
            raise UsageError(f"threads are the CPU's, and {kind} is none; leave them out.")
        if self.cudnn_benchmark and kind != "cuda":
            raise UsageError(f"cudnn is CUDA's, and {kind} has none; leave cudnn_benchmark out.")
        return self._replace(threads=threads)

    def settings(self, kind: str) -> dict[str, int | bool | str]:
        """What a journal's rows of a kind of device depend on; to be asked while the options hold."""
        benchmark = {"cudnn_benchmark": True} if self.cudnn_benchmark else {}
        return {"threads": torch.get_num_threads(), **benchmark, **({FLOAT32: _AS_PYTORCH} if kind == "cuda" else {})}

    def named(self, device: str) -> str:
        """Name of a profile measured so, where the user gives none.

        >>> Options(threads=2).named("cpu"), Options(threads=1).named("cpu")
        ('cpu-2-threads', 'cpu-1-thread')
        """
        threads = "" if self.threads is None else f"-{self.threads}-thread{'s' * (self.threads > 1)}"
        return f"{device}{threads}{'-cudnn-benchmark' * self.cudnn_benchmark}"

    def protocol(self, kind: str, opened: str) -> dict[str, str]:
        """What the protocol of a profile says of them, and by which name a GPU was opened."""
        said = {} if self.threads is None else {THREADS: f"{self.threads}, as asked for"}
        if kind == "cuda":
            benchmark = BENCHMARK if self.cudnn_benchmark else f"no {BENCHMARK}"
            said |= {CUDNN: benchmark, FLOAT32: _AS_PYTORCH, OPENED: opened}
        return said


AS_IS = Options()


@contextmanager
def stated(
    options: Options = AS_IS, device: Device | None = None, *, dtype: torch.dtype | None = torch.float32
) -> Iterator[None]:
    """Inference mode, no autocast, all algorithms, subnormals flushed, allocator warm, float32 in full, as options say.

    Nothing watches the thread. PyTorch's own profiler cannot be halted, and is a UsageError.

    `device` is the current one of its kind. Generated networks make tensors of the default `dtype`; None leaves that of
    the user, whose own models count on it. What is drawn moves no generator of the user's.

    Random weights let activations fade into subnormal numbers, a hundred times slower on a CPU; trained weights do not.
    """
    if torch._C._autograd._profiler_enabled():
        raise UsageError("PyTorch's profiler is on, under which every op takes longer. Measure outside of it.")
    with ExitStack() as undo:
        undo.enter_context(unwatched())
        undo.enter_context(float32_in_full())
        place = getattr(device, "torch_device", None)
        gpus = [place] if place is not None and place.type == "cuda" else []
        undo.enter_context(torch.random.fork_rng(gpus, device_type="cuda"))
        for gpu in gpus:
            undo.enter_context(torch.cuda.device(gpu))
        if dtype is not None:
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        _choose_algorithms(options, undo)
        if options.threads is not None:
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(options.threads)
        # Whether subnormal results become zero now: PyTorch can set this but not tell.
        undo.callback(torch.set_flush_denormal, not (torch.tensor(1e-39, dtype=torch.float32) * 0.5).item())
        torch.set_flush_denormal(True)
        undo.enter_context(no_autocast())
        # The C library's allocator, too, comes to where every long-lived process ends up. Until it has freed a block of
        # 32 MiB, glibc gives large blocks back to the system, and each forward pass pays again for their pages, up to a
        # third of its time. Where the allocator is another, this does nothing.
        torch.empty(_LARGEST_KEPT_BYTES, dtype=torch.uint8)
        try:
            with torch.inference_mode():
                yield
        except DeviceError:
            with suppress(RuntimeError):  # a GPU that is lost takes back nothing
                undo.close()
            raise


def _choose_algorithms(options: Options, undo: ExitStack) -> None:
    """Have all libraries choose among all their algorithms, as by default: those that are left may take longer."""
    if torch.are_deterministic_algorithms_enabled():
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        undo.callback(torch.use_deterministic_algorithms, True, warn_only=warn_only)
        torch.use_deterministic_algorithms(False)
    for library, name, value in (
        (_CUDNN, "enabled", True),
        (_ONEDNN, "enabled", True),
        (_CUDNN, "benchmark", options.cudnn_benchmark),
        (_CUDNN, "deterministic", False),
        (_ONEDNN, "deterministic", False),
    ):
        undo.callback(setattr, library, name, getattr(library, name))
        setattr(library, name, value)


@contextmanager
def float32_in_full() -> Iterator[None]:
    """Have the CPU multiply float32 as float32, and put back how float32 was multiplied on every device.

    PyTorch keeps it twice: in an older interface of one word for all, and in a newer one by library and op. Setting one
    sets part of the other, and either refuses to be read where they contradict each other.
    """
    before = [place.fp32_precision for place in _PLACES]
    with ExitStack() as undo:
        undo.callback(_put_back, before)  # last, since the older interface writes here
        with suppress(RuntimeError):
            word = torch.get_float32_matmul_precision()
            undo.callback(torch.set_float32_matmul_precision, word)
            if word != "highest":
                torch.set_float32_matmul_precision("highest")
        for place in _OF_CPU:
            if place.fp32_precision not in ("none", "ieee"):
                place.fp32_precision = "ieee"
        yield


def _put_back(before: Sequence[str]) -> None:
    for place, said in zip(_PLACES, before, strict=True):
        for word in ("none", said):  # a place that said nothing itself is to follow what is above it again
            if place.fp32_precision != said:
                place.fp32_precision = word


def changes(profile: DeviceProfile, device: Device, options: Options) -> list[str]:
    """What differs between how a profile was measured and how this machine would be with options, as sentences."""
    with stated(options, device):
        return mismatch(profile.machine, device.machine())
