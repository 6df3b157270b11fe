"""Predict how long one forward pass of a model takes on a device, in each runtime, before running it there.

>>> import latpred
>>> latpred.predict("bert-base-uncased", batch=8)  # doctest: +SKIP

Names are imported when they are first used: `import latpred` loads neither torch nor scikit-learn.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latpred.accuracy import compare as compare
    from latpred.adapting import adapt as adapt
    from latpred.api import max_batch as max_batch
    from latpred.api import predict as predict
    from latpred.api import predict_many as predict_many
    from latpred.budget import LatencyBudget as LatencyBudget
    from latpred.calibration import calibrate as calibrate
    from latpred.calibration import check as check
    from latpred.calibration import fit_profile as fit_profile
    from latpred.calibration.generating import measure_generation as measure_generation
    from latpred.calibration.measuring import measure as measure
    from latpred.errors import LatpredError as LatpredError
    from latpred.explaining import explain as explain
    from latpred.explanation import Explanation as Explanation
    from latpred.generating import predict_generation as predict_generation
    from latpred.generation import GenerationCurve as GenerationCurve
    from latpred.generation import GenerationPrediction as GenerationPrediction
    from latpred.graph import ModelGraph as ModelGraph
    from latpred.lengths import Lengths as Lengths
    from latpred.ops import cost as cost
    from latpred.prediction import Curve as Curve
    from latpred.prediction import Prediction as Prediction
    from latpred.predictor import Predictor as Predictor
    from latpred.ranking import agreement as agreement
    from latpred.ranking import rank as rank
    from latpred.tracing import trace as trace
    from latpred.tracing.choices import Choice as Choice
    from latpred.tracing.supernet import Supernet as Supernet

    __version__: str

_HOMES = {
    "Choice": "latpred.tracing.choices",
    "Curve": "latpred.prediction",
    "Explanation": "latpred.explanation",
    "GenerationCurve": "latpred.generation",
    "GenerationPrediction": "latpred.generation",
    "LatencyBudget": "latpred.budget",
    "LatpredError": "latpred.errors",
    "Lengths": "latpred.lengths",
    "ModelGraph": "latpred.graph",
    "Prediction": "latpred.prediction",
    "Predictor": "latpred.predictor",
    "agreement": "latpred.ranking",
    "Supernet": "latpred.tracing.supernet",
    "adapt": "latpred.adapting",
    "calibrate": "latpred.calibration",
    "check": "latpred.calibration",
    "fit_profile": "latpred.calibration",
    "compare": "latpred.accuracy",
    "cost": "latpred.ops",
    "explain": "latpred.explaining",
    "max_batch": "latpred.api",
    "measure": "latpred.calibration.measuring",
    "measure_generation": "latpred.calibration.generating",
    "predict": "latpred.api",
    "predict_many": "latpred.api",
    "predict_generation": "latpred.generating",
    "rank": "latpred.ranking",
    "trace": "latpred.tracing",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name == "__version__":
        return import_module("importlib.metadata").version("latpred")
    if name not in _HOMES:
        raise AttributeError(f"module 'latpred' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    """Public names."""
    return [*__all__, "__version__"]
