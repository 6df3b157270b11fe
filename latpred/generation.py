"""What a user reads about text generation: time to the first token, each further token, all of them, and why.

These records hold numbers; `latpred.generating` makes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from latpred import prediction_forms
from latpred.prediction import Provenance
from latpred.units import format_bytes, format_duration

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "latpred.generation/1"
CURVE_SCHEMA = "latpred.generation-curve/1"


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of the loop: a forward pass, the choice of a token, and whether to go on.

    Attributes
    ----------
    cached : int
        Tokens in the cache when it starts; 0 for the prefill.
    latency_ms, overhead_ms, compute_ms : float
        As for a `Prediction`.
    interval_ms : tuple[float, float]
        90 % interval of the latency.
    regime : str
        "framework-bound", "compute-bound" or "memory-bound".
    """

    cached: int
    latency_ms: float
    interval_ms: tuple[float, float]
    overhead_ms: float
    compute_ms: float
    regime: str


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
        return sum(step.latency_ms for step in self._all)

    @property
    def interval_ms(self) -> tuple[float, float]:
        """Its 90 % interval: what is wrong with one step is wrong with all, so that their ends add up."""
        low, high = (sum(step.interval_ms[end] for step in self._all) for end in (0, 1))
        return low, high

    @property
    def overhead_ms(self) -> float:
        """Dispatch time of all of it."""
        return sum(step.overhead_ms for step in self._all)

    @property
    def compute_ms(self) -> float:
        """Device time of all of it."""
        return sum(step.compute_ms for step in self._all)

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
        """A few lines for a terminal."""
        return "\n".join([_title(self), *(f"  {name:<13}{text}" for name, text in _facts(self))])

    def _repr_html_(self) -> str:
        return _card(_title(self), _facts(self))


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
        """Number of batches."""
        return len(self.points)

    def __iter__(self) -> Iterator[GenerationPrediction]:
        """Predictions in order."""
        return iter(self.points)

    def __getitem__(self, index: int) -> GenerationPrediction:
        """The prediction at a position."""
        return self.points[index]

    def __repr__(self) -> str:
        """A table for a terminal."""
        rows = [HEAD, *(row(point) for point in self.points)]
        widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEAD))]
        lines = ["  " + "  ".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)) for cells in rows]
        return "\n".join([title(self.points[0]), *lines, *(f"  {name:<13}{text}" for name, text in _basis(self[0]))])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in HEAD)
        body = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row(point))}</tr>" for point in self.points)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return _card(title(self.points[0]), _basis(self[0]), table)


HEAD = ("batch", "latency", "90 % interval", "first", "next", "tokens/s", "overhead", "regime")


def row(point: GenerationPrediction) -> tuple[str, ...]:
    """One line of a table, under `HEAD`."""
    low, high = (_ms(end) for end in point.interval_ms)
    if low.split()[-1] == high.split()[-1]:
        low = low.split()[0]
    each = point.per_token_ms
    return (
        str(point.batch) + ("" if point.fits is not False else "*"),
        _ms(point.latency_ms),
        f"{low} to {high}",
        _ms(point.first_token_ms),
        "-" if each is None else _ms(each),
        _rate(point.tokens_per_s),
        f"{point.overhead_share:.0%}",
        (point.steps[-1] if point.steps else point.prefill).regime.removesuffix("-bound"),
    )


def title(point: GenerationPrediction) -> str:
    """What was asked, without the batch."""
    plural = "" if point.new_tokens == 1 else "s"
    kept = "" if point.cache == "dynamic" else f", {point.cache} cache"
    return (
        f"{point.model}: {point.new_tokens} new token{plural} after {point.prompt}, {point.precision}, "
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
        _row(point, tokens, steps)
        for point in points
        for tokens, steps in {point.new_tokens: (point.prefill, *point.steps), 1: (point.prefill,)}.items()
    ]
    return pd.DataFrame(rows)


def _row(point: GenerationPrediction, tokens: int, steps: tuple[Step, ...]) -> dict[str, Any]:
    from latpred.tables import machine_name

    return {
        "machine": machine_name(point.provenance.machine),
        "device": point.device,
        "runtime": point.runtime,
        "precision": point.precision,
        "model": point.model,
        "batch": point.batch,
        "input_kind": input_kind(tokens),
        "input_size": point.prompt,
        "protocol": "single",
        "latency_s": sum(step.latency_ms for step in steps) / 1e3,
        "low_s": sum(step.interval_ms[0] for step in steps) / 1e3,
        "high_s": sum(step.interval_ms[1] for step in steps) / 1e3,
        "overhead_s": sum(step.overhead_ms for step in steps) / 1e3,
        "compute_s": sum(step.compute_ms for step in steps) / 1e3,
        "regime": steps[-1].regime,
    }


def _title(point: GenerationPrediction) -> str:
    return f"{title(point)}, batch {point.batch}"


def _facts(point: GenerationPrediction) -> list[tuple[str, str]]:
    low, high = point.interval_ms
    room = {True: ", fits", False: ", does not fit the device", None: ""}[point.fits]
    facts = [
        ("latency", f"{_ms(point.latency_ms)} (90 %: {_ms(low)} to {_ms(high)}), {_rate(point.tokens_per_s)} tokens/s"),
        ("first token", f"{_ms(point.first_token_ms)}, {point.prefill.regime}"),
    ]
    if point.steps:
        first, last = point.steps[0], point.steps[-1]
        regimes = first.regime if first.regime == last.regime else f"{first.regime}, at last {last.regime}"
        facts.append(("next tokens", f"{_ms(first.latency_ms)} to {_ms(last.latency_ms)} each, {regimes}"))
    clocks = f"{_ms(point.overhead_ms)} dispatching, {_ms(point.compute_ms)} computing"
    facts.append(("clocks", f"{clocks}, overhead {point.overhead_share:.0%} of the latency"))
    facts.append(("memory", f"{format_bytes(point.peak_bytes)} at the peak{room}"))
    return [*facts, *_basis(point)]


def _basis(point: GenerationPrediction) -> list[tuple[str, str]]:
    provenance = point.provenance
    where = provenance.machine.accelerator or provenance.machine.cpu
    rests = f"{provenance.profile}, {provenance.source} on {where}, {provenance.created[:10]}"
    return [("profile", rests), *(("caveat", caveat) for caveat in provenance.caveats)]


def _asked(point: GenerationPrediction) -> dict[str, Any]:
    return {
        "model": point.model,
        "runtime": point.runtime,
        "device": point.device,
        "precision": point.precision,
        "prompt": point.prompt,
        "new_tokens": point.new_tokens,
        "cache": point.cache,
        "provenance": prediction_forms.origin(point.provenance),
    }


def _point(point: GenerationPrediction) -> dict[str, Any]:
    return {
        "batch": point.batch,
        "latency_ms": point.latency_ms,
        "interval_ms": list(point.interval_ms),
        "first_token_ms": point.first_token_ms,
        "per_token_ms": point.per_token_ms,
        "tokens_per_s": point.tokens_per_s,
        "overhead_ms": point.overhead_ms,
        "compute_ms": point.compute_ms,
        "overhead_share": point.overhead_share,
        "peak_bytes": point.peak_bytes,
        "fits": point.fits,
        "steps": [
            {
                "cached": step.cached,
                "latency_ms": step.latency_ms,
                "interval_ms": list(step.interval_ms),
                "overhead_ms": step.overhead_ms,
                "compute_ms": step.compute_ms,
                "regime": step.regime,
            }
            for step in (point.prefill, *point.steps)
        ],
    }


def _card(heading: str, facts: list[tuple[str, str]], above: str = "") -> str:
    rows = "".join(f"<tr><th style='text-align:left'>{escape(n)}</th><td>{escape(t)}</td></tr>" for n, t in facts)
    return f"<div><strong>{escape(heading)}</strong>{above}<table>{rows}</table></div>"


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 1000 else f"{per_second:.3g}"


def _ms(milliseconds: float) -> str:
    return format_duration(milliseconds / 1e3)
