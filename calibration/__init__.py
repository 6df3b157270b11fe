"""Measures: the only part of latpred that starts a clock.

`calibrate` measures a device into a profile, `check` says whether it still holds, `measure` whole models into a table,
`validate` compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latpred.calibration.calibrator import calibrate, calibrate_host, fit_raw
    from latpred.calibration.fitting.kernel_table import evaluate_kernels
    from latpred.calibration.measurement.drift_test import check
    from latpred.calibration.measurement.validation import validate
    from latpred.calibration.measurement.whole_models import measure
    from latpred.calibration.published.fitted_profiles import fit_profile
    from latpred.calibration.schedules import choose_shapes

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
    "calibrate": "calibrator",
    "calibrate_host": "calibrator",
    "check": "measurement.drift_test",
    "choose_shapes": "schedules",
    "evaluate_kernels": "fitting.kernel_table",
    "fit_profile": "published.fitted_profiles",
    "fit_raw": "calibrator",
    "measure": "measurement.whole_models",
    "validate": "measurement.validation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
