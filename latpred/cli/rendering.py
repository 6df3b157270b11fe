"""A curve as a table that fits a terminal of 80 columns, and what to know beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latpred.profile_text import age
from latpred.render import SPARKS
from latpred.render import sparkline as sparkline_of
from latpred.units import format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from latpred.landmarks import Landmark
    from latpred.prediction import Curve, Prediction, Setting

COLUMNS = ("batch", "latency", "90 % interval", "overhead", "compute", "regime", "samples/s")


def print_curve(curve: Curve, console: Console, *, sparkline: bool = False) -> None:
    """Print what was asked, the table, the batch at which the regime changes, provenance and caveats."""
    console.print(_title(curve.setting), style="bold", markup=False, soft_wrap=True)
    if sparkline and len(curve) > 1 and console.encoding.startswith("utf"):
        console.print(_spark(curve), markup=False, soft_wrap=True)
    console.print(_table(curve))
    for line in _facts(curve):
        console.print(line, markup=False, soft_wrap=True)


def _spark(curve: Curve) -> str:
    """Latency and throughput as bars, each from zero to its largest value."""
    latency, rate = curve.latency_ms.tolist(), curve.throughput_per_s.tolist()
    wide = len(curve) > SPARKS // 2
    lines = [
        f"latency   {sparkline_of(latency)}  up to {format_duration(max(latency) / 1e3)}",
        f"samples/s {sparkline_of(rate)}  up to {_rate(max(rate))}",
    ]
    return "\n".join(lines) if wide else "  ".join(lines)


def _title(setting: Setting) -> str:
    size = {"seq": "tokens", "image": "pixels", "audio": "samples"}.get(setting.input_kind)
    inputs = f", {setting.input_size} {size}" if size and setting.input_size else ""
    return f"{setting.model}{inputs}, {setting.precision}, {setting.runtime} on {setting.device}, {setting.protocol}"


def _table(curve: Curve) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "regime" else "right", no_wrap=True)
    for point in curve:
        table.add_row(*_row(point))
    return table


def _row(point: Prediction) -> tuple[str, ...]:
    low, high = (format_duration(end / 1e3) for end in point.interval_ms)
    if low.split()[-1] == high.split()[-1]:
        low = low.split()[0]
    return (
        str(point.batch) + ("" if point.fits is not False else "*"),
        format_duration(point.latency_ms / 1e3),
        f"{low} to {high}",
        format_duration(point.overhead_ms / 1e3),
        format_duration(point.compute_ms / 1e3),
        point.regime.removesuffix("-bound"),
        _rate(point.throughput_per_s),
    )


def _rate(per_s: float) -> str:
    decimals = 0 if per_s >= 100 else 1 if per_s >= 10 else 2
    return f"{per_s:.{decimals}f}"


def _facts(curve: Curve) -> list[str]:
    setting, last = curve.setting, curve.points[-1]
    said = [_crossover(curve.crossover)]
    if any(point.fits is False for point in curve):
        said.append("* needs more memory than the device has")
    share = min(point.coverage.launches for point in curve)
    if last.coverage.estimated_ops:
        unknown = ", ".join(f"{name} ({count})" for name, count in last.coverage.estimated_ops.items())
        said.append(f"coverage: formulas for {share:.1%} of launches; estimated: {unknown}")
    else:
        said.append("coverage: formulas for all launches")
    said.append(f"profile: {_origin(setting)}")
    return said + [f"caveat: {caveat}" for caveat in setting.provenance.caveats]


def _crossover(found: Landmark) -> str:
    if found.batch == 1:
        return "never framework-bound: compute- or memory-bound from batch 1"
    if found.batch is None:
        return "framework-bound at every batch up to 65,536"
    low, high = found.low or 1, found.high
    span = f"{low} to {high}" if high is not None else f"{low} or more"
    return (
        f"compute-bound from batch {found.batch} (90 %: {span})" if low != high else f"compute-bound from batch {low}"
    )


def _origin(setting: Setting) -> str:
    from latpred.datasheet import PROVENANCE
    from latpred.ownership import Owner, owner

    provenance = setting.provenance
    machine = provenance.machine
    if provenance.source.partition(",")[0] == PROVENANCE:
        return f"none: {machine.accelerator} from its datasheet; measure one with: latpred calibrate"
    where = "this machine" if owner(machine) is Owner.THIS else provenance.profile
    threads = f", {machine.threads} thread{'' if machine.threads == 1 else 's'}" if not machine.accelerator else ""
    source, comma, adapted = provenance.source.partition(", ")
    verb = "calibrated" if source == "measured" else source
    return f"{where} ({setting.device}{threads}, {verb} {age(provenance.created)}{comma}{adapted})"
