"""How runtimes other than eager are calibrated: a calibrator of its own for some, whole networks for all others."""

from __future__ import annotations

from latpred.calibration.devices import Device
from latpred.calibration.runtime_calibration.base import REPLAYED, ReplayCalibrator, RuntimeCalibrator
from latpred.calibration.runtime_calibration.compile_calibrator import CompileCalibrator
from latpred.calibration.runtime_calibration.onnx_calibrator import OnnxCalibrator

__all__ = ["RuntimeCalibrator", "get", "seconds_of"]

# On a device that is waited for, whose every node or call can be timed by itself.
_SYNCHRONOUS: dict[str, type[RuntimeCalibrator]] = {"onnxruntime": OnnxCalibrator, "compile": CompileCalibrator}
# Exporting takes a while, compiling longer.
_SECONDS = {
    "onnxruntime": 100.0,
    "compile": 240.0,
    "cuda-graphs": 45.0,
    "onnxruntime-cuda-graphs": 60.0,
    "compile-reduce-overhead": 120.0,
}


def get(runtime: str, device: Device) -> RuntimeCalibrator:
    """The calibrator of a runtime on a device; one that nothing special is known of is calibrated on whole networks."""
    if runtime in REPLAYED:
        return ReplayCalibrator(runtime, device)
    special = {} if device.asynchronous else _SYNCHRONOUS
    return special.get(runtime, RuntimeCalibrator)(runtime, device)


def seconds_of(runtime: str) -> float:
    """What a full calibration spends on a runtime by default."""
    return _SECONDS.get(runtime, 90.0)
