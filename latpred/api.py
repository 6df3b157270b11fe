"""`latpred.predict` and `latpred.max_batch`: from a model and a device's name to a prediction, in one call.

They trace the model, find the profile and hand both to `latpred.predictor`. Nothing here measures: without a profile
the error says how to make one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any, overload

from latpred import datasheet, hostprofile, hostswap, profiles, runtimes
from latpred.errors import UsageError
from latpred.graph import ModelGraph
from latpred.host import cpu_name
from latpred.prediction import Curve, Prediction
from latpred.predictor import Predictor, checked_batches
from latpred.profile import DeviceProfile
from latpred.runtimes import walking

if TYPE_CHECKING:
    import torch

    Model = torch.nn.Module | str | os.PathLike[str] | ModelGraph
    Device = torch.device | str | os.PathLike[str]

_COMPARED = ("torch", "transformers")


@overload
def predict(
    model: Model,
    batch: int = 1,
    runtime: str = "eager",
    *,
    inputs: Any = None,
    seq: int | None = None,
    image: int | None = None,
    device: Device | None = None,
    host: float | str | None = None,
    precision: str | None = None,
    protocol: str = "single",
    inputs_on: str = "device",
) -> Prediction: ...
@overload
def predict(
    model: Model,
    batch: Sequence[int],
    runtime: str = "eager",
    *,
    inputs: Any = None,
    seq: int | None = None,
    image: int | None = None,
    device: Device | None = None,
    host: float | str | None = None,
    precision: str | None = None,
    protocol: str = "single",
    inputs_on: str = "device",
) -> Curve: ...
def predict(
    model: Model,
    batch: int | Sequence[int] = 1,
    runtime: str = "eager",
    *,
    inputs: Any = None,
    seq: int | None = None,
    image: int | None = None,
    device: Device | None = None,
    host: float | str | None = None,
    precision: str | None = None,
    protocol: str = "single",
    inputs_on: str = "device",
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
    device : str, path or torch.device, optional
        "cpu", "cuda:0" or "simulated" as calibrated on this machine, or the name or path of a profile. Without it, this
        machine's own GPU if it was calibrated, else its CPU. A GPU without a profile is predicted from its datasheet.
    host : float or str, optional
        Another host than the profile's: its dispatch over the profile's host's, "this" for the host that asks, or the
        name of a host profile (`latpred calibrate --host-only`). Kernel times stay.
    precision : str, optional
        fp32, tf32, fp16 or bf16; without it, that of the model's parameters.
    protocol : str
        "single": each forward is waited for. "pipelined": forwards follow each other, as in a throughput benchmark.
    inputs_on : str
        "device", or "host" to add the copy of the inputs.

    Returns
    -------
    Prediction or Curve
        Milliseconds, with interval, regime, crossover, breakdown and provenance.

    Raises
    ------
    UsageError
        When an argument is wrong.
    TraceError
        When the model cannot be walked.
    ProfileError
        When there is no profile of the device, or it does not cover what was asked.

    Examples
    --------
    >>> predict("bert-base-uncased", batch=[1, 8, 32])  # doctest: +SKIP
    """
    one = isinstance(batch, bool | float | str) or not hasattr(batch, "__len__")
    sizes = checked_batches([batch] if one else batch)  # type: ignore[list-item, arg-type]
    runtimes.get(runtime)  # a misspelt one is said before a missing profile
    predictor = _predictor(device, host)
    graph = _graph(model, inputs, seq, image, precision, runtime, predictor)
    curve = predictor.curve(graph, sizes, runtime=runtime, protocol=protocol, inputs_on=inputs_on)
    return curve[0] if one else curve


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
    protocol: str = "single",
) -> int:
    """The largest batch whose latency stays within a limit and which fits the device's memory; 0 when there is none.

    Parameters
    ----------
    model, runtime, inputs, seq, image, device, host, precision, protocol
        As for `predict`.
    latency_ms : float
        The limit in milliseconds.

    Raises
    ------
    UsageError, TraceError, ProfileError
        As for `predict`.

    Examples
    --------
    >>> max_batch("resnet50", latency_ms=50)  # doctest: +SKIP
    """
    runtimes.get(runtime)
    predictor = _predictor(device, host)
    graph = _graph(model, inputs, seq, image, precision, runtime, predictor)
    return predictor.max_batch(graph, latency_ms, runtime=runtime, protocol=protocol)


def predictor_of(device: Device | None) -> Predictor:
    """What predicts on a device, as `predict` finds it; kept until a profile changes on disk."""
    return _predictor(device)


def _graph(
    model: Model,
    inputs: Any,
    seq: int | None,
    image: int | None,
    precision: str | None,
    runtime: str,
    predictor: Predictor,
) -> ModelGraph:
    """The graph that the runtime lowers on the predictor's device."""
    if not isinstance(model, ModelGraph):
        target = walking.target_of(predictor.profile.device.kind)
        return walking.walk(model, inputs, runtime=runtime, target=target, seq=seq, image=image, precision=precision)
    given = {"inputs": inputs, "seq": seq, "image": image}
    extra = [name for name, value in given.items() if value is not None]
    if extra:
        raise UsageError(
            f"A traced graph has its inputs already; leave out {', '.join(extra)}, or trace again with them."
        )
    if precision not in (None, model.precision):
        raise UsageError(f"This graph was traced in {model.precision}; trace it again to predict {precision}.")
    return model


def _predictor(device: Device | None, host: float | str | None = None) -> Predictor:
    """The predictor of a device, kept until a profile changes on disk."""
    name = None if device is None else os.fspath(device) if isinstance(device, os.PathLike) else str(device)
    file = () if name is None else _state(name)
    state = (str(profiles.directory()), file, *_directory_state(profiles.directory()))
    if host is not None:
        state = (*state, *_directory_state(hostprofile.directory()))
    return _predictor_of(name, isinstance(device, os.PathLike), host, state)


@lru_cache(maxsize=8)
def _predictor_of(device: str | None, is_path: bool, host: float | str | None, _state: tuple[object, ...]) -> Predictor:
    profile = profiles.load(Path(device)) if device is not None and is_path else profiles.find(device)
    if host is None:
        return Predictor(profile, _foreign(profile))
    swap = hostswap.find(host, profile)
    return Predictor(hostswap.swapped(profile, swap), [swap.caveat, *_foreign(profile, swapped=True)])


def _directory_state(folder: Path) -> list[tuple[object, ...]]:
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [(name, *_state(os.fspath(folder / name))) for name in names]


def _state(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_size)


def _foreign(profile: DeviceProfile, *, swapped: bool = False) -> list[str]:
    """What this machine and its software do not share with the one the profile was measured on."""
    machine = profile.machine
    if profile.provenance == datasheet.PROVENANCE:
        return []
    if not profiles.is_own(machine):
        if swapped:
            return [f"kernel times were measured on another machine ({machine.accelerator or machine.cpu})"]
        where = machine.accelerator or machine.cpu
        return [
            f"measured on another machine ({machine.cpu}, here {cpu_name()}): kernel times hold on {where}, "
            "dispatch costs may differ"
        ]
    here = {"python": python_version(), **{name: _version(name) for name in _COMPARED}}
    return [
        f"measured with {name} {machine.stack[name]}, here is {version}"
        for name, version in here.items()
        if machine.stack.get(name, version) != version
    ]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
