"""Who this host is, told without measuring anything and without importing torch."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from functools import cache
from pathlib import Path


@cache
def hostname_hash() -> str:
    """Sixteen hexadecimal digits of the host name's SHA-256: a profile that is shared does not spread the name."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:16]


@cache
def cpu_name() -> str:
    """Marketing name of the host's processor, else its architecture."""
    for line in _cpuinfo():
        key, colon, value = line.partition(":")
        if colon and key.strip() == "model name":
            return " ".join(value.split())
    if platform.system() == "Darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        ).stdout.strip()
        if asked:
            return asked
    return platform.processor() or platform.machine()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
