"""Lengths of the sequences of a batch: given one by one, or as a distribution from which a typical batch is made.

A batch of a distribution is not drawn at random: its lengths lie at evenly spaced quantiles, so that the same question
has the same answer and the answer is that of a typical batch. Nothing here knows of models or tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from statistics import NormalDist

from latpred.errors import UsageError

EXECUTIONS = ("padded", "nested", "packed")
_PAIR = re.compile(r"(?P<name>[a-z]+)=(?P<value>\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths with a normal distribution, rounded, at least 1 and at most `padded_to`.

    Attributes
    ----------
    mean, std : float
        Tokens.
    padded_to : int
        Tokens that every sequence has with its padding.

    Examples
    --------
    >>> Lengths(mean=20.92, std=10.18, padded_to=128).of(5)
    (8, 16, 21, 26, 34)
    """

    mean: float
    std: float
    padded_to: int

    def __post_init__(self) -> None:
        """Refuse what no batch can have."""
        for name in ("mean", "std"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not value == value:
                raise UsageError(f"{name}={value!r} is not a number of tokens; give one, as in mean=20.92.")
        _whole("padded_to", self.padded_to)
        if not 1 <= self.mean <= self.padded_to:
            raise UsageError(
                f"A mean of {self.mean:g} tokens is not possible: lengths run from 1 to padded_to={self.padded_to}; "
                "give one of those."
            )
        if self.std < 0 or self.std**2 > (self.mean - 1) * (self.padded_to - self.mean):
            raise UsageError(
                f"Lengths from 1 to {self.padded_to} with a mean of {self.mean:g} cannot have a standard deviation of "
                f"{self.std:g}; give one from 0 to {((self.mean - 1) * (self.padded_to - self.mean)) ** 0.5:.4g}."
            )

    def of(self, batch: int) -> tuple[int, ...]:
        """The lengths of a typical batch, ascending."""
        if not self.std:
            return (round(self.mean),) * batch
        normal = NormalDist(self.mean, self.std)
        quantiles = (normal.inv_cdf((index + 0.5) / batch) for index in range(batch))
        return tuple(min(max(round(value), 1), self.padded_to) for value in quantiles)


@dataclass(frozen=True, slots=True)
class Given:
    """Lengths given one by one, padded to the longest."""

    values: tuple[int, ...]

    @property
    def padded_to(self) -> int:
        """The longest."""
        return max(self.values)

    def of(self, batch: int) -> tuple[int, ...]:
        """They themselves.

        Raises
        ------
        UsageError
            When the batch has another size.
        """
        if batch != len(self.values):
            count = len(self.values)
            raise UsageError(
                f"{count} length{'' if count == 1 else 's'} are a batch of {count}, not of {batch}; leave batch out, "
                "or give Lengths(mean=..., std=..., padded_to=...)."
            )
        return self.values


def checked_lengths(lengths: Lengths | Sequence[int]) -> Lengths | Given:
    """Lengths as one of the two forms above.

    Raises
    ------
    UsageError
        When there are none, or one is not a whole number of at least 1.

    Examples
    --------
    >>> checked_lengths([12, 40, 7]).padded_to
    40
    """
    if isinstance(lengths, Lengths | Given):
        return lengths
    if isinstance(lengths, str) or (not isinstance(lengths, Sequence) and not hasattr(lengths, "__len__")):
        raise UsageError(
            f"{lengths!r} are not lengths; give whole numbers, as in lengths=[12, 40, 7], or a Lengths(...)."
        )
    if not len(lengths):
        raise UsageError("The list of lengths is empty; give one for each sequence of the batch, as in [12, 40, 7].")
    for value in lengths:
        _whole("A length", value)
    return Given(tuple(int(value) for value in lengths))


def parse_lengths(text: str) -> Lengths | Given:
    """Lengths from the command line's grammar.

    Raises
    ------
    ValueError
        When the text is not in it, or names lengths that cannot be.

    Examples
    --------
    >>> parse_lengths("12,40,7").of(3)
    (12, 40, 7)
    >>> parse_lengths("mean=20.92,std=10.18,pad=128")
    Lengths(mean=20.92, std=10.18, padded_to=128)
    """
    items = [item.strip() for item in text.split(",")]
    if all(re.fullmatch(r"-?\d+", item) for item in items):
        return checked_lengths([int(item) for item in items])
    found = {match["name"]: match["value"] for item in items if (match := _PAIR.fullmatch(item))}
    if set(found) != {"mean", "std", "pad"} or len(items) != 3 or "." in found["pad"]:
        raise ValueError(f"{text!r} are not lengths; write 12,40,7 or mean=20.92,std=10.18,pad=128.")
    return Lengths(float(found["mean"]), float(found["std"]), int(found["pad"]))


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{name} of {value!r} is not a whole number; give tokens, 1 or more.")
    if int(value) < 1:
        raise UsageError(f"{name} of {value} is not possible; the shortest sequence has 1 token.")
