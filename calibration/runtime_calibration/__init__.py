"""How runtimes other than eager are calibrated: a study of its own for some, whole networks for all others."""

from __future__ import annotations

from importlib import import_module

from latpred.calibration.runtime_calibration.base import Study

__all__ = ["Study", "get"]

# Runtime, and where its study is: what takes the runtime's name. Imported when it is asked for.
_REPLAYS = "latpred.calibration.runtime_calibration.replays:Replays"
_OWN: dict[str, str] = {
    "onnxruntime": "latpred.calibration.runtime_calibration.onnx_nodes:OnnxStudy",
    "compile": "latpred.calibration.runtime_calibration.compile_calls:Compiled",
    "cuda-graphs": _REPLAYS,
    "onnxruntime-cuda-graphs": _REPLAYS,
    "compile-reduce-overhead": _REPLAYS,
}


def get(runtime: str) -> Study:
    """The study of a runtime; one that nothing special is known of is calibrated on whole networks.

    >>> get("torchscript").runtime
    'torchscript'
    """
    if runtime in _OWN:
        module, _, attribute = _OWN[runtime].partition(":")
        study: Study = getattr(import_module(module), attribute)(runtime)
        return study
    from latpred.calibration.runtime_calibration.whole_networks import WholeNetworks

    return WholeNetworks(runtime)
