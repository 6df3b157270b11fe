"""`check` on the simulated device, and the sentences for what cannot be checked."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner
from profiledata import machine, profile

import latpred
from latpred import storage
from latpred.accuracy import drift
from latpred.calibration import calibrate
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec
from latpred.calibration.measurement import drift_test
from latpred.cli import main
from latpred.errors import DeviceError, NoProfileError, ProfileError, UsageError
from latpred.profile import store
from latpred.profile.document import ADAPTED, DeviceProfile

CELLS = 230  # after which every dispatch cell and tiny network and some kernels were timed
GUARD = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "drift_guard.py"))


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceProfile]:
    """A short calibration of the simulated device in one precision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(storage.VARIABLE, str(tmp_path_factory.mktemp("calibrated")))
        yield calibrate(SimulatedDevice(SimulatedSpec(seed=7)), cells=CELLS, precisions=["fp32"])


def test_a_profile_that_holds_and_its_altered_copies(calibrated: DeviceProfile) -> None:
    rounds = GUARD["timed_again"](calibrated, SimulatedDevice(SimulatedSpec(seed=8)), 600.0)
    assert GUARD["moved"](calibrated, rounds) == []
    others = dict(GUARD["altered"](calibrated, 1.15))
    assert len(others) > 20
    missed = [name for name, other in others.items() if not GUARD["caught_in"](name, GUARD["moved"](other, rounds))]
    assert missed == []


@pytest.mark.slow
def test_twenty_seeds_are_quiet_and_every_alteration_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    GUARD["main"](["--seeds", "20", "--cells", str(CELLS)])
    shown = capsys.readouterr().out
    assert "quiet in 20 of 20 unaltered" in shown
    caught = next(line for line in shown.splitlines() if line.startswith("caught in 20 of 20 seeds: "))
    found, _, every = caught.split(": ")[1].split()[:3]
    assert found == every


def test_the_verb_says_what_moved_and_exits_with_one(
    calibrated: DeviceProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "BUSY", math.inf)  # what else this machine does is nothing to a simulated device
    costs = {
        name: us * (1.3 if name.startswith("gemm") else 1) for name, us in calibrated.runtimes["eager"].costs_us.items()
    }
    eager = msgspec.structs.replace(calibrated.runtimes["eager"], costs_us=costs)
    older = msgspec.structs.replace(calibrated.machine, stack={**calibrated.machine.stack, "torch": "1.0"})
    store.save(msgspec.structs.replace(calibrated, runtimes={"eager": eager}, machine=older))
    done = CliRunner().invoke(main, ["check", "--device", "simulated", "--budget", "600s", "--json"])
    found = json.loads(done.stdout)
    assert found["schema"] == "latpred.check/1"
    assert {part["name"] for part in found["parts"] if part["verdict"] == "moved"} == {"gemm.linear", "gemm.addmm"}
    assert any(said.startswith("torch is ") and said.endswith("the profile's is 1.0") for said in found["changes"])
    assert (found["verdict"], done.exit_code) == ("moved", 1)


def test_every_family_of_a_profile_has_anchors(calibrated: DeviceProfile) -> None:
    cells = drift_test.chosen(calibrated)
    held = {part for cell in cells if cell.kind == "kernel" for part in drift_test._parts(calibrated, cell)}
    assert held == set(calibrated.kernels["fp32"])
    assert len({cell.key for cell in cells}) == len(cells)


def test_no_profile() -> None:
    with pytest.raises(NoProfileError, match="Make one with: latpred calibrate"):
        latpred.check()


def test_a_profile_of_another_machine() -> None:
    other = machine(hostname_hash="elsewhere", cpu="Another CPU")
    with pytest.raises(ProfileError, match=r"is of another machine .Another CPU, here .*Check it there"):
        latpred.check(profile(machine=other))


@pytest.mark.parametrize("name", ["rtx-8000", "a100"])
def test_a_profile_that_nobody_measured(name: str) -> None:
    with pytest.raises(ProfileError, match=r"was not measured here .*latpred calibrate"):
        latpred.check(name)


def test_an_adapted_profile_no_longer_predicts_its_cells() -> None:
    with pytest.raises(ProfileError, match=r"was adapted, from cpu on .* Check the profile that it was adapted from"):
        latpred.check(profile(protocol={ADAPTED: "from cpu on 2026-11-21: eager by host and device"}))


def test_a_profile_without_cells() -> None:
    with pytest.raises(ProfileError, match="keeps no cells that could be timed again"):
        latpred.check(profile(samples=()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_gpu_profile_without_cuda() -> None:
    known = profile("gpu")
    device = msgspec.structs.replace(known.device, kind="cuda", asynchronous=True)
    with pytest.raises(DeviceError, match="CUDA"):
        latpred.check(msgspec.structs.replace(known, device=device))


def test_no_time_at_all() -> None:
    with pytest.raises(UsageError, match="Give at least 1 s"):
        latpred.check(profile(), budget_s=0.1)
