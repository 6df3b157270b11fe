"""Who this host is, told without measuring anything and without importing torch."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from functools import cache
from pathlib import Path

_ID_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
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
    return hashlib.sha256(platform.node().encode()).hexdigest()[:16]


@cache
def machine_id() -> str:
    """Sixteen hexadecimal digits that no other machine has; "" where the system has no id, as in many containers."""
    for file in _ID_FILES:
        try:
            own = Path(file).read_text().strip()
        except OSError:
            continue
        if own and own != "uninitialized":
            return _digest(own)
    if platform.system() == "Darwin":
        found = re.search(r'"IOPlatformUUID" = "(.+?)"', _printed("ioreg", "-rd1", "-c", "IOPlatformExpertDevice"))
        return _digest(found[1]) if found else ""
    return ""


@cache
def cpu_name() -> str:
    """Marketing name of the host's processor, else its architecture."""
    name = _processor().get("model name") or _printed("sysctl", "-n", "machdep.cpu.brand_string")
    return " ".join(name.split()) or platform.processor() or platform.machine()


@cache
def cpu_model() -> str:
    """Vendor, family, model and stepping of the processor, and a digest of its vector instructions; "" if not told."""
    known = _processor()
    parts = [known[field] for field in _CPU_FIELDS if field in known]
    if not parts:
        numbers = _printed("sysctl", "-n", "hw.cputype", "hw.cpusubtype", "hw.cpufamily").split()
        return f"Apple {'-'.join(numbers)}" if numbers else ""
    flags = (known.get("flags") or known.get("Features") or "").split()
    vector = " ".join(sorted(flag for flag in flags if _VECTOR.match(flag)))
    return f"{parts[0]} {'-'.join(parts[1:])} {hashlib.sha256(vector.encode()).hexdigest()[:8]}"


@cache
def cores() -> int:
    """Logical processors of the host."""
    return os.cpu_count() or 1


@cache
def memory_bytes() -> int:
    """Memory of the host in bytes; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _processor() -> dict[str, str]:
    """What Linux says of the first processor."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _printed(*command: str) -> str:
    """What a command of macOS prints; "" elsewhere."""
    if platform.system() != "Darwin":
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _digest(text: str) -> str:
    """The id itself is confidential: systemd asks to publish only what it was hashed to."""
    return hashlib.sha256(f"latpred {text}".encode()).hexdigest()[:16]
