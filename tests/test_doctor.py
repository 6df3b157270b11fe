"""What doctor says of the processors: whether they are busy now, and whether their clock is steady."""

from __future__ import annotations

import importlib

import pytest

from latpred import host
from latpred.calibration.timing import disturbance
from latpred.cli import doctor
from latpred.zoo import names

NOTE = "the machine runs on battery"
BUSY = "other work used 0.9 processors"


@pytest.mark.parametrize(
    ("busy", "notes", "said", "advice"),
    [
        ("", [], "", ""),
        (BUSY, [], f"; {BUSY}", doctor.STOP),
        ("", [NOTE], f"; {NOTE}", doctor.POWER),
        (BUSY, [NOTE], f"; {BUSY}; {NOTE}", f"{doctor.STOP}; {doctor.POWER}"),
    ],
)
def test_processors(busy: str, notes: list[str], said: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: 4)
    monkeypatch.setattr(disturbance, "busy_now", lambda: busy)
    monkeypatch.setattr(host, "power_notes", lambda: notes)
    found = doctor._processor()
    assert (found.topic, found.verdict, found.advice) == ("cpu", "note" if said else "ok", advice)
    assert found.detail.partition(" cores")[2].removeprefix(", 4 of them for this process") == said


@pytest.mark.parametrize(("name", "verdict"), [("torchvision", "note"), ("scipy", "fail")])
def test_a_package_that_cannot_be_imported_is_not_ok(name: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: str, *_: object) -> object:
        if module.partition(".")[0] == name:
            raise RuntimeError("operator torchvision::nms does not exist" if name == "torchvision" else "no BLAS")
        return real(module)

    real = importlib.import_module
    monkeypatch.setattr(doctor, "import_module", refuse)
    monkeypatch.setattr(names, "import_module", refuse)
    found = {finding.topic: finding for finding in doctor.examine()}[name]
    assert found.verdict == verdict
    assert "cannot be" in found.detail
    assert "install" in found.advice
    assert ("does not fit the installed torch" in found.detail) == (name == "torchvision")
