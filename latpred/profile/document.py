"""DeviceProfile: everything measured about one device on one machine, and its form as a checked JSON document.

Only structures live here: `latpred.profile.store` finds, reads, checks and writes them, `calibration` measures them and
`latpred.prediction.predictor` uses them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

import msgspec

from latpred.errors import ProfileError

SCHEMA_VERSION = 2  # fields that came later have defaults
THREADS, CUDNN, BENCHMARK = "threads", "cudnn", "benchmark"  # keys of a protocol, and what cudnn may be set to
FITTED = "fitted from published measurements"  # a provenance
ADAPTED = "adapted"  # key of a protocol: what the profile was corrected by
OPENED = "opened as"  # key of a protocol: the GPU by the name that opened it
FLOAT32 = "float32"  # key of a protocol: how fp32 is multiplied on a GPU
HOST = "host"  # key of a protocol: whose dispatch the profile was given
UNSURE = "certainty"  # key of a gate's checks: what a pass leaves open that few networks decided


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the document."""


class Machine(_Record, frozen=True):
    """What must match for a profile to hold: host, device and software stack."""

    hostname_hash: str
    cpu: str
    cores: int
    memory_bytes: int
    system: str
    accelerator: str  # "" on a CPU
    driver: str
    stack: dict[str, str]  # python, torch, transformers, …
    threads: int
    # Whose machine it is. Names do not tell: clouds call all hosts and processors the same. "" where nothing says.
    machine_id: str = ""
    cpu_model: str = ""  # vendor, family, model, stepping, digest of the vector instructions


class DeviceInfo(_Record, frozen=True):
    """The device that executes, and the constants of its clock."""

    name: str  # "cpu", "nvidia-h200", "simulated"
    kind: str  # cpu, cuda or simulated
    asynchronous: bool
    memory_bytes: int
    multiprocessors: int = 0
    launch_us: float = 0.0
    gap_us: float = 0.0
    sync_us: float = 0.0
    queue: int = 1024
    bandwidth_bytes_per_us: float = 0.0
    copy_bytes_per_us: float = 0.0  # host to device, for inputs_on="host"
    cache_bytes: int = 0  # last level; weights that fit stay there between forward passes
    resident_bytes: int = 0  # a pass that touches no more finds its weights in the cache again; 0: as `cache_bytes`
    fresh_bytes_per_us: float = 0.0  # at which the system gives a CPU's ops memory for large results; 0: at once
    # The p of (host ** p + device ** p) ** (1 / p), below which no latency is; 0 takes the slower clock alone.
    clock_exponent: float = msgspec.field(default=0.0, name="knee")


class KernelFit(_Record, frozen=True):
    """Numbers of one fitted `RooflineRegressor`, for one kernel family in one precision.

    The roofline is floor + quadrature of compute and memory time; the residual is a Gaussian process over log
    features, kept as its training points so that numpy alone can evaluate it. On a synchronous device the host cost
    of the op is not in these times: latency is the sum of both.
    """

    family: str  # whose columns and features these are
    floor_us: float  # of a kernel that does nothing
    # Throughput and bandwidths at full use; 0 where no training sample had such work.
    macs_per_us: float
    weight_bytes_per_us: float
    activation_bytes_per_us: float
    # For each dimension of the product, its size at which half the throughput is reached; "few" is added to the rows
    # first, "waves" is in rounds of tiles over all multiprocessors, "outputs" in results.
    saturation: dict[str, float] = {}
    multiprocessors: int = 0  # of the device it was fitted on; 0 leaves waves out
    features: tuple[str, ...] = ()  # names of the residual's inputs, natural logarithms
    length_scales: tuple[float, ...] = ()  # one for each feature
    # Variances of the log residual: prior, and observation noise.
    amplitude: float = 0.0
    noise: float = 0.0
    # Training features and log residuals; factors multiply `noise`, above 1 where a point contradicts its neighbours.
    points: tuple[tuple[float, ...], ...] = ()
    targets: tuple[float, ...] = ()
    noise_factors: tuple[float, ...] = ()
    error: float = 0.0  # median absolute relative error over the training samples, each predicted without itself
    spread: float = 0.0  # standard deviation of the log of those errors
    scale: float = 1.0  # time inside a network over time in a loop of its own
    # For more special families that have too few samples for a fit of their own: their time above the floor over this
    # family's.
    leaf_scales: dict[str, float] = {}
    # Constants of `kernel_times.tiled`, which then stand for the rates and the saturation; empty where a roofline fits
    # as well.
    tiling: dict[str, float] = {}
    # Microseconds of each thing that `graph.features.read` counts for the family; shipped fits may lack the last ones.
    loop_us: tuple[float, ...] = msgspec.field(default=(), name="efforts")
    # Whether the residual's covariance is the exponential of a sum of distances, as suits times that jump with the
    # choice of tiles; else Matern 3/2.
    jumps: bool = False
    # What the last-level cache holds, and how many times as fast activations come that lie there; 0 and 1 where no
    # datasheet tells.
    cache_bytes: float = 0.0
    cache_gain: float = 1.0


class SizeCorrection(_Record, frozen=True):
    """Kernels' times are multiplied by (size / centre) ** exponent; sizes beyond `low` and `high` count as those."""

    of: str  # the size: "time" in microseconds, or "window" and "channels" of convolutions; see `prediction.pricing`
    exponent: float
    centre: float
    low: float
    high: float


class DispatchFit(_Record, frozen=True):
    """What is a runtime's own: its host costs, and where its kernels are not PyTorch's.

    `costs_us` maps a host class to microseconds; a class that is missing falls back to its own prefix
    ("view.transpose" to "view") and at last to "". `scale` is what the same op costs inside a network over what it
    costs in a loop of its own. `cold_costs_us` is what a dispatch takes longer at most whose code has left the
    caches, half of it once `cold_bytes` have passed since the last of its class (see `latpred.prediction.pricing`);
    `cold_calls` is the same of the module and Python calls before it, as a multiple of what they take.

    `kernels` (precision, then family) come before those of the profile. What is not in it takes the profile's times,
    times `kernel_scales` of its format and kind or family ("bf16.conv.3x3"), else of the kind or family alone, or of
    all others (""). All take `size_corrections`, one after the other, which an adaptation to measured architectures may
    find. `gap_us` replaces the stream's gap between two kernels.
    """

    costs_us: dict[str, float]
    module_call_us: float
    python_call_us: float
    fixed_us: float
    scale: float = 1.0
    half_scale: float = 1.0  # of a GPU's host: what fp16 and bf16 take over fp32, as libraries look longer for kernels
    cold_costs_us: dict[str, float] = {}
    cold_bytes: float = 0.0
    cold_calls: float = 0.0
    attribute_read_us: float = 0.0  # beyond what another Python call takes
    spread: float = 0.0  # standard deviation of the log error of whole networks that the fit left out
    busy_spread: float | None = None  # the same where the device sets the pace; None where it is not known apart
    # Standard deviation of the log of what the asker's host takes over the profile's: of hosts with such a GPU, where
    # nobody said which one it is; 0 where the profile is of that host.
    host_spread: float = 0.0
    kernels: dict[str, dict[str, KernelFit]] = {}
    kernel_scales: dict[str, float] = {}
    size_corrections: tuple[SizeCorrection, ...] = msgspec.field(default=(), name="kernel_tilts")
    gap_us: float | None = None
    untested: int = 0  # architectures that a correction rests on, where they were too few to put it to a test
    tested_batches: tuple[int, ...] = ()  # of the rows that a correction rests on; empty where there is none

    @property
    def device_spread(self) -> float:
        """`busy_spread`, or what stands for it where it is not known apart."""
        return self.spread if self.busy_spread is None else self.busy_spread


# Prices in the order of `graph.Calls`.
call_prices: Callable[[DispatchFit], tuple[float, ...]] = attrgetter(
    "module_call_us", "python_call_us", "attribute_read_us"
)


class Sample(_Record, frozen=True):
    """One timed cell: median and half the interquartile range in microseconds, over n repeats."""

    cell: str
    median_us: float
    spread_us: float
    n: int


class Acceptance(_Record, frozen=True):
    """Verdict of the acceptance gate: what was checked, what was found, what to do."""

    passed: bool  # of the device and eager
    checks: dict[str, str]
    advice: tuple[str, ...]
    runtimes: dict[str, bool] = {}  # the same of each other runtime that was calibrated

    @property
    def all_passed(self) -> bool:
        return self.passed and all(self.runtimes.values())


class Checkpoint(_Record, frozen=True):
    """Where a calibration stood: seconds spent, cells measured, and the median error on networks that no fit saw."""

    seconds: float
    cells: int
    error: float


class DeviceProfile(_Record, frozen=True):
    """One device on one machine, ready to predict with."""

    name: str
    schema: int
    created: str  # ISO 8601, UTC
    provenance: str  # "measured", "fitted from published measurements" or "datasheet"
    machine: Machine
    device: DeviceInfo
    protocol: dict[str, str]
    runtimes: dict[str, DispatchFit]
    kernels: dict[str, dict[str, KernelFit]]  # precision, then family
    samples: tuple[Sample, ...]
    acceptance: Acceptance
    seconds: float  # what the calibration took
    learning: tuple[Checkpoint, ...] = ()
    speed: dict[str, float] = {}  # microseconds of the reference work at the speed that all times hold for
    usual: dict[str, float] = {}  # fields of `host.Slowdown`: usual moments of the calibration against that speed
    disturbed: float = 0.0  # share of the cells that other work disturbed until the end
    slowed: float = 0.0  # share of the cells that found no moment at full speed
    failures: dict[str, int] = {}  # cells that could not be measured, by reason
    sha256: str = ""

    def __repr__(self) -> str:
        known = f"{', '.join(self.runtimes)} in {', '.join(self.kernels)}"
        gate = "passed" if self.acceptance.passed else "failed"
        return f"DeviceProfile({self.name}, {self.provenance} {self.created}: {known}, gate {gate})"


REPAIR = "Restore it from a copy, or make a new one with: latpred calibrate"
UPGRADE = "Install a newer latpred, or make the file anew with this one."


def encode(profile: DeviceProfile) -> bytes:
    """The document, with the sha256 of its own body; numbers that are not finite, which JSON has not, are refused."""
    document = to_document(profile)
    document["sha256"] = _digest(document)
    data = msgspec.json.encode(document)
    try:
        msgspec.json.decode(data, type=DeviceProfile)
    except msgspec.ValidationError as error:  # JSON has null where a number is not finite
        raise ProfileError(
            f"profile {profile.name!r} cannot be saved, as a number is not finite: {error}. Calibrate again, with "
            "--fresh."
        ) from None
    return msgspec.json.format(data, indent=1) + b"\n"


def to_document(profile: DeviceProfile) -> dict[str, Any]:
    """The profile as JSON-able builtins."""
    return cast("dict[str, Any]", msgspec.to_builtins(profile))


def decode(data: bytes, source: str) -> DeviceProfile:
    """Read what `encode` wrote; `source` is what messages call it."""
    document = _parse(data, source)
    _check_schema(document, source)
    try:
        profile = msgspec.convert(document, DeviceProfile)
    except msgspec.ValidationError as error:
        newer = "unknown field" in str(error) and document.get("sha256") == _digest(document)
        advice = f"A newer latpred wrote it. {UPGRADE}" if newer else REPAIR
        raise ProfileError(f"{source} is not a valid profile: {error}. {advice}") from None
    if document.get("sha256") != _digest(document):
        raise ProfileError(f"{source} was altered after it was written: its sha256 does not match its body. {REPAIR}")
    return profile


def _parse(data: bytes, source: str) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{source} is damaged: {str(error).rstrip('.')}. {REPAIR}") from None
    if not isinstance(document, dict):
        raise ProfileError(f"{source} is JSON but not a profile: it holds a {type(document).__name__}. {REPAIR}")
    return document


SHOWN = "latpred.profile/1"  # schema of what commands print of a profile


def _check_schema(document: dict[str, Any], source: str) -> None:
    schema = document.get("schema")
    if schema == SHOWN:
        raise ProfileError(
            f"{source} holds what a command printed of a profile, not the profile. Its file is what "
            "`latpred profiles path NAME` prints; copy that one."
        )
    if type(schema) is not int:
        raise ProfileError(f"{source} is JSON but not a profile: it states no schema version. {REPAIR}")
    if schema != SCHEMA_VERSION:
        advice = UPGRADE if schema > SCHEMA_VERSION else REPAIR
        raise ProfileError(f"{source} has schema {schema} and this latpred reads {SCHEMA_VERSION}. {advice}")


def _digest(document: dict[str, Any]) -> str:
    body = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(msgspec.json.encode(body, order="sorted")).hexdigest()
