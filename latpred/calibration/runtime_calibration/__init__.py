"""How runtimes other than eager are calibrated: a calibrator of its own for some, whole networks for all others."""

from __future__ import annotations

from latpred.calibration.runtime_calibration.base import REPLAY_SECONDS, ReplayCalibrator, RuntimeCalibrator

__all__ = ["RuntimeCalibrator", "get"]


def get(runtime: str) -> RuntimeCalibrator:
    """The calibrator of a runtime; one that nothing special is known of is calibrated on whole networks.

    >>> get("torchscript").runtime
    'torchscript'
    """
    if runtime == "onnxruntime":
        from latpred.calibration.runtime_calibration.onnx_calibrator import OnnxCalibrator

        return OnnxCalibrator()
    if runtime == "compile":
        from latpred.calibration.runtime_calibration.compile_calibrator import CompileCalibrator

        return CompileCalibrator()
    return ReplayCalibrator(runtime) if runtime in REPLAY_SECONDS else RuntimeCalibrator(runtime)
