"""`latpred.predict_generation`: from a decoder and a prompt's length to how long its text takes.

The trace is `latpred.tracing.text_generation`'s, the clocks are the predictor's. Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from latpred import runtimes
from latpred.api import predictor_of
from latpred.errors import RuntimeRefusalError
from latpred.prediction.prediction import Curve, Prediction, Provenance, origin, predicted_row
from latpred.prediction.prediction_page import basis_lines, star, star_note
from latpred.prediction.predictor import Predictor
from latpred.query import DeviceQuery, checked_batches, is_one
from latpred.render import Page, Row, Table, format_interval, format_ms
from latpred.units import three_digits

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from latpred.query import Device
    from latpred.tracing.text_generation import GenerationGraph, Stage

    Model = torch.nn.Module | str

    class _Asked(TypedDict, total=False):
        """What `predict_generation` may be asked beside batch and runtime, for its overloads."""

        device: Device | None
        host: float | str | None
        precision: str | None
        attention: str | None
        threads: int | None


SCHEMA = "latpred.generation/1"
CURVE_SCHEMA = "latpred.generation-curve/1"


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of the loop: a forward pass, the choice of a token, and whether to go on."""

    cached: int  # tokens in the cache when it starts; 0 for the prefill
    latency_ms: float
    interval_ms: tuple[float, float]  # 90 % interval of the latency
    overhead_ms: float
    compute_ms: float
    regime: str  # "framework-bound", "compute-bound" or "memory-bound"


@dataclass(frozen=True, slots=True, repr=False)
class GenerationPrediction:
    """How long generating text takes at one batch size.

    Attributes
    ----------
    model, runtime, device, precision : str
        What generates, and where.
    prompt, new_tokens : int
        Tokens of each prompt, and tokens generated for each sequence.
    batch : int
        Sequences generated together.
    cache : str
        "dynamic", or "static" where the runtime needs a cache of fixed length.
    prefill : Step
        From the call to the first new token.
    steps : tuple[Step, ...]
        One for each further token.
    peak_bytes : int
        Parameters and the most activations and cache alive at once.
    fits : bool or None
        Whether that fits the device's memory; None when its size is not known.
    provenance : Provenance
        Profile the prediction rests on, and what may not hold.
    attention : str
        "eager" or "sdpa", where that was asked for, else "".
    """

    model: str
    runtime: str
    device: str
    precision: str
    prompt: int
    new_tokens: int
    batch: int
    cache: str
    prefill: Step
    steps: tuple[Step, ...]
    peak_bytes: int
    fits: bool | None
    provenance: Provenance
    attention: str = ""

    @property
    def first_token_ms(self) -> float:
        """Time to the first token."""
        return self.prefill.latency_ms

    @property
    def step_ms(self) -> NDArray[np.float64]:
        """Milliseconds of each further token."""
        return np.array([step.latency_ms for step in self.steps])

    @property
    def per_token_ms(self) -> float | None:
        """Mean time of a further token; None when there is none."""
        return float(self.step_ms.mean()) if self.steps else None

    @property
    def latency_ms(self) -> float:
        """All of it."""
        return _sum(self._all).latency_ms

    @property
    def interval_ms(self) -> tuple[float, float]:
        """Its 90 % interval: what is wrong with one step is wrong with all, so that their ends add up."""
        return _sum(self._all).interval_ms

    @property
    def overhead_ms(self) -> float:
        """Dispatch time of all of it."""
        return _sum(self._all).overhead_ms

    @property
    def compute_ms(self) -> float:
        """Device time of all of it."""
        return _sum(self._all).compute_ms

    @property
    def overhead_share(self) -> float:
        """Dispatch as a share of the latency, at most 1."""
        return min(1.0, self.overhead_ms / self.latency_ms) if self.latency_ms else 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second, of all sequences together."""
        return self.batch * self.new_tokens * 1e3 / self.latency_ms if self.latency_ms else 0.0

    @property
    def regime(self) -> tuple[str, ...]:
        """Regime of the prefill and of each step."""
        return tuple(step.regime for step in self._all)

    @property
    def _all(self) -> tuple[Step, ...]:
        return (self.prefill, *self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values that JSON can hold."""
        return {"schema": SCHEMA, **_asked(self), **_point(self)}

    def to_frame(self) -> pd.DataFrame:
        """A predicted table (see `latpred.tables`): all of it, and its first token."""
        return frame((self,))

    def __repr__(self) -> str:
        return generation_page(GenerationCurve((self,))).text()

    def _repr_html_(self) -> str:
        return generation_page(GenerationCurve((self,))).html()


@dataclass(frozen=True, slots=True, repr=False)
class GenerationCurve:
    """Text generation over batch sizes, a sequence of `GenerationPrediction`."""

    points: tuple[GenerationPrediction, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values that JSON can hold."""
        return {"schema": CURVE_SCHEMA, **_asked(self.points[0]), "points": [_point(point) for point in self.points]}

    def to_frame(self) -> pd.DataFrame:
        """A predicted table (see `latpred.tables`): for each batch all of it, and its first token."""
        return frame(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[GenerationPrediction]:
        return iter(self.points)

    def __getitem__(self, index: int) -> GenerationPrediction:
        return self.points[index]

    def __repr__(self) -> str:
        return generation_page(self).text()

    def _repr_html_(self) -> str:
        return generation_page(self).html()


def generation_page(curve: GenerationCurve) -> Page:
    """A row for each batch, and what they rest on."""
    heads = ("batch", "latency", "90 % interval", "first", "next", "tokens/s", "overhead", "regime")
    note = star_note(point.fits for point in curve)
    table = Table(heads, [_cells(point) for point in curve], left=("regime",), note=note)
    return Page(title(curve[0]), [table, *basis_lines(curve[0].provenance, curve[0].device)])


def _cells(point: GenerationPrediction) -> Row:
    each = point.per_token_ms
    return (
        f"{point.batch}{star(point.fits)}",
        format_ms(point.latency_ms),
        format_interval(point.interval_ms),
        format_ms(point.first_token_ms),
        "-" if each is None else format_ms(each),
        three_digits(point.tokens_per_s),
        f"{point.overhead_share:.0%}",
        (point.steps[-1] if point.steps else point.prefill).regime.removesuffix("-bound"),
    )


def title(point: GenerationPrediction) -> str:
    """What was asked, without the batch."""
    plural = "" if point.new_tokens == 1 else "s"
    kept = "" if point.cache == "dynamic" else f", {point.cache} cache"
    attention = f", {point.attention} attention" if point.attention else ""
    return (
        f"{point.model}: {point.new_tokens} new token{plural} after {point.prompt}, {point.precision}{attention}, "
        f"{point.runtime} on {point.device}{kept}"
    )


def input_kind(new_tokens: int) -> str:
    """What tables call the input of a generation; its size is the prompt's.

    >>> input_kind(16)
    'prompt+16'
    """
    return f"prompt+{new_tokens}"


def frame(points: tuple[GenerationPrediction, ...]) -> pd.DataFrame:
    """A predicted table: all of it, and beside it the first token, which is a generation of one token."""
    import pandas as pd

    rows = [
        predicted_row(point, replace(_sum(steps), regime=steps[-1].regime), input_kind(tokens), point.prompt, "single")
        | _attention(point)
        for point in points
        for tokens, steps in {point.new_tokens: (point.prefill, *point.steps), 1: (point.prefill,)}.items()
    ]
    return pd.DataFrame(rows)


_ASKED = ("model", "runtime", "device", "precision", "prompt", "new_tokens", "cache")
_FIGURES = (
    *("batch", "latency_ms", "interval_ms", "first_token_ms", "per_token_ms", "tokens_per_s", "overhead_ms"),
    *("compute_ms", "overhead_share", "peak_bytes", "fits"),
)


def _asked(point: GenerationPrediction) -> dict[str, Any]:
    asked = {name: getattr(point, name) for name in _ASKED}
    return {**asked, **_attention(point), "provenance": origin(point.provenance)}


def _attention(point: GenerationPrediction) -> dict[str, str]:
    """What tells cells apart beside the keys of every table, only where it was asked for."""
    return {"attention": point.attention} if point.attention else {}


def _point(point: GenerationPrediction) -> dict[str, Any]:
    return {name: getattr(point, name) for name in _FIGURES} | {
        "interval_ms": list(point.interval_ms),
        "steps": [asdict(step) | {"interval_ms": list(step.interval_ms)} for step in (point.prefill, *point.steps)],
    }


REPLAYED = ("cuda-graphs", "compile", "compile-reduce-overhead")
_MOST_PRICED = 33  # decode steps that are priced one by one; between them times are taken as straight lines
_ESTIMATE = (
    "an estimate: the forward passes of the decode steps run in {} with a static cache of {} tokens, the prefill and "
    "the rest of generate() in eager; the two are added up, as if neither ran while the other does"
)


@overload
def predict_generation(
    model: Model, prompt: int, new_tokens: int, batch: int = 1, runtime: str = "eager", **asked: Unpack[_Asked]
) -> GenerationPrediction: ...
@overload
def predict_generation(
    model: Model, prompt: int, new_tokens: int, batch: Sequence[int], runtime: str = "eager", **asked: Unpack[_Asked]
) -> GenerationCurve: ...
def predict_generation(
    model: Model,
    prompt: int,
    new_tokens: int,
    batch: int | Sequence[int] = 1,
    runtime: str = "eager",
    *,
    device: Device | None = None,
    host: float | str | None = None,
    precision: str | None = None,
    attention: str | None = None,
    threads: int | None = None,
) -> GenerationPrediction | GenerationCurve:
    """Predict how long greedy text generation takes: the prefill, and one step for each further token.

    What is predicted is a call of transformers' `generate()` with prompts of equal length and no padding, all of it:
    besides the forward passes also the choice of each token and the check whether to stop, which waits for the device.

    Parameters
    ----------
    model : torch.nn.Module or str
        A decoder of transformers with a `generate()`, or the name of one ("gpt2", "llama-3.2-1b").
    prompt : int
        Tokens of each prompt.
    new_tokens : int
        Tokens to generate for each; no sequence ends before.
    batch : int or sequence of int
        One batch size for a `GenerationPrediction`, several for a `GenerationCurve`.
    runtime : str
        "eager". In "cuda-graphs", "compile" and "compile-reduce-overhead" the forward passes of the decode steps run in
        that runtime, with a cache of fixed length, and everything else in eager: an estimate, which says so.
    device, host, threads : optional
        As for `predict`.
    precision : str, optional
        fp32, tf32, fp16, bf16 or fp64; without it, that of the model's parameters.
    attention : {"eager", "sdpa"}, optional
        How attention is computed, in the words of transformers; without it as the model's config says. transformers
        before 4.36 (2023) had "eager" alone.

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
    >>> generation = predict_generation("gpt2", prompt=16, new_tokens=4, device="rtx-8000")
    >>> [step.cached for step in generation.steps]
    [16, 17, 18]
    >>> generation.first_token_ms < generation.latency_ms
    True
    """
    sizes = checked_batches(batch)
    runtimes.get(runtime)  # a misspelt one is said as such
    if runtime != "eager" and runtime not in REPLAYED:
        raise RuntimeRefusalError(
            f"Text generation in {runtime} is not predicted: it needs a model exported together with its cache, which "
            f"latpred does not build. Ask for eager, or for an estimate in one of: {', '.join(REPLAYED)}."
        )
    predictor = predictor_of(DeviceQuery(device, host, threads), runtime)
    from latpred.tracing.text_generation import trace_generation

    cache = "static" if runtime in REPLAYED else "dynamic"
    graph = trace_generation(
        model, prompt, new_tokens, precision=precision, attention=attention, cache=cache, target=predictor.target
    )
    curve = generation_curve(predictor, graph, sizes, runtime)
    return curve[0] if is_one(batch) else curve


def generation_curve(
    predictor: Predictor, graph: GenerationGraph, batches: Sequence[int], runtime: str = "eager"
) -> GenerationCurve:
    """Predict what `text_generation.trace_generation` gave; the decode steps' forward passes run in `runtime`."""
    prefill = predictor.curve(graph.prefill.graph, batches)
    lengths = list(range(graph.prompt, graph.prompt + len(graph.steps)))  # steps themselves are made when asked for
    some = np.linspace(0, len(lengths) - 1, min(len(lengths), _MOST_PRICED)).tolist()
    # The first step alone reads weights where the prefill left them.
    chosen = sorted({*range(len(lengths))[:2], *map(round, some)})
    notes = [] if runtime == "eager" else [_ESTIMATE.format(runtime, graph.prompt + graph.new_tokens - 1)]
    priced = [_step_curves(predictor, graph.steps[index], batches, runtime) for index in chosen]
    points = []
    for position, first in enumerate(prefill.points):
        parts = [[curve[position] for curve in curves] for curves in priced]
        steps = [_step(lengths[index], part) for index, part in zip(chosen, parts, strict=True)]
        passes = [first, *(prediction for part in parts for prediction in part)]
        fits = [each.fits for each in passes]
        caveats = [*notes, *(caveat for each in passes for caveat in each.provenance.caveats)]
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
                steps=tuple(_filled(steps, lengths)),
                peak_bytes=max(each.peak_bytes for each in passes),
                fits=None if None in fits else all(fits),
                provenance=replace(first.provenance, caveats=tuple(dict.fromkeys(caveats))),
                attention=first.setting.attention,
            )
        )
    return GenerationCurve(tuple(points))


def _step_curves(predictor: Predictor, stage: Stage, batches: Sequence[int], runtime: str) -> list[Curve]:
    """What adds up to a step: all of it, or the forward pass in its runtime and the rest in eager."""
    if runtime == "eager":
        return [predictor.curve(stage.graph, batches)]
    return [predictor.curve(stage.forward, batches, runtime=runtime), predictor.curve(stage.loop, batches)]


def _step(cached: int, parts: list[Prediction]) -> Step:
    whole, regime = _sum(parts, cached), parts[0].regime
    if len(parts) > 1:
        bound = next((part.regime for part in parts if part.regime != "framework-bound"), "compute-bound")
        regime = "framework-bound" if whole.overhead_ms > whole.compute_ms else bound
    return replace(whole, regime=regime)


def _sum(parts: Sequence[Step | Prediction], cached: int = 0) -> Step:
    """What parts that follow each other take together, without a regime."""
    low, high = (sum(part.interval_ms[end] for part in parts) for end in (0, 1))
    latency, overhead, compute = (
        sum(getattr(part, name) for part in parts) for name in ("latency_ms", "overhead_ms", "compute_ms")
    )
    return Step(cached, latency, (low, high), overhead, compute, "")


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
