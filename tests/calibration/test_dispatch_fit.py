"""Dispatch fits: networks priced by known costs give those costs back."""

from __future__ import annotations

import factories
import msgspec
import numpy as np
import pytest

from latpred.calibration.fitting import dispatch_fit
from latpred.calibration.fitting.dispatch_fit import TimedNetwork
from latpred.graph.graph import Calls, Op
from latpred.prediction.pricing import host_cost
from latpred.profile.document import DispatchFit, call_prices

COSTS = {"gemm.linear": 5.0, "view.transpose": 2.0, "view.reshape": 4.0, "elementwise.add": 8.0}
CALLED = DispatchFit({}, module_call_us=1.5, python_call_us=0.25, fixed_us=12.0, attribute_read_us=0.6)


def op_of(host_class: str, *calls: int) -> Op:
    return factories.view(host_class=host_class, **Calls(*calls)._asdict())


def closing(*calls: int) -> Op:
    """Python that goes on after the last op."""
    return msgspec.structs.replace(op_of("python", *calls), name="python::return")


def run(ops: list[Op], total_us: float, calls_us: tuple[float, ...] = ()) -> TimedNetwork:
    return TimedNetwork(factories.graph(*ops), 1, total_us, calls_us)


def networks(per_call: float, dearer: float) -> list[TimedNetwork]:
    """Networks of other mixes whose passes take `per_call` more a call, and `dearer` Python."""
    mixes = (
        (["gemm.linear", "view.transpose"], 3, 2, 2),
        (["view.reshape", "elementwise.add", "gemm.linear", "view.reshape"], 0, 8, 5),
        (["elementwise.add"] * 4 + ["view.reshape"], 10, 0, 0),
        (["view.transpose"] * 6, 1, 1, 0),
    )
    runs = []
    for names, *counts in mixes:
        ops = [op_of(name) for name in names] + [closing(*counts)]
        calls_us = tuple(COSTS[name] for name in names)
        python_us = dearer * float(np.dot(counts, call_prices(CALLED)))
        runs.append(run(ops, sum(calls_us) + per_call * len(names) + python_us, calls_us))
    return runs


@pytest.mark.parametrize(("per_call", "dearer"), [(0.0, 1.0), (0.5, 2.0), (-1.0, 3.0)])
def test_costs_in_place_come_back(per_call: float, dearer: float) -> None:
    fit = dispatch_fit.fit_in_place(networks(per_call, dearer), CALLED)
    for name, cost in COSTS.items():
        assert fit.costs_us[name] == pytest.approx(cost + per_call, rel=1e-4)
    assert call_prices(fit) == pytest.approx([dearer * us for us in call_prices(CALLED)], rel=1e-4)
    assert fit.fixed_us == 12.0
    assert fit.scale == 1.0


NESTED_VIEWS = ["view.nested.expand", "view.nested.reshape", "view.nested.view"]
ALONE = [(["view.expand"], 1.2), (["bmm.bmm"], 7.0), (["copy.clone"], 5.0)]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (  # a loop of several ops prices the one that is new
            [(["view.to", "fft.r2c", "mul"], 13.0), (["view.to"], 1.0), (["mul", "view.to"], 5.5)],
            {"view.to": 1.0, "mul": 4.5, "fft.r2c": 7.5},
        ),
        (  # loops of composite ops tell their general classes apart
            [
                *ALONE,
                (["view.expand", *NESTED_VIEWS * 2], 1.2 + 6 * 0.8),
                (["view.expand", *NESTED_VIEWS, "bmm.nested.bmm"], 1.2 + 3 * 0.8 + 6.8),
                (["view.expand", "view.nested.expand", "copy.nested.clone", "bmm.nested.bmm"], 1.2 + 0.8 + 4.0 + 6.8),
            ],
            {"view.nested": 0.8, "bmm.nested": 6.8, "copy.nested": 4.0},
        ),
        (  # classes that always come together share as their like do
            [(["view.expand"], 1.0), (["bmm.bmm"], 6.0), ([*NESTED_VIEWS[::2], "bmm.nested.bmm"], 4.0)],
            {"view.nested": 0.5, "bmm.nested": 3.0},
        ),
    ],
)
def test_loops_price_classes(cells: list[tuple[list[str], float]], expected: dict[str, float]) -> None:
    costs = dispatch_fit.loop_costs(cells)
    assert {name: costs[name] for name in expected} == pytest.approx(expected, rel=0.01)


def test_what_closes_a_forward_costs_nothing() -> None:
    fit = dispatch_fit.fit_issued(COSTS, [run([op_of("gemm.linear"), closing()], 17.0)], CALLED)
    assert host_cost(fit, "python.return") == 0.0
    assert host_cost(fit, "never.seen") == 4.5  # the median of 2, 4, 5 and 8


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        # those of its calls count that have least to do
        ([(["gemm.linear"], taken) for taken in (4.0, *[6.0] * 9, 90.0)], {"gemm.linear": 6.0}),
        # 14 - 4 = 10 us, shared alike by the two nested ones that are not known
        (
            [(["view.reshape"], 4.0), (["view.reshape", "gemm.nested.mm", "bmm.nested.bmm"], 14.0)],
            {"view.reshape": 4.0, "gemm.nested.mm": 5.0, "bmm.nested.bmm": 5.0},
        ),
        # nothing is left of a call faster than its first op
        (
            [(["view.reshape"], 4.0), (["view.reshape", "gemm.nested.mm"], 3.0)],
            {"view.reshape": 4.0, "gemm.nested.mm": 0.0},
        ),
    ],
)
def test_calls_timed_in_place_price_classes(passes: list[tuple[list[str], float]], expected: dict[str, float]) -> None:
    runs = [run([*map(op_of, names), closing()], 50.0, (taken,)) for names, taken in passes]
    assert dispatch_fit.class_costs(runs) == pytest.approx(expected)


def test_a_more_general_class_costs_the_median_of_what_it_stands_for_unless_it_was_measured() -> None:
    costs = dispatch_fit.with_parents({"view.a": 1.0, "view.b": 2.0, "view.c.d": 6.0, "gemm": 5.0})
    assert (costs["view"], costs["view.c"], costs["gemm"]) == (2.0, 6.0, 5.0)
    assert costs[""] == 3.5  # of 1, 2, 5 and 6
    assert dispatch_fit.with_parents({"gemm": 5.0, "gemm.linear": 9.0})["gemm"] == 5.0
