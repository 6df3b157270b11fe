"""Conversions and human-readable forms of the units used in names: us, ms, s, bytes, macs."""

from __future__ import annotations

import math

_MOST_DECIMALS = 9
US_PER_S = 1e6
MS_PER_S = 1e3


def format_duration(seconds: float) -> str:
    """Three significant digits in the unit a person would use.

    >>> format_duration(0.0123)
    '12.3 ms'
    >>> format_duration(4.2e-6)
    '4.20 us'
    """
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * scale >= 1:
            return f"{three_digits(seconds * scale)} {unit}"
    return f"{three_digits(seconds * 1e9)} ns"


def format_bytes(count: float) -> str:
    """Binary multiples.

    >>> format_bytes(438_000_000)
    '418 MiB'
    """
    return _multiple(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_count(count: float) -> str:
    """Decimal multiples, as the field writes MACs and parameters.

    >>> format_count(11_174_215_680)
    '11.2 G'
    """
    return _multiple(count, 1000, ("", "k", "M", "G", "T"))


def _multiple(count: float, base: int, units: tuple[str, ...]) -> str:
    """A count in the largest unit that it reaches one of; whole in the smallest."""
    value, unit = float(count), units[0]
    for larger in units[1:]:
        if abs(value) < base:
            break
        value, unit = value / base, larger
    return f"{value:.0f} {unit}".rstrip() if unit == units[0] else f"{three_digits(value)} {unit}"


def three_digits(value: float) -> str:
    """Three significant digits, or all that stand before the point.

    >>> three_digits(12345.6), three_digits(9.996), three_digits(0.00357)
    ('12346', '10.0', '0.00357')
    """
    rounded = abs(float(f"{value:.3g}"))
    before = math.floor(math.log10(rounded)) if 0 < rounded < math.inf else 0
    return f"{value:.{min(max(2 - before, 0), _MOST_DECIMALS)}f}"
