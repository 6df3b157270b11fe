"""How predictions look: a few lines in a terminal, a small table in a notebook. Computes nothing new."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from latpred.units import format_bytes, format_duration

if TYPE_CHECKING:
    from latpred.prediction.crossover import BatchThreshold
    from latpred.prediction.prediction import Curve, Prediction, Setting

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = 5  # classes of the breakdown that are named
SPARKS = 60

Line = tuple[str, str]


def prediction_text(prediction: Prediction) -> str:
    """Title, then one aligned line per fact."""
    return "\n".join([_title(prediction.setting, f"batch {prediction.batch}"), *_aligned(_facts(prediction))])


def prediction_html(prediction: Prediction) -> str:
    """The same facts as a table."""
    return _card(_title(prediction.setting, f"batch {prediction.batch}"), _facts(prediction))


def curve_text(curve: Curve) -> str:
    """Title, sparkline, one row per batch, landmarks."""
    latencies = [point.latency_ms for point in curve]
    lines = [_title(curve.setting, _batches(curve))]
    lines.append(f"  latency {sparkline(latencies)}  {_ms(min(latencies))} to {_ms(max(latencies))}")
    cells = [_CURVE_HEAD, *(_curve_row(point) for point in curve)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_CURVE_HEAD))]
    lines += ["  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([*lines, *_aligned([*_threshold_lines(curve.setting), *_basis(curve.setting)])])


def curve_html(curve: Curve) -> str:
    """The same as a table, with the sparkline above it."""
    head = "".join(f"<th>{escape(name)}</th>" for name in _CURVE_HEAD)
    body = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in _curve_row(point))}</tr>" for point in curve)
    spark = escape(sparkline([point.latency_ms for point in curve]))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    facts = [*_threshold_lines(curve.setting), *_basis(curve.setting)]
    return _card(_title(curve.setting, _batches(curve)), facts, f"<div>{spark}</div>{table}")


def sparkline(values: Sequence[float]) -> str:
    """Bars from zero to the largest value; long series are thinned.

    >>> sparkline([1, 2, 4, 8])
    '▁▂▄█'
    """
    step = -(-len(values) // SPARKS)
    most = max(values)
    return "".join(_BARS[max(0, -(-int(v / most * 80) // 10) - 1)] if most else _BARS[0] for v in values[::step])


_CURVE_HEAD = ("batch", "latency", "90 % interval", "samples/s", "overhead", "compute", "regime")


def _curve_row(point: Prediction) -> tuple[str, ...]:
    low, high = point.interval_ms
    return (
        str(point.batch),
        _ms(point.latency_ms),
        f"{_ms(low)} to {_ms(high)}",
        _rate(point.throughput_per_s),
        _ms(point.overhead_ms),
        _ms(point.compute_ms),
        point.regime + ("" if point.fits is not False else ", too large"),
    )


def _facts(prediction: Prediction) -> list[Line]:
    low, high = prediction.interval_ms
    busy = f", device busy {prediction.device_busy:.0%}"
    room = {True: ", fits", False: ", does not fit the device", None: ""}[prediction.fits]
    rate = f"{_rate(prediction.throughput_per_s)} samples/s"
    return [
        ("latency", f"{_ms(prediction.latency_ms)} (90 %: {_ms(low)} to {_ms(high)}), {rate}"),
        ("regime", f"{prediction.regime}{busy}"),
        ("clocks", f"{_ms(prediction.overhead_ms)} dispatching, {_ms(prediction.compute_ms)} computing"),
        ("mostly", _mostly(prediction)),
        ("memory", f"{format_bytes(prediction.peak_bytes)} at the peak{room}"),
        *_threshold_lines(prediction.setting),
        *_basis(prediction.setting),
    ]


def _mostly(prediction: Prediction) -> str:
    breakdown = prediction.breakdown
    total = sum(share.host_ms + share.device_ms for share in breakdown)
    parts = [
        f"{share.name} {(share.host_ms + share.device_ms) / total:.0%}"
        for share in breakdown[:_SHOWN]
        if total and share.host_ms + share.device_ms >= 0.005 * total
    ]
    return ", ".join(parts) or "nothing"


def _threshold_lines(setting: Setting) -> list[Line]:
    crossover, knee = setting.thresholds.crossover(), setting.thresholds.knee()
    return [
        ("crossover", _threshold(crossover, "compute-bound from batch {}", "framework-bound at every batch")),
        ("knee", _threshold(knee, "latency leaves its floor at batch {}", "latency never leaves its floor")),
    ]


def _threshold(threshold: BatchThreshold, sentence: str, never: str) -> str:
    if threshold.batch is None:
        return never
    span = f" (90 %: {threshold.low} to {threshold.high or 'beyond all looked at'})"
    return sentence.format(threshold.batch) + (span if threshold.low != threshold.high else "")


def _basis(setting: Setting) -> list[Line]:
    provenance = setting.provenance
    where = provenance.machine.accelerator or provenance.machine.cpu
    rests = f"{provenance.profile}, {provenance.source} on {where}, {provenance.created[:10]}"
    return [("profile", rests), *(("caveat", caveat) for caveat in provenance.caveats)]


def _title(setting: Setting, batches: str) -> str:
    size = {"seq": "{} tokens", "image": "{0} x {0} pixels", "audio": "{} samples of audio"}.get(setting.input_kind)
    inputs = [size.format(setting.input_size)] if size else []
    protocol = [] if setting.protocol == "single" else [setting.protocol]
    copied = [] if setting.inputs_on == "device" else ["inputs copied from the host"]
    parts = [batches, *inputs, setting.precision, f"{setting.runtime} on {setting.device}", *protocol, *copied]
    return f"{setting.model}: {', '.join(parts)}"


def _batches(curve: Curve) -> str:
    sizes = curve.batches
    return f"batch {sizes.min()} to {sizes.max()}"


def _aligned(lines: Iterable[Line]) -> list[str]:
    return [f"  {name:<10}{text}" for name, text in lines]


def _card(title: str, facts: list[Line], above: str = "") -> str:
    rows = "".join(f"<tr><th style='text-align:left'>{escape(n)}</th><td>{escape(t)}</td></tr>" for n, t in facts)
    return f"<div><strong>{escape(title)}</strong>{above}<table>{rows}</table></div>"


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 1000 else f"{per_second:.3g}"


def _ms(milliseconds: float) -> str:
    return format_duration(milliseconds / 1e3)
