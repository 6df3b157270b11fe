"""What a process must have set for its measurements to mean what predictions say they mean; it is put back afterwards.

Nothing is measured here. TF32 is the device's to set, by precision: see `Device.use_precision`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import msgspec
import torch

from latpred.errors import UsageError
from latpred.profile.document import BENCHMARK, CUDNN, OPENED, THREADS, DeviceProfile

_LARGEST_KEPT_BYTES = (32 << 20) - 8192  # with the allocator's own bookkeeping, just within what it learns from
_NEWER = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)  # type: ignore[attr-defined]


class Options(NamedTuple):
    """What a measurement may set otherwise than it was."""

    threads: int | None = None  # that an op may use; None leaves it as it is
    cudnn_benchmark: bool = False  # whether cudnn times its convolutions when it meets a shape, and keeps the fastest

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

    def noted_in(self, profile: DeviceProfile, opened: str = "") -> DeviceProfile:
        """The profile, with what was asked for in its protocol, and by which name a GPU was opened."""
        said = dict(profile.protocol)
        if self.threads is not None:
            said[THREADS] = f"{self.threads}, as asked for"
        if profile.device.kind == "cuda":
            said[CUDNN] = BENCHMARK if self.cudnn_benchmark else f"no {BENCHMARK}"
            if opened:
                said[OPENED] = opened
        return msgspec.structs.replace(profile, protocol=said)


AS_IS = Options()


@contextmanager
def stated(options: Options = AS_IS) -> Iterator[None]:
    """Inference mode, no autocast, subnormals flushed, allocator warm, TF32 put back; the rest as the options say.

    Random weights let activations fade into subnormal numbers, a hundred times slower on a CPU; trained weights do not.
    """
    with ExitStack() as undo:
        for setting in _float32_settings():
            undo.callback(setattr, *setting)
        undo.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark = options.cudnn_benchmark
        if options.threads is not None:
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(options.threads)
        # Whether subnormal results become zero now: PyTorch can set this but not tell.
        undo.callback(torch.set_flush_denormal, not (torch.tensor(1e-39) * 0.5).item())
        torch.set_flush_denormal(True)
        for kind in ("cpu", "cuda"):
            undo.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
            torch.set_autocast_enabled(kind, False)
        # The C library's allocator, too, comes to where every long-lived process ends up. Until it has freed a block of
        # 32 MiB, glibc gives large blocks back to the system, and each forward pass pays again for their pages, up to a
        # third of its time. Where the allocator is another, this does nothing.
        torch.empty(_LARGEST_KEPT_BYTES, dtype=torch.uint8)
        with torch.inference_mode():
            yield


def _float32_settings() -> list[tuple[Any, str, Any]]:
    """How float32 is multiplied now: what holds that, by which name, and its value."""
    try:
        places = torch.backends.cuda.matmul, torch.backends.cudnn
        return [(place, "allow_tf32", place.allow_tf32) for place in places]
    except RuntimeError:
        # Set through PyTorch's newer interface, which the older one then refuses to read.
        return [(place, "fp32_precision", place.fp32_precision) for place in _NEWER]
