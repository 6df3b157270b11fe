"""`latpred.predict` and `latpred.max_batch`: from a model and a device's name to a prediction, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from latpred.errors import RuntimeRefusalError, UsageError
from latpred.prediction.find import predictor_of
from latpred.prediction.prediction import Curve, Prediction, joined
from latpred.prediction.predictor import Predictor
from latpred.query import DeviceQuery, GivenLengths, Lengths, Options, checked_batches, checked_lengths, is_one

if TYPE_CHECKING:
    from latpred.query import Device, Model


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
        When the model cannot be traced.
    ProfileError
        When there is no profile of the device, or it does not cover what was asked.

    Examples
    --------
    >>> predict("bert-base-uncased", batch=[1, 8, 32])  # doctest: +SKIP
    """
    sizes = checked_batches(batch)
    options = Options(inputs, seq, image, precision, memory_format, lengths, execution, runtime, protocol, inputs_on)
    predictor = predictor_of(DeviceQuery(device, host, threads, cudnn_benchmark, now), runtime)
    curve = curve_of(predictor, model, sizes, options)
    return curve.points[0] if is_one(batch) else curve


def curve_of(predictor: Predictor, model: Model, batches: Sequence[int], options: Options) -> Curve:
    """What `predict` says, with a predictor that is there already."""
    if options.lengths is not None:
        return _curve_of_lengths(predictor, model, batches, options)
    graph = predictor.trace(model, options, batches)
    return predictor.curve(
        graph, batches, runtime=options.runtime, protocol=options.protocol, inputs_on=options.inputs_on
    )


def _curve_of_lengths(predictor: Predictor, model: Any, batches: Sequence[int], options: Options) -> Curve:
    """Batches of unequal lengths; where nothing is padded, each has a graph of its own."""
    from latpred.tracing.unequal_lengths import trace_lengths

    if not isinstance(model, str) and not hasattr(model, "named_modules"):
        raise UsageError("lengths= needs the model itself: a graph was traced with the inputs it has.")
    execution, lengths = options.execution, checked_lengths(options.lengths)
    if isinstance(lengths, GivenLengths) and list(batches) == [1]:
        batches = [len(lengths.values)]
    asked: dict[str, Any] = {"runtime": options.runtime, "protocol": options.protocol, "inputs_on": options.inputs_on}
    traced: dict[str, Any] = {"target": predictor.target, "precision": options.precision}
    of_batches = [lengths.of(batch) for batch in batches]
    if execution == "padded":
        graph = trace_lengths(model, of_batches[-1], lengths.padded_to, execution, **traced)
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
    return joined(points)


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
    options = Options(inputs, seq, image, precision, memory_format, runtime=runtime, protocol=protocol)
    predictor = predictor_of(DeviceQuery(device, host, threads, cudnn_benchmark), runtime)
    return predictor.max_batch(predictor.trace(model, options), latency_ms, runtime=runtime, protocol=protocol)
