"""The record of a check: its verdict, its sentence, its table."""

from __future__ import annotations

import msgspec

from latpred.accuracy.drift import Check, Part


def part(name: str, verdict: str, ratio: float = 1.0, clock: str = "device") -> Part:
    return Part(clock, name, ratio, ratio / 1.05, ratio * 1.05, 1.07, 8, verdict)


def found(*parts: Part, busy: float = 0.0, changes: tuple[str, ...] = ()) -> Check:
    return Check("cpu", "2026-01-02T03:04:05+00:00", parts, changes, {}, busy, 12.0)


def text(check: Check) -> str:
    return check.page().text()


def test_a_profile_holds() -> None:
    check = found(part("", "holds"), part("fp32 gemm", "holds"), part("fp32 conv", "unclear"))
    assert check.verdict == "holds"
    assert check.sentence == "profile cpu holds: 2 of 3 parts are as they were"
    assert "noise hides a change of 15 % in: fp32 conv" in text(check)
    assert "nothing changed in processor" in text(check)


def test_what_moved_is_named_with_its_factor() -> None:
    classes = (part("gemm.linear", "moved", 1.3, "host"), part("gemm.addmm", "moved", 1.32, "host"))
    check = found(part("fp32 gemm", "holds"), *classes, changes=("torch is 2.14, the profile's is 2.13",))
    assert check.verdict == "moved"
    assert "Anew: latpred calibrate --fresh" in check.sentence
    row = next(line for line in text(check).splitlines() if "gemm (2 classes)" in line)
    assert row.split()[-6:] == ["host", "x1.32", "1.24", "to", "1.39", "16"]
    assert "changed: torch is 2.14, the profile's is 2.13" in text(check)


def test_nothing_is_said_to_have_moved_while_other_work_runs() -> None:
    check = found(part("", "moved", 17.7), part("fp32 gemm", "moved", 2.0), part("fp32 conv", "holds"), busy=1.4)
    assert (check.verdict, check.moved) == ("unclear", ())
    assert "other work used 1.4 processors. Check again on an idle machine." in check.sentence
    assert "moved" not in text(check)
    assert "x17.70" not in text(check)
    assert "noise or other work hides a change of 15 % in: all of the device, fp32 gemm" in text(check)
    assert [each["verdict"] for each in check.to_dict()["parts"]] == ["unclear", "unclear", "holds"]
    assert check.to_frame()["verdict"].tolist() == ["unclear", "unclear", "holds"]
    assert found(part("fp32 gemm", "moved", 2.0), *[part("fp32 conv", "holds")] * 5, busy=1.4).verdict == "unclear"


def test_too_much_noise_is_no_answer() -> None:
    check = found(part("fp32 gemm", "unclear"), part("fp32 conv", "unclear"), part("fp32 norm", "holds"))
    assert check.verdict == "unclear"
    assert "times scatter too much" in check.sentence


def test_as_a_document_and_a_table() -> None:
    check = found(part("fp32 gemm", "moved", 1.2))
    document = check.to_dict()
    assert (document["schema"], document["verdict"], document["parts"][0]["ratio"]) == ("latpred.check/1", "moved", 1.2)
    assert list(check.to_frame().columns) == list(Part.__struct_fields__)
    assert msgspec.convert({k: v for k, v in document.items() if k in Check.__struct_fields__}, Check) == check
