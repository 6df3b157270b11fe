"""Each rule of the advice, on numbers made by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from explanationdata import explanation, headroom, prediction

from latpred.explanation.advice import advise, recommended
from latpred.explanation.explanation import Excluded, Explanation, Headroom

FASTER = "Run it in compile, 2.50 times as fast as eager (2.18 to 2.86)"
FIFTH = "costs at most a fifth more, and fewer layers would be faster but narrower ones hardly."
EXCLUDED = (
    Excluded("compile", "uncalibrated", "not calibrated"),
    Excluded("onnxruntime", "uncalibrated", "not calibrated"),
    Excluded("cuda-graphs", "unsuited", "needs a CUDA device"),
)


def grown(ahead: Headroom, **point: Any) -> Explanation:
    """Of eager alone, of which is known what may grow."""
    return explanation(prediction(**point), headrooms={"eager": ahead})


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        ([("eager", 10.0), ("compile", 4.0)], f"{FASTER}."),
        (
            [("eager", 10.0), ("compile", 4.0), ("onnxruntime", 4.2)],
            f"{FASTER}, or in onnxruntime, which may be as fast.",
        ),
        ([("eager", 10.0), ("compile", 4.0), ("onnxruntime", 8.0, 3.0)], f"{FASTER}."),
        ([("eager", 10.0), ("compile", 9.5)], "Stay with eager: compile may be as fast, but not surely faster."),
        (
            [("eager", 10.0, 3.0), ("compile", 5.0, 3.0)],
            "Stay with eager, or measure both: compile is predicted 2.00 times as fast, but not surely faster (0.42 to "
            "9.46).",
        ),
        ([("eager", 1.0), ("compile", 9.5)], "Stay with eager."),
        ([("compile", 1.0), ("onnxruntime", 9.5)], "Run it in compile, the fastest of those compared."),
    ],
    ids=["surely faster", "two as fast", "a rival of eager", "perhaps", "much but unsure", "slower", "no eager"],
)
def test_which_runtime(points: list[tuple[Any, ...]], sentence: str) -> None:
    found = explanation(*(prediction(*point) for point in points))
    assert advise(found) == sentence
    assert recommended(found).runtime == re.match(r"(?:Run it in|Stay with) ([\w-]+)", sentence)[1]  # type: ignore[index]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (explanation(prediction()), ""),
        (explanation(prediction(), excluded=EXCLUDED),
         "What compile or onnxruntime would bring is not known before a calibration."),
        (explanation(prediction(fits=False)), "Batch 4 needs 1.00 GiB, more than the device has: use a smaller one."),
        (explanation(replace(prediction(fits=False), batch=1)),
         "Batch 1 needs 1.00 GiB, more than the device has: use smaller inputs or a smaller model."),
        (grown(headroom(12, 1.5)),
         "The host sets the latency: batch up to 12 or width up to 1.5 times as large (estimate) " + FIFTH),
        (grown(headroom(None, None)),
         "The host sets the latency: batch beyond 1,048,576 or width beyond 8 times as large (estimate) " + FIFTH),
        (grown(headroom(4, 1.02, halved=0.7)),
         "The host sets the latency, and fewer layers would be faster, as would half the width (0.70 times the "
         "latency, an estimate)."),
        (grown(headroom(doubled=1.95, halved=0.3), regime="compute-bound"),
         "Computing sets the latency, 75% of it in gemm, so fewer or narrower layers help (half the width: 0.30 times "
         "the latency, an estimate), a larger batch brings no throughput."),
        (grown(headroom(doubled=1.4, halved=0.95), regime="compute-bound"),
         "Computing sets the latency, 75% of it in gemm, so fewer or narrower layers help, and twice the batch takes "
         "1.40 times as long."),
        (grown(headroom(doubled=1.1), regime="memory-bound"),
         "Reading memory sets the latency, 75% of it in gemm, so half precision helps where the device has it, and "
         "twice the batch takes 1.10 times as long."),
        (grown(headroom(doubled=1.9), regime="memory-bound", precision="fp16"),
         "Reading memory sets the latency, 75% of it in gemm, so fewer or narrower layers help."),
        (grown(headroom(doubled=1.9), regime="memory-bound"),
         "Reading memory sets the latency, 75% of it in gemm, so half precision helps where the device has it, and so "
         "do fewer or narrower layers."),
    ],
)  # fmt: skip
def test_what_is_said_of_eager_alone(found: Explanation, sentence: str) -> None:
    assert advise(found) == sentence


def test_the_limit_is_that_of_the_recommended_runtime() -> None:
    points = prediction("eager", 10.0), prediction("compile", 4.0, regime="compute-bound")
    said = advise(explanation(*points, headrooms={"eager": headroom(), "compile": headroom(doubled=1.9, halved=0.5)}))
    assert said.startswith(f"{FASTER}; computing sets the latency")
