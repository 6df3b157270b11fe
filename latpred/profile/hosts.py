"""Hosts by name: how long their dispatch takes over that of the reference host (`latpred/models/hosts.json`).

The reference is the middle of the hosts behind "The Framework Tax", whose dispatch every datasheet profile has. A
factor is measured where published latencies name the host; else it follows from how fast one thread of the CPU is.
`examples/published/host_factors.py` works the factors out; nothing is computed here.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from importlib.resources import files
from itertools import combinations

import msgspec

_FAMILIES = re.compile(r"\b(intel|amd|xeon|epyc|core|ryzen|threadripper|platinum|gold|silver)\b")
_SIZE = re.compile(r"\d*xlarge|metal")  # of a cloud instance
_SHORT = 3  # letters and digits
_BASES = {
    "measured": "measured in published latencies",
    "rating": "estimated from its single-thread rating",
    "clock": "estimated from its clock and architecture",
}


class HostRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of one CPU as a host: a row of `latpred/models/hosts.json`."""

    name: str  # the maker's, without "Intel" or "AMD"
    architecture: str
    year: int
    rating_source: str  # who published the rating
    factor: float  # its dispatch over that of the reference host
    log_std: float  # standard deviation of the factor's logarithm
    basis: str  # what the factor rests on: "measured", "clock" (with the architecture) or "rating"
    boost_ghz: float | None = None  # highest clock of one core; None where the maker does not say
    rating: float | None = None  # PassMark's, of a single thread; None where no publication was found
    rating_per_ghz: float | None = None  # in place of a rating: that of a CPU with the same core, over its clock
    measured_in: str = ""  # whose latencies a measured factor is from
    like: str = ""  # the measured host of the same architecture that another rests on
    aliases: tuple[str, ...] = ()  # machines and cloud instances that have this CPU

    @property
    def speed(self) -> float:
        """The rating, or what stands for it."""
        return self.rating or (self.rating_per_ghz or 0.0) * (self.boost_ghz or 0.0)

    @property
    def source(self) -> str:
        """Who published what the factor rests on."""
        return self.measured_in or (f"{self.like}, by clock" if self.like else self.rating_source)

    @property
    def basis_text(self) -> str:
        """What the factor rests on, in words."""
        return _BASES[self.basis]


def find(name: str) -> HostRow | None:
    """The host by its CPU's name, as a maker, a kernel or a paper writes it, or by a machine that has it.

    Its name is the longest run of words in a text: "2x Xeon Gold 6132 (lab 7)" has a Gold 6132. A name as short as
    "g5" is that of other products too: it counts alone, or before the size of an instance.
    """
    words, index, found = _words(name), _index(), ""
    for first, last in combinations(range(len(words) + 1), 2):
        run, after = "".join(words[first:last]), "".join(words[last : last + 1])
        if run in index and (len(run) > _SHORT or run == "".join(words) or _SIZE.fullmatch(after)):
            found = max(found, run, key=len)
    return index.get(found)


def nearest(name: str) -> tuple[str, ...]:
    """Names of hosts that look like a misspelt one, the likeliest first; may be empty."""
    close = difflib.get_close_matches("".join(_words(name)), _index(), n=6, cutoff=0.6)
    return tuple(dict.fromkeys(_index()[key].name for key in close))[:3]


def _words(name: str) -> list[str]:
    """Words without punctuation and makers' families; a version belongs to the number before it, as in 2698v4."""
    plain = _FAMILIES.sub(" ", name.lower())
    return re.findall(r"[a-z0-9]+", re.sub(r"[\s_-]+(v\d+)\b", r"\1", plain))


@cache
def _index() -> dict[str, HostRow]:
    return {"".join(_words(name)): host for host in HOSTS for name in (host.name, *host.aliases)}


HOSTS = msgspec.json.decode((files("latpred.models") / "hosts.json").read_bytes(), type=tuple[HostRow, ...])
