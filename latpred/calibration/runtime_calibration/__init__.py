"""How runtimes other than eager are calibrated: a calibrator of its own for some, whole networks for all others."""

from __future__ import annotations

from collections.abc import Callable

from latpred.calibration.runtime_calibration.base import REPLAY_SECONDS, ReplayCalibrator, RuntimeCalibrator
from latpred.calibration.runtime_calibration.compile_calibrator import CompileCalibrator
from latpred.calibration.runtime_calibration.onnx_calibrator import OnnxCalibrator

__all__ = ["RuntimeCalibrator", "get"]

_OWN: dict[str, Callable[[], RuntimeCalibrator]] = {"onnxruntime": OnnxCalibrator, "compile": CompileCalibrator}


def get(runtime: str) -> RuntimeCalibrator:
    """The calibrator of a runtime; one that nothing special is known of is calibrated on whole networks."""
    if runtime in _OWN:
        return _OWN[runtime]()
    return ReplayCalibrator(runtime) if runtime in REPLAY_SECONDS else RuntimeCalibrator(runtime)
