"""What a process must have set for its measurements to mean what predictions say they mean; it is put back afterwards.

Nothing is measured here. TF32 is the device's to set, by precision: see `Device.use_precision`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

_AUTOCAST = ("cpu", "cuda")
_SWITCHES = ((torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "allow_tf32"))
_NEWER = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)  # type: ignore[attr-defined]


@contextmanager
def stated() -> Iterator[None]:
    """Inference mode, no autocast, convolutions not autotuned, subnormal numbers flushed, TF32 put back.

    Random weights let activations fade into subnormal numbers, a hundred times slower on a CPU; trained weights do not.
    """
    undo: list[Callable[[], object]] = _float32_settings()
    undo.append(partial(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark))
    undo.append(partial(torch.set_flush_denormal, _flushing()))
    undo += [partial(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind)) for kind in _AUTOCAST]
    try:
        torch.backends.cudnn.benchmark = False
        torch.set_flush_denormal(True)
        for kind in _AUTOCAST:
            torch.set_autocast_enabled(kind, False)
        with torch.inference_mode():
            yield
    finally:
        for restore in undo:
            restore()


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
