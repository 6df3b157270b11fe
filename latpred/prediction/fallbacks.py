"""What stands in for what a profile does not know: formats and families that nobody measured, a gate that failed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import msgspec
import numpy as np

from latpred import runtimes
from latpred.errors import ProfileError
from latpred.graph.features import Floats, layout, read
from latpred.graph.graph import Op
from latpred.ops.families import nearest, root
from latpred.prediction.clocks import Z90
from latpred.prediction.kernel_times import KernelEstimate, KernelModel, roofline
from latpred.profile import gpus
from latpred.profile.datasheet import LAUNCH_US, mode_of, short
from latpred.profile.document import ADAPTED, FITTED, DeviceProfile, DispatchFit, KernelFit, decode
from latpred.query import HALVES
from latpred.runtimes.base import REPLAY

PRICED_AS = {"fp64": "fp32", "complex64": "fp32", "complex128": "fp32"}  # precisions whose fits are of another one
# Log standard deviations: of a time with a known rate; of one that no measurement vouches for, so that it may be off by
# a factor of 2; of an op without a formula, which may compute ten times as long as its bytes take, and longer.
KNOWN_LOG_STD, GUESSED_LOG_STD, UNKNOWN_LOG_STD = 0.3, 0.7, 1.4
# Results per clock and multiprocessor of fp32 over those of fp64, by compute capability: CUDA C++ Programming Guide,
# "Throughput of Native Arithmetic Instructions". Libraries multiply in fp64 on the tensor cores of 8.0 and 9.0, which
# do as much as fp32 without them.
FP64_OVER_FP32 = {
    (6, 0): 2.0,
    (6, 1): 32.0,
    (7, 0): 2.0,
    (7, 5): 32.0,
    (8, 0): 1.0,
    (8, 6): 64.0,
    (8, 9): 64.0,
    (9, 0): 1.0,
    (10, 0): 2.0,
    (12, 0): 64.0,
}
WIDE = 2.0  # a CPU's vectors hold half as many numbers of twice the size
INTEGERS = 8.0  # PyTorch has no library for products of integers: 8 times as long as fp32 on the CPU it was measured on

_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
MEASURED = frozenset({"float32", "float16", "bfloat16"})
_SCALED = frozenset({"aten::_scaled_mm", "aten::_int_mm"})  # have kernels of their own on GPUs


class Format(NamedTuple):
    """How arithmetic in a format that was not measured is priced."""

    slower: float  # than in the format it is priced as
    log_std: float
    caveat: str


def format_of(op: Op, needed: str, profile: DeviceProfile) -> Format | None:
    """What is known of an op whose format was not measured; None for others. `needed` names the fits of its format."""
    if op.family and op.dtype in MEASURED and not profile.kernels.get(needed):
        return Format(1.0, GUESSED_LOG_STD, f"kernels in {op.dtype} were not measured: their speed is a guess")
    if op.dtype in MEASURED or not op.family or layout(op.family).product is None:
        return None
    if op.dtype in _COMPLEX:
        part = _COMPLEX[op.dtype]
        slower = _double(op, profile)[0] if part == "float64" else 1.0
        caveat = f"products in {op.dtype} were not measured: priced as 4 in {part}"  # which is how they are counted
        return Format(slower, KNOWN_LOG_STD, caveat)
    if op.dtype == "float64":
        slower, mode = _double(op, profile)
        rate = f"the rate of {mode}" if slower == 1.0 else f"1/{slower:.0f} of the rate of {mode}"
        return Format(slower, KNOWN_LOG_STD, f"products in float64 were not measured: priced at {rate}")
    if op.dtype.startswith("float8") and op.name in _SCALED and profile.device.kind == "cuda":
        return _of_8_bits(op, profile)
    no_library = op.name.startswith("aten::") and op.name not in _SCALED
    if no_library and (op.dtype.startswith("float8") or profile.device.kind != "cpu"):
        raise ProfileError(
            f"PyTorch has no {op.name} in {op.dtype} on {profile.device.name}, so the model cannot run there. Convert "
            "the operands to a floating-point format that it has: float32, float16 or bfloat16."
        )
    caveat = f"{op.name} in {op.dtype} was not measured: its speed is a guess"
    return Format(INTEGERS if no_library else 1.0, GUESSED_LOG_STD, caveat)


def _of_8_bits(op: Op, profile: DeviceProfile) -> Format:
    """Products of 8 bits at the rate that the datasheet promises, over that of fp16."""
    name = profile.machine.accelerator or profile.device.name
    gpu = gpus.find(name)
    if gpu is None or "fp8" not in gpu.tflops:
        raise ProfileError(
            f"{name} multiplies nothing in {op.dtype}, as far as its datasheet is known, so {op.name} cannot be priced "
            "there. Name a GPU that does, as --device h100, or give the model weights in float16 or bfloat16."
        )
    faster = gpu.tflops["fp8"] / gpu.tflops["fp16"]
    caveat = f"products in {op.dtype} were not measured: priced at {faster:.1f} times the rate of fp16, as by datasheet"
    return Format(1.0 / faster, KNOWN_LOG_STD, caveat)


class OtherFormat:
    """A kernel model whose arithmetic takes longer than what it was fitted to."""

    def __init__(self, model: KernelModel | OtherFormat, other: Format) -> None:
        self.fit: KernelFit = model.fit
        self._model, self._format, self.caveat = model, other, other.caveat

    def times(self, rows: Floats, leaf_scales: Floats) -> KernelEstimate:
        """Their arithmetic is drawn out; memory is as fast as ever."""
        times = self._model.times(rows, leaf_scales)
        roof = roofline(self.fit, read(self.fit.family, rows))
        slower = roof._replace(compute=roof.compute * self._format.slower)
        # Beside what is usual of the fit, which whole networks vouch for: none of them was in this format.
        log_std = np.hypot(np.maximum(times.log_std, self.fit.spread), self._format.log_std)
        return KernelEstimate(times.us * (slower.us / roof.us), log_std, roof.memory >= slower.compute)


def _double(op: Op, profile: DeviceProfile) -> tuple[float, str]:
    """Rate of an op's products in fp32 over that in float64, and what fp32 is computed in."""
    if profile.device.kind == "cpu":
        return WIDE, "fp32"
    name = profile.machine.accelerator or profile.device.name
    gpu = gpus.find(name)
    if gpu is None or gpu.compute_capability not in FP64_OVER_FP32:
        raise ProfileError(
            f"Nothing tells how fast {name} is in float64: it was not measured, and there is no datasheet. "
            "Predict the model in another format, as precision='fp32'."
        )
    mode = mode_of(gpu, "fp32", root(op.family))  # what the fit that is drawn out was measured in
    tf32_over_fp32 = gpu.peak_macs_per_us(mode) / gpu.peak_macs_per_us("fp32")
    return FP64_OVER_FP32[gpu.compute_capability] * tf32_over_fp32, mode


UNTESTED_LOG_STD = math.log(10.0) / Z90  # nothing says how wrong a profile is: a factor of ten either way
_MEDIAN_OF_NORMAL = 0.6745  # median of the absolute value of a standard normal variable
_CHECK = re.compile(r"([\d.]+|inf|nan)%: (passed|failed)")
_P90 = re.compile(r"([\d.]+)% p90")
_MOST_LOW = 0.99  # a prediction that is 100 % too low is none


def as_wide_as_gate(profile: DeviceProfile, runtime: str, fit: DispatchFit) -> DispatchFit:
    """A runtime's fit with spreads no narrower than the errors that the profile's gate found; see `least_log_std`."""
    log_std = least_log_std(profile, runtime)
    busy = None if fit.busy_spread is None else max(fit.busy_spread, log_std)
    return msgspec.structs.replace(fit, spread=max(fit.spread, log_std), busy_spread=busy)


def least_log_std(profile: DeviceProfile, runtime: str) -> float:
    """Standard deviation of the log error that the gate found, where it failed; 0 where it passed or there is none.

    The gate of a fit to published tables is models that were left out. Datasheets have none, and state their spreads,
    as adapted profiles do: the errors of an earlier gate are part of those, or have given way to errors left out.
    """
    if ADAPTED in profile.protocol:
        return 0.0
    gate = profile.acceptance
    if profile.provenance == FITTED and not gate.runtimes.get(runtime, gate.passed):
        own = f", {runtime}" if runtime in gate.runtimes else ""
        said = _P90.search(profile.protocol.get(f"leave-one-model-out{own}", ""))
        return _log_error(float(said[1]) / 100) / Z90 if said else 0.0  # nobody tried, which its spreads say
    if profile.provenance != "measured" or (gate.passed and gate.runtimes.get(runtime, True)):
        return 0.0
    prefix = f"{runtime}: "
    of_runtime = {name.removeprefix(prefix): said for name, said in gate.checks.items() if name.startswith(prefix)}
    tested = [of_runtime] if of_runtime else []
    if not gate.passed or not of_runtime:  # what is wrong with the device's kernels is wrong in every runtime
        tested.append(gate.checks)
    return max(map(_log_std, tested))


def _log_std(checks: dict[str, str]) -> float:
    errors = _values(checks, "p90 error of ")
    shifts = _values(checks, "median shift between two timings", failed=True)
    if not errors or not all(map(math.isfinite, errors)):
        return UNTESTED_LOG_STD
    return math.hypot(_log_error(max(errors)) / Z90, max(shifts, default=0.0) / _MEDIAN_OF_NORMAL)


def _log_error(error: float) -> float:
    """The log error of a relative one, which may be of either sign: 50 % is up to a factor of two."""
    return max(math.log1p(error), -math.log1p(-min(error, _MOST_LOW)) if error < 1 else 0.0)


def _values(checks: dict[str, str], start: str, *, failed: bool = False) -> list[float]:
    """Shares that checks of a name found."""
    matches = [_CHECK.match(said) for name, said in checks.items() if name.startswith(start)]
    return [float(match[1]) / 100 for match in matches if match and (match[2] == "failed" or not failed)]


# Of two values, on a core of an EPYC: sorts of 50 to 50,000 values and searches in 256 agree to a fifth, searches in 16
# and `unique` take about half. What picks the first few counts as one comparison of each value, which is a guess: it
# took 1.4 to 11 ns.
_COMPARISON_US = 0.005
_ONE_PASS = ("sort.topk", "sort.kthvalue", "sort.searchsorted")


def guess(
    profile: DeviceProfile, fits: dict[str, KernelFit], family: str = "other", by_pytorch: bool = False
) -> KernelFit:
    """A fit for families never measured, from the rates of those that were.

    On a CPU each step of a recurrent layer takes at least as long as a kernel that does nothing; where PyTorch takes
    the steps itself, it dispatches a product and an activation in each. What sorts there takes its time to compare.
    """
    rates = [fit.macs_per_us for fit in fits.values() if fit.macs_per_us]
    widths = [fit.activation_bytes_per_us for fit in fits.values() if fit.activation_bytes_per_us]
    width = float(np.median(widths)) if widths else profile.device.bandwidth_bytes_per_us
    floor_us = float(np.median([fit.floor_us for fit in fits.values()]))
    kind = root(family) if root(family) in ("rnn", "sort") else "other"
    costs_us = profile.runtimes[EAGER].costs_us if by_pytorch and EAGER in profile.runtimes else {}
    loop_us: tuple[float, ...] = ()
    if kind == "rnn":  # of each of the family's `calls`
        loop_us = (floor_us + nearest(costs_us, "gemm") + nearest(costs_us, "elementwise"),)
    elif kind == "sort":
        loop_us = (_COMPARISON_US, 0.0) if family in _ONE_PASS else (0.0, _COMPARISON_US)
    return KernelFit(
        family=kind,
        floor_us=floor_us,
        macs_per_us=float(np.median(rates)) if rates else 0.0,
        weight_bytes_per_us=width,
        activation_bytes_per_us=width,
        loop_us=loop_us if profile.device.kind == "cpu" else (),
        spread=GUESSED_LOG_STD if rates else UNTESTED_LOG_STD,  # without any rate, multiply-adds come out for free
    )


EAGER, TORCHSCRIPT = "eager", "torchscript"
# What a node that launches nothing costs onnxruntime, over a view in eager: both measured on one CPU.
HOST_NODE = 0.15
HOST_NODES = ("node.view", "node.host", "node.shape")
ATTENTION_LAUNCHES = 5  # of onnxruntime's node: heads apart, scores, softmax, their values, heads together
# Over what an elementwise op takes eager's host: the checks before a compiled graph, 35 us where a launch through the
# wrapper takes 9 (torch.compile on a GB200, meta-pytorch/tritonbench#1017), and each of its inputs (as on one CPU).
GUARDED, GUARDED_INPUT = 4.0, 0.04
# A launch in an engine, which has its arguments ready, over an elementwise op in eager.
BARE_LAUNCH = 0.25
# Between kernels that are launched one by one well ahead of the device. Those of a graph, which tell the floors, follow
# each other at once: on an H100 the smallest kernel takes 2.19 us in a queue and 1.14 in a graph.
STREAM_GAP_US = 1.05
# Any fit knows what TorchScript takes over eager: the fits share one ratio for each class of ops.
_RATIOS_FROM = "rtx-8000.json"
# Classes of a scripted graph whose costs the published tables do not tell apart from others.
_LIKE = {"bmm": "gemm", "attention": "gemm", "embedding": "index"}
# Kernels that a compiler writes, and eager's that move as many bytes in the same way.
_WRITTEN = {"generated": "elementwise", "generated.reduction": "norm", "generated.softmax": "norm"}


def with_estimates(profile: DeviceProfile) -> DeviceProfile:
    """The profile with estimates of runtimes it lacks; a measured one, and one without eager, as it is."""
    if profile.provenance == "measured" or EAGER not in profile.runtimes:
        return profile
    eager, known = profile.runtimes[EAGER], dict(profile.runtimes)
    of_all = {name: profile.kernels.get(name.partition(" ")[0], {}) | fits for name, fits in profile.kernels.items()}
    own = {precision: _own_kernels(fits, eager, precision) for precision, fits in of_all.items()}
    for name, estimate in ESTIMATES.items():
        if name in profile.runtimes:
            continue
        fit = estimate.make(eager)
        known[name] = msgspec.structs.replace(
            fit,
            spread=short(math.hypot(fit.spread, estimate.log_std)),
            busy_spread=short(math.hypot(fit.device_spread, estimate.log_std)),
            kernels=own if estimate.own_kernels else fit.kernels,
        )
    return msgspec.structs.replace(profile, runtimes=known)


def caveat(runtime: str) -> str:
    """What a prediction says of a runtime that is estimated."""
    said = f"{runtime} was not measured on this GPU: estimated from {ESTIMATES[runtime].basis}."
    if getattr(runtimes.get(runtime), "predicted_only", False):
        return said
    return f"{said} Where the GPU is, measure it: latpred calibrate --device cuda:0 --runtimes {runtime}"


def _replayed(eager: DispatchFit) -> DispatchFit:
    """One launch, whatever it holds; kernels are eager's, as far as an adaptation has corrected those too."""
    return _like(eager, {"": 0.0, REPLAY: 0.0}, LAUNCH_US)


def _onnxruntime(eager: DispatchFit) -> DispatchFit:
    """Each node launches as an elementwise op does, without Python; nodes of shapes stay on the host."""
    launch, view = _launch(eager), nearest(eager.costs_us, "view")
    costs = {"": launch, "node": launch, **dict.fromkeys(HOST_NODES, short(HOST_NODE * view))}
    costs["node.attention"] = short(ATTENTION_LAUNCHES * launch)
    return _like(eager, costs, eager.fixed_us, gap_us=STREAM_GAP_US)


def _optimized(eager: DispatchFit) -> DispatchFit:
    """The same; kernels of an attention node that stays in parts share what the node launches."""
    part = short(ATTENTION_LAUNCHES / 3 * _launch(eager))
    known = _onnxruntime(eager)
    return msgspec.structs.replace(known, costs_us={**known.costs_us, "node.bmm": part, "node.softmax": part})


def _engine(eager: DispatchFit) -> DispatchFit:
    """One call, and a bare launch of each kernel."""
    return _like(eager, {"": short(BARE_LAUNCH * _launch(eager))}, eager.fixed_us, gap_us=STREAM_GAP_US)


def _compiled(eager: DispatchFit) -> DispatchFit:
    """Guards, generated kernels that launch as elementwise ops do, and library calls without the Python around them.

    What runs between two graphs is eager's. A graph that is captured copies its inputs, then it is one launch.
    """
    launch, scripted = _launch(eager), _torchscript(eager).costs_us
    costs = {
        "": launch,
        "guards": short(GUARDED * launch),
        REPLAY: short(LAUNCH_US + launch),
        **{f"kernel.extern.{name}".rstrip("."): scripted[name] for name in scripted if not name.startswith("node")},
        **{f"eager.{name}".rstrip("."): cost for name, cost in eager.costs_us.items()},
    }
    return _like(eager, costs, eager.fixed_us, python_call_us=short(GUARDED_INPUT * launch))


def _torchscript(eager: DispatchFit) -> DispatchFit:
    """Eager's classes times their ratios; the interpreter's own nodes are part of those."""
    ratios = _scripted_ratios()
    costs = {name: short(cost * ratios.get(root(name), ratios[""])) for name, cost in eager.costs_us.items()}
    costs |= {name: costs[like] for name, like in _LIKE.items() if like in costs}
    # Graphs of TorchScript's own tools have nodes, those of an era the classes of eager.
    nodes = {f"node.{name}" if name else "node": cost for name, cost in costs.items()}
    return _like(eager, {**costs, **nodes, "node.interpreter": 0.0}, eager.fixed_us * ratios["fixed"])


def _launch(eager: DispatchFit) -> float:
    """What an op with the least around its launch takes."""
    return nearest(eager.costs_us, "elementwise")


def _own_kernels(fits: dict[str, KernelFit], eager: DispatchFit, precision: str) -> dict[str, KernelFit]:
    """Fits of kernels that eager has none of, from those of its own.

    What a compiler writes moves bytes as eager's kernels do. In half precision, eager's convolutions copy their tensors
    to where tensor cores read them, and back; a runtime that lays tensors out itself saves that.
    """
    own = {name: (like, fits[like]) for name, like in _WRITTEN.items() if like in fits}
    if precision.partition(" ")[0] in HALVES and "elementwise" in fits:
        least = fits["elementwise"].activation_bytes_per_us
        for name, fit in fits.items():
            if root(name).startswith("conv") and fit.activation_bytes_per_us < least:
                own[name] = root(name), msgspec.structs.replace(fit, activation_bytes_per_us=least)
    scales = eager.kernel_scales
    return {
        name: msgspec.structs.replace(
            fit, family=name, leaf_scales={}, scale=fit.scale * scales.get(like, scales.get("", 1.0))
        )
        for name, (like, fit) in own.items()
    }


def _like(eager: DispatchFit, costs_us: dict[str, float], fixed_us: float, **others: float) -> DispatchFit:
    """Dispatch without Python, over eager's kernels; where these queue up, `gap_us` of a stream is between them."""
    bare = {"module_call_us": 0.0, "python_call_us": 0.0, "attribute_read_us": 0.0}
    return msgspec.structs.replace(eager, costs_us=costs_us, fixed_us=short(fixed_us), **bare | others)


@cache
def _scripted_ratios() -> dict[str, float]:
    """TorchScript's host costs over eager's by class, as the fits to published latencies have them."""
    file = files("latpred.models") / "profiles" / _RATIOS_FROM
    fits = decode(file.read_bytes(), _RATIOS_FROM).runtimes
    eager, scripted = fits[EAGER], fits[TORCHSCRIPT]
    plain = {name: cost for name, cost in eager.costs_us.items() if root(name) == name}
    ratios = {name: scripted.costs_us[name] / cost for name, cost in plain.items()}
    return {**ratios, "fixed": scripted.fixed_us / eager.fixed_us}


class _Estimate(NamedTuple):
    """How a runtime that nobody measured on a GPU is estimated from eager."""

    make: Callable[[DispatchFit], DispatchFit]  # its dispatch from eager's
    basis: str  # what that rests on, in words
    log_std: float = 0.25  # of the error beside eager's, as published rows show; see docs/published-tables.md
    own_kernels: bool = False  # whether a compiler or an engine of its own writes kernels


ESTIMATES = {
    TORCHSCRIPT: _Estimate(
        _torchscript, "eager's dispatch times what TorchScript took of it on five GPUs, and eager's kernels"
    ),
    "cuda-graphs": _Estimate(_replayed, "eager's kernels, launched together"),
    "onnxruntime": _Estimate(
        _onnxruntime, "its own graph, eager's kernels, and for each node the dispatch of an elementwise op in eager"
    ),
    "onnxruntime-cuda-graphs": _Estimate(_replayed, "the graph of onnxruntime and eager's kernels, launched together"),
    "onnxruntime-optimized": _Estimate(
        _optimized, "eager's kernels, fused as its optimizer does, each dispatched as an elementwise op", 0.4
    ),
    "compile": _Estimate(
        _compiled,
        "its own graph, eager's kernels, TorchScript's dispatch of library calls, and for each generated kernel that "
        "of an elementwise op",
        0.35,
        own_kernels=True,
    ),
    "compile-reduce-overhead": _Estimate(
        _compiled, "the graph of compile and eager's kernels, launched together", 0.35, own_kernels=True
    ),
    "tensorrt": _Estimate(
        _engine, "eager's kernels, fused as an engine does, each with a bare launch", 0.4, own_kernels=True
    ),
}
