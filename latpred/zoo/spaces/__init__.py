"""Published search spaces, a module for each: what each tells of its networks, and how they go by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from numbers import Integral
from typing import Any

from torch import Tensor, nn

from latpred.errors import UsageError
from latpred.query import SPACES

Place = Callable[[str, Mapping[str, Callable[[], nn.Module | None]]], nn.Module | None]


@dataclass(frozen=True, slots=True)
class Space:
    """A published search space."""

    name: str  # what its names start with
    size: int  # how many networks it has
    encoding: Callable[[int], str]  # the published text of the network of a number
    chosen: Callable[[Any], dict[str, str]]  # the option of each place, from an encoding
    # The network; its first argument gives a place its layer, from the place's label and what its options build.
    network: Callable[..., nn.Module]
    pixels: Callable[[Any], int]  # the image's side that an encoding asks for
    options: Callable[[Any], dict[str, Any]] = lambda _: {}  # those of `network` that an encoding asks for

    def encoded(self, architecture: Any) -> Any:
        """The encoding of an architecture that may be a number."""
        if not isinstance(architecture, Integral):
            return architecture
        index = int(architecture)
        if not 0 <= index < self.size:
            raise UsageError(f"{self.name} has no network {index}; its numbers are 0 to {self.size - 1}.")
        return self.encoding(index)

    def build(self, architecture: Any, **options: Any) -> nn.Module:
        """The network of an encoding or a number; `options` are those of `network`."""
        encoding = self.encoded(architecture)
        chosen, side = self.chosen(encoding), self.pixels(encoding)
        made = self.network(lambda label, layers: layers[chosen[label]](), **{**self.options(encoding), **options})
        # As timm's models say it: what the module is traced and timed at unless image= is given.
        made.default_cfg = {"input_size": (3, side, side)}  # type: ignore[assignment]
        return made


def space(name: str) -> Space:
    """A space by its name."""
    found: Space = import_module(f"latpred.zoo.spaces.{name}").SPACE
    return found


def named(name: object) -> tuple[Space, str | int] | None:
    """The space and the architecture that a name such as "fbnet:C" or "nasbench201:17" says; None where it is none.

    >>> named("bert-base-uncased") is None
    True
    """
    if not isinstance(name, str):
        return None
    of, _, architecture = name.partition(":")
    if of not in SPACES:
        return None
    if not architecture:
        raise UsageError(f"{name!r} names no network; give its number or its encoding, as {of}:0.")
    return space(of), int(architecture) if architecture.isdecimal() else architecture


def convolution(
    entering: int,
    leaving: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Module:
    """Convolution, batch normalisation, activation."""
    layer = nn.Conv2d(entering, leaving, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(leaving), activation())


class Residual(nn.Module):
    """Layers one after the other, whose result is added to their input where it is of the same shape."""

    def __init__(self, *layers: nn.Module, added: bool) -> None:
        super().__init__()
        self.body, self.added = nn.Sequential(*layers), added

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return x + out if self.added else out
