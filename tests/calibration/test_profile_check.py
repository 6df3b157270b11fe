"""`check` on the simulated device, what cannot be checked, what is called moved, and the record of what was found."""

from __future__ import annotations

import gzip
import json
import math
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from clidata import run
from guards import journals
from profiledata import machine, profile

import latpred
from latpred import host, storage
from latpred.accuracy import drift
from latpred.accuracy.drift import Check, Part
from latpred.calibration import calibrate
from latpred.calibration.devices.machine import GpuState
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec
from latpred.calibration.measurement import drift_test
from latpred.calibration.measurement.drift_test import Ratio
from latpred.calibration.schedules import network_spec
from latpred.calibration.session import Row
from latpred.errors import DeviceError, NoProfileError, ProfileError, UsageError
from latpred.profile import store
from latpred.profile.document import ADAPTED, DeviceProfile, Sample

CELLS = 230  # after which every dispatch cell and tiny network and some kernels were timed
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
GUARD = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "drift_guard.py"))


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceProfile]:
    """A short calibration of the simulated device in one precision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(storage.VARIABLE, str(tmp_path_factory.mktemp("calibrated")))
        yield calibrate(SimulatedDevice(SimulatedSpec(seed=7)), cells=CELLS, precisions=["fp32"])


def stored_rows() -> list[Row]:
    """What the stored journal of a CPU holds."""
    return [msgspec.json.decode(line, type=Row) for line in gzip.decompress(journals.CPU.read_bytes()).splitlines()[1:]]


def stored_profile() -> DeviceProfile:
    """What these rows are fitted to, which `test_guards.py` makes sure of."""
    return msgspec.convert(journals.kept(journals.CPU), DeviceProfile)


@pytest.mark.parametrize("slower", [1.0, 1.3])
def test_parts_of_a_cpu_hold_at_the_speed_of_their_profile(slower: float) -> None:
    rows = [_slowed(row, slower) for row in stored_rows()]
    parts = {(part.clock, part.name): part for part in drift_test.compared(stored_profile(), [rows])}
    assert 0.9 < parts["host", ""].ratio < 1.1
    assert 0.9 < parts["device", ""].ratio < 1.1
    assert 0.9 < parts["device", "fp32 conv"].ratio < 1.1
    assert 0.9 < parts["device", "fp32 reduction"].ratio < 1.1  # most of whose calls are dispatch


def _slowed(row: Row, slower: float) -> Row:
    """A row of a machine on which all takes so many times longer, the reference work too."""
    timings = {name: msgspec.structs.replace(one, median_s=slower * one.median_s) for name, one in row.timings.items()}
    calls_us, speed = (slower * us for us in row.calls_us), {kind: slower * us for kind, us in row.speed.items()}
    return msgspec.structs.replace(row, timings=timings, calls_us=tuple(calls_us), speed=speed)


def test_ops_are_compared_at_the_speed_of_cold_dispatch_and_calls_at_that_of_warm_one() -> None:
    stored = stored_profile()
    stored = msgspec.structs.replace(stored, speed={**stored.speed, host.COLD_DISPATCH: 300.0})
    networks = [row for row in stored_rows() if row.cell.kind == "network"]
    tiny = [row for row in networks if network_spec(row.cell).tiny]

    def ratios(slower: float) -> list[float]:
        """Of calls, and of ops that take so many times longer in a run whose cold dispatch does."""
        rows = [row if network_spec(row.cell).chain else _slowed(row, slower) for row in tiny]
        speed = {**stored.speed, host.COLD_DISPATCH: slower * 300.0}
        read = [msgspec.structs.replace(row, speed=speed) for row in rows]
        parts = {part.name: part.ratio for part in drift_test.compared(stored, [read])}
        return [parts[name] for name in ("module calls", "elementwise", "norm")]

    assert ratios(1.5) == pytest.approx(ratios(1.0), rel=0.05)


def test_cells_that_are_not_known_any_more_are_no_probes(calibrated: DeviceProfile) -> None:
    dims = "seed=1,width=64,size=8,batch=1"
    keys = [f"network/eager/fp32/gone/{dims},cold=0", f"network/eager/fp32/mlp/{dims}", "kernel/eager/fp32/gone/n=1"]
    gone = tuple(Sample(key, 2.0, 0.1, 30) for key in keys)
    cells = drift_test.probe_cells(msgspec.structs.replace(calibrated, samples=(*gone, *calibrated.samples)))
    assert len({cell.key for cell in cells}) == len(cells) > len(gone)
    assert not {cell.key for cell in cells} & set(keys)
    with pytest.raises(ProfileError, match="keeps no cells that could be timed again"):
        drift_test.probe_cells(profile(samples=gone))


@pytest.mark.slow
def test_five_seeds_are_quiet_and_every_alteration_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    GUARD["main"](["--seeds", "5", "--cells", str(CELLS)])
    shown = capsys.readouterr().out
    assert "quiet in 5 of 5 unaltered" in shown
    caught = next(line for line in shown.splitlines() if line.startswith("caught in 5 of 5 seeds: "))
    found, _, every = caught.split(": ")[1].split()[:3]
    assert int(found) == int(every) > 20


def test_the_verb_says_what_moved_and_exits_with_1(calibrated: DeviceProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "BUSY", math.inf)  # what else this machine does is nothing to a simulated device
    costs = {
        name: us * (1.3 if name.startswith("gemm") else 1) for name, us in calibrated.runtimes["eager"].costs_us.items()
    }
    eager = msgspec.structs.replace(calibrated.runtimes["eager"], costs_us=costs)
    stack = {**calibrated.machine.stack, "torch": "1.0"}
    older = msgspec.structs.replace(calibrated.machine, stack=stack, threads=calibrated.machine.threads + 1)
    store.save(msgspec.structs.replace(calibrated, runtimes={"eager": eager}, machine=older))
    done = run("check", "--device", "simulated", "--budget", "600s", "--json")
    found = json.loads(done.stdout)
    assert found["schema"] == "latpred.check/1"
    assert {part["name"] for part in found["parts"] if part["verdict"] == "moved"} == {"gemm.linear", "gemm.addmm"}
    assert [said.partition(" is ")[0] for said in found["changes"]] == ["torch"]
    assert found["changes"][0].endswith("the profile's is 1.0")
    assert found["again"] == "latpred calibrate --device simulated"
    assert (found["verdict"], done.exit_code) == ("moved", 1)


ELSEWHERE = profile(machine=machine(hostname_hash="elsewhere", cpu="Another CPU"))
CUDA = profile(device=msgspec.structs.replace(profile().device, kind="cuda", asynchronous=True))


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({}, NoProfileError, "Make one with: latpred calibrate"),
        ({"profile": "rtx-8000"}, ProfileError, r"was not measured here .*latpred calibrate"),
        ({"profile": "h100"}, ProfileError, r"was not measured here .*latpred calibrate"),
        ({"device": torch.device("cpu")}, NoProfileError, "Make one with: latpred calibrate --device cpu"),
        ({"profile": profile(samples=())}, ProfileError, "keeps no cells that could be timed again"),
        (
            {"profile": profile(protocol={ADAPTED: "from cpu on 2026-11-21: eager by host and device"})},
            ProfileError,
            r"was adapted, from cpu on .* Check the profile that it was adapted from",
        ),
        ({"profile": ELSEWHERE}, ProfileError, r"is of another machine .Another CPU, here .*Check it there"),
        ({"profile": profile(), "device": "simulated"}, ProfileError, "'cpu' is of cpu, not of simulated"),
        pytest.param({"profile": CUDA}, DeviceError, "CUDA", marks=WITHOUT_CUDA),
        ({"profile": profile(), "budget_s": 0.1}, UsageError, "Give at least 1 s"),
    ],
)
def test_what_cannot_be_checked(asked: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        latpred.check(**asked)


PARTS = 24
PROBES = 6


def rounds(seed: int, noise: float, factors: Mapping[str, float], speed: float = 1.0) -> list[list[Ratio]]:
    """Two rounds of parts that all took `speed` times as long, some of them more."""
    rng = np.random.default_rng(seed)
    return [
        [
            Ratio("device", f"part{i}", f"{i}/{j}", math.log(speed * factors.get(f"part{i}", 1.0)) + error, noise)
            for i in range(PARTS)
            for j, error in enumerate(rng.normal(0.0, noise, PROBES))
        ]
        for _ in range(2)
    ]


def named(parts: list[Part], verdict: str) -> set[str]:
    return {part.name for part in parts if part.verdict == verdict}


@pytest.mark.parametrize("seed", range(20))
def test_fifteen_percent_in_one_part_is_seen_and_nothing_else(seed: int) -> None:
    for factors in ({"part3": 1.15}, {"part3": 1 / 1.15}, {}):
        assert named(drift_test.drift(rounds(seed, 0.03, factors)), "moved") == set(factors)


@pytest.mark.parametrize("seed", range(20))
def test_noise_hides_a_change_and_is_never_called_one(seed: int) -> None:
    parts = drift_test.drift(rounds(seed, 0.4, {"part3": 1.15}))
    assert named(parts, "moved") == set()
    assert "part3" in named(parts, "unclear")


def test_a_common_speed_is_said_by_itself_and_clocks_have_their_own() -> None:
    parts = {part.name: part for part in drift_test.drift(rounds(1, 0.01, {"part3": 1.3}, speed=1.5))}
    assert parts[""].ratio == pytest.approx(1.5, rel=0.01)
    assert parts[""].verdict == "moved"
    assert parts["part3"].ratio == pytest.approx(1.3, rel=0.02)
    assert parts["part4"].verdict == "holds"
    assert parts["part3"].low < 1.3 < parts["part3"].high
    on_host = [[ratio._replace(clock="host") for ratio in one] for one in rounds(2, 0.01, {}, speed=1.4)]
    both = drift_test.drift([a + b for a, b in zip(on_host, rounds(3, 0.01, {}), strict=True)])
    assert [(part.clock, part.name) for part in both if part.verdict == "moved"] == [("host", "")]


def test_one_outlier_among_the_probes_moves_nothing_nor_does_nothing_at_all() -> None:
    first, second = rounds(4, 0.01, {})
    struck = [ratio._replace(log_ratio=1.0) if ratio.probe == "5/0" else ratio for ratio in first]
    assert named(drift_test.drift([struck, second]), "moved") == set()
    assert drift_test.drift([[], []]) == []  # a part that is missing is no part


def part(name: str, verdict: str, ratio: float = 1.0, clock: str = "device") -> Part:
    return Part(clock, name, ratio, ratio / 1.05, ratio * 1.05, 1.07, 8, verdict)


def found(*parts: Part, busy: float = 0.0, changes: tuple[str, ...] = ()) -> Check:
    return Check("cpu", "2026-01-02T03:04:05+00:00", parts, changes, {}, busy, 12.0, "latpred calibrate --device cpu")


def text(check: Check) -> str:
    return check.page().text()


def test_a_profile_holds() -> None:
    check = found(part("", "holds"), part("fp32 gemm", "holds"), part("fp32 conv", "unclear"))
    assert check.verdict == "holds"
    assert check.sentence == "profile cpu holds: 2 of 3 parts are as they were"
    assert "noise hides a change of 15 % in: fp32 conv" in text(check)
    assert "nothing changed in processor" in text(check)
    assert repr(check) == text(check)
    assert check.sentence in check._repr_html_()


def test_what_moved_is_named_with_its_factor() -> None:
    classes = (part("gemm.linear", "moved", 1.3, "host"), part("gemm.addmm", "moved", 1.32, "host"))
    check = found(part("fp32 gemm", "holds"), *classes, changes=("torch is 2.14, the profile's is 2.13",))
    assert check.verdict == "moved"
    assert "Anew: latpred calibrate --device cpu --fresh" in check.sentence
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


def test_a_gpu_in_use_is_not_said_to_have_moved(calibrated: DeviceProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {name: 1.3 * us for name, us in calibrated.runtimes["eager"].costs_us.items()}
    eager = msgspec.structs.replace(calibrated.runtimes["eager"], costs_us=costs)
    monkeypatch.setattr(drift, "BUSY", math.inf)
    verdicts = {}
    for others in (0, 1):
        device = SimulatedDevice(SimulatedSpec(seed=7))
        device.state = lambda others=others: GpuState("1", 1800, (), others)  # type: ignore[attr-defined]
        slower = msgspec.structs.replace(calibrated, runtimes={"eager": eager})
        check = latpred.check(slower, device=device, budget_s=600)
        verdicts[check.verdict] = check.sentence
    assert verdicts["moved"].startswith("profile simulated does not hold")
    assert "holds: another process uses the GPU. Check again on an idle machine." in verdicts["unclear"]


def test_too_much_noise_is_no_answer() -> None:
    check = found(part("fp32 gemm", "unclear"), part("fp32 conv", "unclear"), part("fp32 norm", "holds"))
    assert check.verdict == "unclear"
    assert "times scatter too much" in check.sentence
