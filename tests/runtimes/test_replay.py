"""What runtimes that replay captured graphs share: one step for all kernels, and what no graph can hold."""

from __future__ import annotations

import numpy as np
import pytest
from factories import add, device, dispatch, linear, profile, view
from factories import graph as make_graph

from latpred.errors import RuntimeRefusalError
from latpred.prediction import clocks
from latpred.prediction.pricing import PriceList
from latpred.runtimes.cuda_graphs import one_replay, refuse_uncapturable


def test_one_step_launches_every_kernel() -> None:
    schedule = one_replay("replayed", (view(module_calls=2), linear(python_calls=3), add(launches=2)))
    assert schedule.host_class == ("replay",)
    assert schedule.kernel_step.tolist() == [0, 0, 0]
    assert schedule.kernel_family == ("gemm", "elementwise.add", "elementwise.add")
    assert schedule.kernel_share.tolist() == [1.0, 0.5, 0.5]
    assert [schedule.ops[index].name for index in schedule.kernel_op] == ["aten::linear", "aten::add", "aten::add"]
    assert (schedule.module_calls.sum(), schedule.python_calls.sum(), schedule.sync.sum()) == (0, 0, 0)


def test_copies_of_inputs_come_first_and_by_themselves() -> None:
    schedule = one_replay("replayed", (linear(), add()), first=(add(python_calls=1), add()))
    assert schedule.host_class == ("elementwise.add", "elementwise.add", "replay")
    assert schedule.kernel_step.tolist() == [0, 1, 2, 2]
    assert schedule.python_calls.tolist() == [1, 0, 0]


def test_nothing_to_launch_is_still_replayed() -> None:
    schedule = one_replay("replayed", (view(),))
    assert schedule.host_class == ("replay",)
    assert len(schedule.kernel_step) == 0


def test_latency_is_one_launch_and_all_kernels() -> None:
    prices = profile(runtimes={"replayed": dispatch(costs_us={"replay": 7.0}, fixed_us=5.0)})
    info = device(gap_us=0.5)
    for count in (1, 10, 2000):  # 2000 are more than the queue holds, but they come in one launch
        schedule = one_replay("replayed", [linear(rows=1, width=10)] * count)
        priced = PriceList(prices).price(schedule, "fp32")
        kernels = priced.rows_at(np.ones(1)).us[priced.kernel_row]
        latency = clocks.latency(priced.timeline, priced.host_us, kernels, info, "single")
        assert latency[0] == pytest.approx(5 + 7 + 4 + kernels.sum() + (count - 1) * 0.5 + 10)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            add(name="aten::_local_scalar_dense", module="encoder.0", syncs=1),
            r"_dense in encoder\.0 makes the host wait",
        ),
        (add(name="aten::nonzero", module="router"), r"the size of what aten::nonzero in router gives depends on"),
        (
            add(name="ort::NonZero"),
            r"what ort::NonZero gives depends on the data\. Ask for runtime='eager'",
        ),
    ],
)
def test_what_cannot_be_captured_is_named(op, message) -> None:
    refuse_uncapturable("cuda-graphs", "net", make_graph(linear(), add()).ops)
    with pytest.raises(RuntimeRefusalError, match=f"cuda-graphs cannot capture net: .*{message}"):
        refuse_uncapturable("cuda-graphs", "net", make_graph(linear(), op, add()).ops)
