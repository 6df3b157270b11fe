"""Which parts of a profile moved: robust centres of log ratios, held against their own noise.

All parts of a clock share a tempo (a throttled GPU, a busy host): the median over its parts, reported by itself, so
that a part is judged by what it moved beyond the others. No part is called moved because many were looked at:
thresholds are those of a family-wise error of `FALSE_ALARMS` per check.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import norm

from latpred.calibration.observing import Seen
from latpred.drift import Part

FALSE_ALARMS = 1e-3
LEAST = 0.07  # log ratio below which nothing is called moved, however well it is known
WANTED = math.log(1.15)  # what a check should see
PRIOR = 4  # anchors that a part's usual doubt counts as
MAD_TO_SD, MEDIAN_TO_MEAN = 1.4826, 1.2533


class _Group(NamedTuple):
    """Anchors of one part, each the median over rounds."""

    clock: str
    part: str
    ratios: np.ndarray[tuple[int], np.dtype[np.float64]]
    doubt: float


def judged(rounds: Sequence[Iterable[Seen]]) -> list[Part]:
    """The parts of a profile, those that all others of a clock have in common first.

    Parameters
    ----------
    rounds : sequence of iterables of Seen
        The same anchors in every round.
    """
    groups = sorted(_groups([seen for one in rounds for seen in one]), key=lambda group: group.part)
    parts: list[Part] = []
    clocks = sorted({group.clock for group in groups}, reverse=True)
    z = float(norm.isf(FALSE_ALARMS / 2 / max(len(groups) + len(clocks), 1)))
    for clock in clocks:
        own = [group for group in groups if group.clock == clock]
        centres = [float(np.median(group.ratios)) for group in own]
        common = float(np.median(centres))
        usual = _usual(own, centres)
        errors = [_error(group, usual) for group in own]
        parts.append(_part(clock, "", common, MEDIAN_TO_MEAN * float(np.median(errors)) / math.sqrt(len(own)), z, own))
        for group, centre, error in zip(own, centres, errors, strict=True):
            parts.append(_part(clock, group.part, centre - common, error, z, [group]))
    return parts


def _groups(seen: Iterable[Seen]) -> list[_Group]:
    by_part: dict[tuple[str, str], dict[str, list[Seen]]] = {}
    for one in seen:
        by_part.setdefault((one.clock, one.part), {}).setdefault(one.anchor, []).append(one)
    return [
        _Group(
            clock,
            part,
            np.array([np.median([one.log_ratio for one in group]) for group in anchors.values()]),
            float(np.median([one.doubt for group in anchors.values() for one in group])),
        )
        for (clock, part), anchors in by_part.items()
    ]


def _usual(groups: Sequence[_Group], centres: Sequence[float]) -> float:
    """Standard deviation of one anchor's ratio as most of this clock's have it."""
    within = [group.ratios - np.median(group.ratios) for group in groups if len(group.ratios) > 2]
    if within:
        return MAD_TO_SD * float(np.median(np.abs(np.concatenate(within))))
    return MAD_TO_SD * float(np.median(np.abs(np.array(centres) - np.median(centres))))


def _error(group: _Group, usual: float) -> float:
    """Standard error of a part's centre."""
    count = len(group.ratios)
    left = group.ratios - np.median(group.ratios)
    prior = max(usual, group.doubt)
    variance = (PRIOR * prior**2 + float(left @ left)) / (PRIOR + count - 1)
    return MEDIAN_TO_MEAN * math.sqrt(variance / count) if count > 2 else math.sqrt(variance / count)


def _part(clock: str, name: str, log_ratio: float, error: float, z: float, groups: Sequence[_Group]) -> Part:
    threshold = max(LEAST, z * error)
    moved, told = abs(log_ratio) > threshold, threshold <= WANTED
    return Part(
        clock=clock,
        name=name,
        ratio=math.exp(log_ratio),
        low=math.exp(log_ratio - z * error),
        high=math.exp(log_ratio + z * error),
        least=math.exp(threshold),
        anchors=sum(len(group.ratios) for group in groups),
        verdict="moved" if moved else "holds" if told else "unclear",
    )
