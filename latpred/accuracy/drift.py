"""What a check of a profile found: which of its parts still hold, what moved, and what of the machine is another.

Records and their text only; `latpred.calibration.measurement.drift_test` measures.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pandas as pd

from latpred import host
from latpred.ops.families import root
from latpred.render import Page, Table, listed

SCHEMA = "latpred.check/1"
HOLDS, MOVED, UNCLEAR = "holds", "moved", "unclear"
BUSY = 0.25  # processors that other work may use before times are not to be believed
MOST_NAMED = 8


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that a profile prices, timed again."""

    clock: str  # "host" for dispatch, "device" for kernels
    # Precision and kernel family, class of op, or kind of call; "" for what all parts of the clock have in common.
    name: str
    ratio: float  # time now over the profile's, without what the clock's parts have in common
    low: float  # between `low` and `high` the ratio lies, all parts looked at being counted
    high: float
    least: float  # smallest factor that would have been called moved
    timed: int  # cells or kernels that were timed
    verdict: str  # HOLDS, MOVED, or UNCLEAR where noise hides a change of 15 %

    @property
    def group(self) -> str:
        """The part without what is special about it: several classes of one kind of op are shown together."""
        return root(self.name) if self.clock == "host" else self.name


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a profile still holds."""

    profile: str  # its name
    created: str  # when it was calibrated
    parts: tuple[Part, ...]  # everything that was timed again
    changes: tuple[str, ...]  # what differs between the machine now and the profile's, in sentences
    speed: dict[str, float]  # reference times now over the profile's; what is timed is brought to the profile's speed
    busy: float  # processors that other work used meanwhile; 0 where the system does not say
    seconds: float  # what the check took
    again: str  # the command that measures the profile again
    gpu: str = ""  # what disturbed the GPU meanwhile, as another process on it; "" where nothing did, or nobody looked

    @property
    def told(self) -> tuple[Part, ...]:
        """The parts as they may be called: beside other work, or on a slowed GPU, none is said to have moved."""
        if self.busy <= BUSY and not self.gpu:
            return self.parts
        return tuple(
            msgspec.structs.replace(part, verdict=UNCLEAR) if part.verdict == MOVED else part for part in self.parts
        )

    @property
    def moved(self) -> tuple[Part, ...]:
        """Parts that are not what the profile says."""
        return tuple(part for part in self.told if part.verdict == MOVED)

    @property
    def unclear(self) -> tuple[Part, ...]:
        """Parts of which noise, or other work, leaves too little to tell by."""
        return tuple(part for part in self.told if part.verdict == UNCLEAR)

    @property
    def verdict(self) -> str:
        """One word for all: "holds", "moved", or "unclear" where other work or noise leaves too little to tell by."""
        if self.moved:
            return MOVED
        if self.told != self.parts:
            return UNCLEAR
        return UNCLEAR if 2 * len(self.unclear) > len(self.parts) else HOLDS

    @property
    def sentence(self) -> str:
        """The answer, and what to do about it."""
        if self.verdict == HOLDS:
            return f"profile {self.profile} holds: {self._counted(HOLDS)}"
        if self.verdict == MOVED:
            return f"profile {self.profile} does not hold: {self._counted(MOVED)}. Anew: {self.again} --fresh"
        scatter = f"other work used {self.busy:.1f} processors" if self.busy > BUSY else "times scatter too much"
        reason = self.gpu or scatter
        return f"cannot tell whether profile {self.profile} holds: {reason}. Check again on an idle machine."

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "sentence": self.sentence,
            **msgspec.to_builtins(self),
            "parts": msgspec.to_builtins(self.told),
        }

    def to_frame(self) -> pd.DataFrame:
        """One row for each part."""
        return pd.DataFrame([msgspec.structs.asdict(part) for part in self.told])

    def page(self) -> Page:
        """The answer, the parts that moved, those that cannot be told, and what changed on the machine."""
        parts: list[Table | str] = []
        if self.verdict == MOVED:
            whole = [part for part in self.parts if not part.name]
            parts += [f"all of the {part.clock}: x{part.ratio:.2f}, taken off below" for part in whole]
            parts.append(_table(self.moved))
        if self.unclear:
            what = "noise" if self.told == self.parts else "noise or other work"
            names = dict.fromkeys(part.group or f"all of the {part.clock}" for part in self.unclear)
            parts.append(f"{what} hides a change of 15 % in: {listed(list(names), MOST_NAMED)}")
        if self.speed:
            parts.append(f"the machine now over the profile's speed, taken off all times: {host.sentence(self.speed)}")
        same = "nothing changed in processor, device, driver and packages"
        parts += [f"changed: {said}" for said in self.changes] or [same]
        return Page(self.sentence, parts)

    def __repr__(self) -> str:
        return self.page().text()

    def _repr_html_(self) -> str:
        return self.page().html()

    def _counted(self, verdict: str) -> str:
        count = sum(part.verdict == verdict for part in self.parts)
        return f"{count} of {len(self.parts)} parts are {'as they were' if verdict == HOLDS else 'not as they were'}"


def _table(parts: tuple[Part, ...]) -> Table:
    """What moved, classes of one kind of op in one row."""
    groups: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        groups.setdefault((part.clock, part.group), []).append(part)
    rows = []
    for (clock, name), group in groups.items():
        middle = sorted(group, key=lambda part: part.ratio)[len(group) // 2]
        shown = (name or "everything") + (f" ({len(group)} classes)" if len(group) > 1 else "")
        between = f"{min(part.low for part in group):.2f} to {max(part.high for part in group):.2f}"
        rows.append((shown, clock, f"x{middle.ratio:.2f}", between, str(sum(part.timed for part in group))))
    return Table(("moved", "of the", "by", "between", "timed"), rows, left=("moved", "of the"))
