"""Each rule of the advice, on numbers made by hand."""

from __future__ import annotations

import pytest
from explanationdata import explanation, headroom, prediction

from latpred.explanation.advice import advise, recommended
from latpred.explanation.explanation import Excluded, Headroom


def test_a_runtime_is_recommended_where_it_is_surely_faster() -> None:
    found = explanation(prediction("eager", 10.0), prediction("compile", 4.0))
    assert recommended(found).runtime == "compile"
    assert advise(found) == "Run it in compile, 2.50 times as fast as eager (2.18 to 2.86)."


def test_runtimes_that_are_about_as_fast_are_named_too() -> None:
    found = explanation(prediction("eager", 10.0), prediction("compile", 4.0), prediction("onnxruntime", 4.2))
    assert ", or in onnxruntime, about as fast" in advise(found)


def test_eager_stays_where_nobody_can_say_that_something_is_faster() -> None:
    found = explanation(prediction("eager", 10.0), prediction("compile", 9.5))
    assert found.fastest.runtime == "compile"
    assert recommended(found).runtime == "eager"
    assert advise(found) == "Stay with eager: compile may be as fast, but not surely faster."


def test_a_runtime_that_is_much_faster_by_the_middle_but_not_surely_is_to_be_measured() -> None:
    found = explanation(prediction("eager", 10.0, factor=3.0), prediction("compile", 5.0, factor=3.0))
    assert recommended(found).runtime == "eager"
    assert advise(found).startswith("Stay with eager, or measure both: compile is predicted 2.00 times as fast, but ")


def test_eager_stays_where_all_else_is_slower() -> None:
    assert advise(explanation(prediction("eager", 1.0), prediction("compile", 9.5))) == "Stay with eager."


def test_without_eager_the_fastest_is_the_fastest_of_those_compared() -> None:
    found = explanation(prediction("compile", 1.0), prediction("onnxruntime", 9.5))
    assert advise(found) == "Run it in compile, the fastest of those compared."


def test_with_eager_alone_the_advice_says_how_to_compare() -> None:
    excluded = (
        Excluded("compile", "uncalibrated", "not calibrated"),
        Excluded("onnxruntime", "uncalibrated", "not calibrated"),
        Excluded("cuda-graphs", "unsuited", "needs a CUDA device"),
    )
    assert advise(explanation(prediction(), excluded=excluded)) == (
        "What compile or onnxruntime would bring is not known before: latpred calibrate --runtimes compile,onnxruntime."
    )


@pytest.mark.parametrize(
    ("ahead", "sentence"),
    [
        (
            headroom(12, 1.5),
            "The host sets the latency: batch up to 12 or width up to 1.5 times as large (estimate) costs at "
            "most a fifth more, and fewer layers would be faster but narrower ones hardly.",
        ),
        (
            headroom(None, None),
            "The host sets the latency: batch beyond 1,048,576 or width beyond 8 times as large (estimate) costs at "
            "most a fifth more, and fewer layers would be faster but narrower ones hardly.",
        ),
        (
            headroom(4, 1.02, halved=0.7),
            "The host sets the latency, and fewer layers would be faster, as would half the width (0.70 times the "
            "latency, an estimate).",
        ),
    ],
    ids=["room", "endless", "no room"],
)
def test_framework_bound(ahead: Headroom, sentence: str) -> None:
    assert advise(explanation(prediction(), headrooms={"eager": ahead})) == sentence


@pytest.mark.parametrize(
    ("ahead", "sentence"),
    [
        (
            headroom(doubled=1.95, halved=0.3),
            "Computing sets the latency, 75% of it in gemm, so fewer or narrower layers help (half the width: 0.30 "
            "times the latency, an estimate), a larger batch brings no throughput.",
        ),
        (
            headroom(doubled=1.4, halved=0.95),
            "Computing sets the latency, 75% of it in gemm, so fewer or narrower layers help, and twice the batch "
            "takes 1.40 times as long.",
        ),
    ],
    ids=["full", "not full"],
)
def test_compute_bound(ahead: Headroom, sentence: str) -> None:
    assert advise(explanation(prediction(regime="compute-bound"), headrooms={"eager": ahead})) == sentence


@pytest.mark.parametrize(
    ("precision", "doubled", "sentence"),
    [
        (
            "fp32",
            1.1,
            "Reading memory sets the latency, 75% of it in gemm, so half precision helps where the device has it, and "
            "twice the batch takes 1.10 times as long.",
        ),
        ("fp16", 1.9, "Reading memory sets the latency, 75% of it in gemm, and so do fewer or narrower layers."),
    ],
)
def test_memory_bound(precision: str, doubled: float, sentence: str) -> None:
    point = prediction(regime="memory-bound", precision=precision)
    assert advise(explanation(point, headrooms={"eager": headroom(doubled=doubled)})) == sentence


def test_a_batch_that_does_not_fit_is_the_first_thing_to_say() -> None:
    said = advise(explanation(prediction(fits=False)))
    assert said == "Batch 4 needs 1.00 GiB, more than the device has: use a smaller one."


def test_the_limit_is_that_of_the_recommended_runtime() -> None:
    points = prediction("eager", 10.0), prediction("compile", 4.0, regime="compute-bound")
    said = advise(explanation(*points, headrooms={"eager": headroom(), "compile": headroom(doubled=1.9, halved=0.5)}))
    assert said.startswith("Run it in compile, 2.50 times as fast as eager (2.18 to 2.86); computing sets the latency")
