"""Who this host is, told without measuring anything and without importing torch."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from latpred.units import format_bytes

PROC, SYS = Path("/proc"), Path("/sys")
_GIVEN_BACK = ("inactive_file", "active_file", "slab_reclaimable")  # in a control group's memory.stat
_ID_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
# What names a processor: on x86, and on Arm. Clouds give several generations the same marketing name.
_CPU_FIELDS = (
    *("vendor_id", "cpu family", "model", "stepping"),
    *("CPU implementer", "CPU variant", "CPU part", "CPU revision"),
)
# Instruction sets that kernels are chosen by. Other flags come and go with kernels and microcode.
_VECTOR = re.compile(r"(s?sse|avx|amx|fma|f16c|bmi|aes|sha|sve|sme|asimd|neon|fphp|bf16|i8mm)")


@cache
def hostname_hash() -> str:
    """Sixteen hexadecimal digits of the host name's SHA-256: a profile that is shared does not spread the name."""
    return _digest(platform.node())


@cache
def machine_id() -> str:
    """Sixteen hexadecimal digits that no other machine has; "" where Linux has no id, as in many containers."""
    own = next((text for text in map(_text, _ID_FILES) if text and text != "uninitialized"), "")
    # The id itself is confidential: systemd asks to publish only what it was hashed to.
    return _digest(f"latpred {own}") if own else ""


def short_id() -> str:
    """Eight digits that tell machines apart which share a folder; those of one hardware only where the system has ids.

    >>> len(short_id())
    8
    """
    return (machine_id() or _digest(f"{cpu_name()} {cpu_model()} {cores()}"))[:8]


@cache
def cpu_name() -> str:
    """Marketing name of the host's processor, else its architecture."""
    name = _processor().get("model name", "")
    if platform.system() == "Darwin":
        command = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
        name = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return " ".join(name.split()) or platform.processor() or platform.machine()


@cache
def cpu_model() -> str:
    """Vendor, family, model and stepping of the processor, and a digest of its vector instructions; "" if not told."""
    known = _processor()
    parts = [known[field] for field in _CPU_FIELDS if field in known]
    if not parts:
        return ""
    flags = (known.get("flags") or known.get("Features") or "").split()
    vector = " ".join(sorted(flag for flag in flags if _VECTOR.match(flag)))
    return f"{parts[0]} {'-'.join(parts[1:])} {_digest(vector)[:8]}"


@cache
def cores() -> int:
    """Logical processors of the host."""
    return os.cpu_count() or 1


def usable_cores() -> int:
    """Processors that this process may run on, and that its container gives it time on."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores()
    return max(1, int(min(own, cpu_quota())))


@cache
def cpu_quota() -> float:
    """Processors whose time a container gives its processes in all; infinite where nothing limits it."""
    limits = [math.inf]
    for group in _control_groups("cpu"):
        older = f"{_text(group / 'cpu.cfs_quota_us')} {_text(group / 'cpu.cfs_period_us')}"
        quota, _, period = (_text(group / "cpu.max") or older).partition(" ")
        if quota.isdecimal() and period.isdecimal():
            limits.append(int(quota) / int(period))
    return min(limits)


def throttled_s() -> float | None:
    """Seconds in which a container's limit kept threads from running, added up; None where nothing limits them."""
    if cpu_quota() == math.inf:
        return None
    # Each group counts what its own limit took. Version 1 may have a folder under two names, and counts nanoseconds.
    stats = "\n".join(_text(group / "cpu.stat") for group in {group.resolve() for group in _control_groups("cpu")})
    counts = re.findall(r"^throttled_(usec|time) (\d+)", stats, re.MULTILINE)
    return sum(int(count) * (1e-6 if unit == "usec" else 1e-9) for unit, count in counts) if counts else None


def _control_groups(controller: str) -> list[Path]:
    """The folders of the control groups that this process is in and of those around them, where it has any.

    Version 1 has a tree for each controller, or for several at once. The path may be that of the host, as within a
    container, whose own group is then the root.
    """
    mounts, found = SYS / "fs" / "cgroup", list[Path]()
    for listed, path in re.findall(r"^\d+:([^:]*):/*(.*)$", _text(PROC / "self" / "cgroup"), re.MULTILINE):
        if listed and controller not in listed.split(","):
            continue
        for root in (mounts / listed, mounts / controller) if listed else (mounts,):
            inner = root / path
            found += [inner, *(outer for outer in inner.parents if outer.is_relative_to(root))]
    return found


@cache
def memory_bytes() -> int:
    """Memory of the host in bytes; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def usable_memory_bytes() -> int:
    """Memory that processes here may take together: the host's, or what their container gives them of it."""
    return int(min([memory_bytes(), *(limit for limit, _ in _memory_limits())]))


def bytes_left() -> float:
    """Memory and address space that the process may still take; infinite where nothing says how much."""
    free = re.search(r"MemAvailable:\s+(\d+) kB", _text(PROC / "meminfo"))
    left = [1024.0 * int(free[1]) if free else math.inf]
    for limit, group in _memory_limits():
        fields = dict(line.split()[:2] for line in _text(group / "memory.stat").splitlines() if " " in line)
        taken = _text(group / "memory.current") or _text(group / "memory.usage_in_bytes")
        if taken.isdecimal():  # pages of files and the like are given back when memory is needed
            # Version 1 says in fields of their own what groups inside take, too.
            given_back = (fields.get(f"total_{name}", fields.get(name, 0)) for name in _GIVEN_BACK)
            left.append(limit - int(taken) + sum(map(int, given_back)))
    try:
        import resource

        space = resource.getrlimit(resource.RLIMIT_AS)[0]
        pages = int((PROC / "self" / "statm").read_text(encoding="utf-8").split()[0])
        if space != resource.RLIM_INFINITY:
            left.append(space - pages * resource.getpagesize())
    except (ImportError, OSError, ValueError, IndexError):
        pass
    return min(left)


def demand_room(needed: float) -> None:
    """Refuse what memory has no room for: no allocation fails, but the system or a container ends the process."""
    left = bytes_left()
    if needed > left:
        raise MemoryError(f"it needs {format_bytes(needed)}, and {format_bytes(left)} are free")


def _memory_limits() -> list[tuple[int, Path]]:
    """How many bytes each control group around this process may take, and its folder."""
    groups = _control_groups("memory")
    limits = ((_text(group / "memory.max") or _text(group / "memory.limit_in_bytes"), group) for group in groups)
    return [(int(limit), group) for limit, group in limits if limit.isdecimal()]


def versions(*packages: str) -> dict[str, str]:
    """Versions of those of some packages that are installed."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _processor() -> dict[str, str]:
    """What Linux says of the first processor."""
    first = _text(PROC / "cpuinfo").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text(path: Path) -> str:
    """What a file holds, without the space around it; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


# These drivers call by the name "powersave" what others call "schedutil": the clock follows the load.
_DRIVERS_THAT_FOLLOW_LOAD = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
_GOVERNORS_THAT_FOLLOW_LOAD = ("schedutil", "ondemand", "conservative")


class _ProcessorTime(NamedTuple):
    """Seconds of all processors together since the system started, in steps of a tick (10 ms)."""

    processors: int  # that are counted
    idle_s: float  # doing nothing, waiting for a disk included
    stolen_s: float  # taken by the hypervisor while there was work


def processor_time() -> _ProcessorTime | None:
    """What /proc/stat counts; None where there is none, or only zeros as in some sandboxes."""
    lines = [line.split() for line in _text(PROC / "stat").splitlines() if line.startswith("cpu")]
    ticks = [int(field) for field in lines[0][1:9]] if len(lines) > 1 else []
    if len(ticks) < 8 or not any(ticks):
        return None
    second = os.sysconf("SC_CLK_TCK")
    return _ProcessorTime(len(lines) - 1, (ticks[3] + ticks[4]) / second, ticks[7] / second)


def pressure_s() -> float | None:
    """Seconds since the start in which some task was ready to run and had no processor; None where nobody counts."""
    total_us = re.search(r"^some .*\btotal=(\d+)", _text(PROC / "pressure" / "cpu"), re.MULTILINE)
    return int(total_us[1]) * 1e-6 if total_us else None


def own_delay_s() -> float | None:
    """Seconds that the threads of this process were ready to run and had no processor; None where nobody counts."""
    # A thread that ended takes its part with it, so the sum can shrink.
    delay_ns = slices = 0
    for path in (PROC / "self" / "task").glob("*/schedstat"):
        try:
            _, waited_ns, ran = (int(field) for field in _text(path).split())
        except ValueError:
            continue
        delay_ns, slices = delay_ns + waited_ns, slices + ran
    return delay_ns * 1e-9 if slices else None


def descendants_s() -> float:
    """Processor time of living processes under this one and of all that ended under them; 0 where nobody lists them."""
    ticks, parents = 0, ["self"]
    while parents:
        with suppress(OSError):  # one that ends meanwhile
            lists = [_text(path) for path in (PROC / parents.pop() / "task").glob("*/children")]
            for child in " ".join(lists).split():
                parents.append(child)
                # After the name, which may hold anything: time of the user and the system, own and of what ended.
                ticks += sum(map(int, _text(PROC / child / "stat").rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def load() -> float | None:
    """Tasks that ran or wanted to, on average over the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def power_notes() -> list[str]:
    """What makes the processors' clock unsteady or slow, in a sentence each; empty where nothing is known of it."""
    supplies, clock = SYS / "class" / "power_supply", SYS / "devices" / "system" / "cpu" / "cpu0" / "cpufreq"
    governor, driver = (_text(clock / name) for name in ("scaling_governor", "scaling_driver"))
    plugged = any(_text(path) == "1" for path in supplies.glob("*/online"))
    draining = any(_text(path) == "Discharging" for path in supplies.glob("BAT*/status"))  # a mouse's has other names
    notes = ["the machine runs on battery"] if draining and not plugged else []
    if governor == "powersave" and driver not in _DRIVERS_THAT_FOLLOW_LOAD:
        notes.append("the governor powersave keeps the processors at their lowest clock")
    elif governor in _GOVERNORS_THAT_FOLLOW_LOAD:
        notes.append(f"the governor {governor} lets the processors' clock follow the load")
    return notes


PRODUCT, CONVOLUTION, CACHE, STREAM = "product", "convolution", "cache", "stream"
DISPATCH, COLD_DISPATCH = "dispatch", "cold_dispatch"
ELEMENTWISE, THREADS = "elementwise", "threads"  # the same op on one thread, and shared among several
MEANINGS = {
    DISPATCH: "dispatch",
    COLD_DISPATCH: "dispatch from cold caches",
    PRODUCT: "a product in the cache",
    CONVOLUTION: "a convolution in the cache",
    CACHE: "weights from the shared cache",
    STREAM: "a stream through memory",
    ELEMENTWISE: "an elementwise op",
    THREADS: "an elementwise op that threads share",
}
KINDS = tuple(MEANINGS)
COLUMN = "speed_{}_us"  # of a measurement table: what a reference took in the run that a cell is of
SLOWED = "slow_ratio"  # of the same: how many times slower than in the run's fastest moments it was for a cell
CACHE_ROWS = 32  # of the reference that reads its fp32 weights from the shared cache
CACHE_MACS_PER_BYTE = CACHE_ROWS / 4
# Families of kernels that go by the reference product. Samples of bmm scatter 4 to 10 % less about their fits if they
# go by the elementwise op (four calibrations of a Genoa, one thread).
PRODUCTS = ("gemm", "attention", "rnn")
CONVOLUTIONS, DEPTHWISE = "conv", "conv_depthwise"
# By which power of how slow dispatch is on the CPU a forward pass takes its host longer on a GPU: 0.7 to 1.05 beside an
# H100 whose host other machines share, where a launch alone has 0.6 to 0.8 and waiting for an idle GPU 0.85 to 1.
LAUNCH_POWER = 0.8
CORE_CACHE_BYTES = 1 << 20  # cores have a cache of 0.25 to 2 MiB to themselves


class Slowdown(NamedTuple):
    """How many times longer things take than at a profile's speed: dispatch, and kernels by what they wait for."""

    dispatch: float = 1.0  # Python and calls of modules, whose code stays near
    ops: float = 1.0  # dispatch of ops, each of which runs code of its own
    product: float = 1.0  # kernels of these kinds, on data of the core's own cache
    convolution: float = 1.0
    cache: float = 1.0  # kernels as far as they read from the cache that cores and neighbours share, or from beyond it
    elementwise: float = 1.0  # kernels of other kinds
    depthwise: float = 1.0  # depthwise convolutions, which go by the same reference

    @classmethod
    def usual(cls, fields: Mapping[str, float]) -> Slowdown:
        """From the fields that are known; where a profile is older than some references, others stand in.

        The mean of product and convolution stands for the shared cache and for an elementwise op, a convolution for a
        depthwise one, dispatch from warm caches for that from cold ones.

        >>> Slowdown.usual({"dispatch": 1.12, "convolution": 1.21})[4:]
        (1.1, 1.1, 1.21)
        """
        convolution = fields.get("convolution", 1.0)
        both = math.sqrt(fields.get("product", 1.0) * convolution)
        dispatch = fields.get("dispatch", 1.0)
        stand_ins = {"ops": dispatch, "cache": both, "elementwise": both, "depthwise": convolution}
        return cls(**{**stand_ins, **fields})

    def near(self, family: str) -> float:
        """The slowdown of a family's kernels on data of the core's own cache.

        >>> Slowdown(product=1.1, elementwise=1.44).near("norm")
        1.44
        """
        if family.startswith(CONVOLUTIONS):
            return self.depthwise if family.startswith(DEPTHWISE) else self.convolution
        return self.product if family.startswith(PRODUCTS) else self.elementwise


SAME = Slowdown()
_FIELDS = {DISPATCH: "dispatch", COLD_DISPATCH: "ops", PRODUCT: "product", CONVOLUTION: "convolution"}


def slowdown(profile_us: Mapping[str, float], now_us: Mapping[str, float], *, asynchronous: bool = False) -> Slowdown:
    """What a machine's reference times now say against those of a profile; one that either lacks changes nothing.

    Of kernels on an `asynchronous` device, which is one of their own, the host's references say nothing; what launches
    them is in part the driver's, which a neighbour slows less (`LAUNCH_POWER`). What reads from the shared cache goes
    by the geometric mean of its reference and of a product: a model finds part of what it reads nearer.

    >>> slowdown({"product": 500.0, "cache": 2500.0}, {"product": 500.0, "cache": 3600.0}).cache
    1.2
    """
    ratios = ratio(profile_us, now_us)
    dispatch = ratios.get(DISPATCH, 1.0)
    if asynchronous:
        return Slowdown(dispatch**LAUNCH_POWER, dispatch**LAUNCH_POWER)
    fields = {field: ratios[kind] for kind, field in _FIELDS.items() if kind in ratios}
    if CACHE in ratios:
        fields["cache"] = math.sqrt(ratios[CACHE] * ratios.get(PRODUCT, 1.0))
    timed = ratios.get(THREADS, ratios.get(ELEMENTWISE))
    if timed is not None:
        fields |= {"elementwise": timed, "depthwise": timed}
    return Slowdown.usual(fields)


def ratio(profile_us: Mapping[str, float], now_us: Mapping[str, float]) -> dict[str, float]:
    """Reference times now over a profile's, for each reference that both have."""
    return {kind: now_us[kind] / us for kind, us in profile_us.items() if us > 0 and now_us.get(kind, 0.0) > 0}


def sentence(ratios: Mapping[str, float]) -> str:
    """The machine's speed against a profile's, in words.

    >>> sentence({"product": 1.234, "dispatch": 0.99})
    'dispatch x0.99, a product in the cache x1.23'
    """
    return ", ".join(f"{MEANINGS[kind]} x{ratios[kind]:.2f}" for kind in KINDS if kind in ratios)
