"""Which cells a calibration times: stable, bounded, and one for every builder."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from unittest.mock import Mock

import msgspec
import pytest
import torch

from latpred import host
from latpred.calibration import cells, schedules
from latpred.calibration.cells import Cell
from latpred.calibration.devices import open_device
from latpred.calibration.workloads import blocks, networks, single_ops
from latpred.errors import TraceError
from latpred.graph.graph import ModelGraph

DRAWN = list(islice(cells.kernel_cells("fp32"), 400))
SMALL = list(islice(schedules.small_networks(), schedules.SMALL))


def test_keys_of_cells_are_unique_and_stable() -> None:
    fixed = [*cells.memory_cells(), *cells.dispatch_cells(), cells.CLOCK]
    fixed += [schedules.network_cell(spec) for spec in (*schedules.chain_networks(), *schedules.tiny_networks(30))]
    keys = {cell.key for cell in fixed}
    assert len(keys) == len(fixed)
    spec = networks.NetworkSpec("encoder", 7, 64, 12, 3, cold=True)
    keys.add(schedules.network_cell(spec, "bf16").key)
    assert keys >= {  # journals find cells by these texts
        "clock/eager/fp32/constants/",
        "memory/eager/fp32/read/bytes=1048576",
        "dispatch/eager/fp32/gemm/k=8,m=4,n=8",
        "network/eager/bf16/encoder/batch=3,cold=1,seed=7,size=12,width=64",
    }


def test_a_network_that_finds_no_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Mock(side_effect=RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"))
    monkeypatch.setattr(schedules.in_network, "time_ops", fail)
    schedule, (spec,) = schedules.Synchronous(open_device("cpu"), ("fp32",)), schedules.tiny_networks(1)
    with pytest.raises(MemoryError, match="can't allocate memory"):
        schedule.measure(schedules.network_cell(spec))


def test_a_cell_that_memory_has_no_room_for_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = networks.NetworkSpec("mlp", 10, 1280, 1024, 1)
    weights = networks.graph(wide).parameter_bytes
    cold = schedules.network_cell(msgspec.structs.replace(wide, cold=True))
    read = Cell("memory", "read", cells.COPY.dims)
    schedule = schedules.Synchronous(open_device("cpu"), ("fp32",))
    monkeypatch.setattr(schedules.in_network, "time_ops", lambda *_, **__: pytest.fail("begun"))
    monkeypatch.setattr(schedules.timer, "single", lambda *_, **__: pytest.fail("begun"))
    for cell, needed in ((cold, 2 * weights), (cells.COPY, 2 * cells.COPIED_BYTES), (read, cells.COPIED_BYTES)):
        monkeypatch.setattr(host, "bytes_left", lambda needed=needed: needed - 1)
        with pytest.raises(MemoryError, match=r"it needs \S+ MiB, and \S+ MiB are free"):
            schedule.measure(cell)


def test_every_builder_has_a_dispatch_cell() -> None:
    assert {cell.name for cell in cells.dispatch_cells()} == set(single_ops.BUILDERS)


def test_kernel_cells_come_once_before_any_comes_twice() -> None:
    names = [cell.name for cell in DRAWN]
    first = names[: len(set(names))]
    assert set(first) == set(cells.KERNELS)
    assert len(first) == len(cells.KERNELS)
    halves = list(islice(cells.kernel_cells("fp16"), 400))
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
        assert 0 < held(cell) <= cells.LARGEST_BYTES, cell.key


def test_small_networks_multiply_single_rows_by_large_weights_that_stay_in_the_cache() -> None:
    assert [spec.kind for spec in SMALL] == list(networks.SMALL_KINDS) * 8
    assert {spec.batch for spec in SMALL if spec.kind == "mlp"} >= {1, 2, 3, 4, 8, 16}
    assert not any(spec.cold or spec.holdout or spec.tiny for spec in SMALL)
    graphs = [networks.graph(spec) for spec in SMALL]
    assert max(graph.parameter_bytes for graph in graphs) <= networks.SMALL_BYTES
    of_one_sample = [graph for spec, graph in zip(SMALL, graphs, strict=True) if spec.batch == 1]
    products = [op for graph in of_one_sample for op in graph.at(1) if op.family == "gemm" and op.dims["m"].at(1) == 1]
    assert sum(op.weight_bytes.at(1) > 500_000 for op in products) >= 3


def test_a_calibration_of_a_minute_times_what_the_blocks_of_networks_do_not_contain() -> None:
    medleys = [spec for spec in SMALL if spec.kind == networks.MEDLEY]
    launched = [op for spec in medleys for op in networks.graph(spec).at(spec.batch) if op.launches]
    timed = Counter(op.family.partition(".across")[0] for op in launched)
    known = {op.family for spec in islice(schedules.sized_networks(), 66) for op in networks.graph(spec).ops}
    new = set(timed) - known
    assert {"copy.pad.reflect", "elementwise.elu", "elementwise.mish", "conv_transpose"} <= new
    assert {"copy.pad.reflect.1d", "conv_depthwise.multiplied", "conv_depthwise.padded"} <= new
    assert {"batch_norm.training", "softmax.softmax.strided", "conv_depthwise.channels_last"} <= new
    assert len(new) > 25
    assert min(timed.values()) >= 2
    makers = list(blocks.MEDLEY)
    held = {
        makers[n % len(makers)]
        for spec in medleys
        for n in range(spec.seed * blocks.MEDLEY_LAYERS, (spec.seed + 1) * blocks.MEDLEY_LAYERS)
    }
    assert held == set(makers)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cpu_times_a_small_network_after_each_of_every_size_and_fewer_later(precision: str) -> None:
    drawn = schedules.Synchronous(open_device("simulated"), (precision,)).cells()
    timed = [cell for cell in islice(drawn, 200) if cell.kind == "network"]
    timed = [cell for cell in timed if not schedules.network_spec(cell).tiny]
    specs = list(map(schedules.network_spec, timed))
    assert {cell.precision for cell in timed} == {precision}
    first, later = specs[: 2 * schedules.SMALL], specs[2 * schedules.SMALL :]
    assert first[::2] == list(islice(schedules.sized_networks(), schedules.SMALL))
    assert first[1::2] == SMALL
    assert later[4::5] == list(islice(schedules.small_networks(), schedules.SMALL, schedules.SMALL + len(later) // 5))
    assert not any(spec.kind in (networks.MEDLEY, networks.LARGE) for spec in later[:4])


def test_sized_networks_are_affordable() -> None:
    specs = list(islice(schedules.sized_networks(), 24))
    for spec in specs:
        graph = networks.graph(spec)
        assert max(graph.macs(spec.batch), graph.bytes(spec.batch)) <= 4_000_000_000
    assert not any(spec.tiny for spec in specs)


def test_a_network_that_cannot_be_traced_is_drawn_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = list(islice(schedules.sized_networks(), 12))
    broken, trace = networks.draw(specs[4].seed), networks.graph

    def failing(spec: networks.NetworkSpec, precision: str = "fp32") -> ModelGraph:
        if spec == broken:
            raise TraceError("no pixel is left")
        return trace(spec, precision)

    monkeypatch.setattr(networks, "graph", failing)
    assert list(islice(schedules.sized_networks(), 12)) == [*specs[:4], broken, *specs[5:]]


def test_holdout_networks_are_those_of_the_sized_that_no_fit_sees() -> None:
    holdouts = [spec for spec in islice(schedules.sized_networks(), 66) if spec.holdout]
    assert len(holdouts) >= 5
    assert list(islice(schedules.holdout_networks(), len(holdouts))) == holdouts
