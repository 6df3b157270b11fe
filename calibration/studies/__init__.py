"""How runtimes other than eager are calibrated: a study of its own for some, whole networks for all others."""

from __future__ import annotations

from importlib import import_module

from latpred.calibration.studies.base import Study

__all__ = ["Study", "get"]

# Runtime, and where its study is: what takes the runtime's name. Imported when it is asked for.
_REPLAYS = "latpred.calibration.studies.replays:Replays"
_OWN: dict[str, str] = {
    "onnxruntime": "latpred.calibration.studies.onnxruntime:OnnxStudy",
    "compile": "latpred.calibration.studies.compile:Compiled",
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
    from latpred.calibration.studies.whole import WholeNetworks

    return WholeNetworks(runtime)
