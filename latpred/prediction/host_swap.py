"""Swaps the host of a profile: its dispatch costs are scaled by a factor, its kernels stay as they are.

A factor comes as a number, from two hosts whose dispatch was measured, or from the table of known hosts. Nothing is
measured here.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any, NamedTuple

import msgspec
import numpy as np

from latpred import storage
from latpred.errors import HostError, NoProfileError, UsageError
from latpred.ops.families import root
from latpred.prediction.pricing import host_cost
from latpred.profile import datasheet, host_profile, hosts, store
from latpred.profile.document import HOST, DeviceProfile, DispatchFit
from latpred.profile.hosts import HostRow
from latpred.profile.store import Owner, owner
from latpred.query import THIS

NO_LAUNCH = ("view", "free")  # classes that launch nothing: they cost the same whatever device there is
FEWEST = 4  # classes that two hosts must share
LEAST_US = 0.05  # a cost below that is what a fit left over, and says nothing of the host
SMALLEST, LARGEST = 0.05, 20.0
# Standard deviations of a log factor: of a given number, and of what one factor for all classes leaves out.
NUMBER_LOG_STD = 0.10
LEAST_LOG_STD = 0.05


class _Measured(NamedTuple):
    """A host whose dispatch was measured, beside the CPU and not a GPU."""

    dispatch: DispatchFit
    label: str  # what to call it


class Swap(NamedTuple):
    """A host in place of the profile's."""

    factor: float  # its dispatch over that of the profile's host
    log_std: float  # standard deviation of its log
    label: str  # what to call it

    @property
    def caveat(self) -> str:
        return (
            f"host swapped for {self.label}: dispatch is {self.factor:.2f} times that of the profile's host; "
            "kernel times are unchanged"
        )


def find(host: float | str | os.PathLike[str], profile: DeviceProfile) -> Swap:
    """What `--host` stands for: a factor, "this" for the host that asks, a measured one's name or file, or a CPU's.

    A factor is this host's dispatch over the profile's. Names that the user gave come before those of
    `latpred.profile.hosts`.

    >>> find(1.3, profile).factor  # doctest: +SKIP
    1.3
    """
    name = os.fspath(host) if isinstance(host, os.PathLike) else str(host)
    number = _factor(name)
    if number is not None:
        return Swap(number, NUMBER_LOG_STD, "a host of the factor given")
    found = _named(name)
    if isinstance(found, HostRow):
        level, log_std = _level(profile)
        return Swap(found.factor / level, math.hypot(found.log_std, log_std), f"{found.name} ({found.basis_text})")
    return Swap(*ratio(found.dispatch, _eager(profile), no_launch=profile.device.asynchronous), found.label)


def demand_known(host: str) -> None:
    """Refuse a host that no profile could be predicted with: a name that nobody knows, or a factor out of range."""
    if host != THIS and _factor(host) is None:
        _named(host)


def _factor(name: str) -> float | None:
    """The factor that a number stands for; None for a name."""
    try:
        number = float(name)
    except ValueError:
        return None
    if not SMALLEST <= number <= LARGEST:
        raise UsageError(
            f"a host factor of {number:g} is not possible: give this host's dispatch over the profile's, "
            f"from {SMALLEST:g} to {LARGEST:g}, as in --host 1.3."
        )
    return number


def ratio(host: DispatchFit, other: DispatchFit, *, no_launch: bool) -> tuple[float, float]:
    """One host's dispatch over another's, and the standard deviation of its log.

    The median over the classes that both know, a special one by its general class if need be; where only one of the two
    fed a GPU, over those that launch nothing (`no_launch`), with module and Python calls.
    """
    shared = [
        name
        for name in sorted(host.costs_us)
        if "." in name and root(name) in other.costs_us and (not no_launch or root(name) in NO_LAUNCH)
    ]
    pairs = [(host_cost(host, name) * host.scale, host_cost(other, name) * other.scale) for name in shared]
    pairs += [
        (host.module_call_us * host.scale, other.module_call_us * other.scale),
        (host.python_call_us * host.scale, other.python_call_us * other.scale),
    ]
    logs = np.array([math.log(mine / theirs) for mine, theirs in pairs if min(mine, theirs) > LEAST_US])
    if len(logs) < FEWEST:
        raise HostError(
            f"the two hosts share {len(logs)} dispatch classes, too few to compare them by (at least {FEWEST}). "
            "Give the factor itself, as in --host 1.3, or measure anew with: latpred calibrate --host-only"
        )
    middle = float(np.median(logs))
    # 1.4826 median deviations are a standard deviation; the median of n classes is 1.25 / sqrt(n) of it off.
    deviation = 1.4826 * float(np.median(np.abs(logs - middle)))
    return math.exp(middle), max(LEAST_LOG_STD, 1.25 * deviation / math.sqrt(len(logs)))


def swapped(profile: DeviceProfile, swap: Swap) -> DeviceProfile:
    """The profile on another host: dispatch of every runtime scaled, intervals as wide as the factor may be off."""
    times = ("module_call_us", "python_call_us", "attribute_read_us", "fixed_us")
    runtimes = {}
    for name, fit in profile.runtimes.items():
        scaled: dict[str, Any] = {time: getattr(fit, time) * swap.factor for time in times}
        for table in ("costs_us", "cold_costs_us"):
            scaled[table] = {kind: cost * swap.factor for kind, cost in getattr(fit, table).items()}
        runtimes[name] = msgspec.structs.replace(fit, host_spread=swap.log_std, **scaled)
    return msgspec.structs.replace(profile, runtimes=runtimes, protocol={**profile.protocol, HOST: swap.label})


def unnamed(profile: DeviceProfile) -> tuple[str, float] | None:
    """What to say of a host that nobody named, and how slow it may be over that of the profile; None for others."""
    if profile.provenance == "measured" or HOST in profile.protocol:
        return None
    level, _ = _level(profile)
    factors = [host.factor / level for host in hosts.HOSTS]
    fastest, slowest = min(factors), max(factors)
    count = re.match(r"\d+ published hosts", profile.machine.cpu)
    many = count is not None or profile.provenance == datasheet.PROVENANCE
    which = f"the middle of {count[0] if count else 'the published hosts'}" if many else "one published host"
    caveat = (
        f"dispatch is that of {which}; hosts known by name take {fastest:.1f} to {slowest:.1f} times as long: name "
        "yours with --host"
    )
    return caveat, slowest


def _level(profile: DeviceProfile) -> tuple[float, float]:
    """Dispatch of a profile's host over that of the reference host, and the standard deviation of its log."""
    if profile.provenance != "measured":  # the dispatch of a middle host
        own, reference = _eager(profile), datasheet.shared().dispatch
        shared = [own.costs_us[name] / us for name, us in reference.costs_us.items() if own.costs_us.get(name)]
        return float(np.median(shared)) * own.scale, 0.0
    host = hosts.find(profile.machine.cpu)
    if host is None:
        raise HostError(
            f"profile {profile.name!r} was measured on a host whose CPU ({profile.machine.cpu}) is not among the known "
            "hosts, so it cannot be compared with them. Give the factor itself, as in --host 1.3, or measure the other "
            "host where it is: latpred calibrate --host-only"
        )
    return host.factor, host.log_std


def _named(name: str) -> _Measured | HostRow:
    """A host by name: what was measured of it, else what the table of hosts knows."""
    if name == THIS:
        return _this()
    known = None if storage.is_path(name) or name in host_profile.names() else hosts.find(name)
    if known is not None:
        return known
    host = host_profile.load(name)
    return _Measured(host.dispatch, f"{host.name} ({host.machine.cpu})")


def _this() -> _Measured:
    """Costs of the host that asks: measured alone, else with the CPU."""
    own = [host for host in host_profile.listing() if owner(host.machine) is not Owner.ANOTHER]
    if own:
        latest = max(own, key=lambda host: (owner(host.machine) is Owner.THIS, host.created))
        return _Measured(latest.dispatch, f"this host ({latest.machine.cpu})")
    try:
        device = store.find("cpu")
    except NoProfileError:
        raise HostError(
            "this host was not measured yet. Measure it, in seconds, with: latpred calibrate --host-only"
        ) from None
    return _Measured(_eager(device), f"this host ({device.machine.cpu})")


def _eager(profile: DeviceProfile) -> DispatchFit:
    if "eager" not in profile.runtimes:
        raise HostError(
            f"profile {profile.name!r} has no eager dispatch to compare hosts by. "
            "Give the factor itself, as in --host 1.3."
        )
    return profile.runtimes["eager"]
