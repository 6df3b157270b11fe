"""Kernels from calls timed in place: what is left after dispatch, and what kernels leave behind them."""

from __future__ import annotations

import factories
import pytest

from latpred.calibration import placed
from latpred.calibration.dispatchfit import NetworkRun
from latpred.graph import Op

DISPATCH = factories.dispatch()  # 5 us for gemm, 3 for view.transpose, 7 for others; 20 for the pass
GEMM_US, TRANSPOSE_US, ADD_US, PASS_US = 5.0, 3.0, 7.0, 20.0


def run(rows: int, kernels_us: tuple[float, float], after: tuple[float, float, float], **changes: bool) -> NetworkRun:
    """A product, a transpose and a sum; each kernel adds a constant, root and proportional part `after` it."""
    product_us, sum_us = kernels_us
    ops = (factories.linear(rows), factories.view(), factories.add(rows))
    calls_us = (GEMM_US + product_us, TRANSPOSE_US, ADD_US + sum_us)
    left = sum(after[0] + after[1] * us**0.5 + after[2] * us for us in kernels_us)
    return NetworkRun(factories.graph(*ops), 1, PASS_US + sum(calls_us) + left, calls_us, **changes)


def runs(after: tuple[float, float, float]) -> list[NetworkRun]:
    kernels = ((40.0, 9.0), (100.0, 16.0), (900.0, 400.0), (2500.0, 25.0), (64.0, 3600.0))
    return [run(rows, us, after) for rows, us in zip((1, 2, 3, 4, 5), kernels, strict=True)]


@pytest.mark.parametrize(
    "after", [(0.0, 0.0, 0.0), (2.0, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.0, 0.1), (1.0, 0.2, 0.05)]
)
def test_known_kernels_and_afterwork_come_back(after: tuple[float, float, float]) -> None:
    samples = placed.placed_samples(runs(after), DISPATCH)
    products = [sample.us for sample in samples if sample.family == "gemm"]
    expected = [us + after[0] + after[1] * us**0.5 + after[2] * us for us in (40.0, 100.0, 900.0, 2500.0, 64.0)]
    assert products == pytest.approx(expected, rel=1e-3)
    assert len(samples) == 10  # nothing of the transposes


def test_rows_hold_the_work_of_the_op() -> None:
    product = placed.placed_samples([run(3, (40.0, 9.0), (0.0, 0.0, 0.0))], DISPATCH)[0]
    weights, moved = 4.0 * 768 * 768, 4.0 * 3 * 768
    assert product.row == (3.0 * 768 * 768, weights, moved, moved, 3.0, 768.0, 768.0)


def test_resident_weights_are_read_like_activations() -> None:
    product = placed.placed_samples([run(3, (40.0, 9.0), (0.0, 0.0, 0.0), resident=True)], DISPATCH)[0]
    assert product.row[1:3] == (0.0, 4.0 * 768 * 768 + 4.0 * 3 * 768)


def test_a_call_hidden_in_its_dispatch_is_known_to_be_short() -> None:
    # of 5 us of dispatch and no kernel: a tenth of the call, which weighs next to nothing
    product, total = placed.placed_samples([run(3, (0.0, 8.0), (0.0, 0.0, 0.0))], DISPATCH)
    assert product.us == pytest.approx(0.1 * 5.0)
    assert product.weight == pytest.approx(1 / (1 + (0.5 * 9) ** 2))
    assert total.us == pytest.approx(8.0)


def test_a_call_that_is_all_kernel_weighs_most() -> None:
    light, heavy = placed.placed_samples([run(3, (5.0, 7e9), (0.0, 0.0, 0.0))], DISPATCH)
    assert light.weight == pytest.approx(1 / 1.25)  # half of the call: 1 / (1 + 0.5 ** 2)
    assert heavy.weight == pytest.approx(1.0)


def test_kernels_that_share_a_call_give_no_sample() -> None:
    nested: Op = factories.add(100, host_class="elementwise.nested.add")
    graph = factories.graph(factories.linear(4), nested)
    shared = NetworkRun(graph, 1, 500.0, (450.0,))
    assert placed.placed_samples([shared], DISPATCH) == []


def test_estimated_work_gives_no_sample() -> None:
    graph = factories.graph(factories.linear(4, estimated=True))
    assert placed.placed_samples([NetworkRun(graph, 1, 500.0, (450.0,))], DISPATCH) == []


def test_the_host_time_of_a_pass() -> None:
    ops = (factories.linear(4, module_calls=2), factories.view(python_calls=6), factories.add())
    fit = factories.dispatch(scale=2.0)
    # 20 + 2 x (5 + 3 + 7 + 2 modules at 1 + 6 functions at 0.5)
    assert placed.host_us(NetworkRun(factories.graph(*ops), 1, 0.0), fit) == 20.0 + 2.0 * 20.0
