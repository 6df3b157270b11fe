"""Datasheets of GPUs: peaks, bandwidth, sizes and clocks, as their makers publish them (`latpred/models/gpus.json`).

Published figures only, each with its source; what part of them real kernels reach is `profile.datasheet`'s business.
Nothing here was measured.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

import msgspec

from latpred.errors import UnknownGpuError

GIB = 2**30
TENSOR = ("tf32", "fp16", "bf16")  # precisions that tensor cores multiply in
_HELD = re.compile(r"(?P<gpu>.*?) *\(?(?:locked|held)? *(?:at )?(?P<mhz>\d+) ?MHz\)?", re.IGNORECASE)
_SAME_DESIGN = {(7, 5): "7.0", (8, 7): "8.6", (8, 9): "8.6"}


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the datasheet of one GPU says, in the units that datasheets use: a row of `latpred/models/gpus.json`."""

    name: str  # short, as in "a100-40gb"
    title: str  # the maker's
    architecture: str  # as "Turing"
    compute_capability: tuple[int, int]
    multiprocessors: int
    boost_mhz: float
    tflops: dict[str, float]  # by precision: dense, accumulated in fp32; none where there are no faster units for it
    gb_per_s: float
    memory_gib: float
    l2_kib: int
    source: str  # document and year
    tensor_mhz: float = 0.0  # behind the tensor-core peaks, where the maker states another clock
    power_limited: bool = False  # draws its power from the slot alone (75 W or less), too little for its boost clock
    aliases: tuple[str, ...] = ()  # other names that find it

    @property
    def design(self) -> str:
        """Design of its multiprocessors, by the compute capability that first had it.

        7.5 multiplies as 7.0 does, and 8.9 as 8.6, whose second fp32 path shares its issue slots with integers; 8.0
        has none.
        """
        major, minor = self.compute_capability
        return _SAME_DESIGN.get((major, minor), f"{major}.{minor}")

    @property
    def tensor_clock_hz(self) -> float:
        """Clock behind the tensor-core peaks."""
        return (self.tensor_mhz or self.boost_mhz) * 1e6

    @property
    def memory_bytes(self) -> int:
        """Size of the memory."""
        return int(self.memory_gib * GIB)

    @property
    def l2_bytes(self) -> int:
        """Size of the last-level cache."""
        return self.l2_kib << 10

    @property
    def tensor_cores(self) -> bool:
        """Whether products in half precision run on units of their own."""
        return "fp16" in self.tflops

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions a model can run in; half precision without tensor cores is stored short and multiplied in fp32."""
        return tuple(name for name in ("fp32", *TENSOR) if name in self.tflops or name == "fp16")

    @property
    def bandwidth_bytes_per_us(self) -> float:
        """Memory bandwidth per microsecond."""
        return self.gb_per_s * 1e9 / 1e6

    def at_clock(self, mhz: float) -> Spec:
        """The same GPU with its clock held at `mhz`, as benchmarks do: memory is as fast, and power no limit."""
        if not 0.0 < mhz <= self.boost_mhz:
            raise UnknownGpuError(f"a {self.title} has no clock of {mhz:g} MHz: its boost clock is {self.boost_mhz:g}.")
        part, tensor_part = mhz / self.boost_mhz, mhz * 1e6 / self.tensor_clock_hz
        return msgspec.structs.replace(
            self,
            name=f"{self.name} at {mhz:g} MHz",
            boost_mhz=mhz,
            tensor_mhz=0.0,
            tflops={name: peak * (part if name == "fp32" else tensor_part) for name, peak in self.tflops.items()},
            power_limited=False,
        )

    def peak_macs_per_us(self, precision: str) -> float:
        """Peak multiply-adds per microsecond, half the FLOPs; of fp32 for a precision that has no faster units."""
        return self.tflops.get(precision, self.tflops["fp32"]) * 1e12 / 2 / 1e6


def spec(name: str) -> Spec:
    """The datasheet of a GPU by its name, an alias, or what its driver calls it; "t4 at 900 MHz" holds its clock."""
    gpu = find(name)
    if gpu is None:
        close = nearest(name)
        every = (each.name for each in SPECS)
        hint = f"Did you mean {', '.join(close)}?" if close else f"There are: {', '.join(every)}."
        raise UnknownGpuError(f"no datasheet of a GPU called {name!r}. {hint}")
    return gpu


def find(name: str) -> Spec | None:
    """The same; None where there is no datasheet of that name."""
    held = _HELD.fullmatch(name)
    gpu = _index().get(_plain(held["gpu"] if held else name))
    return gpu.at_clock(float(held["mhz"])) if gpu and held else gpu


def one_name_each(names: Iterable[str]) -> dict[str, str]:
    """For each name of a device the first that means the same GPU; other devices keep their names.

    >>> one_name_each(["A100-SXM4-80GB", "cpu", "a100"])
    {'A100-SXM4-80GB': 'A100-SXM4-80GB', 'cpu': 'cpu', 'a100': 'A100-SXM4-80GB'}
    """
    first: dict[str, str] = {}
    return {name: first.setdefault(gpu.name, name) if (gpu := find(name)) else name for name in names}


def nearest(name: str) -> tuple[str, ...]:
    """Short names that look like a misspelt one, the likeliest first; may be empty."""
    held = _HELD.fullmatch(name)
    close = difflib.get_close_matches(_plain(held["gpu"] if held else name), _index(), n=6, cutoff=0.6)
    return tuple(dict.fromkeys(_index()[key].name for key in close))[:3]


def _plain(name: str) -> str:
    """Letters and digits only, without what makers put around a GPU's name."""
    return re.sub(r"nvidia|geforce|quadro|tesla|graphics|[^a-z0-9]", "", name.lower())


@cache
def _index() -> dict[str, Spec]:
    return {_plain(name): each for each in SPECS for name in (each.name, each.title, *each.aliases)}


SPECS = msgspec.json.decode((files("latpred.models") / "gpus.json").read_bytes(), type=tuple[Spec, ...])
