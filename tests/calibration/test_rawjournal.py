"""Profiles of journals that were measured elsewhere: they are fitted as here, and what is no journal is told apart."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from latpred.calibration import fit_raw, schedules
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec, TrueCosts
from latpred.calibration.schedules import Asynchronous
from latpred.calibration.session import JOURNAL, LAST, Session
from latpred.errors import CalibrationError

CELLS = 140


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A folder with the journal of a calibration of the simulated device that was not finished."""
    device = SimulatedDevice(SimulatedSpec(seed=2))
    campaign = Asynchronous(device, ("fp32",))
    with Session(tmp_path, device.machine(), "any") as session:
        for cell in schedules.memory_cells():
            session.run(cell, campaign.measure)
        for cell in islice(campaign.cells(), CELLS):
            session.run(cell, campaign.measure)
    return tmp_path


def test_a_journal_is_fitted_whether_or_not_its_calibration_was_finished(journal: Path) -> None:
    profile = fit_raw(journal, name="journalled")
    assert (profile.name, profile.device.name) == ("journalled", "simulated")
    assert profile.device.sync_us == pytest.approx(TrueCosts().sync_us, rel=0.03)
    (journal / JOURNAL).rename(journal / LAST)
    again = fit_raw(journal)
    assert again.name == "simulated"
    assert (again.runtimes, again.kernels, again.device) == (profile.runtimes, profile.kernels, profile.device)


def test_a_journal_of_another_version_is_told_apart(journal: Path) -> None:
    (journal / JOURNAL).write_text((journal / JOURNAL).read_text().replace('"cold":', '"warmth":'))
    with pytest.raises(CalibrationError, match="another version of latpred: its cells lack 'cold'"):
        fit_raw(journal)


def test_what_is_no_journal_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"no journal\.jsonl or last\.jsonl in .*nowhere"):
        fit_raw(tmp_path / "nowhere")
    (tmp_path / LAST).write_text("not a journal\n")
    with pytest.raises(CalibrationError, match="no calibration journal"):
        fit_raw(tmp_path)
