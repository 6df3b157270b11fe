"""Networks that only call: a chain of modules, a chain of functions. What is left of their time is the call's."""

from __future__ import annotations

from torch import Tensor, nn


class ModuleChain(nn.Module):
    """So many modules, one after the other, that do nothing."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.links = nn.Sequential(*(nn.Identity() for _ in range(calls)))

    def forward(self, x: Tensor) -> Tensor:
        """The input."""
        out: Tensor = self.links(x)
        return out


class FunctionChain(nn.Module):
    """So many calls of a Python function that does nothing."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        """The input."""
        for _ in range(self.calls):
            x = _pass_on(x)
        return x


def _pass_on(x: Tensor) -> Tensor:
    return x
