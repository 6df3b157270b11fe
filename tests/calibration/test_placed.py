"""Kernels from calls timed in place: what is left after dispatch, and what kernels leave behind them."""

from __future__ import annotations

import factories
import msgspec
import pytest

from latpred.calibration.fitting import kernel_fit
from latpred.calibration.fitting.dispatch_fit import NetworkRun
from latpred.graph.graph import Op

DISPATCH = factories.dispatch()  # 5 us for gemm, 3 for view.transpose, 7 for others; 20 for the pass
GEMM_US, TRANSPOSE_US, ADD_US, PASS_US = 5.0, 3.0, 7.0, 20.0


def left_behind(us: float, after: tuple[float, float, float]) -> float:
    return after[0] * us / (us + kernel_fit.SHORT_US) + after[1] * us**0.5 + after[2] * us


def run(rows: int, kernels_us: tuple[float, float], after: tuple[float, float, float], **changes: bool) -> NetworkRun:
    """A product, a transpose and a sum; each kernel adds parts `after` it that saturate, grow as its root and as it."""
    product_us, sum_us = kernels_us
    ops = (factories.linear(rows), factories.view(), factories.add(rows))
    calls_us = (GEMM_US + product_us, TRANSPOSE_US, ADD_US + sum_us)
    left = sum(left_behind(us, after) for us in kernels_us)
    return NetworkRun(factories.graph(*ops), 1, PASS_US + sum(calls_us) + left, calls_us, **changes)


def runs(after: tuple[float, float, float]) -> list[NetworkRun]:
    kernels = ((40.0, 9.0), (100.0, 16.0), (900.0, 400.0), (2500.0, 25.0), (64.0, 3600.0))
    return [run(rows, us, after) for rows, us in zip((1, 2, 3, 4, 5), kernels, strict=True)]


@pytest.mark.parametrize(
    "after", [(0.0, 0.0, 0.0), (2.0, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.0, 0.1), (1.0, 0.2, 0.05)]
)
def test_known_kernels_and_afterwork_come_back(after: tuple[float, float, float]) -> None:
    samples = kernel_fit.placed_samples(runs(after), DISPATCH)
    products = [sample.us for sample in samples if sample.family == "gemm"]
    expected = [us + left_behind(us, after) for us in (40.0, 100.0, 900.0, 2500.0, 64.0)]
    assert products == pytest.approx(expected, rel=1e-3)
    assert len(samples) == 10  # nothing of the transposes


def test_rows_hold_the_work_of_the_op() -> None:
    product = kernel_fit.placed_samples([run(3, (40.0, 9.0), (0.0, 0.0, 0.0))], DISPATCH)[0]
    weights, moved = 4.0 * 768 * 768, 4.0 * 3 * 768
    assert product.row == (3.0 * 768 * 768, weights, moved, moved, 3.0, 768.0, 768.0)


def test_resident_weights_are_read_like_activations() -> None:
    product = kernel_fit.placed_samples([run(3, (40.0, 9.0), (0.0, 0.0, 0.0), resident=True)], DISPATCH)[0]
    assert product.row[1:3] == (0.0, 4.0 * 768 * 768 + 4.0 * 3 * 768)


def test_a_call_hidden_in_its_dispatch_is_known_to_be_short() -> None:
    product, total = kernel_fit.placed_samples([run(3, (0.0, 8.0), (0.0, 0.0, 0.0))], DISPATCH)
    assert product.us == pytest.approx(kernel_fit.LEAST_SHARE * GEMM_US)
    assert total.us == pytest.approx(8.0)


def test_an_error_counts_beside_the_dispatch_and_a_share_of_the_pass() -> None:
    timed = run(3, (5.0, 700.0), (0.0, 0.0, 0.0))
    product, _ = kernel_fit.placed_samples([timed], DISPATCH)
    assert product.beside_us == pytest.approx(GEMM_US + kernel_fit.PASS_SHARE * timed.total_us)


HALF_BYTES = 1e6  # after which code is half cold
COLD = msgspec.structs.replace(DISPATCH, cold_costs_us={"gemm": 10.0, "view": 6.0, "": 14.0}, cold_bytes=HALF_BYTES)


def cold_run(rows: int, product_us: float, sum_us: float) -> NetworkRun:
    """As `run`, with nothing left behind, where every call finds its code as cold as the bytes of the pass make it."""
    ops = (factories.linear(rows), factories.view(), factories.add(rows * 1000))
    graph = factories.graph(*ops)
    touched = graph.bytes(1)  # each class comes once in a pass
    share = touched / (touched + HALF_BYTES)
    calls_us = (GEMM_US + product_us + 10.0 * share, TRANSPOSE_US + 6.0 * share, ADD_US + sum_us + 14.0 * share)
    return NetworkRun(graph, 1, PASS_US + sum(calls_us), calls_us)


def test_what_cold_code_takes_longer_is_no_kernel() -> None:
    products, sums = (
        [sample.us for sample in kernel_fit.placed_samples([cold_run(500, 40.0, 9.0)], COLD) if sample.family == family]
        for family in ("gemm", "elementwise.add")
    )
    assert products == pytest.approx([40.0])
    assert sums == pytest.approx([9.0])


def test_calls_without_a_kernel_tell_what_cold_code_takes() -> None:
    timed = [cold_run(rows, 40.0, 9.0) for rows in range(1, 1000, 1000 // kernel_fit.FEWEST_COLD)]
    found = kernel_fit.with_cold(DISPATCH, DISPATCH, timed, HALF_BYTES)
    # A transpose takes 6 us from cold caches, twice its 3 us, and so all classes take twice theirs.
    assert found.cold_costs_us == {name: pytest.approx(2.0 * us) for name, us in DISPATCH.costs_us.items()}
    assert found.cold_bytes == HALF_BYTES
    assert found.costs_us == DISPATCH.costs_us


def test_few_calls_tell_nothing_of_cold_code() -> None:
    assert kernel_fit.with_cold(DISPATCH, DISPATCH, [cold_run(500, 40.0, 9.0)], HALF_BYTES) == DISPATCH
    assert (
        kernel_fit.with_cold(DISPATCH, DISPATCH, [cold_run(500, 40.0, 9.0)] * kernel_fit.FEWEST_COLD, 0.0) == DISPATCH
    )


def test_kernels_that_share_a_call_give_no_sample() -> None:
    nested: Op = factories.add(100, host_class="elementwise.nested.add")
    graph = factories.graph(factories.linear(4), nested)
    shared = NetworkRun(graph, 1, 500.0, (450.0,))
    assert kernel_fit.placed_samples([shared], DISPATCH) == []


def test_estimated_work_gives_no_sample() -> None:
    graph = factories.graph(factories.linear(4, estimated=True))
    assert kernel_fit.placed_samples([NetworkRun(graph, 1, 500.0, (450.0,))], DISPATCH) == []


def test_the_host_time_of_a_pass() -> None:
    ops = (factories.linear(4, module_calls=2), factories.view(python_calls=6), factories.add())
    fit = factories.dispatch(scale=2.0)
    # 20 + 2 x (5 + 3 + 7 + 2 modules at 1 + 6 functions at 0.5)
    assert kernel_fit.host_us(NetworkRun(factories.graph(*ops), 1, 0.0), fit) == 20.0 + 2.0 * 20.0


def test_the_host_time_of_a_pass_counts_cold_code() -> None:
    timed = cold_run(500, 40.0, 9.0)
    kernels_us = 40.0 + 9.0
    assert kernel_fit.host_us(timed, COLD) == pytest.approx(timed.total_us - kernels_us)
