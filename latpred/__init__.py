"""Predict how long one forward pass of a model takes on a device, in each runtime, before running it there.

>>> import latpred
>>> latpred.predict("bert-base-uncased", batch=8)  # doctest: +SKIP

Names are imported when they are first used: `import latpred` loads neither torch nor scikit-learn.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as typing's, which a Ctrl-C would find half imported before the command line can answer

if TYPE_CHECKING:
    from latpred.accuracy.adaptation import adapt as adapt
    from latpred.accuracy.comparison import compare as compare
    from latpred.api import max_batch as max_batch
    from latpred.api import predict as predict
    from latpred.calibration import calibrate as calibrate
    from latpred.calibration import check as check
    from latpred.calibration import fit_profile as fit_profile
    from latpred.calibration.measurement.timed_generation import measure_generation as measure_generation
    from latpred.calibration.measurement.whole_models import measure as measure
    from latpred.errors import LatpredError as LatpredError
    from latpred.explanation.explain import explain as explain
    from latpred.explanation.explanation import Explanation as Explanation
    from latpred.explanation.generation import GenerationCurve as GenerationCurve
    from latpred.explanation.generation import GenerationPrediction as GenerationPrediction
    from latpred.explanation.generation import predict_generation as predict_generation
    from latpred.graph.graph import ModelGraph as ModelGraph
    from latpred.ops import cost as cost
    from latpred.prediction.prediction import Curve as Curve
    from latpred.prediction.prediction import Prediction as Prediction
    from latpred.prediction.predictor import Predictor as Predictor
    from latpred.query import Lengths as Lengths
    from latpred.search.budget import LatencyBudget as LatencyBudget
    from latpred.search.choices import Choice as Choice
    from latpred.search.many import predict_many as predict_many
    from latpred.search.option_table import latency_table as latency_table
    from latpred.search.ranking import agreement as agreement
    from latpred.search.ranking import rank as rank
    from latpred.search.supernet import Supernet as Supernet
    from latpred.tracing import trace as trace

    __version__: str

_HOMES = {
    "Choice": "latpred.search.choices",
    "Curve": "latpred.prediction.prediction",
    "Explanation": "latpred.explanation.explanation",
    "GenerationCurve": "latpred.explanation.generation",
    "GenerationPrediction": "latpred.explanation.generation",
    "LatencyBudget": "latpred.search.budget",
    "LatpredError": "latpred.errors",
    "Lengths": "latpred.query",
    "ModelGraph": "latpred.graph.graph",
    "Prediction": "latpred.prediction.prediction",
    "Predictor": "latpred.prediction.predictor",
    "agreement": "latpred.search.ranking",
    "Supernet": "latpred.search.supernet",
    "adapt": "latpred.accuracy.adaptation",
    "calibrate": "latpred.calibration",
    "check": "latpred.calibration",
    "fit_profile": "latpred.calibration",
    "compare": "latpred.accuracy.comparison",
    "cost": "latpred.ops",
    "explain": "latpred.explanation.explain",
    "latency_table": "latpred.search.option_table",
    "max_batch": "latpred.api",
    "measure": "latpred.calibration.measurement.whole_models",
    "measure_generation": "latpred.calibration.measurement.timed_generation",
    "predict": "latpred.api",
    "predict_many": "latpred.search.many",
    "predict_generation": "latpred.explanation.generation",
    "rank": "latpred.search.ranking",
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
