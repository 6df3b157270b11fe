"""How predictions and curves look: a few facts of one, a table of several. Computes nothing new."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from latpred.prediction.clocks import KNEE_RATIO
from latpred.profile.datasheet import PROVENANCE
from latpred.profile.profile_page import age
from latpred.profile.store import Owner, owner, threads_text
from latpred.render import SPARKS, Facts, Page, Row, Table, format_interval, format_ms, format_threshold, sparkline
from latpred.units import format_bytes, three_digits

if TYPE_CHECKING:
    from latpred.prediction.clocks import BatchThreshold
    from latpred.prediction.prediction import Curve, Prediction, Provenance, Setting

_NAMED = 5  # classes of the breakdown that are named
_SIZES = {"seq": "{} tokens", "image": "{} pixels", "audio": "{} samples"}
_TOO_LARGE = "needs more memory than the device has"
CURVE_HEADS = ("batch", "latency", "90 % interval", "overhead", "compute", "regime", "samples/s")


def prediction_page(prediction: Prediction) -> Page:
    busy = f", device busy {prediction.device_busy:.0%}"
    room = {True: ", fits", False: ", does not fit the device", None: ""}[prediction.fits]
    rate, knee = f"{three_digits(prediction.throughput_per_s)} samples/s", prediction.knee()
    start = "at no batch up to 65,536" if knee.batch is None else f"from batch {format_threshold(knee)}"
    facts = [
        ("latency", f"{format_ms(prediction.latency_ms)} (90 %: {format_interval(prediction.interval_ms)}), {rate}"),
        ("regime", f"{prediction.regime}{busy}"),
        ("clocks", f"{format_ms(prediction.overhead_ms)} dispatching, {format_ms(prediction.compute_ms)} computing"),
        ("mostly", _mostly(prediction)),
        ("memory", f"{format_bytes(prediction.peak_bytes)} at the peak{room}"),
        ("crossover", _crossover_sentence(prediction.crossover)),
        ("knee", f"latency exceeds {KNEE_RATIO:g} times that of batch 1 {start}"),
        *basis(prediction.provenance, prediction.device),
    ]
    return Page(f"{title(prediction.setting)}, batch {prediction.batch}", [Facts(facts)])


def curve_page(curve: Curve, *, sparklines: bool = True) -> Page:
    """Sparklines, a row for each batch, and what holds for all."""
    setting = curve.setting
    sparks = [_sparks(curve)] if sparklines and len(curve) > 1 else []
    rows = [curve_row(point) for point in curve]
    table = Table(CURVE_HEADS, rows, left=("regime",), note=star_note(point.fits for point in curve))
    remarks = [_crossover_sentence(curve.crossover), _coverage(curve)]
    return Page(title(setting), [*sparks, table, *remarks, *basis_lines(setting.provenance, setting.device)])


def title(setting: Setting) -> str:
    """What was asked, without the batch."""
    copied = "" if setting.inputs_on == "device" else ", inputs copied from the host"
    parts = [setting.model, *input_text(setting), *setting.setup, f"{setting.runtime} on {setting.device}"]
    return f"{', '.join(parts)}, {setting.protocol}{copied}"


def input_text(setting: Setting) -> list[str]:
    """The size of the inputs, where they have one: one string or none."""
    size = _SIZES.get(setting.input_kind)
    return [size.format(setting.input_size)] if size and setting.input_size else []


def star(fits: bool | None) -> str:
    """A star behind a batch that needs too much memory."""
    return "*" if fits is False else ""


def star_note(all_fits: Iterable[bool | None]) -> str:
    return f"* {_TOO_LARGE}" if any(map(star, all_fits)) else ""


def too_large(point: Prediction) -> tuple[str, ...]:
    """A caveat of a batch that needs too much memory; none of any other."""
    return (f"batch {point.batch} {_TOO_LARGE}",) if point.fits is False else ()


def _crossover_sentence(crossover: BatchThreshold) -> str:
    if crossover.batch == crossover.high == 1:
        return "never framework-bound: compute- or memory-bound from batch 1"
    if crossover.batch is None:
        return "framework-bound at every batch up to 65,536"
    return f"compute- or memory-bound from batch {format_threshold(crossover)}"


def basis(provenance: Provenance, device: str) -> list[tuple[str, str]]:
    """The profile that a prediction for a device rests on, and what may not hold."""
    return [("profile", _origin(provenance, device)), *(("caveat", caveat) for caveat in provenance.caveats)]


def basis_lines(provenance: Provenance, device: str) -> list[str]:
    """The same as sentences."""
    return [f"{name}: {text}" for name, text in basis(provenance, device)]


def _origin(provenance: Provenance, device: str) -> str:
    machine = provenance.machine
    source, comma, adapted = provenance.source.partition(", ")
    if source == PROVENANCE and not adapted:
        return f"none: {machine.accelerator} from its datasheet; measure one with: latpred calibrate"
    where = "this machine" if owner(machine) is Owner.THIS else provenance.profile
    threads = "" if machine.accelerator else f", {threads_text(machine.threads)}"
    verb = {"measured": "calibrated", PROVENANCE: "made from its datasheet"}.get(source, source)
    return f"{where} ({device}{threads}, {verb} {age(provenance.created)}{comma}{adapted})"


def _mostly(prediction: Prediction) -> str:
    breakdown = prediction.breakdown
    total = sum(share.overhead_ms + share.compute_ms for share in breakdown)
    parts = [
        f"{share.name} {(share.overhead_ms + share.compute_ms) / total:.0%}"
        for share in breakdown[:_NAMED]
        if total and share.overhead_ms + share.compute_ms >= 0.005 * total
    ]
    return ", ".join(parts) or "nothing"


def _sparks(curve: Curve) -> str:
    """Latency and throughput as bars, each from zero to its largest value."""
    latency, rate = curve.latency_ms.tolist(), curve.throughput_per_s.tolist()
    lines = (
        f"latency   {sparkline(latency)}  up to {format_ms(max(latency))}",
        f"samples/s {sparkline(rate)}  up to {three_digits(max(rate))}",
    )
    return ("\n" if len(curve) > SPARKS // 2 else "  ").join(lines)


def curve_row(point: Prediction) -> Row:
    return (
        f"{point.batch}{star(point.fits)}",
        format_ms(point.latency_ms),
        format_interval(point.interval_ms),
        format_ms(point.overhead_ms),
        format_ms(point.compute_ms),
        point.regime.removesuffix("-bound"),
        three_digits(point.throughput_per_s),
    )


def _coverage(curve: Curve) -> str:
    estimated = {name: count for point in curve for name, count in point.coverage.estimated_ops.items()}
    if not estimated:
        return "coverage: formulas for all launches"
    share = min(point.coverage.launches for point in curve)
    unknown = ", ".join(f"{name} ({count})" for name, count in estimated.items())
    return f"coverage: formulas for {share:.1%} of launches; estimated: {unknown}"
