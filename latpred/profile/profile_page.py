"""A profile for people: what was measured, on what, and how well it was fitted. Computes nothing new."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from latpred import host
from latpred.profile.document import ADAPTED, DeviceProfile, DispatchFit, call_prices
from latpred.profile.store import threads_text
from latpred.render import Facts, Page, Table
from latpred.units import format_bytes, format_duration


def profile_page(profile: DeviceProfile) -> Page:
    """What was measured, on what, and how well each family of kernels was fitted."""
    numbers = ("gmacs_per_s", "weight_gb_per_s", "activation_gb_per_s", "floor_us")
    # Heads of two lines leave the names of families room on a terminal of 80 columns.
    heads = ("kernel family", "precision", "GMAC/s", "weights\nGB/s", "activations\nGB/s", "floor\nus", "error")
    rows = [
        (row["family"], row["precision"], *(_number(row[name]) for name in numbers), f"{row['error']:.1%}")
        for row in kernel_rows(profile)
    ]
    verb = "calibrated" if profile.provenance == "measured" else profile.provenance
    adapted = ", adapted" if ADAPTED in profile.protocol else ""
    threads = profile.machine.threads
    known = [threads_text(threads)] if threads else []  # a datasheet says nothing of them
    how = ", ".join([profile.device.name, *known, f"{verb} {age(profile.created)}{adapted}"])
    return Page(f"{profile.name}: {how}", [Facts(_facts(profile)), "\n", Table(heads, rows)])


def age(created: str, now: datetime | None = None) -> str:
    """How long ago an ISO 8601 time was, as a person would say it.

    >>> age("2026-01-01T00:00:00+00:00", datetime(2026, 1, 1, 0, 3, 5, tzinfo=UTC))
    '3 minutes ago'
    """
    then = datetime.fromisoformat(created)
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    seconds = ((now or datetime.now(UTC)) - then).total_seconds()
    for unit, length in (("year", 31_557_600), ("month", 2_629_800), ("day", 86_400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // length)
        if count >= 1:
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


def kernel_rows(profile: DeviceProfile) -> list[dict[str, Any]]:
    """One row per precision and kernel family: throughput, bandwidth, floor and cross-validated error."""
    return [
        {
            "precision": precision,
            "family": family,
            "gmacs_per_s": fit.macs_per_us / 1e3,
            "weight_gb_per_s": fit.weight_bytes_per_us / 1e3,
            "activation_gb_per_s": fit.activation_bytes_per_us / 1e3,
            "floor_us": fit.floor_us,
            "error": fit.error,
        }
        for precision, fits in profile.kernels.items()
        for family, fit in fits.items()
    ]


def _facts(profile: DeviceProfile) -> list[tuple[str, str]]:
    machine, device, gate = profile.machine, profile.device, profile.acceptance
    driver = f" (driver {machine.driver})" if machine.driver else ""
    accelerator = f", {machine.accelerator}{driver}" if machine.accelerator else ""
    cores = f", {machine.cores} cores" if machine.cores else ""
    memory = f", {format_bytes(machine.memory_bytes)}" if machine.memory_bytes else ""
    facts = [
        ("machine", f"{machine.cpu}{cores}{accelerator}{memory}"),
        ("stack", ", ".join(f"{name} {version}" for name, version in machine.stack.items())),
        *profile.protocol.items(),
        ("calibration", f"{len(profile.samples)} cells in {format_duration(profile.seconds)}"),
    ]
    if profile.speed:
        times = ", ".join(f"{host.MEANINGS[kind]} {us:.0f} us" for kind, us in profile.speed.items())
        facts.append(("full speed", times))
    if profile.usual:
        times = ", ".join(f"{kind} x{ratio:.2f}" for kind, ratio in profile.usual.items())
        facts.append(("usual speed", f"{times}: predictions are for it"))
    if profile.disturbed:
        facts.append(("disturbed", f"{profile.disturbed:.0%} of the cells, by other work until the end"))
    if profile.slowed:
        facts.append(("slowed", f"{profile.slowed:.0%} of the cells, which found no moment at full speed"))
    facts += [("failed", f"{count} cells: {reason}") for reason, count in profile.failures.items()]
    if device.asynchronous:
        clock = f"launch {device.launch_us:.2f} us, gap {device.gap_us:.2f} us, sync {device.sync_us:.2f} us"
        facts.append(("clock", clock))
    facts += [(runtime, _runtime_line(fit)) for runtime, fit in profile.runtimes.items()]
    verdict = "passed" if gate.all_passed else "failed"
    facts.append(("gate", verdict if gate.checks else "none"))
    facts += [("", f"{name}: {verdict}") for name, verdict in gate.checks.items()]
    return [*facts, *(("", advice) for advice in gate.advice)]


def _runtime_line(fit: DispatchFit) -> str:
    costs = [cost for name, cost in fit.costs_us.items() if name]
    said = [f"{min(costs):.1f} to {max(costs):.1f} us per op"] if costs else []
    calls = zip(("module call", "Python call", "attribute read"), call_prices(fit), strict=True)
    said += [f"{name} {us:.2g} us" for name, us in calls if us]
    said += [f"{fit.fixed_us:.1f} us per call"]
    if fit.kernel_scales:
        scales = fit.kernel_scales.values()
        said += [f"kernels {min(scales):.2f} to {max(scales):.2f} times eager's"]
    if fit.gap_us is not None:
        said += [f"gap {fit.gap_us:.2f} us"]
    return ", ".join(said)


def _number(value: float) -> str:
    if not value:
        return "-"
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"  # which "3g" would write as 1e+03
