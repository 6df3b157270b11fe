"""`latpred.predict_generation`: from a decoder and a prompt's length to how long its text takes.

The walk is `latpred.tracing.generation`'s, the clocks are the predictor's. Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from latpred import runtimes
from latpred.errors import RuntimeRefusalError
from latpred.finding import located, predictor_of
from latpred.generation import GenerationCurve, GenerationPrediction, Step
from latpred.prediction import Curve, Prediction, Provenance
from latpred.predictor import Predictor, checked_batches, is_one

if TYPE_CHECKING:
    import os

    import torch

    from latpred.tracing.generation import GenerationGraph, Stage

    Model = torch.nn.Module | str
    Device = torch.device | str | os.PathLike[str]

REPLAYED = ("cuda-graphs", "compile", "compile-reduce-overhead")
_MOST_PRICED = 33  # decode steps that are priced one by one; between them times are taken as straight lines


@overload
def predict_generation(
    model: Model,
    prompt: int,
    new_tokens: int,
    batch: int = 1,
    runtime: str = "eager",
    *,
    device: Device | None = None,
    precision: str | None = None,
) -> GenerationPrediction: ...
@overload
def predict_generation(
    model: Model,
    prompt: int,
    new_tokens: int,
    batch: Sequence[int],
    runtime: str = "eager",
    *,
    device: Device | None = None,
    precision: str | None = None,
) -> GenerationCurve: ...
def predict_generation(
    model: Model,
    prompt: int,
    new_tokens: int,
    batch: int | Sequence[int] = 1,
    runtime: str = "eager",
    *,
    device: Device | None = None,
    precision: str | None = None,
) -> GenerationPrediction | GenerationCurve:
    """Predict how long greedy text generation takes: the prefill, and one step for each further token.

    What is predicted is a call of transformers' `generate()` with prompts of equal length and no padding, all of it:
    besides the forward passes also the choice of each token and the check whether to stop, which waits for the device.

    Parameters
    ----------
    model : torch.nn.Module or str
        A transformers model with a `generate()`, or the name of a decoder ("gpt2", "llama-3.2-1b").
    prompt : int
        Tokens of each prompt.
    new_tokens : int
        Tokens to generate for each; no sequence ends before.
    batch : int or sequence of int
        One batch size for a `GenerationPrediction`, several for a `GenerationCurve`.
    runtime : str
        "eager". In "cuda-graphs", "compile" and "compile-reduce-overhead" the forward passes of the decode steps run in
        that runtime, with a cache of fixed length, and everything else in eager: an estimate, which says so.
    device : str, path or torch.device, optional
        As for `predict`.
    precision : str, optional
        fp32, tf32, fp16, bf16 or fp64; without it, that of the model's parameters.

    Returns
    -------
    GenerationPrediction or GenerationCurve
        Time to the first token, of each further one and of all, with interval and regimes.

    Raises
    ------
    UsageError
        When an argument is wrong, the model generates no text, or it does not take so many tokens.
    RuntimeRefusalError
        When nothing can be told of generation in the runtime.
    TraceError, ProfileError
        As for `predict`.

    Examples
    --------
    >>> predict_generation("gpt2", prompt=128, new_tokens=16, batch=[1, 8, 64])  # doctest: +SKIP
    """
    one = is_one(batch)
    sizes = checked_batches([batch] if one else batch)  # type: ignore[list-item, arg-type]
    _check_runtime(runtime)
    predictor = predictor_of(located(device))
    predictor.check(runtime)
    from latpred.tracing.generation import trace_generation

    cache = "static" if runtime in REPLAYED else "dynamic"
    graph = trace_generation(model, prompt, new_tokens, precision=precision, cache=cache)
    curve = generation_curve(predictor, graph, sizes, runtime)
    return curve[0] if one else curve


def generation_curve(
    predictor: Predictor, graph: GenerationGraph, batches: NDArray[np.int64], runtime: str = "eager"
) -> GenerationCurve:
    """Predict a walk of text generation with one profile.

    Parameters
    ----------
    predictor : Predictor
        Of a device.
    graph : GenerationGraph
        What `latpred.tracing.generation.trace_generation` gives.
    batches : ndarray of int
        Batch sizes.
    runtime : str
        Of the decode steps' forward passes.
    """
    prefill = predictor.curve(graph.prefill.graph, batches)
    chosen = _chosen(len(graph.steps))
    priced = [_step_curves(predictor, graph.steps[index], batches, runtime) for index in chosen]
    notes = _notes(graph, runtime)
    points = []
    for position in range(len(batches)):
        first = prefill[position]
        known = [
            _step(graph.steps[index].before, [curve[position] for curve in curves])
            for index, curves in zip(chosen, priced, strict=True)
        ]
        peaks = [first, *(curve[position] for curves in priced for curve in curves)]
        caveats = dict.fromkeys([*notes, *(caveat for point in peaks for caveat in point.provenance.caveats)])
        points.append(
            GenerationPrediction(
                model=first.model,
                runtime=runtime,
                device=first.device,
                precision=first.precision,
                prompt=graph.prompt,
                new_tokens=graph.new_tokens,
                batch=first.batch,
                cache=graph.cache,
                prefill=_step(0, [first]),
                steps=tuple(_filled(known, [step.before for step in graph.steps])),
                peak_bytes=max(point.peak_bytes for point in peaks),
                fits=_all_fit(peaks),
                provenance=_with(first.provenance, tuple(caveats)),
            )
        )
    return GenerationCurve(tuple(points))


def _check_runtime(runtime: str) -> None:
    runtimes.get(runtime)  # a misspelt one is said as such
    if runtime != "eager" and runtime not in REPLAYED:
        raise RuntimeRefusalError(
            f"Text generation in {runtime} is not predicted: it needs a model exported together with its cache, which "
            f"latpred does not build. Ask for eager, or for an estimate in one of: {', '.join(REPLAYED)}."
        )


def _step_curves(predictor: Predictor, stage: Stage, batches: NDArray[np.int64], runtime: str) -> list[Curve]:
    """What adds up to a step: all of it, or the forward pass in its runtime and the rest in eager."""
    if runtime == "eager":
        return [predictor.curve(stage.graph, batches)]
    return [predictor.curve(stage.forward, batches, runtime=runtime), predictor.curve(stage.loop, batches)]


def _step(cached: int, parts: list[Prediction]) -> Step:
    """One step from the parts that it consists of, the longest of which gives its regime."""
    low, high = (sum(part.interval_ms[end] for part in parts) for end in (0, 1))
    overhead, compute = sum(part.overhead_ms for part in parts), sum(part.compute_ms for part in parts)
    regime = max(parts, key=lambda part: part.compute_ms).regime
    if len(parts) > 1:
        bound = next((part.regime for part in parts if part.regime != "framework-bound"), "compute-bound")
        regime = "framework-bound" if overhead > compute else bound
    return Step(cached, sum(part.latency_ms for part in parts), (low, high), overhead, compute, regime)


def _chosen(count: int) -> list[int]:
    if count <= _MOST_PRICED:
        return list(range(count))
    return sorted({round(index) for index in np.linspace(0, count - 1, _MOST_PRICED).tolist()})


def _filled(known: list[Step], lengths: list[int]) -> Iterable[Step]:
    """A step for each length: the known ones, and straight lines between them."""
    if len(known) == len(lengths):
        return known
    at = [step.cached for step in known]
    rows = [(s.latency_ms, *s.interval_ms, s.overhead_ms, s.compute_ms) for s in known]
    columns = [np.interp(lengths, at, column).tolist() for column in zip(*rows, strict=True)]
    nearest = np.abs(np.subtract.outer(lengths, at)).argmin(axis=1).tolist()
    return [
        Step(length, latency, (low, high), overhead, compute, known[near].regime)
        for length, near, latency, low, high, overhead, compute in zip(lengths, nearest, *columns, strict=True)
    ]


def _notes(graph: GenerationGraph, runtime: str) -> list[str]:
    if runtime == "eager":
        return []
    return [
        f"an estimate: the forward passes of the decode steps run in {runtime} with a static cache of "
        f"{graph.prompt + graph.new_tokens - 1} tokens, the prefill and the rest of generate() in eager; the two are "
        "added up, as if neither ran while the other does"
    ]


def _all_fit(points: list[Prediction]) -> bool | None:
    fits = [point.fits for point in points]
    return None if None in fits else all(fits)


def _with(provenance: Provenance, caveats: tuple[str, ...]) -> Provenance:
    return Provenance(provenance.profile, provenance.source, provenance.created, provenance.machine, caveats)
