"""Explanation: a model's runtimes side by side, where the time goes, how far it can grow, and what to change.

It holds numbers; `explanation.explain` makes them, `explanation.advice` puts them into a sentence, and
`explanation_page` shows them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from latpred import plot
from latpred.prediction.prediction import Prediction
from latpred.prediction.prediction_page import input_text
from latpred.render import Page, Row, Table, format_interval, format_ms

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

NAMED = 6  # classes of ops that are named
LEAST_SHARE = 0.005  # of the latency, below which a class is not named
AXES = {"seq": "tokens", "image": "pixels of a side", "audio": "samples"}


def explanation_page(explanation: Explanation) -> Page:
    """Advice, what each runtime takes, its clocks, where the time goes, what may grow, what is missing, caveats."""
    setting = explanation.fastest.prediction.setting
    inputs = ", ".join([f"batch {explanation.batch}", *input_text(setting), *setting.setup])
    tables = [latencies(explanation), clocks(explanation), shares(explanation)]
    tables += [growth(name, headroom) for name, headroom in explanation.headrooms.items()]
    remarks = [*(f"without {name}: {reason}" for name, reason in missing(explanation)), *caveats(explanation)]
    parts: list[Table | str] = [*filter(None, [explanation.advice]), *tables, *remarks]
    return Page(f"{setting.model}: {inputs} on {setting.device}, {setting.protocol}", parts, prose=True)


def latencies(explanation: Explanation) -> Table:
    """Latency of each runtime, and how it compares with eager."""
    rows = [
        (point.runtime, format_ms(point.latency_ms), format_interval(point.interval_ms), _speedup(choice))
        for choice in explanation.choices
        for point in [choice.prediction]
    ]
    return Table(("runtime", "latency", "90 % interval", "speed-up over eager"), rows)


def clocks(explanation: Explanation) -> Table:
    """What host and device do in each runtime, and from which batch on the device sets the latency."""
    rows = []
    for choice in explanation.choices:
        point, batch = choice.prediction, choice.prediction.crossover_batch
        times = (format_ms(point.overhead_ms), format_ms(point.compute_ms))
        regime = point.regime.removesuffix("-bound")
        crossover = "never" if batch is None else str(batch)
        rows.append((choice.runtime, *times, str(choice.steps), str(choice.launches), regime, crossover))
    return Table(("runtime", "overhead", "compute", "steps", "launches", "regime", "crossover"), rows)


def shares(explanation: Explanation) -> Table:
    """Overhead and compute of the classes of ops that take most, in the fastest runtime and in eager."""
    chosen = [choice for choice in explanation.choices if choice.runtime in (explanation.fastest.runtime, "eager")]
    names = dict.fromkeys(name for choice in chosen for name in _classes(choice))
    heads = ("ops", *(f"{choice.runtime} {clock}" for choice in chosen for clock in ("overhead", "compute")))
    rows = [(name, *(cell for choice in chosen for cell in _times(choice, name))) for name in names]
    return Table(heads, rows, title="where the time goes:")


def growth(runtime: str, headroom: Headroom) -> Table:
    """What may grow within 5 and 20 % of the latency in a runtime; what more batch and less width would do."""
    rows = []
    for room in headroom.rooms:
        name = AXES.get(room.axis, room.axis) + " (estimate)" * room.estimate
        rows.append((name, _size(room.now, room), _upto(room.nearly_free, room), _upto(room.cheap, room)))
    doubled = f"twice the batch takes {headroom.doubled:.2f} times as long"
    note = f"{doubled}, half the width {headroom.halved:.2f} times (estimate)"
    return Table((f"may grow in {runtime}", "now", "for 5 % more", "for 20 % more"), rows, note=note)


def missing(explanation: Explanation) -> list[tuple[str, str]]:
    """Runtimes that are not compared, those for one reason together."""
    reasons: dict[tuple[str, ...], list[str]] = {}  # by what stands before and after the runtime's name
    for one in explanation.excluded:
        # What runs on another kind of device only is no more than mentioned.
        reason = one.reason.partition(";")[0].removeprefix(f"{one.runtime} ") if one.kind == "unsuited" else one.reason
        reasons.setdefault(tuple(reason.split(one.runtime)), []).append(one.runtime)
    return [(", ".join(names), ",".join(names).join(parts)) for parts, names in reasons.items()]


def caveats(explanation: Explanation) -> list[str]:
    """What may not hold, each kind once, with the runtimes it is about where it is not about all."""
    kinds: dict[str, dict[str, str]] = {}  # what is said of each runtime, by what it begins with
    for choice in explanation.choices:
        for caveat in choice.prediction.provenance.caveats:
            own = caveat.removeprefix(f"{choice.runtime} was ")  # not asked, or not measured on this GPU: why and how
            kind = caveat if own == caveat else own.partition(": ")[0]
            kinds.setdefault(kind, {})[choice.runtime] = own
    return [_caveat(kind, said, len(explanation.choices)) for kind, said in kinds.items()]


def _caveat(kind: str, said: Mapping[str, str], everywhere: int) -> str:
    """A kind of caveat of so many runtimes; where each has words of its own, only with where these are found."""
    texts, names = set(said.values()), ", ".join(said)
    if len(texts) > 1:
        return f"caveat of {len(said)} runtimes ({names}): {kind}; latpred predict --runtime NAME says more of each"
    return (
        f"caveat: {texts.pop()}" if len(said) == everywhere and kind in texts else f"caveat of {names}: {texts.pop()}"
    )


def _classes(choice: Choice) -> list[str]:
    """Classes that take most of the host's and of the device's time together."""
    least = LEAST_SHARE * choice.prediction.latency_ms
    largest = choice.prediction.breakdown[:NAMED]
    return [share.name for share in largest if share.overhead_ms + share.compute_ms >= least]


def _times(choice: Choice, name: str) -> Row:
    for share in choice.prediction.breakdown:
        if share.name == name:
            return tuple(format_ms(ms) if ms else "-" for ms in (share.overhead_ms, share.compute_ms))
    return ("-", "-")


def _upto(value: float | None, room: AxisHeadroom) -> str:
    if value is None:
        return f"beyond {_size(room.most, room)}"
    return "no further" if value <= room.now else f"to {_size(value, room)}"


def _size(value: float, room: AxisHeadroom) -> str:
    return f"{value:,.10g}{'x' if room.axis == 'width' else ''}"


def _speedup(choice: Choice) -> str:
    speedup = choice.speedup
    if choice.runtime == "eager" or speedup is None:
        return "-"
    doubt = "" if not speedup.equal else ", about equal" if speedup.alike else ", not sure"
    return f"{speedup.times:.2f}x ({speedup.low:.2f} to {speedup.high:.2f}){doubt}"


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
    """A runtime that can run the model."""

    prediction: Prediction
    steps: int  # what the host dispatches
    launches: int  # kernels that the device is given
    # Half the width of the log latency's 90 % interval, as far as the profile's kernel times are the reason, and as far
    # as it is that nobody knows the asker's host.
    kernel_error: float = 0.0
    host_error: float = 0.0
    speedup: Ratio | None = None  # eager's latency over its own; None where eager is not known

    @property
    def runtime(self) -> str:
        return self.prediction.runtime


def ratio(one: Choice, other: Choice) -> Ratio:
    """How many times as long `one` takes as `other`.

    What the profile's kernel times are off by lengthens both, so it cancels as far as both rest on them, and what the
    asker's host takes longer, as far as both wait for it; all other errors are taken to have nothing in common.
    """
    a, b = one.prediction, other.prediction
    times = a.latency_ms / b.latency_ms
    squares = sum(math.log(p.interval_ms[1] / p.latency_ms) ** 2 for p in (a, b))
    shared = min(one.kernel_error, other.kernel_error) ** 2 + min(one.host_error, other.host_error) ** 2
    width = math.sqrt(max(squares - 2.0 * shared, 0.0))
    return Ratio(times, times * math.exp(-width), times * math.exp(width))


class Excluded(NamedTuple):
    """A runtime that is not compared. kind : "unsuited", "uncalibrated", "missing" or "refused"."""

    runtime: str
    kind: str
    reason: str


class AxisHeadroom(NamedTuple):
    """How far something may grow before the latency is 1.05 and 1.2 times what it is."""

    axis: str  # "batch", "width" (as a factor) or the kind of the inputs
    now: float
    nearly_free: float | None  # the largest value within 1.05 times; None where that is beyond `most`
    cheap: float | None  # and within 1.2 times
    most: float  # the largest looked at
    estimate: bool  # whether it rests on scaled counts instead of a trace


class Headroom(NamedTuple):
    """What may grow, and what would become of the latency in one runtime."""

    rooms: tuple[AxisHeadroom, ...]
    doubled: float  # times the latency with twice the batch
    halved: float  # and with half the width (estimated)

    def room(self, axis: str) -> AxisHeadroom | None:
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
    headrooms : dict[str, Headroom]
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
        unknown = Ratio(math.nan, math.nan, math.nan)
        speedups = [choice.speedup or unknown for choice in self.choices]
        return frame.assign(
            x_steps=[choice.steps for choice in self.choices],
            launches=[choice.launches for choice in self.choices],
            x_speedup=[speedup.times for speedup in speedups],
            x_speedup_low=[speedup.low for speedup in speedups],
            x_speedup_high=[speedup.high for speedup in speedups],
        )

    def plot(self) -> Figure:
        """Draw the runtimes side by side and where the time goes in each.

        Raises
        ------
        MissingPackageError
            When matplotlib is not installed.
        """
        return plot.explanation(self)

    def __repr__(self) -> str:
        return explanation_page(self).text()

    def _repr_html_(self) -> str:
        return explanation_page(self).html()


def _choice(choice: Choice) -> dict[str, Any]:
    prediction = choice.prediction.to_dict()
    del prediction["schema"]
    speedup = None if choice.speedup is None else choice.speedup._asdict()
    return {**prediction, "steps": choice.steps, "launches": choice.launches, "speedup": speedup}


def _headroom(headroom: Headroom) -> dict[str, Any]:
    rooms = {room.axis: room._asdict() for room in headroom.rooms}
    return {"rooms": rooms, "twice_the_batch": headroom.doubled, "half_the_width": headroom.halved}
