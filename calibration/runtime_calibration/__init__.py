"""How runtimes other than eager are calibrated: a calibrator of its own for some, whole networks for all others."""

from __future__ import annotations

from importlib import import_module

from latpred.calibration.runtime_calibration.base import REPLAY_SECONDS, ReplayCalibrator, RuntimeCalibrator

__all__ = ["RuntimeCalibrator", "get"]

# The module and class of a runtime's own calibrator, imported when it is asked for.
_OWN = {"onnxruntime": ("onnx_calibrator", "OnnxCalibrator"), "compile": ("compile_calibrator", "CompileCalibrator")}


def get(runtime: str) -> RuntimeCalibrator:
    """The calibrator of a runtime; one that nothing special is known of is calibrated on whole networks.

    >>> get("torchscript").runtime
    'torchscript'
    """
    if runtime not in _OWN:
        return (ReplayCalibrator if runtime in REPLAY_SECONDS else RuntimeCalibrator)(runtime)
    module, name = _OWN[runtime]
    calibrator: RuntimeCalibrator = getattr(import_module(f"{__name__}.{module}"), name)(runtime)
    return calibrator
