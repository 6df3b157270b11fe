"""Datasheets of GPUs: peaks, bandwidth, sizes and clocks, as their makers publish them.

Published figures only, each with its source; what part of them real kernels reach is `latpred.datasheet`'s business.
Nothing here was measured.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

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


def _gpu(
    name: str,
    title: str,
    family: tuple[str, tuple[int, int]],
    *,
    sms: int,
    mhz: float | tuple[float, float],
    tflops: dict[str, float],
    gb_per_s: float,
    memory_gib: float,
    l2_bytes: int,
    source: str,
    aliases: tuple[str, ...] = (),
) -> Spec:
    """A datasheet in the units that datasheets use: one clock, or the general and the tensor cores'."""
    clock, tensor_clock = mhz if isinstance(mhz, tuple) else (mhz, mhz)
    return Spec(
        name=name,
        title=title,
        aliases=aliases,
        architecture=family[0],
        compute_capability=family[1],
        multiprocessors=sms,
        clock_hz=clock * 1e6,
        tensor_clock_hz=tensor_clock * 1e6,
        macs_per_s=MappingProxyType({precision: value * 1e12 / 2 for precision, value in tflops.items()}),
        bandwidth_bytes_per_s=gb_per_s * 1e9,
        memory_bytes=int(memory_gib * GIB),
        l2_bytes=l2_bytes,
        source=source,
    )


_PASCAL, _VOLTA, _TURING = ("Pascal", (6, 1)), ("Volta", (7, 0)), ("Turing", (7, 5))
_GA100, _GA102, _ADA = ("Ampere", (8, 0)), ("Ampere", (8, 6)), ("Ada", (8, 9))
_HOPPER, _GB100, _GB202 = ("Hopper", (9, 0)), ("Blackwell", (10, 0)), ("Blackwell", (12, 0))


def _halves(fp32: float, tf32: float, half: float) -> dict[str, float]:
    return {"fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half}


# fmt: off
SPECS: tuple[Spec, ...] = (
    _gpu(
        "titan-x-pascal", "NVIDIA TITAN X (Pascal)", _PASCAL, sms=28, mhz=1531, tflops={"fp32": 10.97},
        gb_per_s=480.4, memory_gib=12, l2_bytes=3072 * KIB, aliases=("titanx-pascal", "titan x"),
        source="NVIDIA TITAN X product page, 2016",
    ),
    _gpu(
        "gtx-1080ti", "NVIDIA GeForce GTX 1080 Ti", _PASCAL, sms=28, mhz=1582, tflops={"fp32": 11.34},
        gb_per_s=484.4, memory_gib=11, l2_bytes=2816 * KIB, aliases=("1080ti",),
        source="NVIDIA GeForce GTX 1080 Ti product page, 2017",
    ),
    _gpu(
        "v100", "Tesla V100-SXM2-32GB", _VOLTA, sms=80, mhz=1530, tflops={"fp32": 15.7, "fp16": 125.0},
        gb_per_s=900, memory_gib=32, l2_bytes=6 * MIB, aliases=("v100-sxm2", "v100-32gb", "v100-sxm3-32gb"),
        source="NVIDIA Tesla V100 GPU Architecture whitepaper, 2017",
    ),
    _gpu(
        "v100-16gb", "Tesla V100-SXM2-16GB", _VOLTA, sms=80, mhz=1530, tflops={"fp32": 15.7, "fp16": 125.0},
        gb_per_s=900, memory_gib=16, l2_bytes=6 * MIB, source="NVIDIA Tesla V100 GPU Architecture whitepaper, 2017",
    ),
    _gpu(
        "rtx-2080ti", "NVIDIA GeForce RTX 2080 Ti", _TURING, sms=68, mhz=1545, tflops={"fp32": 13.4, "fp16": 53.8},
        gb_per_s=616, memory_gib=11, l2_bytes=5632 * KIB, aliases=("2080ti",),
        source="NVIDIA Turing GPU Architecture whitepaper, 2018 (reference card)",
    ),
    _gpu(
        "rtx-8000", "Quadro RTX 8000", _TURING, sms=72, mhz=1770, tflops={"fp32": 16.3, "fp16": 130.5},
        gb_per_s=672, memory_gib=48, l2_bytes=6 * MIB, source="NVIDIA Turing GPU Architecture whitepaper, 2018",
    ),
    _gpu(
        "t4", "Tesla T4", _TURING, sms=40, mhz=1590, tflops={"fp32": 8.1, "fp16": 65.0},
        gb_per_s=320, memory_gib=16, l2_bytes=4 * MIB, source="NVIDIA T4 datasheet, 2019",
    ),
    _gpu(
        "a100-40gb", "NVIDIA A100-SXM4-40GB", _GA100, sms=108, mhz=1410, tflops=_halves(19.5, 156.0, 312.0),
        gb_per_s=1555, memory_gib=40, l2_bytes=40 * MIB, aliases=("a100-sxm4",),
        source="NVIDIA A100 Tensor Core GPU Architecture whitepaper, 2020",
    ),
    _gpu(
        "a100", "NVIDIA A100-SXM4-80GB", _GA100, sms=108, mhz=1410, tflops=_halves(19.5, 156.0, 312.0),
        gb_per_s=2039, memory_gib=80, l2_bytes=40 * MIB, aliases=("a100-80gb", "a100-sxm"),
        source="NVIDIA A100 80GB datasheet, 2021",
    ),
    _gpu(
        "a100-pcie", "NVIDIA A100 80GB PCIe", _GA100, sms=108, mhz=1410, tflops=_halves(19.5, 156.0, 312.0),
        gb_per_s=1935, memory_gib=80, l2_bytes=40 * MIB, aliases=("a100-pcie-80gb",),
        source="NVIDIA A100 80GB datasheet, 2021",
    ),
    _gpu(
        "rtx-3090", "NVIDIA GeForce RTX 3090", _GA102, sms=82, mhz=1695, tflops=_halves(35.6, 35.6, 71.0),
        gb_per_s=936, memory_gib=24, l2_bytes=6 * MIB, aliases=("3090",),
        source="NVIDIA Ampere GA102 GPU Architecture whitepaper, 2020",
    ),
    _gpu(
        "rtx-a6000", "NVIDIA RTX A6000", _GA102, sms=84, mhz=1800, tflops=_halves(38.7, 77.4, 154.8),
        gb_per_s=768, memory_gib=48, l2_bytes=6 * MIB, aliases=("a6000",),
        source="NVIDIA Ampere GA102 GPU Architecture whitepaper, 2020",
    ),
    _gpu(
        "rtx-4090", "NVIDIA GeForce RTX 4090", _ADA, sms=128, mhz=2520, tflops=_halves(82.6, 82.6, 165.2),
        gb_per_s=1008, memory_gib=24, l2_bytes=72 * MIB, aliases=("4090",),
        source="NVIDIA Ada GPU Architecture whitepaper, 2022",
    ),
    _gpu(
        "l4", "NVIDIA L4", _ADA, sms=58, mhz=2040, tflops=_halves(30.3, 60.0, 121.0),
        gb_per_s=300, memory_gib=24, l2_bytes=48 * MIB, source="NVIDIA L4 datasheet, 2023",
    ),
    _gpu(
        "l40s", "NVIDIA L40S", _ADA, sms=142, mhz=2520, tflops=_halves(91.6, 183.0, 362.0),
        gb_per_s=864, memory_gib=48, l2_bytes=96 * MIB, source="NVIDIA L40S datasheet, 2023",
    ),
    _gpu(
        "h100", "NVIDIA H100 80GB HBM3", _HOPPER, sms=132, mhz=(1980, 1830), tflops=_halves(66.9, 494.7, 989.4),
        gb_per_s=3352, memory_gib=80, l2_bytes=50 * MIB, aliases=("h100-sxm", "h100-sxm5", "h100-80gb"),
        source="NVIDIA H100 Tensor Core GPU Architecture whitepaper, 2022",
    ),
    _gpu(
        "h100-pcie", "NVIDIA H100 PCIe", _HOPPER, sms=114, mhz=(1755, 1620), tflops=_halves(51.2, 378.0, 756.0),
        gb_per_s=2039, memory_gib=80, l2_bytes=50 * MIB,
        source="NVIDIA H100 Tensor Core GPU Architecture whitepaper, 2022",
    ),
    _gpu(
        "h200", "NVIDIA H200", _HOPPER, sms=132, mhz=(1980, 1830), tflops=_halves(66.9, 494.7, 989.4),
        gb_per_s=4800, memory_gib=141, l2_bytes=50 * MIB, aliases=("h200-sxm", "h200-141gb"),
        source="NVIDIA H200 datasheet, 2023",
    ),
    _gpu(
        "b200", "NVIDIA B200", _GB100, sms=148, mhz=(1965, 1850), tflops=_halves(75.0, 1125.0, 2250.0),
        gb_per_s=8000, memory_gib=180, l2_bytes=126 * MIB, aliases=("b200-sxm", "b200-180gb"),
        source="NVIDIA HGX B200 datasheet, 2024; clocks and L2 as its driver reports them",
    ),
    _gpu(
        "rtx-5090", "NVIDIA GeForce RTX 5090", _GB202, sms=170, mhz=2407, tflops=_halves(104.8, 104.8, 209.5),
        gb_per_s=1792, memory_gib=32, l2_bytes=96 * MIB, aliases=("5090",),
        source="NVIDIA RTX Blackwell GPU Architecture whitepaper, 2025",
    ),
)
# fmt: on
