"""Adaptation: a profile corrected by measured architectures, and what that bought. Holds figures; computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from latpred.corrections import GENERAL, Factors
from latpred.metrics import Errors
from latpred.profile import DeviceProfile

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "latpred.adaptation/1"
_MOST_SHOWN = 6
_WORTH_SAYING = 0.02  # factors nearer to 1 are not shown


@dataclass(frozen=True, slots=True)
class Bought:
    """Errors over the measured rows: of the profile as it was, and corrected without the architecture judged."""

    before: Errors
    after: Errors


@dataclass(frozen=True, slots=True)
class RuntimeAdaptation:
    """What was done for one runtime.

    Attributes
    ----------
    runtime : str
        Its name.
    architectures : int
        How many were measured.
    level : str
        How much was corrected: "none", "one factor", "host and device", "classes" or "classes and sizes".
    judged : bool
        Whether there were enough architectures to leave one out; without, the corrections were not put to a test.
    bought : Bought
        Over all rows. Of no worth where it was not judged: there the errors after say nothing of other models.
    by_regime : mapping of str to Bought
        Over the rows of each regime, as the profile sees it.
    left_out : mapping of str to float
        Mean absolute log error of architectures left out, at each level that was tried.
    factors : Factors
        What host costs by class and kernel times by family were multiplied by; "" is for those that no row has. Kernel
        times were also multiplied by the powers of their sizes that `tilts` gives.
    interval : bool
        Whether the profile's intervals now follow from the errors left out.
    """

    runtime: str
    architectures: int
    level: str
    judged: bool
    bought: Bought
    by_regime: Mapping[str, Bought]
    left_out: Mapping[str, float]
    factors: Factors
    interval: bool

    @property
    def rows(self) -> int:
        """How many rows were used."""
        return self.bought.before.cells


@dataclass(frozen=True, slots=True)
class Adaptation:
    """A corrected profile with the evidence for it.

    Attributes
    ----------
    profile : DeviceProfile
        Corrected; give it to `latpred.Predictor`, or save it with `latpred.profiles.save`.
    adapted_from : str
        The profile it was made from.
    created : str
        When, ISO 8601, UTC.
    runtimes : tuple[RuntimeAdaptation, ...]
        One for each runtime that was measured; others are as they were.
    """

    profile: DeviceProfile = field(repr=False)
    adapted_from: str
    created: str
    runtimes: tuple[RuntimeAdaptation, ...]

    def text(self) -> str:
        """What it bought, for people."""
        lines = [f"{self.adapted_from} adapted to measured architectures: errors of each, itself left out"]
        for each in self.runtimes:
            lines += _lines(each)
        untouched = [name for name in self.profile.runtimes if name not in {each.runtime for each in self.runtimes}]
        if untouched:
            lines.append(f"unchanged, for want of rows: {', '.join(untouched)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON can hold it, without the profile."""
        return {
            "schema": SCHEMA,
            "profile": self.profile.name,
            "adapted_from": self.adapted_from,
            "created": self.created,
            "runtimes": [_document(each) for each in self.runtimes],
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per runtime and regime, with errors before and after."""
        import pandas as pd

        rows = [
            {
                "runtime": each.runtime,
                "regime": regime,
                "level": each.level,
                "architectures": each.architectures,
                "rows": bought.before.cells,
                "median_before": bought.before.median,
                "median_after": bought.after.median,
                "p90_before": bought.before.p90,
                "p90_after": bought.after.p90,
            }
            for each in self.runtimes
            for regime, bought in {"all": each.bought, **each.by_regime}.items()
        ]
        return pd.DataFrame(rows)


def _lines(each: RuntimeAdaptation) -> list[str]:
    lines = [f"{each.runtime}: {each.architectures} architectures, {each.rows} rows; corrected: {each.level}"]
    if not each.judged:
        lines.append(
            "  too few architectures to leave one out: nothing vouches for the correction; intervals grow by it"
        )
        lines.append(f"  median error {each.bought.before.median:.1%} before the correction, {each.rows} rows")
    groups = {"all": each.bought, **(each.by_regime if len(each.by_regime) > 1 else {})} if each.judged else {}
    for name, bought in groups.items():
        before, after = bought.before, bought.after
        lines.append(
            f"  {name:<16} median {before.median:.1%} -> {after.median:.1%}, "
            f"p90 {before.p90:.1%} -> {after.p90:.1%}, {before.cells} rows"
        )
    for title, factors in (("host", each.factors.host), ("device", each.factors.kernel)):
        if said := _said(factors):
            lines.append(f"  {title} factors: {said}")
    tilts = [tilt for tilt in each.factors.tilts if abs(tilt.exponent) >= _WORTH_SAYING]
    if tilts:
        lines.append("  device times go with " + ", ".join(f"{tilt.of}^{tilt.exponent:+.2f}" for tilt in tilts))
    return lines


def _said(factors: Mapping[str, float]) -> str:
    """The factors furthest from 1."""
    told = sorted(factors.items(), key=lambda item: -abs(item[1] - 1.0))
    told = [(name, factor) for name, factor in told if abs(factor - 1.0) >= _WORTH_SAYING][:_MOST_SHOWN]
    if len({f"{factor:.2f}" for factor in factors.values()}) == 1:
        return f"{told[0][1]:.2f} for all" if told else ""
    return ", ".join(f"{name if name != GENERAL else 'all others'} {factor:.2f}" for name, factor in told)


def _document(each: RuntimeAdaptation) -> dict[str, Any]:
    return {
        **{name: getattr(each, name) for name in ("runtime", "architectures", "rows", "level", "judged", "interval")},
        "bought": asdict(each.bought),
        "by_regime": {name: asdict(bought) for name, bought in each.by_regime.items()},
        "left_out": dict(each.left_out),
        "host_factors": dict(each.factors.host),
        "kernel_factors": dict(each.factors.kernel),
        "kernel_tilts": [msgspec.to_builtins(tilt) for tilt in each.factors.tilts],
    }
