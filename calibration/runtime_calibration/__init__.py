"""How runtimes other than eager are calibrated: a calibrator of its own for some, whole networks for all others."""

from __future__ import annotations

from importlib import import_module

from latpred.calibration.runtime_calibration.base import RuntimeCalibrator

__all__ = ["RuntimeCalibrator", "get"]

# Runtime, and the module and class of its calibrator. Imported when it is asked for.
_REPLAYS = ("replays", "ReplayCalibrator")
_OWN = {
    "onnxruntime": ("onnx_calibrator", "OnnxCalibrator"),
    "compile": ("compile_calibrator", "CompileCalibrator"),
    "cuda-graphs": _REPLAYS,
    "onnxruntime-cuda-graphs": _REPLAYS,
    "compile-reduce-overhead": _REPLAYS,
}


def get(runtime: str) -> RuntimeCalibrator:
    """The calibrator of a runtime; one that nothing special is known of is calibrated on whole networks.

    >>> get("torchscript").runtime
    'torchscript'
    """
    if runtime not in _OWN:
        return RuntimeCalibrator(runtime)
    module, name = _OWN[runtime]
    calibrator: RuntimeCalibrator = getattr(import_module(f"{__name__}.{module}"), name)(runtime)
    return calibrator
