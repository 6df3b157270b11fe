"""`latpred.predict` and `latpred.max_batch`: from a model and a device's name to a prediction, in one call.

They walk the model, let `latpred.prediction.find` find the profile, and hand both to `latpred.prediction.predictor`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from latpred import runtimes
from latpred.errors import RuntimeRefusalError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.lengths import EXECUTIONS, Lengths, checked_lengths
from latpred.prediction.find import located, predictor_now, predictor_of
from latpred.prediction.prediction import Curve, Prediction, joined
from latpred.prediction.predictor import Predictor, checked_batches, is_one
from latpred.runtimes import lowering
from latpred.runtimes.legacy_torch import traced_for
from latpred.runtimes.lowering import target_of


def lengths_curve(
    predictor: Predictor,
    model: Any,
    batches: NDArray[np.int64],
    lengths: Lengths | Sequence[int],
    execution: str = "padded",
    *,
    runtime: str = "eager",
    precision: str | None = None,
    protocol: str = "single",
    inputs_on: str = "device",
) -> Curve:
    """Predict batches of unequal lengths."""
    from latpred.tracing.unequal_lengths import trace_lengths

    if execution not in EXECUTIONS:
        raise UsageError(f"execution={execution!r} is not known; choose from: {', '.join(EXECUTIONS)}.")
    if not isinstance(model, str) and not hasattr(model, "named_modules"):
        raise UsageError("lengths= needs the model itself: a graph was walked with the inputs it has.")
    given = checked_lengths(lengths)
    if not isinstance(given, Lengths) and batches.tolist() == [1]:
        batches = np.array([len(given.values)])
    asked: dict[str, Any] = {"runtime": runtime, "protocol": protocol, "inputs_on": inputs_on}
    target = target_of(predictor.profile.device.kind)
    if execution == "padded":
        typical = [given.of(batch) for batch in batches.tolist()][-1]
        graph = trace_lengths(model, typical, given.padded_to, execution, target=target, precision=precision)
        return predictor.curve(graph, batches, **asked)
    if runtime != "eager":
        raise RuntimeRefusalError(
            f"{runtime} runs graphs of fixed shapes, so nothing {execution}; ask for execution='padded', or for eager."
        )
    points = []
    for batch in batches.tolist():
        graph = trace_lengths(model, given.of(batch), given.padded_to, execution, target=target, precision=precision)
        points.append(predictor.predict(graph, batch, **asked))
    return joined(points)


if TYPE_CHECKING:
    import pandas as pd
    import torch

    from latpred.lengths import Lengths
    from latpred.progress import ProgressEvent

    Model = torch.nn.Module | str | os.PathLike[str] | ModelGraph
    Device = torch.device | str | os.PathLike[str]


@overload
def predict(
    model: Model,
    batch: int = 1,
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
    threads: int | None = None,
    cudnn_benchmark: bool | None = None,
    protocol: str = "single",
    inputs_on: str = "device",
    now: bool = False,
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
    lengths: Lengths | Sequence[int] | None = None,
    execution: str = "padded",
    device: Device | None = None,
    host: float | str | None = None,
    precision: str | None = None,
    memory_format: str | None = None,
    threads: int | None = None,
    cudnn_benchmark: bool | None = None,
    protocol: str = "single",
    inputs_on: str = "device",
    now: bool = False,
) -> Curve: ...
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
        a machine without any is calibrated first, its CPU for under a minute (LATPRED_CALIBRATE=never prevents it).
    host : float or str, optional
        Another host than the profile's: its dispatch over the profile's host's, "this" for the host that asks, or the
        name of a host profile (`latpred calibrate --host-only`). Kernel times stay.
    precision : str, optional
        fp32, tf32, fp16, bf16 or fp64; without it, that of the model's parameters.
    memory_format : str, optional
        "contiguous" or "channels_last"; without it, contiguous or that of the graph.
    threads : int, optional
        Threads that an op may use on the CPU: asks for a profile measured with so many.
    cudnn_benchmark : bool, optional
        Asks for a profile measured with `torch.backends.cudnn.benchmark` on, or off.
    protocol : str
        "single": each forward is waited for. "pipelined": forwards follow each other, as in a throughput benchmark.
    inputs_on : str
        "device", or "host" to add the copy of the inputs.
    now : bool
        Time small reference work for a second, and answer for the machine as it is at this moment. Without it the
        answer is for the machine at the full speed that its profile was measured at.

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
    one = is_one(batch)
    sizes = checked_batches([batch] if one else batch)  # type: ignore[list-item, arg-type]
    runtimes.get(runtime)  # a misspelt one is said before a missing profile
    predictor = predictor_of(located(device, host, threads, cudnn_benchmark))
    predictor.check(runtime)
    if now:
        predictor = predictor_now(predictor)
    given = Input(inputs, seq, image, precision, memory_format)
    if lengths is None and execution != "padded":
        raise UsageError(f"execution={execution!r} says what is done about unequal lengths; give lengths= too.")
    if lengths is not None:
        _alone(given, "lengths=")
        options: dict[str, Any] = {"precision": precision, "protocol": protocol, "inputs_on": inputs_on}
        curve = lengths_curve(predictor, model, sizes, lengths, execution, runtime=runtime, **options)
    else:
        graph = _graph(model, given, runtime, predictor, sizes.tolist())
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
    memory_format: str | None = None,
    threads: int | None = None,
    cudnn_benchmark: bool | None = None,
    protocol: str = "single",
) -> int:
    """The largest batch whose latency stays within a limit and which fits the device's memory; 0 when there is none.

    Parameters
    ----------
    model, runtime, inputs, seq, image, device, host, precision, memory_format, threads, cudnn_benchmark, protocol
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
    predictor = predictor_of(located(device, host, threads, cudnn_benchmark))
    predictor.check(runtime)
    graph = _graph(model, Input(inputs, seq, image, precision, memory_format), runtime, predictor)
    return predictor.max_batch(graph, latency_ms, runtime=runtime, protocol=protocol)


def predict_many(
    candidates: Iterable[Any],
    *,
    batch: int | Sequence[int] = 1,
    runtime: str | Sequence[str] = "eager",
    device: Device | None = None,
    precision: str | None = None,
    protocol: str = "single",
    inputs: Any = None,
    seq: int | None = None,
    image: int | None = None,
    errors: str = "record",
    n_jobs: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: bool | Callable[[ProgressEvent], None] | None = None,
) -> pd.DataFrame:
    """Predict many candidates of a search at once; what is learnt of one candidate serves the others.

    Parameters
    ----------
    candidates : iterable
        Modules, functions without arguments that build one (called on the meta device, without initialisation),
        transformers configs (their base model), names, or graphs and functions that give them (`latpred.Supernet` has
        the graphs of many architectures quickly). A generator will do.
    batch : int or sequence of int
        Batch sizes.
    runtime : str or sequence of str
        Runtimes.
    device, precision, protocol, inputs, seq, image
        As for `predict`; they hold for all candidates.
    errors : {"record", "raise"}
        A candidate that cannot be built, walked or predicted gets rows that say why ("record"), or ends everything.
    n_jobs : int, optional
        Processes that share the work, -1 for one on each core; without it, this process alone, or the workers of a
        `joblib.parallel_config` that the call stands in, as backend="dask" or "ray". The table is the same to the bit.
        A candidate that cannot be sent to a worker, or that kills it, is an error of its own.
    resume : path, optional
        A Parquet file: what it has is not predicted again, and what is new is added every few seconds. Rows are told
        apart by the candidate's contents with whatever its code names, the question, the profile, and the versions of
        the libraries; a candidate that cannot be told from others, or that failed, is predicted again.
    progress : bool or callable, optional
        True shows a bar with rate and time left on a terminal; a function is told each
        `latpred.progress.ProgressEvent`.

    Returns
    -------
    DataFrame
        One row for each candidate, batch and runtime, in this order: candidate (its position), name, batch, runtime,
        precision, latency_ms, low_ms, high_ms (its 90 % interval), host_ms, device_ms, regime, macs, parameters,
        launches, error (None, or the reason why the numbers are NaN).

    Raises
    ------
    UsageError
        When an argument is wrong.
    ProfileError
        When there is no profile of the device, or it does not cover what was asked.
    CandidateError
        With errors="raise", for the first candidate that fails.

    Examples
    --------
    >>> from transformers import BertConfig
    >>> table = predict_many((BertConfig(num_hidden_layers=n) for n in (2, 4, 8)), batch=[1, 16])  # doctest: +SKIP
    """
    from latpred.search import many

    predictor = predictor_of(located(device))
    options = {"precision": precision, "protocol": protocol, "inputs": inputs, "seq": seq, "image": image}
    running: dict[str, Any] = {"errors": errors, "n_jobs": n_jobs, "resume": resume, "progress": progress}
    return many.predict_many(predictor, candidates, batch=batch, runtime=runtime, **options, **running)


class Input(NamedTuple):
    """What a model is run on, as users give it; see `predict`."""

    inputs: Any = None
    seq: int | None = None
    image: int | None = None
    precision: str | None = None
    memory_format: str | None = None


def _graph(model: Model, given: Input, runtime: str, predictor: Predictor, batches: Sequence[int] = ()) -> ModelGraph:
    """The graph that the runtime lowers on the predictor's device."""
    if isinstance(model, ModelGraph):
        return as_traced(model, given)
    inputs, seq, image, precision, memory_format = given
    with traced_for(predictor.profile.protocol.get("era", "")):
        return lowering.trace_for_runtime(
            model,
            inputs,
            runtime=runtime,
            target=lowering.target_of(predictor.profile.device.kind),
            seq=seq,
            image=image,
            precision=precision,
            memory_format=memory_format or "contiguous",
            batches=batches,
        )


def _alone(given: Input, option: str) -> None:
    """Refuse what lengths take the place of."""
    extra = [name for name in ("inputs", "seq", "image", "memory_format") if getattr(given, name) is not None]
    if extra:
        raise UsageError(f"{option} says what the inputs are; leave out {', '.join(extra)}.")


def as_traced(graph: ModelGraph, given: Input) -> ModelGraph:
    """A graph, unless it is asked to be what it is not.

    Raises
    ------
    UsageError
        When inputs, a precision or a memory format are given that it was not walked with.
    """
    extra = [name for name in ("inputs", "seq", "image") if getattr(given, name) is not None]
    if extra:
        raise UsageError(
            f"A traced graph has its inputs already; leave out {', '.join(extra)}, or trace again with them."
        )
    if given.precision not in (None, graph.precision):
        raise UsageError(f"This graph was traced in {graph.precision}; trace it again to predict {given.precision}.")
    if given.memory_format not in (None, graph.memory_format):
        raise UsageError(
            f"This graph was traced in the {graph.memory_format} format; trace it again for {given.memory_format}."
        )
    return graph
