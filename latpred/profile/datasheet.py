"""Profiles from datasheets: a stated guess for a GPU that nobody measured.

Peaks, bandwidth, sizes and multiprocessors are the datasheet's. What part of them PyTorch's kernels reach, and what a
server's processor takes to dispatch an op, is what GPUs with published latencies have in common: see `Shared`. Nothing
here is a measurement of the GPU asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import exp, hypot, inf, log, sqrt
from typing import Any, NamedTuple

import msgspec

from latpred.ops.families import DIMS, root
from latpred.profile.document import (
    SCHEMA_VERSION,
    Acceptance,
    DeviceInfo,
    DeviceProfile,
    DispatchFit,
    KernelFit,
    Machine,
)
from latpred.profile.gpus import Spec

# What a kernel's time is made of. floor: microseconds. compute, weights, activations: times per multiply-add or byte
# over what the datasheet promises. waves, outputs, k, n: sizes of half use, results per multiprocessor.
SLOTS = ("floor", "compute", "weights", "activations", "waves", "outputs", "k", "n")
PRODUCT_ONLY = ("compute", "weights", "waves", "outputs", "k", "n")
# Multiply-adds of one multiprocessor's tensor cores in a cycle, at the full rate of most architectures.
TENSOR_MACS = {"fp16": 512.0, "tf32": 256.0}
CACHE_BYTES = 64.0  # that one multiprocessor can take from the last-level cache in a cycle
# What one draws in products of 10 to 30 us whose operands lie there: about as much on an A100, whose memory gives that
# too, as on an L40S, whose memory gives a quarter of it. Chosen on the table that docs/gpus.md judges it on.
DRAWN_BYTES = 9.0
LARGE_CACHE = 16 << 20  # holds a layer at least; what smaller caches change is in what kernels reach
# Values of a window that average pooling takes on one multiprocessor in a cycle; maxima are faster, as GoogLeNet shows.
# Untested hypothesis: addresses have 64 bits there, which Pascal multiplies in many steps, and 32 bits in maxima.
TAPS = {"6.1": 2.25}
# PyTorch's bilinear upsampling of contiguous maps has a thread for each place, which takes one plane after the other, a
# read from memory each: EfficientFormerV2 says so, at .295 us on an RTX 3090 and .248 us on an RTX 4090.
PLANE_US = 0.27
# Depthwise convolutions with windows wider than these, of so many channels and more, have no kernel made for them. What
# one multiprocessor then multiplies in a cycle: 5.3 to 8.3 in PyTorch's loop over 7 x 7 places (FastViT, StarNet), 4.6
# to 5.4 over 9 x 9 (ConvMixer); 1.4 to 2.0 in cuDNN's of channels_last (ConvMixer, FocalNet; MixNet's, of up to 396
# channels, are faster). All on an RTX 3090 and an RTX 4090.
_LAST = "conv_depthwise.channels_last"
WIDE_WINDOWS = {
    **dict.fromkeys(("conv_depthwise", "conv_depthwise.multiplied", "conv_depthwise.padded"), (5, 1, 5.3)),
    _LAST: (7, 512, 1.7),
}
# In PyTorch 2 multiply-adds of depthwise convolutions in channels_last of 2 ** 31 values or more, which 32 bits cannot
# count, take as long as so many bytes from memory: 5 to 16 in most networks on an RTX 3090 and an RTX 4090
# (EfficientNet, MobileViTv2, Xception), more in a few on the former, hardly any in ViTamin-L2. Untested hypothesis:
# PyTorch 1 cut such batches for cuDNN.
UNCOUNTABLE_BYTES = 10.0
# A step of a recurrent layer is a launch at least. The shortest takes 2.2 us on an H100, steps of cudnn's LSTMs of 192
# to 384 channels took 10 to 17 us there.
STEP_US = 2.2


def mode_of(gpu: Spec, precision: str, family: str) -> str:
    """What a product's units compute in: "fp32", "tf32", "fp16" (tensor cores) or "half" (fp32 units).

    PyTorch lets convolutions in fp32 use TF32 where there is any, and other products not; depthwise ones never do.

    >>> from latpred.profile.gpus import spec
    >>> [mode_of(spec(name), "fp32", "conv") for name in ("a100", "v100")]
    ['tf32', 'fp32']
    """
    if precision in ("fp16", "bf16"):
        return "fp16" if gpu.tensor_cores else "half"
    if "tf32" not in gpu.tflops or root(family) == "conv_depthwise":
        return "fp32"
    return "tf32" if precision == "tf32" or family.startswith("conv") else "fp32"


def log_promise(gpu: Spec, mode: str, slot: str) -> float:
    """Logarithm of what the datasheet says of a slot: microseconds per multiply-add or byte, or multiprocessors."""
    if slot == "compute":
        return -log(macs_per_us(gpu, mode))
    if slot in ("weights", "activations"):
        return -log(gpu.bandwidth_bytes_per_us)
    return log(gpu.multiprocessors) if slot == "outputs" else 0.0


def macs_per_us(gpu: Spec, mode: str) -> float:
    """What units could compute, if nothing held them up.

    Tensor cores wait for operands, which reach them at the pace of multiprocessors and clock: a card whose tensor cores
    run at half rate is not half as fast. The middle of both paces, in logarithms, is right for GPUs that were left out.
    Tensor cores that are faster than that pace are fed faster too.
    """
    peak = gpu.peak_macs_per_us(mode)
    fed = TENSOR_MACS.get(mode, 0.0) * gpu.multiprocessors * gpu.tensor_clock_hz / 1e6
    return sqrt(peak * max(peak, fed))


class Limits(NamedTuple):
    """What a GPU does at most in a microsecond, by its datasheet."""

    macs_per_us: float
    bytes_per_us: float  # from memory
    cache_bytes: float  # size of the last-level cache
    cache_bytes_per_us: float
    taps_per_us: float  # values that pooling takes into its results, each as often as windows cover it
    plane_us: float = 0.0  # of each plane, where kernels take one after the other
    # Of depthwise convolutions with a wider window than `widest`, and `many_channels` or more.
    widest: float = inf
    many_channels: float = inf
    wide_macs_per_us: float = inf
    uncountable_macs_per_us: float = inf  # of depthwise convolutions of `UNCOUNTABLE` values
    step_us: float = 0.0  # of each step of a recurrent layer, which waits for the one before


def limits_of(gpu: Spec, precision: str, family: str, *, before_2: bool = False) -> Limits:
    """What no kernel of a family is faster than in a precision, or in a PyTorch before 2.0."""
    mode = mode_of(gpu, precision, family)
    taps = TAPS.get(gpu.design, inf) if family == "pooling.avg" else inf
    widest, many_channels, wide_macs = WIDE_WINDOWS.get(family, (inf, inf, inf))
    slow = family == _LAST and not before_2
    return Limits(
        macs_per_us=gpu.peak_macs_per_us(mode),
        bytes_per_us=gpu.bandwidth_bytes_per_us,
        cache_bytes=gpu.l2_bytes,
        cache_bytes_per_us=gpu.multiprocessors * CACHE_BYTES * gpu.boost_mhz,
        taps_per_us=gpu.multiprocessors * taps * gpu.boost_mhz,
        plane_us=PLANE_US if family == "pooling.upsample_bilinear" else 0.0,
        widest=widest,
        many_channels=many_channels,
        wide_macs_per_us=gpu.multiprocessors * wide_macs * gpu.boost_mhz,
        uncountable_macs_per_us=gpu.bandwidth_bytes_per_us / UNCOUNTABLE_BYTES if slow else inf,
        step_us=STEP_US,
    )


PROVENANCE = "datasheet"
CAVEAT = "nothing was measured: datasheet peaks with typical efficiencies"
ADAPTED_CAVEAT = "datasheet peaks with typical efficiencies, then adapted to measured models"
ADVICE = "Measure it: latpred calibrate on a machine that has one"

LAUNCH_US, SYNC_US = 5.0, 10.0
COPY_BYTES_PER_US = 12_000.0  # PCIe 3.0 x16, pinned
# Standard deviation of the log of what no table tells: other years of PyTorch and architectures. Not measured.
ELSEWHERE = 0.3
ANY = ""  # design of which no GPU was measured
_CONTINUES = {"12.0": "8.6", "10.0": "9.0", "9.0": "8.0", "6.0": "6.1"}  # a design without numbers is like an older one

# Families that no table tells apart from others with the same work.
STAND_INS = {
    "embedding": "index",
    "factory": "elementwise",
    "other": "elementwise",
    "sort": "elementwise",
    "fft": "elementwise",
    "attention": "bmm",
}
# Families that no table has, and what they are guessed to be like.
GUESSES = {"rnn": "gemm", "conv_transpose": "conv", "conv_native": "conv", "generated": "elementwise"}


class Shared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What GPUs of a table have in common, as `examples/framework_tax/datasheets.py` wrote it down."""

    created: str
    source: str
    # By design (`ANY` for others), kernel family, mode and slot: the slot over what a datasheet promises.
    kernels: dict[str, dict[str, dict[str, dict[str, float]]]]
    dispatch: DispatchFit  # of eager, on the middle host; spreads are of GPUs left out, and how far hosts lie apart
    clock_exponent: float  # of the norm of host and device, as in `DeviceInfo`
    error: float  # median, on GPUs left out, their hosts not known
    power_limited: dict[str, float] = {}  # by slot: how many times that of other GPUs, where the slot is the only power


@cache
def shared() -> Shared:
    """What ships with latpred."""
    return msgspec.json.decode((files("latpred.models") / "datasheets.json").read_bytes(), type=Shared)


def profile_of(spec: Spec) -> DeviceProfile:
    """A profile of a GPU in a typical server, from its datasheet."""
    common = shared()
    dispatch = msgspec.structs.replace(
        common.dispatch, spread=_wider(common.dispatch.spread), busy_spread=_wider(common.dispatch.device_spread)
    )
    device = device_of(spec, common.clock_exponent)
    if cache_gain(spec) > 1.0:  # where it makes a difference what the last-level cache keeps of weights
        device = msgspec.structs.replace(device, resident_bytes=spec.l2_bytes // 2)
    families = sorted({*DIMS, *common.kernels[ANY]})
    return DeviceProfile(
        name=spec.name,
        schema=SCHEMA_VERSION,
        created=common.created,
        provenance=PROVENANCE,
        machine=machine_of(spec, "a typical server CPU"),
        device=device,
        protocol={"source": spec.source, "efficiencies": common.source},
        runtimes={"eager": dispatch},
        kernels={
            precision: {family: _kernel(common, spec, precision, family) for family in families}
            for precision in spec.precisions
        },
        samples=(),
        acceptance=Acceptance(False, {}, (ADVICE,)),
        seconds=0.0,
    )


def _kernel(common: Shared, spec: Spec, precision: str, family: str) -> KernelFit:
    measured = common.kernels[_nearest(spec.design, common)]
    like = family if family in measured else (STAND_INS | GUESSES)[family]
    mode = mode_of(spec, precision, like)
    limited = common.power_limited if spec.power_limited else {}
    numbers = {
        slot: exp(log_promise(spec, mode, slot)) * share * limited.get(slot, 1.0)
        for slot, share in measured[like][mode].items()
    }
    plain = kernel_fit(family, numbers, spec, common.error, _wider(common.dispatch.device_spread))
    gain = cache_gain(spec)
    return msgspec.structs.replace(plain, cache_bytes=spec.l2_bytes, cache_gain=gain) if gain > 1.0 else plain


def _wider(spread: float) -> float:
    return short(hypot(spread, ELSEWHERE))


def _nearest(design: str, common: Shared) -> str:
    """The design whose numbers to take: its own, else the one it continues, else what all have in common."""
    while design not in common.kernels and design in _CONTINUES:
        design = _CONTINUES[design]
    return design if design in common.kernels else ANY


def kernel_fit(family: str, numbers: Mapping[str, float], spec: Spec, error: float, spread: float) -> KernelFit:
    """A plain roofline of one family, from a number for each of `SLOTS`; without "compute" it multiplies nothing."""
    product = "compute" in numbers
    moved = short(1.0 / numbers["activations"])
    return KernelFit(
        family=family,
        floor_us=short(numbers["floor"]),
        macs_per_us=short(1.0 / numbers["compute"]) if product else 0.0,
        weight_bytes_per_us=short(1.0 / numbers["weights"]) if product else moved,
        activation_bytes_per_us=moved,
        saturation={name: short(numbers[name]) for name in ("waves", "outputs", "k", "n") if product},
        multiprocessors=spec.multiprocessors if product else 0,
        error=error,
        spread=spread,
    )


def cache_gain(gpu: Spec) -> float:
    """How many times as fast kernels draw bytes from a large last-level cache as from memory.

    >>> from latpred.profile.gpus import spec
    >>> [round(cache_gain(spec(name)), 1) for name in ("l40s", "a100", "rtx-3090")]
    [3.7, 1.0, 1.0]
    """
    drawn = gpu.multiprocessors * DRAWN_BYTES * gpu.boost_mhz / gpu.bandwidth_bytes_per_us
    return short(max(drawn, 1.0)) if gpu.l2_bytes >= LARGE_CACHE else 1.0


def device_of(spec: Spec, clock_exponent: float) -> DeviceInfo:
    """A device whose launches and synchronisations take what they usually do; gaps between kernels are in floors."""
    return DeviceInfo(
        name=spec.name,
        kind="cuda",
        asynchronous=True,
        memory_bytes=spec.memory_bytes,
        multiprocessors=spec.multiprocessors,
        launch_us=LAUNCH_US,
        sync_us=SYNC_US,
        bandwidth_bytes_per_us=spec.bandwidth_bytes_per_us,
        copy_bytes_per_us=COPY_BYTES_PER_US,
        clock_exponent=short(clock_exponent),
    )


def short(value: float) -> float:
    """Six digits: what a measurement can bear, and a third of the file."""
    return float(f"{value:.6g}")


def machine_of(spec: Spec, cpu: str, **told: Any) -> Machine:
    """A machine of which little more than its GPU is known."""
    unknown: dict[str, Any] = {
        **dict.fromkeys(("hostname_hash", "system", "driver"), ""),
        **dict.fromkeys(("cores", "memory_bytes", "threads"), 0),
        "stack": {},
    }
    return Machine(cpu=cpu, accelerator=spec.title, **(unknown | told))
