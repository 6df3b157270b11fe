"""`latpred.predict(..., lengths=...)`: batches of unequal lengths, at what they are padded to or as they are.

A padded batch has one walk for all batch sizes. Nested and packed ones are walked for each batch size, since what they
do depends on every length; where their regime changes is read off straight lines through the batches asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latpred.errors import RuntimeRefusalError, UsageError
from latpred.joined import joined
from latpred.lengths import EXECUTIONS, Lengths, checked_lengths
from latpred.prediction import Curve
from latpred.predictor import Predictor
from latpred.runtimes.walking import target_of


def lengths_curve(
    predictor: Predictor,
    model: Any,
    batches: NDArray[np.int64],
    lengths: Lengths | Sequence[int],
    execution: str = "padded",
    *,
    runtime: str = "eager",
    precision: str | None = None,
    protocol: str = "single",
    inputs_on: str = "device",
) -> Curve:
    """Predict batches of unequal lengths."""
    from latpred.tracing.packed import trace_lengths

    if execution not in EXECUTIONS:
        raise UsageError(f"execution={execution!r} is not known; choose from: {', '.join(EXECUTIONS)}.")
    if not isinstance(model, str) and not hasattr(model, "named_modules"):
        raise UsageError("lengths= needs the model itself: a graph was walked with the inputs it has.")
    given = checked_lengths(lengths)
    if not isinstance(given, Lengths) and batches.tolist() == [1]:
        batches = np.array([len(given.values)])
    asked: dict[str, Any] = {"runtime": runtime, "protocol": protocol, "inputs_on": inputs_on}
    target = target_of(predictor.profile.device.kind)
    if execution == "padded":
        typical = [given.of(batch) for batch in batches.tolist()][-1]
        graph = trace_lengths(model, typical, given.padded_to, execution, target=target, precision=precision)
        return predictor.curve(graph, batches, **asked)
    if runtime != "eager":
        raise RuntimeRefusalError(
            f"{runtime} runs graphs of fixed shapes, so nothing {execution}; ask for execution='padded', or for eager."
        )
    points = []
    for batch in batches.tolist():
        graph = trace_lengths(model, given.of(batch), given.padded_to, execution, target=target, precision=precision)
        points.append(predictor.predict(graph, batch, **asked))
    return joined(points)
