"""Modes in which models are built: without memory and initial values, or with values that nobody else's draws move.

A mode belongs to the thread that entered it. PyTorch's own ways to the same end, functions of `torch.nn.init` put
aside and the random generator seeded anew, belong to all threads: a model that another one builds meanwhile would keep
uninitialised memory, or get the same weights twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.nn import init
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._device import DeviceContext, _device_constructors

Tensor = torch.Tensor

# What gives a tensor its first values and returns it.
_FILLS = frozenset(
    {
        *(init.uniform_, init.normal_, init.constant_, init.kaiming_uniform_),
        *(Tensor.uniform_, Tensor.normal_, Tensor.fill_, Tensor.zero_),
        *(Tensor.erfinv_, Tensor.clamp_),  # steps of a truncated normal distribution
    }
)
_DRAWS = frozenset(
    {
        *(init.uniform_, init.normal_, init.kaiming_uniform_),
        *(Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_, Tensor.random_, Tensor.exponential_),
        *(Tensor.geometric_, Tensor.cauchy_, Tensor.log_normal_, Tensor.multinomial, Tensor.bernoulli),
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal),
        *(torch.bernoulli, torch.multinomial, torch.poisson),
    }
)
_CONSTRUCTORS = frozenset(_device_constructors())
_ALIKE: dict[Callable[..., Any], Callable[..., Any]] = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}


class Unweighted(DeviceContext):
    """Within it, this thread makes tensors on the meta device, and nothing there is initialised.

    >>> with Unweighted():
    ...     torch.nn.Linear(4, 4).weight.device
    device(type='meta')
    """

    def __init__(self) -> None:
        super().__init__("meta")

    def __enter__(self) -> None:
        # As `with torch.device("meta")`, which besides notes the device where all threads find it.
        for mode in self._taken_off():
            if isinstance(mode, DeviceContext):
                self.prev_mode = mode
        self._put_back([self, *self._others])

    def __exit__(self, *_: object) -> None:
        self._taken_off()
        before = [] if self.prev_mode is None else [self.prev_mode]
        self._put_back([*before, *self._others])

    def _taken_off(self) -> list[TorchFunctionMode]:
        """Empty the stack of modes; it gives them from the lowest on and remembers those that say no device."""
        modes = [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]  # type: ignore[no-untyped-call]
        self._others = [mode for mode in modes if not isinstance(mode, DeviceContext)]
        return modes

    def _put_back(self, modes: Sequence[TorchFunctionMode]) -> None:
        for mode in modes:
            _push_mode(mode)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func in _FILLS:
            tensor = args[0] if args else options.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        elif func in _CONSTRUCTORS and options.get("device") is None:
            options["device"] = self.device
        return func(*args, **options)


class Seeded(TorchFunctionMode):
    """Within it, this thread draws random numbers on the CPU from a generator of its own.

    >>> with Seeded(0):
    ...     one = torch.nn.Linear(4, 4)
    >>> with Seeded(0):
    ...     torch.equal(one.weight, torch.nn.Linear(4, 4).weight)
    True
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func in _ALIKE:
            like = args[0]
            given = {"dtype": like.dtype, "device": like.device} | options
            return _ALIKE[func](like.shape, generator=self._generator, **given)
        if func in _DRAWS and options.get("generator") is None and not _elsewhere(args, options):
            options["generator"] = self._generator
        return func(*args, **options)


def _elsewhere(args: Sequence[Any], options: dict[str, Any]) -> bool:
    """Whether a draw is made on another device, to which the generator does not belong."""
    device = next((value.device for value in (*args, *options.values()) if isinstance(value, Tensor)), None)
    return torch.device(device or options.get("device") or "cpu").type != "cpu"
