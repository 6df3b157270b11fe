"""Measures: the only part of latpred that starts a clock.

`calibrate` measures a device into a profile, `check` says whether it still holds, `measure` whole models into a table,
`validate` compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latpred.calibration.calibrator import calibrate as calibrate
    from latpred.calibration.calibrator import calibrate_host as calibrate_host
    from latpred.calibration.calibrator import fit_raw as fit_raw
    from latpred.calibration.fitting.kernel_table import choose_shapes as choose_shapes
    from latpred.calibration.fitting.kernel_table import evaluate_kernels as evaluate_kernels
    from latpred.calibration.measurement.drift_test import check as check
    from latpred.calibration.measurement.validation import validate as validate
    from latpred.calibration.measurement.whole_models import measure as measure
    from latpred.calibration.published.fitted_profiles import fit_profile as fit_profile

_HOMES = {
    "calibrate": "calibrator",
    "calibrate_host": "calibrator",
    "check": "measurement.drift_test",
    "choose_shapes": "fitting.kernel_table",
    "evaluate_kernels": "fitting.kernel_table",
    "fit_profile": "published.fitted_profiles",
    "fit_raw": "calibrator",
    "measure": "measurement.whole_models",
    "validate": "measurement.validation",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
