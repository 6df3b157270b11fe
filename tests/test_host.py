"""What a host says of itself, and its files of its processors and their power: all from made-up files."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from latpred import host

XEON = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: {model}
model name\t: Intel(R) Xeon(R)  Processor
stepping\t: 8
flags\t\t: fpu sse4_2 avx2 {flags}

processor\t: 1
model\t\t: 999
"""
ARM = """Features\t: fp asimd
CPU implementer\t: 0x41
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1
"""


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files of the system, by path; all others are not there."""
    known: dict[str, str] = {}

    def read(self: Path, *_: object, **__: object) -> str:
        if str(self) not in known:
            raise FileNotFoundError(self)
        return known[str(self)]

    monkeypatch.setattr(Path, "read_text", read)
    return known


def model(files: dict[str, str], text: str) -> str:
    files["/proc/cpuinfo"] = text
    return host.cpu_model.__wrapped__()


def test_one_marketing_name_stands_for_several_processors(files: dict[str, str]) -> None:
    old = model(files, XEON.format(model=85, flags="avx512f"))
    assert old.startswith("GenuineIntel 6-85-8 ")
    assert host.cpu_name.__wrapped__() == "Intel(R) Xeon(R) Processor"
    assert model(files, XEON.format(model=143, flags="avx512f")) != old
    assert model(files, XEON.format(model=85, flags="")) != old
    assert model(files, XEON.format(model=85, flags="avx512f ibrs md_clear")) == old
    assert model(files, ARM).startswith("0x41 0x3-0xd0c-1 ")


def test_an_id_is_hashed_and_may_be_missing(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.platform, "system", lambda: "Linux")
    assert host.machine_id.__wrapped__() == ""
    assert model(files, "") == ""
    files["/etc/machine-id"] = ""
    files["/var/lib/dbus/machine-id"] = "0123456789abcdef0123456789abcdef\n"
    found = host.machine_id.__wrapped__()
    assert len(found) == 16
    assert found not in files["/var/lib/dbus/machine-id"]


TWO = "cpu  100 10 50 800 40 5 5 30 20 0\ncpu0 50 5 25 400 20 3 2 15 10 0\ncpu1 50 5 25 400 20 2 3 15 10 0\nctxt 9\n"
SECOND = os.sysconf("SC_CLK_TCK")  # in ticks


def written(folder: Path, files: dict[str, str]) -> Path:
    """The folder with the files in it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


PRESSURE = "some avg10=12.50 avg60=3.00 avg300=1.00 total=41558462\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"


@pytest.mark.parametrize(
    ("read", "file", "text", "found"),
    [
        (host.processor_time, "stat", TWO, (2, 840 / SECOND, 30 / SECOND)),  # waiting for a disk is idle
        (host.processor_time, "stat", "intr 1 2 3\n", None),
        (host.processor_time, "stat", "cpu 1 2 3 4\ncpu0 1 2 3 4\n", None),
        (host.processor_time, "stat", "cpu 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0\n", None),  # gVisor counts nothing
        (host.processor_time, "stat", "cpu 1 1 1 5 1 1 1 1\n", None),
        (host.pressure_s, "pressure/cpu", PRESSURE, 41.558462),
        (host.pressure_s, "pressure/cpu", "full avg10=0.00 total=0\n", None),
        (host.own_delay_s, "self/task/7/schedstat", "0 0 0\n", None),  # a kernel that counts no delay writes zeros
    ],
)
def test_system_counters(
    read: Callable[[], object], file: str, text: str, found: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PROC", written(tmp_path, {file: text}))
    assert read() == pytest.approx(found)


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stat").mkdir()
    for folder in (tmp_path, tmp_path / "missing"):
        monkeypatch.setattr(host, "PROC", folder)
        monkeypatch.setattr(host, "SYS", folder)
        assert host.processor_time() is host.pressure_s() is host.own_delay_s() is None
        assert host.power_notes() == []


def test_own_delay_is_that_of_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"7": "100 2000000 3\n", "8": "100 500000 1\n", "9": "", "10": "one two three\n"}
    tasks = {f"self/task/{task}/schedstat": text for task, text in files.items()}
    monkeypatch.setattr(host, "PROC", written(tmp_path, tasks))
    assert host.own_delay_s() == pytest.approx(2.5e-3)


def test_usable_cores_and_load_with_and_without_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5}, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 2.5, 3.5), raising=False)
    assert host.load() == 1.5
    for quota, cores in ((math.inf, 3), (2.5, 2), (0.5, 1)):
        monkeypatch.setattr(host, "cpu_quota", lambda quota=quota: quota)
        assert host.usable_cores() == cores
    monkeypatch.setattr(host, "cpu_quota", lambda: math.inf)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "getloadavg", raising=False)
    assert host.usable_cores() == (os.cpu_count() or 1)
    assert host.load() is None


MAINS = {"class/power_supply/AC/type": "Mains\n", "class/power_supply/AC/online": "1\n"}
BATTERY = {"class/power_supply/BAT0/type": "Battery\n", "class/power_supply/BAT0/status": "Discharging\n"}
MOUSE = {
    "class/power_supply/hid/type": "Battery\n",
    "class/power_supply/hid/status": "Discharging\n",
    "class/power_supply/hid/scope": "Device\n",
}
CLOCK = "devices/system/cpu/cpu0/cpufreq/"
GOVERNOR, DRIVER = CLOCK + "scaling_governor", CLOCK + "scaling_driver"
LOWEST = "the governor powersave keeps the processors at their lowest clock"
ON_BATTERY = "the machine runs on battery"


@pytest.mark.parametrize(
    ("files", "notes"),
    [
        ({}, []),
        (BATTERY, [ON_BATTERY]),
        ({**BATTERY, **MAINS}, []),
        (MOUSE, []),
        ({GOVERNOR: "powersave\n", DRIVER: "acpi-cpufreq\n"}, [LOWEST]),
        ({GOVERNOR: "powersave\n", DRIVER: "intel_pstate\n"}, []),
        ({GOVERNOR: "schedutil\n"}, ["the governor schedutil lets the processors' clock follow the load"]),
    ],
)
def test_power_notes(files: dict[str, str], notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SYS", written(tmp_path, files))
    assert host.power_notes() == notes


def test_what_a_limit_leaves_of_the_address_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getpagesize", lambda: 4096)
    monkeypatch.setattr(host, "PROC", tmp_path)
    assert host.bytes_left() == math.inf  # no such file
    written(tmp_path, {"self/statm": "1000 800 300 1 0 600 0\n"})
    for limit, left in ((resource.RLIM_INFINITY, math.inf), (5_000_000, 904_000)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert host.bytes_left() == left
    written(tmp_path, {"meminfo": "MemTotal:  2000 kB\nMemAvailable:     800 kB\n"})
    assert host.bytes_left() == 800 * 1024


GROUP = {"self/cgroup": "5:cpu:/\n0::/box/inner\n"}


@pytest.mark.parametrize(
    ("limits", "processors", "bytes_"),
    [
        ({}, math.inf, math.inf),
        ({"box/inner/cpu.max": "max 100000\n", "box/inner/memory.max": "max\n"}, math.inf, math.inf),
        ({"box/cpu.max": "250000 100000\n", "box/inner/memory.max": "4000\n"}, 2.5, 4000),
        ({"box/inner/cpu.max": "50000 100000\n", "memory.max": "9000\n", "box/memory.max": "7000\n"}, 0.5, 7000),
    ],
)
def test_a_container_gives_processors_and_memory(
    limits: dict[str, str], processors: float, bytes_: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = tmp_path / "fs" / "cgroup"
    monkeypatch.setattr(host, "PROC", written(tmp_path, GROUP))
    monkeypatch.setattr(host, "SYS", tmp_path)
    written(groups, limits | {"box/inner/memory.stat": "anon 5\ninactive_file 200\nactive_file 100\n"})
    assert host.cpu_quota.__wrapped__() == processors
    monkeypatch.setattr(host, "cpu_quota", lambda: processors)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert host.usable_cores() == max(1, min(64, int(min(processors, 64))))
    assert host.usable_memory_bytes() == min(host.memory_bytes(), bytes_)
    assert host.bytes_left() == math.inf, "nobody says how much is taken"
    for path in ("box/inner", "box", ""):
        written(groups, {f"{path}/memory.current": "1000\n"})
    left = bytes_ - 1000 + (300 if "box/inner/memory.max" in limits else 0)
    assert host.bytes_left() == left
    written(tmp_path, {"meminfo": "MemTotal:  2000 kB\nMemAvailable:     5 kB\n"})
    assert host.bytes_left() == min(5 * 1024, left)


@pytest.mark.parametrize("group", ["memory/docker/x", "memory"], ids=["host", "container whose root it is"])
@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
def test_control_groups_of_version_1_give_processors_and_memory(
    group: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "8:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n0::/system.slice\n"
    monkeypatch.setattr(host, "PROC", written(tmp_path, {"self/cgroup": told}))
    monkeypatch.setattr(host, "SYS", tmp_path)
    processors = {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}
    processors["cpu.stat"] = "nr_throttled 3\nthrottled_time 250000000\n"
    memory = {
        "memory.limit_in_bytes": "4000\n",
        "memory.usage_in_bytes": "1000\n",
        "memory.stat": "inactive_file 20\ntotal_inactive_file 200\n",
    }
    written(tmp_path / "fs" / "cgroup" / folder / "docker" / "x", processors)
    written(tmp_path / "fs" / "cgroup" / folder, processors | {"cpu.cfs_quota_us": "-1\n"})
    if folder != "cpu":
        (tmp_path / "fs" / "cgroup" / "cpu").symlink_to(folder)
    written(tmp_path / "fs" / "cgroup" / group, memory)
    assert host.cpu_quota.__wrapped__() == 1.5
    for quota, throttled_s in ((1.5, 0.5), (math.inf, None)):
        monkeypatch.setattr(host, "cpu_quota", lambda quota=quota: quota)
        assert host.throttled_s() == throttled_s
    assert host.usable_memory_bytes() == 4000
    assert host.bytes_left() == 4000 - 1000 + 200
