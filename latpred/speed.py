"""The speed of a machine against the one that a profile holds for, and what that does to predicted times.

A profile keeps how long small reference work took at the full speed of the machine (`DeviceProfile.speed`). The same
work timed again says how much slower the machine is now: dispatch by the dispatch reference, kernels by a product and a
convolution. A stream through memory and threads that meet are told beside them and used for nothing: between full
calibrations of one machine the stream differed by a third, and kernels did not follow it. Nothing is timed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PRODUCT, CONVOLUTION, STREAM, DISPATCH, THREADS = "product", "convolution", "stream", "dispatch", "threads"
KINDS = (DISPATCH, PRODUCT, CONVOLUTION, STREAM, THREADS)
MEANINGS = {
    DISPATCH: "dispatch",
    PRODUCT: "a product in the cache",
    CONVOLUTION: "a convolution in the cache",
    STREAM: "a stream through memory",
    THREADS: "threads that meet",
}
COLUMN = "speed_{}_us"  # of a measurement table: what a reference took in the run that a cell is of
SLOWED = "slow_ratio"  # of the same: how many times slower than in the run's fastest moments it was for a cell
# Of that ratio, by which forward passes take longer: 0.7 to 1 where the core that dispatches was slowed, 0 to 0.4 where
# another one was, on which the ratio is a root already.
SLOWED_POWER = 0.5


class Slowdown(NamedTuple):
    """How many times longer things take than at a profile's speed: dispatch, and kernels by what limits them."""

    dispatch: float = 1.0
    compute: float = 1.0
    memory: float = 1.0


SAME = Slowdown()


def slowdown(profile_us: Mapping[str, float], now_us: Mapping[str, float], *, asynchronous: bool = False) -> Slowdown:
    """What a machine's reference times now say against those of a profile.

    Parameters
    ----------
    profile_us, now_us : mapping
        Microseconds of each reference; one that either lacks changes nothing.
    asynchronous : bool
        Whether kernels run on a device of their own, of whose speed the host's references say nothing.

    Examples
    --------
    >>> slowdown({"dispatch": 100.0, "product": 500.0}, {"dispatch": 120.0, "product": 500.0})
    Slowdown(dispatch=1.2, compute=1.0, memory=1.0)
    """
    ratios = ratio(profile_us, now_us)
    dispatch = ratios.get(DISPATCH, 1.0)
    if asynchronous:
        return Slowdown(dispatch)
    kernels = (ratios.get(PRODUCT, 1.0) * ratios.get(CONVOLUTION, 1.0)) ** 0.5
    return Slowdown(dispatch, kernels, kernels)


def ratio(profile_us: Mapping[str, float], now_us: Mapping[str, float]) -> dict[str, float]:
    """Reference times now over a profile's, for each reference that both have."""
    return {kind: now_us[kind] / us for kind, us in profile_us.items() if us > 0 and now_us.get(kind, 0.0) > 0}


def sentence(ratios: Mapping[str, float]) -> str:
    """The machine's speed against a profile's, in words.

    >>> sentence({"product": 1.234, "dispatch": 0.99})
    'dispatch x0.99, a product in the cache x1.23'
    """
    return ", ".join(f"{MEANINGS[kind]} x{ratios[kind]:.2f}" for kind in KINDS if kind in ratios)
