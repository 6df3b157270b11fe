"""What the host's processors do at this moment and what power they are given, read from the system's own files.

Needs no clock: it reads counters and settings, and compares nothing. `latpred.calibration.disturbance` compares two
readings. Every reader gives None, or nothing, where the system has no such file or writes something else into it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
SYS = Path("/sys")

# These drivers call by the name "powersave" what others call "schedutil": the clock follows the load.
_DRIVERS_THAT_FOLLOW_LOAD = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
_GOVERNORS_THAT_FOLLOW_LOAD = ("schedutil", "ondemand", "conservative")
_SAVING = ("power", "balance_power")

BUSY_LOAD = 0.3  # of a task for each usable processor; this process itself adds 0.1 while it starts
BUSY_SHARE = 0.1  # of the last ten seconds


class ProcessorTime(NamedTuple):
    """Seconds of all processors together since the system started, in steps of a tick (10 ms).

    Attributes
    ----------
    processors : int
        Processors that are counted.
    idle_s : float
        Doing nothing, waiting for a disk included.
    busy_s : float
        Working for this system, interrupts included; what a hypervisor took is not.
    stolen_s : float
        Taken by the hypervisor while there was work.
    """

    processors: int
    idle_s: float
    busy_s: float
    stolen_s: float


class Pressure(NamedTuple):
    """How far tasks of this system waited for a processor, ready to run.

    Attributes
    ----------
    recent : float
        Share of the last ten seconds in which one waited.
    waited_s : float
        Seconds in which one waited since the system started.
    """

    recent: float
    waited_s: float


def busy_notes(usable: int) -> list[str]:
    """What says that other work keeps the processors busy now, as far as one look tells."""
    now, waiting = load(), pressure()
    notes = [f"load {now:.1f}"] if now is not None and now > BUSY_LOAD * usable else []
    if waiting is not None and waiting.recent > BUSY_SHARE:
        notes.append(f"tasks waited for a processor in {100 * waiting.recent:.0f} % of the last 10 s")
    return notes


def processor_time(proc: Path = PROC) -> ProcessorTime | None:
    """What /proc/stat counts; None where there is none, or only zeros as in some sandboxes."""
    lines = [line.split() for line in _text(proc / "stat").splitlines() if line.startswith("cpu")]
    try:
        ticks = [int(field) for field in lines[0][1:9]]
        second = os.sysconf("SC_CLK_TCK")
    except (IndexError, ValueError, AttributeError, OSError):
        return None
    # Before Linux 2.6.11 nothing was said of stolen time. Guests (fields 9 and 10) are counted under user already.
    if len(ticks) < 7 or not any(ticks) or len(lines) < 2:
        return None
    idle, stolen = ticks[3] + ticks[4], sum(ticks[7:])
    return ProcessorTime(len(lines) - 1, idle / second, (sum(ticks) - idle - stolen) / second, stolen / second)


def pressure(proc: Path = PROC) -> Pressure | None:
    """What /proc/pressure/cpu says; None on a kernel that keeps no such record."""
    for line in _text(proc / "pressure" / "cpu").splitlines():
        kind, *pairs = line.split()
        if kind == "some":
            fields = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            try:
                return Pressure(float(fields["avg10"]) / 100, int(fields["total"]) * 1e-6)
            except (KeyError, ValueError):
                return None
    return None


def own_delay_s(proc: Path = PROC) -> float | None:
    """Seconds that the threads of this process were ready to run and had no processor, added up.

    A thread that ended takes its part with it, so the sum can shrink. None where the kernel does not count it.
    """
    delay_ns = slices = 0
    for path in (proc / "self" / "task").glob("*/schedstat"):
        try:
            _, waited_ns, ran = (int(field) for field in _text(path).split())
        except ValueError:
            continue
        delay_ns, slices = delay_ns + waited_ns, slices + ran
    return delay_ns * 1e-9 if slices else None


def usable_cores() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float | None:
    """Tasks that ran or wanted to, on average over the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def power_notes(sys: Path = SYS) -> list[str]:
    """What makes the processors' clock unsteady or slow, in a sentence each; empty where nothing is known of it."""
    clock = sys / "devices" / "system" / "cpu" / "cpu0" / "cpufreq"
    governor, driver, preference = (
        _text(clock / name).strip() for name in ("scaling_governor", "scaling_driver", "energy_performance_preference")
    )
    notes = ["the machine runs on battery"] if _on_battery(sys / "class" / "power_supply") else []
    if governor == "powersave" and driver not in _DRIVERS_THAT_FOLLOW_LOAD:
        notes.append("the governor powersave keeps the processors at their lowest clock")
    elif governor in _GOVERNORS_THAT_FOLLOW_LOAD:
        notes.append(f"the governor {governor} lets the processors' clock follow the load")
    if preference in _SAVING:
        notes.append(f"the processors are set to save energy ({preference})")
    return notes


def _on_battery(supplies: Path) -> bool:
    """Whether a battery of the machine itself is being drained."""
    batteries = [path.parent for path in supplies.glob("*/type") if _text(path).strip() == "Battery"]
    own = [path for path in batteries if _text(path / "scope").strip() != "Device"]  # a mouse has a battery too
    plugged = any(_text(path).strip() == "1" for path in supplies.glob("*/online"))
    return not plugged and any(_text(path / "status").strip() == "Discharging" for path in own)


def _text(path: Path) -> str:
    """What a file holds; nothing where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
