"""Which cells a calibration times: stable, bounded, and one for every builder."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch

from latpred.calibration import schedules
from latpred.calibration.cells import Cell
from latpred.calibration.workloads import networks, single_ops
from latpred.errors import TraceError
from latpred.graph.graph import ModelGraph

DRAWN = list(islice(schedules.kernel_cells("fp32", seed=0), 400))


def test_keys_of_cells_are_unique() -> None:
    fixed = [*schedules.memory_cells(), *schedules.dispatch_cells(), schedules.CLOCK]
    fixed += [schedules.network_cell(spec) for spec in (*schedules.chain_networks(), *schedules.tiny_networks(30))]
    assert len({cell.key for cell in fixed}) == len(fixed)


def test_keys_of_cells_are_stable() -> None:
    # journals find cells by these texts
    assert schedules.CLOCK.key == "clock/eager/fp32/constants/"
    assert schedules.memory_cells()[0].key == "memory/eager/fp32/read/bytes=1048576"
    keys = {cell.key for cell in schedules.dispatch_cells()}
    assert "dispatch/eager/fp32/gemm/k=8,m=4,n=8" in keys
    spec = networks.NetworkSpec("encoder", 7, 64, 12, 3, cold=True)
    key = "network/eager/bf16/encoder/batch=3,cold=1,seed=7,size=12,width=64"
    assert schedules.network_cell(spec, "bf16").key == key


def test_every_builder_has_a_dispatch_cell() -> None:
    assert {cell.name for cell in schedules.dispatch_cells()} == set(single_ops.BUILDERS)


def test_cells_hold_the_dimensions_that_their_builders_read() -> None:
    for cell in (*schedules.dispatch_cells(), *DRAWN):
        assert set(cell.dims) == set(schedules.dims_of(cell.name))


def test_kernel_cells_come_once_before_any_comes_twice() -> None:
    names = [cell.name for cell in DRAWN]
    first = names[: len(set(names))]
    assert len(set(first)) == len(first)
    assert {"gemm", "conv", "attention", "layer_norm", "max_pool"} <= set(first)


def test_the_kernel_stream_is_always_the_same() -> None:
    assert list(islice(schedules.kernel_cells("fp32", seed=0), 400)) == DRAWN
    assert list(islice(schedules.kernel_cells("fp32", seed=1), 400)) != DRAWN
    halves = list(islice(schedules.kernel_cells("fp16", seed=0), 400))
    assert {cell.precision for cell in halves} == {"fp16"}
    assert [cell.dims for cell in halves] != [cell.dims for cell in DRAWN]


def held(cell: Cell) -> int:
    """Bytes of the largest tensor of a cell, on the meta device."""
    with torch.device("meta"):
        built = single_ops.make(cell)
        out = built.function(*built.inputs, *built.weights)
    outputs = [out] if isinstance(out, torch.Tensor) else [tensor for tensor in out if isinstance(tensor, torch.Tensor)]
    return max(tensor.numel() * tensor.element_size() for tensor in (*built.inputs, *built.weights, *outputs))


def test_kernel_cells_are_bounded_and_build_without_a_device() -> None:
    for cell in DRAWN:
        assert 0 < held(cell) <= schedules.LARGEST_BYTES, cell.key


def test_a_transposed_copy_has_something_to_copy() -> None:
    rng = random.Random(0)
    drawn = [schedules._kernel_cell(rng, "transpose_copy", "fp32") for _ in range(400)]
    assert min(cell.dims["rows"] for cell in drawn) == 2
    few = [cell for cell in drawn if cell.dims["rows"] < 4]
    assert len(few) > 5
    for cell in few:
        graph, batch = single_ops.graph(cell)
        assert any(op.launches for op in graph.at(batch))


def test_memory_cells_span_the_caches() -> None:
    sizes = [cell.dims["bytes"] for cell in schedules.memory_cells() if cell.name == "read"]
    assert sizes == [2**power for power in range(20, 29)]  # 1 to 256 MiB
    assert [cell.name for cell in schedules.memory_cells()][len(sizes) :] == ["bandwidth", "upload"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_network_cell_is_its_spec(precision: str) -> None:
    specs = [*schedules.chain_networks(), *schedules.tiny_networks(20), *(networks.draw(seed) for seed in range(60))]
    assert any(spec.cold for spec in specs)
    assert [schedules.network_spec(schedules.network_cell(spec, precision)) for spec in specs] == specs


def test_sized_networks_are_affordable_and_go_on_where_told() -> None:
    specs = list(islice(schedules.sized_networks(), 24))
    for spec in specs:
        graph = networks.graph(spec)
        assert max(graph.macs(spec.batch), graph.bytes(spec.batch)) <= 4_000_000_000
    later = list(islice(schedules.sized_networks(specs[10].seed), 14))
    assert later == specs[10:]
    assert not any(spec.tiny for spec in specs)


def test_a_network_that_cannot_be_traced_is_drawn_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    known = list(islice(schedules.sized_networks(), 12))
    broken, walk = networks.draw(known[4].seed), networks.graph

    def failing(spec: networks.NetworkSpec, precision: str = "fp32") -> ModelGraph:
        if spec == broken:
            raise TraceError("no pixel is left")
        return walk(spec, precision)

    monkeypatch.setattr(networks, "graph", failing)
    assert schedules.walked(broken) is None
    assert schedules.walked(known[0]) is not None
    assert list(islice(schedules.sized_networks(), 12)) == [*known[:4], broken, *known[5:]]


def test_judging_networks_are_the_holdouts_of_the_sized() -> None:
    holdouts = [spec for spec in islice(schedules.sized_networks(), 120) if spec.holdout]
    assert len(holdouts) >= 10
    assert list(islice(schedules.judging_networks(), len(holdouts))) == holdouts
