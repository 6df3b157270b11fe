"""What a host says of itself, on x86, on Arm and without an id."""

from __future__ import annotations

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


def test_an_arm_processor_has_a_model_too(files: dict[str, str]) -> None:
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
