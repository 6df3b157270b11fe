"""`latpred.adapt`: a few measured architectures correct a device's profile, as far as leaving each out shows a gain.

How factors are found is `fit.corrections`' business; here rows become measured forward passes, the freedom of the
factors is chosen, and a profile is put together that says what was done to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from latpred.accuracy import metrics
from latpred.accuracy.metrics import Errors
from latpred.errors import UsageError
from latpred.fit.corrections import GENERAL, Factors, Fit, LatencyModel, Level, Row, corrected
from latpred.prediction.clocks import Floats
from latpred.prediction.crossover import Z90
from latpred.prediction.predictor import Predictor
from latpred.profile.document import ADAPTED, DeviceProfile, DispatchFit

if TYPE_CHECKING:
    import pandas as pd

    from latpred.accuracy.predicted import GraphKey
    from latpred.graph.graph import ModelGraph

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
        times were also multiplied by the powers of their sizes that `size_corrections` gives.
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
        Corrected; give it to `latpred.Predictor`, or save it with `latpred.profile.store.save`.
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
    size_corrections = [
        size_correction
        for size_correction in each.factors.size_corrections
        if abs(size_correction.exponent) >= _WORTH_SAYING
    ]
    if size_corrections:
        lines.append(
            "  device times go with "
            + ", ".join(f"{size_correction.of}^{size_correction.exponent:+.2f}" for size_correction in size_corrections)
        )
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
        "kernel_tilts": [msgspec.to_builtins(size_correction) for size_correction in each.factors.size_corrections],
    }


NONE = Level("none", 0.0, 0.0, 0.0, 0.0)
LEVELS = (
    Level("one factor", 0.7, 0.0, 0.0, 0.0),
    Level("host and device", 0.7, 0.3, 0.2, 0.0),
    Level("classes", 0.7, 0.3, 0.3, 0.3),
    Level("classes and sizes", 0.7, 0.3, 0.3, 0.3, 0.15),
)
FEWEST = 4  # architectures that a choice by leaving one out takes
FEWEST_FOR_INTERVALS = 8
LEAST_GAIN = 0.005  # in mean log error; less than that is nobody's gain
MOST_RATIO = 50.0  # measured over predicted, beyond which a unit is wrong rather than a profile


class _Judged(NamedTuple):
    """A runtime's rows with the fit that was chosen, and the mean errors left out at every level."""

    runtime: str
    rows: list[Row]
    regimes: tuple[str, ...]
    plain: Fit
    chosen: Fit
    left_out: dict[str, float]


def adapt(
    profile: DeviceProfile,
    measured: Any,
    *,
    graphs: Mapping[GraphKey, ModelGraph] | None = None,
    inputs: Any = None,
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Adaptation:
    """Correct a profile with measured architectures, and say by leaving each out what that bought.

    Host costs and kernel times get factors: one for everything, one for each clock, or one for each host class and
    kernel family, and in the end powers of kernels' sizes too; all are believed to be near 1. What errs least on
    architectures left out is taken, if it gains more than the noise; else nothing is changed. Fewer than four
    architectures cannot be left out: they move everything by one factor, for which nothing vouches, and intervals grow
    by that factor. Runtimes without rows stay as they are.

    Parameters
    ----------
    profile : DeviceProfile
        Of the device that was measured, or of one like it.
    measured : DataFrame, path or iterable
        Columns of a measurement table, of which model, batch and latency_s (or latency_ms) must be there; what
        `latpred.measure` gives will do. Or rows (model, batch, runtime, precision, latency_ms). A model is a name, a
        `ModelGraph`, a module, a config or a function that builds one. Ten architectures are plenty.
    graphs : mapping, optional
        Walked models by `accuracy.predicted.GraphKey`, as a recording holds them; names that are not in it are traced.
    inputs : optional
        What modules are called with, where it does not follow from them.
    name : str, optional
        Of the new profile; default: the old one's with "-adapted".
    progress : callable, optional
        Told what is being traced.

    Raises
    ------
    TableError
        When the rows are not usable.
    UsageError
        When they are of another device, or of another unit by all signs.
    ProfileError
        When the profile does not cover their runtime or precision.

    Examples
    --------
    >>> import latpred
    >>> table = latpred.measure(architectures, [1, 16])  # doctest: +SKIP
    >>> better = adapt(profile, table)  # doctest: +SKIP
    >>> print(better.text())  # doctest: +SKIP
    >>> latpred.Predictor(better.profile).predict_many(candidates)  # doctest: +SKIP
    """
    from latpred.accuracy.predicted import read_rows

    predictor = Predictor(profile)
    parts = read_rows(predictor, measured, graphs or {}, inputs, progress)
    judged = [_judged(predictor, runtime, rows) for runtime, rows in parts.items()]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    # Of runtimes that were only estimated, those that have rows now are kept.
    runtimes = {**profile.runtimes, **{name: predictor.profile.runtimes[name] for name in parts}}
    new, records = msgspec.structs.replace(profile, runtimes=runtimes), []
    for each in judged:
        widths = _widths(each)
        record = _record(each, widths is not None)
        if each.chosen.level is not NONE:
            new = corrected(new, each.runtime, each.chosen.factors)
        fit = new.runtimes[each.runtime]
        if widths is None:
            fit = _widened(fit, each)
        else:  # which are of the host that measured the rows
            fit = _with_spreads(msgspec.structs.replace(fit, host_spread=0.0), *widths)
        fit = msgspec.structs.replace(fit, untested=0 if record.judged else record.architectures)
        new = msgspec.structs.replace(new, runtimes={**new.runtimes, each.runtime: fit})
        records.append(record)
    protocol = {**profile.protocol, ADAPTED: f"from {profile.name} on {now[:10]}: {'; '.join(map(_told, records))}"}
    new = msgspec.structs.replace(new, name=name or f"{profile.name}-adapted", protocol=protocol, sha256="")
    return Adaptation(new, profile.name, now, tuple(records))


def _judged(predictor: Predictor, runtime: str, rows: list[Row]) -> _Judged:
    predictions = [predictor.predict(row.graph, row.batch, runtime=runtime, protocol=row.protocol) for row in rows]
    law = LatencyModel(predictor, rows, runtime)
    plain = law.unchanged(NONE)
    _demand_unit(plain.left_out)
    architecture = np.array([row.architecture for row in rows])
    noise = float(np.median([row.noise for row in rows])) / math.sqrt(len(rows))
    if len(set(architecture.tolist())) < FEWEST:
        chosen, tried = law.fit(LEVELS[0]), [plain]
    else:
        tried = [plain, *(law.fit(level) for level in LEVELS)]
        chosen = _chosen(tried, architecture, max(LEAST_GAIN, noise))
    left_out = {fit.level.name: float(_by_architecture(fit, architecture).mean()) for fit in tried}
    return _Judged(runtime, rows, tuple(point.regime for point in predictions), plain, chosen, left_out)


def _chosen(tried: Sequence[Fit], architecture: Any, least: float) -> Fit:
    """The fit that errs least on architectures left out, if that gains more than the noise; else the first."""
    errors = [_by_architecture(fit, architecture) for fit in tried]
    best = int(np.argmin([each.mean() for each in errors]))
    gains = errors[0] - errors[best]
    return tried[best] if gains.mean() > max(least, float(gains.std(ddof=1)) / math.sqrt(len(gains))) else tried[0]


def _by_architecture(fit: Fit, architecture: Any) -> Floats:
    """Mean absolute error of each architecture, left out."""
    sizes = np.abs(fit.left_out)
    return np.array([sizes[architecture == one].mean() for one in np.unique(architecture)])


def _demand_unit(errors: Floats) -> None:
    ratio = math.exp(float(np.median(errors)))
    if not 1 / MOST_RATIO < ratio < MOST_RATIO:
        raise UsageError(
            f"The rows take {ratio:.3g} times what the profile predicts, in the median: check the unit of their "
            "latencies (latency_s is seconds, latency_ms milliseconds) and that the profile is of their device."
        )


def _widths(judged: _Judged) -> tuple[float, float | None] | None:
    """Spreads where the host sets the pace and where the device does; None where rows are too few to tell.

    They are as narrow as the errors left out vouch for, and no narrower for what so few of them can tell.
    """
    small = np.array([regime == "framework-bound" for regime in judged.regimes])
    architecture = np.array([row.architecture for row in judged.rows])
    spreads = []
    for rows in (small, ~small, np.ones(len(small), bool)):
        enough = len(np.unique(architecture[rows])) >= FEWEST_FOR_INTERVALS
        spreads.append(metrics.half_width(judged.chosen.left_out[rows], architecture[rows]) / Z90 if enough else None)
    host, device, both = spreads
    if both is None:
        return None
    return (host, device) if host is not None and device is not None else (both, None)


def _widened(fit: DispatchFit, judged: _Judged) -> DispatchFit:
    """Intervals of too few rows to tell them from: those of before, made as wide as what speaks against them.

    That is the largest error left out. Without any, it is the correction itself, as it may be of no good at all.
    """
    host, busy = fit.spread, fit.spread if fit.busy_spread is None else fit.busy_spread
    if len(judged.left_out) > 1:
        least = float(np.abs(judged.chosen.left_out).max()) / Z90
        return _with_spreads(fit, max(host, least), max(busy, least))
    factors = (*judged.chosen.factors.host.values(), *judged.chosen.factors.kernel.values())
    sigma = max(abs(math.log(factor)) for factor in factors) / Z90
    return _with_spreads(fit, math.hypot(host, sigma), math.hypot(busy, sigma))


def _with_spreads(fit: DispatchFit, host: float, busy: float | None) -> DispatchFit:
    return msgspec.structs.replace(fit, spread=host, busy_spread=None if busy == host else busy)


def _record(judged: _Judged, interval: bool) -> RuntimeAdaptation:
    rows, factors = judged.rows, judged.chosen.factors
    architectures = [str(row.architecture) for row in rows]
    regimes = np.array(judged.regimes, dtype=object)

    def bought(own: Any) -> Bought:
        models = [name for name, wanted in zip(architectures, own, strict=True) if wanted]
        before, after = (
            metrics.errors(np.exp(-fit.left_out[own]), np.ones(len(models)), models)
            for fit in (judged.plain, judged.chosen)
        )
        return Bought(before, after)

    return RuntimeAdaptation(
        runtime=judged.runtime,
        architectures=len(set(architectures)),
        level=judged.chosen.level.name,
        judged=len(judged.left_out) > 1,
        bought=bought(np.ones(len(rows), bool)),
        by_regime={str(name): bought(regimes == name) for name in sorted(set(judged.regimes))},
        left_out=judged.left_out,
        factors=factors,
        interval=interval,
    )


def _told(record: RuntimeAdaptation) -> str:
    bought, many = record.bought, "s" * (record.architectures != 1)
    said = f"{record.runtime} by {record.rows} rows of {record.architectures} architecture{many}, "
    said += f"corrected {record.level}, "
    if not record.judged:
        return f"{said}median error before {bought.before.median:.1%}; too few to leave one out, nothing vouches for it"
    return f"{said}median error left out {bought.before.median:.1%} -> {bought.after.median:.1%}"
