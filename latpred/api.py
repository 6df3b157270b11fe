"""`latpred.predict` and `latpred.max_batch`: from a model and a device's name to a prediction, in one call.

The predictor of a device is found by its profile, with what may not hold of that here, and kept until the file changes.
A machine that has no profile yet is calibrated for eager where no device is named (`LATPRED_CALIBRATE=never` prevents
it).
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from platform import python_version
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from latpred import host, runtimes, storage
from latpred.errors import NoProfileError, ProfileError, RuntimeRefusalError, UsageError
from latpred.prediction import host_swap
from latpred.prediction.prediction import Curve, Prediction, joined
from latpred.prediction.predictor import Predictor
from latpred.profile import datasheet, host_profile, store
from latpred.profile.document import ADAPTED, FITTED, THREADS, DeviceProfile
from latpred.profile.store import Owner, caveat, difference, owner
from latpred.progress import each_tenth
from latpred.query import MOST_BATCH, DeviceQuery, GivenLengths, Options, checked_batches, checked_lengths, is_one
from latpred.runtimes import lowering
from latpred.runtimes.legacy_torch import traced_for

if TYPE_CHECKING:
    from latpred.query import Device, Lengths, Model

    class _Asked(TypedDict, total=False):
        """What `predict` may be asked beside batch and runtime, for its overloads."""

        inputs: Any
        seq: int | None
        image: int | None
        lengths: Lengths | Sequence[int] | None
        execution: str
        device: Device | None
        host: float | str | None
        precision: str | None
        memory_format: str | None
        attention: str | None
        threads: int | None
        cudnn_benchmark: bool | None
        protocol: str
        inputs_on: str
        now: bool


VARIABLE = "LATPRED_CALIBRATE"
CHOICES = ("quick", "never")
_THREAD_SETTINGS = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_")  # beginnings of variables of the environment
MOSTLY = 0.5  # of a calibration's cells, from which slow moments are what a user mostly meets
_PACKAGES = ("torch", "transformers")  # whose versions are compared with those that a profile was measured with


@overload
def predict(model: Model, batch: int = 1, runtime: str = "eager", **asked: Unpack[_Asked]) -> Prediction: ...
@overload
def predict(model: Model, batch: Sequence[int], runtime: str = "eager", **asked: Unpack[_Asked]) -> Curve: ...
def predict(
    model: Model,
    batch: int | Sequence[int] = 1,
    runtime: str = "eager",
    *,
    inputs: Any = None,
    seq: int | None = None,
    image: int | None = None,
    lengths: Lengths | Sequence[int] | None = None,
    execution: str = "padded",
    device: Device | None = None,
    host: float | str | None = None,
    precision: str | None = None,
    memory_format: str | None = None,
    attention: str | None = None,
    threads: int | None = None,
    cudnn_benchmark: bool | None = None,
    protocol: str = "single",
    inputs_on: str = "device",
    now: bool = False,
) -> Prediction | Curve:
    """Predict how long one forward pass takes.

    Parameters
    ----------
    model : torch.nn.Module, str or ModelGraph
        A module, a name ("bert-base-uncased", "torchvision:resnet50", "file.py:build"), an .onnx file (for runtimes
        that run those), or what `latpred.trace` gave.
    batch : int or sequence of int
        One batch size for a `Prediction`, several for a `Curve`.
    runtime : str
        One of `latpred.runtimes.names()`, as "eager" or "onnxruntime".
    inputs : tuple or dict, optional
        Example inputs of the model's forward, for models whose inputs do not follow from their config.
    seq, image : int, optional
        Sequence length in tokens, or image side in pixels.
    lengths : sequence of int or Lengths, optional
        Tokens of each sequence, whose number is then the batch; or `latpred.Lengths(mean=, std=, padded_to=)`, of which
        every batch gets a typical one. For transformers models of tokens and for nn.TransformerEncoder.
    execution : str
        What is done about unequal lengths. "padded": everything at the padded length. "nested": torch's nested tensors
        in nn.TransformerEncoder. "packed": one row of all tokens (transformers models; an estimate).
    device : str, path or torch.device, optional
        "cpu", "cuda:0" or "simulated" as calibrated on this machine, or the name or path of a profile. Without it, this
        machine's own GPU if it was calibrated, else its CPU. A GPU without a profile is predicted from its datasheet;
        a machine without any is calibrated first, its CPU for up to 3 minutes (LATPRED_CALIBRATE=never prevents it).
    host : float or str, optional
        Another host than the profile's: its dispatch over the profile's host's, "this" for the host that asks, the name
        of a host profile (`latpred calibrate --host-only`), or of a CPU that latpred knows, as in host="EPYC 7742"
        (`latpred profiles list --hosts`). Kernel times stay.
    precision : str, optional
        fp32, tf32, fp16, bf16 or fp64; without it, that of the model's parameters. amp-fp16 or amp-bf16: weights in
        fp32, each forward pass in a `torch.autocast` of its own (eager, cuda-graphs and compile).
    memory_format : str, optional
        "contiguous" or "channels_last"; without it, contiguous or that of the graph.
    attention : str, optional
        How attention is computed: "eager", as products and softmax, or "sdpa", in one call; without it, as the model
        does, or did with the PyTorch that the profile is of.
    threads : int, optional
        Threads that an op may use on the CPU: asks for a profile measured with so many.
    cudnn_benchmark : bool, optional
        Asks for a profile measured with `torch.backends.cudnn.benchmark` on, or off.
    protocol : str
        "single": each forward is waited for. "pipelined": forwards follow each other, as in a throughput benchmark.
    inputs_on : str
        "device", or "host" to add the copy of the inputs. A CPU copies none.
    now : bool
        Time small reference work for a second, and answer for the machine as it is at this moment, and for no other
        host. Without it the answer is for the usual moments of the calibration.

    Returns
    -------
    Prediction or Curve
        Milliseconds, with interval, regime, crossover, breakdown and provenance.

    Raises
    ------
    UsageError
        When an argument is wrong.
    TraceError
        When the model cannot be traced.
    ProfileError
        When there is no profile of the device, or it does not cover what was asked.

    Examples
    --------
    >>> predict("bert-base-uncased", batch=[1, 8, 32])  # doctest: +SKIP
    """
    sizes = checked_batches(batch)
    tokens = None if lengths is None else checked_lengths(lengths)
    given = (inputs, seq, image, precision, memory_format, attention, tokens, execution)
    options = Options(*given, runtime, protocol, inputs_on)
    if isinstance(tokens, GivenLengths) and is_one(batch) and sizes == (1,):  # as where no batch was given
        sizes = (len(tokens.values),)
    predictor = predictor_of(DeviceQuery(device, host, threads, cudnn_benchmark, now), runtime)
    curve = curve_of(predictor, model, sizes, options)
    return curve.points[0] if is_one(batch) else curve


def curve_of(predictor: Predictor, model: Model, batches: Sequence[int], options: Options) -> Curve:
    """What `predict` says, with a predictor that is there already."""
    asked = {"runtime": options.runtime, "protocol": options.protocol, "inputs_on": options.inputs_on}
    if options.lengths is None:
        return predictor.curve(predictor.trace(model, options, batches), batches, **asked)
    with traced_for(predictor.era):
        return _curve_of_lengths(predictor, model, batches, options, asked)


def _curve_of_lengths(
    predictor: Predictor, model: Any, batches: Sequence[int], options: Options, asked: dict[str, str]
) -> Curve:
    """Batches of unequal lengths; where nothing is padded, each has a graph of its own."""
    from latpred.runtimes.cuda_graphs import as_captured
    from latpred.tracing.unequal_lengths import trace_lengths

    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    if lowering.is_onnx_file(model) or not (isinstance(model, str) or hasattr(model, "named_modules")):
        raise UsageError(
            "lengths= needs a PyTorch model or the name of one: a graph, and an .onnx file, has the inputs that it was "
            "made with."
        )
    execution, lengths = options.execution, options.lengths
    assert lengths is not None
    traced: dict[str, Any] = {"target": predictor.target, "precision": options.precision}
    of_batches = [lengths.of(batch) for batch in batches]
    if execution == "padded":
        with as_captured() if options.runtime == "cuda-graphs" else nullcontext():
            graph = trace_lengths(model, of_batches[-1], lengths.padded_to, execution, batches=batches, **traced)
        return predictor.curve(graph, batches, **asked)
    if options.runtime != "eager":
        raise RuntimeRefusalError(
            f"{options.runtime} runs graphs of fixed shapes, so nothing {execution}; ask for execution='padded', or "
            "for eager."
        )
    points = []
    for batch, tokens in zip(batches, of_batches, strict=True):
        graph = trace_lengths(model, tokens, lengths.padded_to, execution, **traced)
        points.append(predictor.predict(graph, batch, **asked))
    return joined(points, asynchronous=predictor.profile.device.asynchronous)


def max_batch(
    model: Model,
    latency_ms: float,
    runtime: str = "eager",
    *,
    inputs: Any = None,
    seq: int | None = None,
    image: int | None = None,
    device: Device | None = None,
    host: float | str | None = None,
    precision: str | None = None,
    memory_format: str | None = None,
    attention: str | None = None,
    threads: int | None = None,
    cudnn_benchmark: bool | None = None,
    protocol: str = "single",
) -> int:
    """The largest batch whose latency stays within a limit and which fits the device's memory; 0 when there is none.

    1,048,576 is the largest that is tried: it stands for that and more, and a warning says so.

    Parameters
    ----------
    model, runtime, inputs, seq, image, device, host, precision, memory_format, attention, protocol
        As for `predict`.
    latency_ms : float
        The limit in milliseconds.
    threads, cudnn_benchmark
        As for `predict`.

    Raises
    ------
    UsageError, TraceError, ProfileError
        As for `predict`.

    Examples
    --------
    >>> max_batch("resnet50", latency_ms=50)  # doctest: +SKIP
    """
    options = Options(inputs, seq, image, precision, memory_format, attention, runtime=runtime, protocol=protocol)
    predictor = predictor_of(DeviceQuery(device, host, threads, cudnn_benchmark), runtime)
    largest = predictor.max_batch(predictor.trace(model, options), latency_ms, runtime=runtime, protocol=protocol)
    if largest == MOST_BATCH:
        said = f"{largest:,} is the largest batch that is tried: larger ones may keep {latency_ms:g} ms and fit, too"
        warnings.warn(said, stacklevel=2)
    return largest


def predictor_of(query: DeviceQuery, runtime: str | None = None, *, beside: Sequence[str] = ()) -> Predictor:
    """The predictor of a device, kept until a profile changes on disk; it must know the runtime, if one is given.

    Runtimes `beside` it are asked for too, where the profile has them.
    """
    names = beside if runtime is None else (runtime, *beside)
    for name in names:
        runtimes.get(name)  # a misspelt one is said before a missing profile
    plain = replace(query, now=False) if query.now else query
    try:
        predictor = _remembered(plain, _state_of(query))
    except NoProfileError as missing:
        demand_quick(plain, names, missing)
        if plain.device is not None or not allowed():
            raise
        _calibrate()
        predictor = _remembered(plain, _state_of(query))
    if runtime is not None:
        predictor.check(runtime)
    return predictor_now(predictor) if query.now else predictor


def profile_of(query: DeviceQuery) -> DeviceProfile:
    """The profile that predictions for a device rest on; nothing is calibrated for it."""
    return store.find(query.device, threads=query.threads, cudnn_benchmark=query.cudnn_benchmark)  # type: ignore[arg-type]


@lru_cache(maxsize=8)
def _remembered(query: DeviceQuery, _state: tuple[object, ...]) -> Predictor:
    profile = profile_of(query)
    settings = [*_other_threads(query, profile), *_autotuned(query, profile)]
    if query.host is None:
        return Predictor(profile, [*_foreign(profile), *settings])
    swap = host_swap.find(query.host, profile)
    return Predictor(host_swap.swapped(profile, swap), [swap.caveat, *_foreign(profile, swapped=True), *settings])


def _state_of(query: DeviceQuery) -> tuple[object, ...]:
    """Differs whenever a profile, or what is said of it, may have changed."""
    folders = [storage.profiles_dir()] if query.host is None else [storage.profiles_dir(), host_profile.directory()]
    files = chain.from_iterable(map(storage.documents, folders))
    return (*map(str, folders), _threads_now(), *map(_file_state, (query.device, query.host, *files)))


def _file_state(named: object) -> tuple[object, ...]:
    """What tells one content of a file from another."""
    if not isinstance(named, str | os.PathLike):  # nothing, or the factor of a host
        return (named,)
    try:
        status = os.stat(named)
    except OSError:
        return (named,)
    return (named, status.st_mtime_ns, status.st_size)


def predictor_now(predictor: Predictor) -> Predictor:
    """The same predictor for the machine as it is at this moment: a second of timing says how fast that is."""
    profile = predictor.profile
    reason = ""
    if profile.provenance != "measured":
        source = "from a datasheet" if profile.provenance == datasheet.PROVENANCE else profile.provenance
        reason = f"is {source}, of no machine whose present speed could be timed"
    elif owner(profile.machine) is Owner.ANOTHER:
        whose = f"{profile.machine.cpu}, {difference(profile.machine)}"
        reason = f"was measured on another machine ({whose}), whose present speed cannot be timed here"
    elif not profile.speed:
        reason = "does not record how fast the machine was when it was measured"
    if reason:
        raise ProfileError(
            f"profile {profile.name!r} {reason}. Ask without now=True (--now), or make a profile of this machine: "
            "latpred calibrate"
        )
    from latpred.calibration.timing.reference_speed import speed_now

    asynchronous = profile.device.asynchronous
    now = speed_now(1 if asynchronous else profile.machine.threads, host_only=asynchronous)
    slowdown = host.slowdown(profile.speed, now, asynchronous=asynchronous)
    ratios = host.sentence(host.ratio(profile.speed, now))
    said = f"adjusted to the present speed of the machine; reference times, relative to the profile's: {ratios}"
    of_other_moments = _mostly_slow(profile)
    kept = (caveat for caveat in predictor.caveats if caveat not in of_other_moments)
    return Predictor(profile, (*kept, said), slowdown)


def allowed() -> bool:
    """Whether a machine without a profile may be calibrated without being asked."""
    value = os.environ.get(VARIABLE, "").strip().lower() or CHOICES[0]
    if value not in CHOICES:
        raise UsageError(f"{VARIABLE}={value!r} is not known; set it to {' or '.join(CHOICES)}.")
    return value != "never"


def demand_quick(query: DeviceQuery, names: Sequence[str], missing: NoProfileError) -> None:
    """Raise the error of a missing profile where the quick calibration makes none that answers the query.

    It measures eager alone, with the settings that PyTorch has by itself. A misspelt host is said first.
    """
    if query.host is not None:
        host_swap.demand_known(str(query.host))
    others = ",".join(name for name in dict.fromkeys(names) if name != "eager")
    if others and "Make one with: " in str(missing):
        raise NoProfileError(f"{missing} --runtimes {others}") from None
    if others or query.threads is not None or query.cudnn_benchmark is not None:
        raise missing


def busy_note() -> str:
    """What to know before a calibration beside other work, part of a sentence; "" when the processors are free."""
    from latpred.calibration.timing.disturbance import busy_now

    busy = busy_now()
    return f"; {busy}, so figures will be rough" if busy else ""


def _calibrate() -> None:
    from latpred.calibration import calibrate

    _say(
        f"no profile of this machine in {store.directory()}; calibrating its CPU now, once, in one to three minutes "
        f"(latpred calibrate is more exact and does a GPU; {VARIABLE}=never switches this off){busy_note()}"
    )
    profile = calibrate("cpu", quick=True, progress=each_tenth("calibrating", _say))
    _say(f"calibrated: {store.file_of(profile.name)}")


def _say(sentence: str) -> None:
    print(f"latpred: {sentence}", file=sys.stderr, flush=True)


def _foreign(profile: DeviceProfile, *, swapped: bool = False) -> list[str]:
    """Caveats: how this machine and its software differ from those that the profile was measured with."""
    machine = profile.machine
    if profile.provenance == datasheet.PROVENANCE:
        others = store.others_of_gpu(profile)
        return [f"there is a profile of this GPU: ask for it with --device {others[0]}"] if others else []
    if profile.provenance == FITTED:
        of = f"fitted to published latencies of a {machine.accelerator}"
        if swapped:
            return [f"kernel times were {of}"]
        return [f"{of}, then adapted to those measured on one host" if ADAPTED in profile.protocol else of]
    whose = owner(machine)
    if whose is Owner.ANOTHER and swapped:
        return [f"kernel times were measured on another machine ({machine.accelerator or machine.cpu})"]
    if whose is Owner.ANOTHER:
        return [caveat(profile)]
    here = {"python": python_version()} | dict.fromkeys(_PACKAGES, "none") | host.versions(*_PACKAGES)
    others = [
        f"measured with {name} {machine.stack[name]}, here it is {version}: times may differ; measure anew with: "
        + store.calibration(profile)
        for name, version in here.items()
        if machine.stack.get(name, version) != version
    ]
    return [*others, *_mostly_slow(profile)] if whose is Owner.THIS else [caveat(profile), *others]


def _mostly_slow(profile: DeviceProfile) -> list[str]:
    """What predictions from a profile say whose machine was slow in most moments of its calibration."""
    said = (
        f"the machine was slow around {profile.slowed:.0%} of the cells of its calibration: this is for its other "
        "moments, and now=True (--now) for the present one"
    )
    return [said] if profile.slowed > MOSTLY else []


def _other_threads(query: DeviceQuery, profile: DeviceProfile) -> list[str]:
    """A caveat where PyTorch uses another number of threads here, unless the profile was asked for by its threads."""
    meant = query.threads is not None or (THREADS in profile.protocol and query.device is not None)
    if meant or profile.device.kind != "cpu" or owner(profile.machine) is Owner.ANOTHER:
        return []
    here, then = _threads_now(), profile.machine.threads
    if here == then:
        return []
    return [
        f"measured with {store.threads_text(then)}, but torch uses {here} here: make a profile for that with "
        f"latpred calibrate --device cpu --threads {here}, or set torch.set_num_threads({then}) where the model runs"
    ]


def _autotuned(query: DeviceQuery, profile: DeviceProfile) -> list[str]:
    """A caveat where cudnn's autotuning was on for the calibration, unless the profile was asked for by that."""
    found = query.device is None or (isinstance(query.device, str) and store.is_live(query.device))
    if not found or query.cudnn_benchmark is not None or not store.cudnn_benchmarked(profile):
        return []
    return [
        "measured with torch.backends.cudnn.benchmark on, which PyTorch has off: ask with cudnn_benchmark=True "
        "(--cudnn-benchmark) where it is on, or make a profile without it: latpred calibrate --device "
        f"{store.live_name(profile)}"
    ]


def _threads_now() -> int:
    """Threads that PyTorch uses here and now; before it is loaded, as many as in the last process like this one."""
    if "torch" in sys.modules:
        return _threads_of_torch()
    remembered = storage.cache_dir() / "threads" / _threads_key()
    with suppress(OSError, ValueError):
        return int(remembered.read_text(encoding="utf-8"))
    threads = _threads_of_torch()
    with suppress(OSError):
        storage.write(remembered, str(threads).encode())
    return threads


def _threads_of_torch() -> int:
    import torch

    return torch.get_num_threads()


def _threads_key() -> str:
    """Digest of what decides how many threads PyTorch and its libraries use."""
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_THREAD_SETTINGS))
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [host.cores()]
    told = "\n".join([*host.versions("torch").values(), host.cpu_name(), host.cpu_model(), str(usable), *settings])
    return hashlib.sha256(told.encode()).hexdigest()[:32]
