"""Datasheets of GPUs: peaks, bandwidth, sizes and clocks, as their makers publish them (`models/gpus.json`).

Published figures only, each with its source; what part of them real kernels reach is `profile.datasheet`'s business.
Nothing here was measured.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

import msgspec

from latpred.errors import UnknownGpuError

GIB, MIB, KIB = 2**30, 2**20, 2**10
TENSOR = ("tf32", "fp16", "bf16")  # precisions that tensor cores multiply in
ARCHITECTURES = ("Pascal", "Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell")  # by age


@dataclass(frozen=True, slots=True)
class Spec:
    """What the datasheet of one GPU says.

    Attributes
    ----------
    name : str
        Short name, as in "a100-40gb".
    title : str
        The maker's name.
    aliases : tuple[str, ...]
        Other names that find it.
    architecture : str
        One of `ARCHITECTURES`.
    compute_capability : tuple[int, int]
        CUDA compute capability.
    multiprocessors : int
        Streaming multiprocessors.
    clock_hz, tensor_clock_hz : float
        Boost clock, and the one behind the tensor-core peaks where the maker states another.
    macs_per_s : Mapping[str, float]
        Peak multiply-adds per second (half the FLOP/s of the datasheet) by precision: dense, accumulated in fp32. A
        precision without an entry is one the GPU has no faster units for.
    bandwidth_bytes_per_s : float
        Of its memory.
    memory_bytes, l2_bytes : int
        Sizes.
    source : str
        Document and year.
    """

    name: str
    title: str
    aliases: tuple[str, ...]
    architecture: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    clock_hz: float
    tensor_clock_hz: float
    macs_per_s: Mapping[str, float]
    bandwidth_bytes_per_s: float
    memory_bytes: int
    l2_bytes: int
    source: str

    def __reduce__(self) -> tuple[Callable[[str], Spec], tuple[str]]:
        """By its name, for processes beside this one, which know the same datasheets."""
        return spec, (self.name,)

    @property
    def tensor_cores(self) -> bool:
        """Whether products in half precision run on units of their own."""
        return "fp16" in self.macs_per_s

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions a model can run in; half precision without tensor cores is stored short and multiplied in fp32."""
        return tuple(name for name in ("fp32", *TENSOR) if name in self.macs_per_s or name == "fp16")

    @property
    def bandwidth_bytes_per_us(self) -> float:
        """Memory bandwidth per microsecond."""
        return self.bandwidth_bytes_per_s / 1e6

    def peak_macs_per_s(self, precision: str) -> float:
        """Peak multiply-adds per second; that of fp32 for a precision that has no faster units.

        >>> spec("rtx 3090").peak_macs_per_s("fp16") / 1e12
        35.5
        """
        return self.macs_per_s.get(precision, self.macs_per_s["fp32"])

    def peak_macs_per_us(self, precision: str) -> float:
        """The same per microsecond."""
        return self.peak_macs_per_s(precision) / 1e6


def spec(name: str) -> Spec:
    """The datasheet of a GPU by its name, an alias, or what its driver calls it.

    Raises
    ------
    UnknownGpuError
        When there is none; the message lists the nearest.

    Examples
    --------
    >>> spec("NVIDIA A100-SXM4-40GB").name, spec("h200").multiprocessors
    ('a100-40gb', 132)
    """
    found = _index().get(_plain(name))
    if found is None:
        raise UnknownGpuError(f"no datasheet of a GPU called {name!r}. {_nearest(name)}")
    return found


def known(name: str) -> bool:
    """Whether there is a datasheet of that name.

    >>> known("a100"), known("cpu")
    (True, False)
    """
    return _plain(name) in _index()


def names() -> tuple[str, ...]:
    """Short names of all GPUs, in the order they came out."""
    return tuple(each.name for each in SPECS)


def nearest(name: str) -> tuple[str, ...]:
    """Short names that look like a misspelt one, the likeliest first; may be empty."""
    index = _index()
    close = difflib.get_close_matches(_plain(name), list(index), n=6, cutoff=0.6)
    return tuple(dict.fromkeys(index[key].name for key in close))[:3]


def _nearest(name: str) -> str:
    close = nearest(name)
    return f"Did you mean {', '.join(close)}?" if close else f"There are: {', '.join(names())}."


def _plain(name: str) -> str:
    """Letters and digits only, without what makers put around a GPU's name."""
    return re.sub(r"nvidia|geforce|quadro|tesla|graphics|[^a-z0-9]", "", name.lower())


@cache
def _index() -> dict[str, Spec]:
    return {_plain(name): each for each in SPECS for name in (each.name, each.title, *each.aliases)}


class _Sheet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `models/gpus.json`, in the units that datasheets use."""

    name: str
    title: str
    architecture: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    boost_mhz: float
    tflops: dict[str, float]
    gb_per_s: float
    memory_gib: float
    l2_kib: int
    source: str
    tensor_mhz: float = 0.0  # where it is another
    aliases: tuple[str, ...] = ()

    def spec(self) -> Spec:
        """The same in the units that latpred computes in."""
        return Spec(
            name=self.name,
            title=self.title,
            aliases=self.aliases,
            architecture=self.architecture,
            compute_capability=self.compute_capability,
            multiprocessors=self.multiprocessors,
            clock_hz=self.boost_mhz * 1e6,
            tensor_clock_hz=(self.tensor_mhz or self.boost_mhz) * 1e6,
            macs_per_s=MappingProxyType({precision: value * 1e12 / 2 for precision, value in self.tflops.items()}),
            bandwidth_bytes_per_s=self.gb_per_s * 1e9,
            memory_bytes=int(self.memory_gib * GIB),
            l2_bytes=self.l2_kib * KIB,
            source=self.source,
        )


_SHEETS = msgspec.json.decode((files("latpred.models") / "gpus.json").read_bytes(), type=tuple[_Sheet, ...])
SPECS: tuple[Spec, ...] = tuple(sheet.spec() for sheet in _SHEETS)
