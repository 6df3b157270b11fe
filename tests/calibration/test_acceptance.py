"""Acceptance: errors of networks that no fit saw, the spread they leave, the gates, and what is timed for them."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import factories
import msgspec
import numpy as np
import pytest
import torch

from latpred.calibration import schedules
from latpred.calibration.cells import COPY, Cell
from latpred.calibration.devices import conditions
from latpred.calibration.devices.cpu import CpuDevice
from latpred.calibration.fitting import acceptance, profile_fit
from latpred.calibration.fitting.acceptance import HoldoutError, accepted, network_spread
from latpred.calibration.fitting.dispatch_fit import TimedNetwork
from latpred.calibration.session import Row
from latpred.calibration.timing import reference_speed
from latpred.calibration.timing.timer import Timing
from latpred.calibration.workloads import networks, suites
from latpred.host import Slowdown
from latpred.prediction.clocks import Z90
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.profile.document import UNSURE

GATE = suites.get(suites.GATE)
HOLDOUTS = [schedules.network_cell(spec) for spec in map(networks.draw, range(6 * len(networks.KINDS))) if spec.holdout]


NUMBERS = count()


def error(ratio: float, kernel_spread: float = 0.0) -> HoldoutError:
    """A network predicted at `ratio` times what it takes."""
    return HoldoutError(f"network/{next(NUMBERS)}", 100.0 * ratio, 100.0, kernel_spread)


def several(*ratios: float) -> list[HoldoutError]:
    return list(map(error, ratios))


def row(cell: Cell, seconds: float = 1e-3, error: str = "") -> Row:
    return Row(cell, {} if error else {"single": Timing(seconds, 0.0, 5, True)}, 0.1, error)


def test_holdout_networks_are_predicted_by_the_profile_at_the_speed_that_they_were_timed_at() -> None:
    # a synchronous device: 20 us for the pass, 5 for the class
    eager = factories.dispatch(spread=0.5)  # which is no part of what kernels alone leave open
    profile = factories.profile(factories.device(asynchronous=False, kind="cpu"), runtimes={"eager": eager})
    run = TimedNetwork(factories.graph(factories.linear(rows=128, width=768)), 2, 500.0)
    fast = TimedNetwork(factories.graph(factories.linear(rows=1, width=768)), 1, 500.0)  # next to nothing but bytes
    slow = fast._replace(slowdown=Slowdown(cache=1.5))
    found, faster, slower = acceptance.holdout_errors(profile, {"holdout": run, "fast": fast, "slow": slow})
    assert found.predicted_us == pytest.approx(1e3 * Predictor(profile).predict(run.graph, 2).latency_ms)
    assert found.predicted_us > 25.0 + 2 * 128 * 768 * 768 / 1e6  # at most a million multiply-adds a microsecond
    assert (found.cell, found.measured_us) == ("holdout", 500.0)
    assert found.log_error == pytest.approx(math.log(found.predicted_us / 500.0))
    assert found.kernel_spread == pytest.approx(0.0, abs=1e-6)
    assert slower.predicted_us - 25.0 == pytest.approx(1.5 * (faster.predicted_us - 25.0))  # all but dispatch


def test_the_spread_covers_nine_in_ten_of_others_beyond_what_kernels_explain_within_bounds() -> None:
    percents, explained = ([error(math.exp(each / 100), spread) for each in range(1, 11)] for spread in (0.0, 0.04))
    assert network_spread(percents) == pytest.approx(0.10 / Z90, abs=1e-4)
    normal = [error(math.exp(log)) for log in np.random.default_rng(0).normal(0.0, 0.2, 2000)]
    assert network_spread(normal) == pytest.approx(0.2, rel=0.06)
    assert network_spread(explained) == pytest.approx(math.sqrt((0.10 / Z90) ** 2 - 0.04**2), abs=1e-4)
    assert network_spread([error(1.0)] * 10) == pytest.approx(acceptance.LEAST_SPREAD, abs=1e-4)
    assert network_spread([error(1e9)] * 10) == 1.0
    assert network_spread([]) == 2 * acceptance.LEAST_SPREAD


def test_networks_whose_kernels_are_guesses_say_nothing_of_others() -> None:
    known, guessed = error(1.01), error(4.0, 0.4)._replace(guessed=True)
    least = acceptance.LEAST_SPREAD
    assert network_spread([*[known] * 11, guessed]) == least < network_spread([*[known] * 11, error(4.0, 0.4)])
    assert network_spread([*[known] * 11, guessed._replace(kernel_spread=0.01)]) > least  # where they take no time
    assert network_spread([*[known] * (acceptance.FEWEST - 1), guessed]) > least  # too few others
    ops = (factories.linear(), factories.add(family="fft"))
    runs = {op.family: TimedNetwork(factories.graph(op), 1, 100.0) for op in ops}
    assert [one.guessed for one in acceptance.holdout_errors(factories.profile(), runs)] == [False, True]


COMMAND = "latpred calibrate --device cuda:1"
ANEW = f"Close other programs, let the machine cool down, and calibrate anew: {COMMAND} --fresh"
MORE_TIME = f"Give the calibration more time: {COMMAND} --budget 5m"
DISTURBED = "Other work disturbed 40% of the cells until the end."
MEDIAN = "median error of holdout networks that no fit saw at most 15%"
P90 = "p90 error of holdout networks that no fit saw at most 40%"
SHIFT = "median shift between two timings, at equal speed, at most 10%"
CALM = "cells that other work disturbed at most 25%"
ENOUGH = "networks to judge by at least 5"
TOGETHER = "cells while the host had moved the processors apart at most 50%"
UNSPOILT = "fitted cells that were disturbed or of processors apart at most 0%"
MEND = "Mend what kept cells from being measured (memory)"
APART = "The host had moved the processors apart for 60% of the cells"


@pytest.mark.parametrize(
    ("ratios", "quality", "failing", "advice"),
    [
        ([1.05] * 5, {"stable": 0.9}, {}, []),
        ([1.2] * 10, {}, {MEDIAN: "20.0%"}, [ANEW]),
        ([1.0] * 8 + [1.6] * 2, {}, {P90: "60.0%"}, [ANEW]),
        ([1.0] * 10, {"stable": 0.69}, {"timings that were stable at least 70%": "69.0%"}, [ANEW]),
        ([1.0] * 10, {"shifts": (1.2, 1.2, 1.0)}, {SHIFT: "18.2%"}, [ANEW]),
        ([1.0] * 10, {"disturbed": 0.4}, {CALM: "40.0%"}, [DISTURBED]),
        ([1.0] * 10, {"apart": 0.5}, {}, []),
        ([1.0] * 10, {"apart": 0.6}, {TOGETHER: "60.0%"}, [APART]),
        ([1.0] * 10, {"disturbed": 0.25, "apart": 0.45, "spoilt": 0.7}, {UNSPOILT: "70.0%"}, [ANEW]),
        ([1.0] * 4, {}, {ENOUGH: "4"}, [MORE_TIME]),
        ([1.0] * 4, {"seconds": 570.0}, {ENOUGH: "4"}, [MORE_TIME.replace("5m", "19m")]),
        ([1.0] * 10, {"seen": 70}, {}, []),
        ([1.0] * 10, {"seen": 69}, {"networks to learn from at least 70": "69"}, [MORE_TIME]),
        ([1.0] * 10, {"missing": ["memory"]}, {"kinds of cells that could not be measured": "memory"}, [MEND]),
        ([], {}, dict.fromkeys((MEDIAN, P90), "nothing to judge by") | {ENOUGH: "0"}, [ANEW, MORE_TIME]),
    ],
)
def test_what_fails(ratios: list[float], quality: dict[str, Any], failing: dict[str, str], advice: list[str]) -> None:
    verdict = accepted(several(*ratios), (), **quality, command=COMMAND)
    assert verdict.passed == (not failing)
    failed = {name: text.removesuffix(": failed") for name, text in verdict.checks.items() if text.endswith("failed")}
    assert failed == failing
    assert len(verdict.advice) == len(advice)
    assert all(line.startswith(start) for line, start in zip(verdict.advice, advice, strict=True))


@pytest.mark.parametrize(
    ("networks", "better", "said"),
    [
        # Of n networks as many lie below the median of all as coins show heads: 7 of 9 and 12 of 16 are enough.
        (9, 7, ""),
        (9, 6, "judged by 9 networks, the median error of others may be up to 20.0%"),
        (16, 12, ""),
        (16, 11, "judged by 16 networks, the median error of others may be up to 20.0%"),
    ],
)
def test_a_pass_that_few_networks_decided_says_what_it_leaves_open(networks: int, better: int, said: str) -> None:
    def model(number: int, batch: int) -> HoldoutError:
        return error(1.1 if number < better else 1.2)._replace(cell=f"model/onnxruntime/fp32/{number}/batch={batch}")

    errors = [model(number, batch) for number in range(networks) for batch in (1, 8)]
    verdict = acceptance.with_runtime(factories.profile(), "onnxruntime", errors, seconds=200.0)
    assert verdict.runtimes == {"onnxruntime": True}
    assert verdict.checks.get(f"onnxruntime: {UNSURE}", "") == said
    command = "latpred calibrate --device simulated --runtimes onnxruntime --budget 7m"
    more = bool(said) and networks < acceptance.ENOUGH  # a longer one would have no others to be judged by
    assert verdict.advice == (f"Calibrate onnxruntime anew when nothing else runs: {command}",) * more
    fit = factories.dispatch()
    profile = factories.profile(runtimes={"eager": fit, "onnxruntime": fit})
    profile = msgspec.structs.replace(profile, acceptance=verdict)
    op = factories.graph(factories.add())
    caveats = [Predictor(profile).predict(op, runtime=name).provenance.caveats for name in profile.runtimes]
    told = f"onnxruntime passed its acceptance gate, but {said}; see: latpred profiles show {profile.name}"
    assert [told in each for each in caveats] == [False, bool(said)]


def test_ordinary_models_decide_where_there_are_enough() -> None:
    verdict = accepted(several(1.5) * 10, several(*[1.02] * acceptance.FEWEST))
    assert verdict.passed
    assert verdict.checks["median error of ordinary models that no fit saw at most 15%"] == "2.0%: passed"
    assert verdict.checks["median error of holdout networks"] == "50.0%"
    # They are also those of whom there must be enough: a calibration of a minute times few holdout networks.
    few = accepted(several(*[1.02] * (acceptance.FEWEST - 1)), several(*[1.02] * acceptance.FEWEST))
    assert few.passed
    assert few.checks["networks to judge by at least 5"] == "5: passed"


@pytest.mark.parametrize(
    ("slow", "networks_slow", "who"),
    [(1.0, 1.0, "ordinary models"), (1.3, 1.0, "holdout networks"), (1.3, 1.3, "ordinary models")],
)
def test_models_of_slow_moments_leave_the_verdict_to_fast_networks(slow: float, networks_slow: float, who: str) -> None:
    several = [row(cell) for cell in HOLDOUTS if not schedules.network_spec(cell).tiny][: acceptance.FEWEST]
    rows = [
        *(at_slowness(one, networks_slow) for one in several),
        *(at_slowness(row(cell), slow) for cell in acceptance.models("fp32")[: acceptance.FEWEST]),
        # A budget may end before there are kernels of a precision: nothing can be predicted in it.
        *(row(schedules.network_cell(schedules.network_spec(one.cell), "fp16")) for one in several),
        row(acceptance.models("fp16")[0]),
    ]
    checked, errors = profile_fit._checked(store.load("epyc-shared"), rows, rows, reference_speed.FULL)
    assert len(errors) == acceptance.FEWEST
    assert f"median error of {who} that no fit saw at most 15%" in checked.acceptance.checks


def at_slowness(one: Row, slow: float) -> Row:
    return msgspec.structs.replace(one, timings={"single": Timing(1e-3, 0.0, 5, True, slow)})


def test_kinds_that_could_not_be_measured_are_named() -> None:
    for failed, also in ((3, []), (4, [schedules.CLOCK.kind])):
        rows = [row(HOLDOUTS[0], error="it raised"), *[row(schedules.CLOCK, error="it raised")] * failed]
        rows += [row(schedules.CLOCK)] * (9 - failed)
        assert acceptance.missing(rows) == [f"network {HOLDOUTS[0].name}", "holdout networks", *also]
    moved = [row(COPY, error="out of memory"), *[row(Cell("memory", "read", {"bytes": size})) for size in range(9)]]
    assert acceptance.missing(moved) == [f"memory {COPY.name}"]


def test_models_come_first_and_again_then_holdouts_of_every_kind() -> None:
    others = [schedules.network_cell(networks.draw(seed)) for seed in range(3)]
    others += [schedules.network_cell(schedules.network_spec(cell), "fp16") for cell in HOLDOUTS]
    cells = list(acceptance.cells([row(cell) for cell in (*HOLDOUTS, *others)], "fp32"))
    assert {cell.precision for cell in cells} == {"fp32"}
    models = len(GATE.ready) * len(GATE.batches)
    assert all(cell.kind == "model" and acceptance.AGAIN not in cell.dims for cell in cells[:models])
    repeated = [cell for cell in cells[models:] if cell.kind == "network"]
    assert {cell.name for cell in repeated} == set(networks.KINDS)
    assert all(schedules.network_spec(cell).holdout and cell.dims[acceptance.AGAIN] == 1 for cell in repeated)
    assert cells[models : 2 * models] == [acceptance.again(cell) for cell in cells[:models]]
    assert cells[2 * models :] == repeated
    failed_or_repeated = [row(HOLDOUTS[0], error="it raised"), row(acceptance.again(HOLDOUTS[1]))]
    assert not [cell for cell in acceptance.cells(failed_or_repeated, "fp32") if cell.kind == "network"]


def test_a_model_is_timed_whole_and_becomes_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("model", "gate/mlp", {"batch": 1})
    device, asked = CpuDevice(), list[str]()
    monkeypatch.setattr(device, "use_precision", asked.append)
    with conditions.stated(conditions.Options(threads=torch.get_num_threads())):
        row = acceptance.measure(cell, device)
    assert asked == ["fp32"], "the cell before may have left another"
    run = profile_fit.timed_network(row, CpuDevice().info())
    assert run.total_us == pytest.approx(1e6 * row.timings["single"].median_s)
    assert (run.batch, run.graph.macs(1)) == (1, 745_600)


def test_a_shift_is_what_the_speed_of_the_machine_does_not_explain() -> None:
    first, second = HOLDOUTS[0], acceptance.again(HOLDOUTS[0])
    rows = [row(first), row(second), row(HOLDOUTS[1])]
    # The second timing took 1.3 times as long, on a machine whose references predict 1.2 times.
    errors = [HoldoutError(cell.key, *us, 0.0) for cell, us in ((first, (90.0, 100.0)), (second, (108.0, 130.0)))]
    assert acceptance.shift(rows, errors) == pytest.approx([1.3 / 1.2])
    assert acceptance.shift(rows, errors[:1]) == []
    once = HoldoutError(HOLDOUTS[1].key, 1.0, 2.0, 0.0)
    alone, both = acceptance.averaged(rows, [errors[1], once, errors[0]])  # the second timing may stand first
    assert both.log_error == pytest.approx((math.log(90 / 100) + math.log(108 / 130)) / 2)
    assert (both.cell, alone) == (first.key, pytest.approx(once))


def test_predictions_that_move_no_more_end_a_calibration() -> None:
    before = acceptance.predictions(store.load("epyc-shared"), "fp32")
    assert before.shape == (len(GATE.ready) * len(GATE.batches),)
    assert acceptance.settled(before, 1.005 * before)
    moving = np.where(np.arange(len(before)) % 5 == 0, 1.2 * before, before)  # a fifth still moves
    unknown = np.where(np.arange(len(before)) == 0, np.nan, before)
    assert not any(acceptance.settled(before, now) for now in (1.02 * before, moving, unknown))
