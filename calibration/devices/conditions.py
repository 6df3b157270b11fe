"""What a process must have set for its measurements to mean what predictions say they mean; it is put back afterwards.

Nothing is measured here. TF32 is the device's to set, by precision: see `Device.use_precision`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from latpred.errors import UsageError
from latpred.graph.dtypes import dtype_of
from latpred.profile.document import BENCHMARK, CUDNN, THREADS, DeviceProfile

_AUTOCAST = ("cpu", "cuda")
_LARGEST_KEPT_BYTES = (32 << 20) - 8192  # with the allocator's own bookkeeping, just within what it learns from
_SWITCHES = ((torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "allow_tf32"))
_NEWER = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)  # type: ignore[attr-defined]


class Options(NamedTuple):
    """What a measurement may set otherwise than it was.

    threads : how many threads an op may use; None leaves it as it is. cudnn_benchmark : whether cudnn times its
    convolutions when it meets a shape first, and keeps the fastest.
    """

    threads: int | None = None
    cudnn_benchmark: bool = False

    def checked(self, kind: str) -> Options:
        """The same, for a kind of device.

        Raises
        ------
        UsageError
            For fewer than one thread, and for what the kind of device does not have.
        """
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"{self.threads} threads compute nothing; give 1 or more, as in --threads 2.")
        if self.threads is not None and kind != "cpu":
            raise UsageError(f"threads are the CPU's, and {kind} is none; leave them out.")
        if self.cudnn_benchmark and kind != "cuda":
            raise UsageError(f"cudnn is CUDA's, and {kind} has none; leave cudnn_benchmark out.")
        return self

    def settings(self) -> dict[str, int | bool]:
        """What a journal's rows depend on; to be asked while the options hold."""
        return {"threads": torch.get_num_threads(), **({"cudnn_benchmark": True} if self.cudnn_benchmark else {})}

    def named(self, device: str) -> str:
        """Name of a profile measured so, where the user gives none.

        >>> Options(threads=2).named("cpu")
        'cpu-2-threads'
        """
        threads = "" if self.threads is None else f"-{self.threads}-threads"
        return f"{device}{threads}{'-cudnn-benchmark' * self.cudnn_benchmark}"

    def noted_in(self, profile: DeviceProfile) -> DeviceProfile:
        """The profile, with what was asked for in its protocol."""
        said = dict(profile.protocol)
        if self.threads is not None:
            said[THREADS] = f"{self.threads}, as asked for"
        if profile.device.kind == "cuda":
            said[CUDNN] = BENCHMARK if self.cudnn_benchmark else f"no {BENCHMARK}"
        return msgspec.structs.replace(profile, protocol=said)


AS_IS = Options()


@contextmanager
def stated(options: Options = AS_IS) -> Iterator[None]:
    """Inference mode, no autocast, subnormals flushed, allocator warm, TF32 put back; the rest as the options say.

    Random weights let activations fade into subnormal numbers, a hundred times slower on a CPU; trained weights do not.
    """
    threads = options.threads
    undo: list[Callable[[], object]] = _float32_settings()
    undo.append(partial(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark))
    undo.append(partial(torch.set_flush_denormal, _flushing()))
    if threads is not None:
        undo.append(partial(torch.set_num_threads, torch.get_num_threads()))
    undo += [partial(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind)) for kind in _AUTOCAST]
    try:
        torch.backends.cudnn.benchmark = options.cudnn_benchmark
        if threads is not None:
            torch.set_num_threads(threads)
        torch.set_flush_denormal(True)
        for kind in _AUTOCAST:
            torch.set_autocast_enabled(kind, False)
        _warm_allocator()
        with torch.inference_mode():
            yield
    finally:
        for restore in undo:
            restore()


def _warm_allocator() -> None:
    """Bring the C library's allocator to where every long-lived process ends up.

    Until it has freed a block of 32 MiB, glibc gives large blocks back to the system, and each forward pass pays again
    for their pages, up to a third of its time. Where the allocator is another, this does nothing.
    """
    torch.empty(_LARGEST_KEPT_BYTES, dtype=torch.uint8)


def _flushing() -> bool:
    """Whether subnormal results become zero now; PyTorch can set this but not tell."""
    return not bool((torch.tensor(1e-39) * 0.5).item())


def _float32_settings() -> list[Callable[[], object]]:
    """Calls that set again how float32 is multiplied now."""
    try:
        return [partial(setattr, place, name, getattr(place, name)) for place, name in _SWITCHES]
    except RuntimeError:
        # Set through PyTorch's newer interface, which the older one then refuses to read.
        return [partial(setattr, place, "fp32_precision", place.fp32_precision) for place in _NEWER]


def cast(tensors: Iterable[Tensor], precision: str) -> tuple[Tensor, ...]:
    """Floating-point tensors in a precision's dtype; others as they are."""
    dtype = dtype_of(precision)
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors)


WARM_UPS, FORWARDS = 3, 3


class Seen(NamedTuple):
    """What one forward pass launched.

    launches : ops that gave the device something to do, which is what latpred walks; a library may take several kernels
    for one, and what a graph replays is launched by none. kernels, kernel_s : kernels that ran, and seconds of them
    all. fills : of memory, which latpred does not count.
    """

    launches: float
    kernels: float
    kernel_s: float
    fills: float


class Event(NamedTuple):
    """One thing a device did."""

    name: str
    microseconds: float


def profile(call: Callable[[], object], synchronize: Callable[[], None]) -> Seen:
    """What torch.profiler sees of a call on a CUDA device, averaged over a few."""
    for _ in range(WARM_UPS):
        call()
    synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(FORWARDS):
            call()
        synchronize()
    events = list(profiler.events() or ())
    return summed(device_events(events), launching_ops(events), FORWARDS)


def device_events(events: Iterable[Any]) -> list[Event]:
    """Those of a profiler's events that happened on the device, annotations of user code left out."""
    return [
        Event(event.name, float(event.device_time_total))
        for event in events
        if event.device_type.name != "CPU" and not event.is_user_annotation
    ]


def launching_ops(events: Iterable[Any]) -> int:
    """How many of a profiler's events are ops that launched a kernel, or a copy within the device."""
    return sum(
        event.device_type.name == "CPU" and any(_counts(kernel.name) for kernel in event.kernels) for event in events
    )


def summed(events: Iterable[Event], ops: int, forwards: int) -> Seen:
    """Kernels and copies within the device, for each forward pass; copies from and to the host are none of its work.

    >>> summed([Event("gemm", 4.0), Event("Memcpy HtoD", 9.0), Event("Memset (Device)", 1.0)], ops=1, forwards=1)
    Seen(launches=1.0, kernels=1.0, kernel_s=4e-06, fills=1.0)
    """
    found = list(events)
    times = [event.microseconds for event in found if _counts(event.name)]
    fills = sum(event.name.startswith("Memset") for event in found)
    return Seen(ops / forwards, len(times) / forwards, sum(times) * 1e-6 / forwards, fills / forwards)


def _counts(name: str) -> bool:
    return not name.startswith(("Memset", "Memcpy")) or "DtoD" in name
