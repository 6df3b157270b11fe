"""Explanation: a model's runtimes side by side, where the time goes, how far it can grow, and what to change.

It holds numbers; `explanation.explain` makes them, `explanation.advice` puts them into a sentence. How it looks is
`latpred.render.explanation_text`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from latpred.prediction.prediction import Prediction

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SCHEMA = "latpred.explanation/1"
NEARLY_FREE, CHEAP = 1.05, 1.2  # times the latency now, up to which something may grow
ALIKE = 1.2  # times as long, up to which nothing is said to differ unless the intervals do


class Ratio(NamedTuple):
    """How many times as long one prediction takes as another, with the 90 % interval of that."""

    times: float
    low: float
    high: float

    @property
    def longer(self) -> bool:
        """Whether it surely takes longer."""
        return self.low > 1.0

    @property
    def equal(self) -> bool:
        """Whether either may be the faster one."""
        return self.low <= 1.0 <= self.high

    @property
    def alike(self) -> bool:
        """Whether either may be the faster one, and neither is predicted to be so by much."""
        return self.equal and 1 / ALIKE < self.times < ALIKE


@dataclass(frozen=True, slots=True)
class Choice:
    """A runtime that can run the model.

    Attributes
    ----------
    prediction : Prediction
        Latency, clocks, regime and breakdown in it.
    steps, launches : int
        What the host dispatches, and kernels that the device is given.
    kernel_error : float
        Half the width of the log latency's 90 % interval, as far as the profile's kernel times are the reason.
    speedup : Ratio or None
        Eager's latency over its own; None where eager is not known.
    """

    prediction: Prediction
    steps: int
    launches: int
    kernel_error: float = 0.0
    speedup: Ratio | None = None

    @property
    def runtime(self) -> str:
        """Its name."""
        return self.prediction.runtime


def ratio(one: Choice, other: Choice) -> Ratio:
    """How many times as long `one` takes as `other`.

    What the profile's kernel times are off by lengthens both, so it cancels as far as both rest on them; all other
    errors are taken to have nothing to do with each other.
    """
    a, b = one.prediction, other.prediction
    times = a.latency_ms / b.latency_ms
    squares = sum(math.log(p.interval_ms[1] / p.latency_ms) ** 2 for p in (a, b))
    width = math.sqrt(max(squares - 2.0 * min(one.kernel_error, other.kernel_error) ** 2, 0.0))
    return Ratio(times, times * math.exp(-width), times * math.exp(width))


class Excluded(NamedTuple):
    """A runtime that is not compared. kind : "unsuited", "uncalibrated", "missing" or "refused"."""

    runtime: str
    kind: str
    reason: str


class AxisHeadroom(NamedTuple):
    """How far something may grow before the latency is 1.05 and 1.2 times what it is.

    axis : "batch", "width" (as a factor) or the kind of the inputs. now : its value. nearly_free, cheap : the largest
    value within each; None where that is beyond `most`, the largest looked at. estimate : whether it rests on scaled
    counts instead of a walk.
    """

    axis: str
    now: float
    nearly_free: float | None
    cheap: float | None
    most: float
    estimate: bool


class Headroom(NamedTuple):
    """What would become of the latency in one runtime.

    rooms : what may grow. doubled, halved : times the latency with twice the batch and with half the width (estimated).
    """

    rooms: tuple[AxisHeadroom, ...]
    doubled: float
    halved: float

    def room(self, axis: str) -> AxisHeadroom | None:
        """The room along an axis."""
        return next((room for room in self.rooms if room.axis == axis), None)


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """What each runtime makes of a model at one batch size, and what to change.

    Attributes
    ----------
    choices : tuple[Choice, ...]
        Runtimes that can run it, the fastest first.
    excluded : tuple[Excluded, ...]
        The others, each with its reason.
    headrooms : dict[str, Outlook]
        What may grow, in the fastest runtime and in eager.
    advice : str
        One sentence.
    """

    choices: tuple[Choice, ...]
    excluded: tuple[Excluded, ...]
    headrooms: dict[str, Headroom] = field(compare=False)
    advice: str = ""

    @property
    def fastest(self) -> Choice:
        """The runtime with the lowest latency; others may be about as fast, see `rivals`."""
        return self.choices[0]

    @property
    def rivals(self) -> tuple[str, ...]:
        """Runtimes of which nobody can say that they are slower than the fastest."""
        return tuple(choice.runtime for choice in self.choices[1:] if not ratio(choice, self.fastest).longer)

    @property
    def eager(self) -> Choice | None:
        """Eager PyTorch, where the profile knows it."""
        return self.choice("eager")

    @property
    def batch(self) -> int:
        """Batch size."""
        return self.fastest.prediction.batch

    def choice(self, runtime: str) -> Choice | None:
        """A runtime by name; None where it is not among the choices."""
        return next((choice for choice in self.choices if choice.runtime == runtime), None)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values that JSON can hold."""
        return {
            "schema": SCHEMA,
            "model": self.fastest.prediction.model,
            "batch": self.batch,
            "fastest": self.fastest.runtime,
            "about_as_fast": list(self.rivals),
            "advice": self.advice,
            "runtimes": [_choice(choice) for choice in self.choices],
            "excluded": [one._asdict() for one in self.excluded],
            "outlooks": {name: _headroom(headroom) for name, headroom in self.headrooms.items()},
        }

    def to_frame(self) -> pd.DataFrame:
        """A predicted table (see `latpred.tables`), one row per runtime, with launches, steps and speed-up."""
        import pandas as pd

        frame = pd.concat([choice.prediction.to_frame() for choice in self.choices], ignore_index=True)
        speedups = [choice.speedup for choice in self.choices]
        return frame.assign(
            x_steps=[choice.steps for choice in self.choices],
            launches=[choice.launches for choice in self.choices],
            x_speedup=[math.nan if found is None else found.times for found in speedups],
            x_speedup_low=[math.nan if found is None else found.low for found in speedups],
            x_speedup_high=[math.nan if found is None else found.high for found in speedups],
        )

    def plot(self) -> Figure:
        """Draw the runtimes side by side and where the time goes in each.

        Raises
        ------
        MissingPackageError
            When matplotlib is not installed.
        """
        from latpred import plot

        return plot.explanation(self)

    def __repr__(self) -> str:
        """Tables and sentences for a terminal."""
        from latpred.render.explanation_text import plain

        return plain(self)

    def _repr_html_(self) -> str:
        from latpred.render.explanation_text import html

        return html(self)


def _choice(choice: Choice) -> dict[str, Any]:
    found = choice.prediction.to_dict()
    del found["schema"]
    speedup = None if choice.speedup is None else choice.speedup._asdict()
    return {**found, "steps": choice.steps, "launches": choice.launches, "speedup": speedup}


def _headroom(headroom: Headroom) -> dict[str, Any]:
    rooms = {room.axis: room._asdict() for room in headroom.rooms}
    return {"rooms": rooms, "twice_the_batch": headroom.doubled, "half_the_width": headroom.halved}
