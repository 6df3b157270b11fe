"""What a process must have set for its measurements to mean what predictions say they mean; it is put back afterwards.

Nothing is measured here. TF32 is the device's to set, by precision: see `Device.use_precision`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from latpred.errors import UsageError
from latpred.profile.document import BENCHMARK, CUDNN, THREADS, DeviceProfile
from latpred.tracing.inputs import dtype_of

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
        """The same; a UsageError says what of it a kind of device does not have."""
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

        >>> Options(threads=2).named("cpu"), Options(threads=1).named("cpu")
        ('cpu-2-threads', 'cpu-1-thread')
        """
        threads = "" if self.threads is None else f"-{self.threads}-thread{'s' * (self.threads > 1)}"
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
    # Whether subnormal results become zero now: PyTorch can set this but not tell.
    undo.append(partial(torch.set_flush_denormal, not (torch.tensor(1e-39) * 0.5).item()))
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
