"""Measures: the only part of latpred that starts a clock.

`calibrate` measures a device into a profile, `check` says whether it still holds, `measure` whole models into a table,
`validate` compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latpred.calibration.campaign import calibrate
    from latpred.calibration.checking import check
    from latpred.calibration.choosing import choose_shapes
    from latpred.calibration.hostonly import calibrate_host
    from latpred.calibration.kerneltable import evaluate_kernels
    from latpred.calibration.measuring import measure
    from latpred.calibration.rawjournal import fit_raw
    from latpred.calibration.tablefit.api import fit_profile
    from latpred.calibration.validation import validate

__all__ = [
    "calibrate",
    "calibrate_host",
    "check",
    "choose_shapes",
    "evaluate_kernels",
    "fit_profile",
    "fit_raw",
    "measure",
    "validate",
]

_HOMES = {
    "calibrate": "campaign",
    "calibrate_host": "hostonly",
    "check": "checking",
    "choose_shapes": "choosing",
    "evaluate_kernels": "kerneltable",
    "fit_profile": "tablefit.api",
    "fit_raw": "rawjournal",
    "measure": "measuring",
    "validate": "validation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
