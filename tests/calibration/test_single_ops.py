"""Single-op cells: their traced work equals what one derives by hand, and their weights rotate."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from latpred.calibration import cells
from latpred.calibration.cells import Cell
from latpred.calibration.workloads import single_ops
from latpred.errors import CalibrationError
from latpred.graph.graph import Op

CONV = {"batch": 2, "c_in": 8, "c_out": 16, "size": 8, "kernel": 3, "stride": 2, "groups": 1}
DEPTHWISE = CONV | {"c_out": 8, "stride": 1, "groups": 8}
ATTENTION = {"batch": 2, "heads": 3, "queries": 4, "head_dim": 8, "masked": 0}
CPU = torch.device("cpu")


def traced(name: str, dims: dict[str, int]) -> tuple[Op, int]:
    """The only op of a cell that launches, and the batch to read it at."""
    graph, batch = single_ops.graph(Cell("kernel", name, dims))
    (op,) = (op for op in graph.at(batch) if op.launches)
    return op, batch


@pytest.mark.parametrize(
    ("name", "dims", "family", "macs", "weights", "read", "written"),
    [
        # 4 x 8 outputs of 8 multiply-adds; a matrix and a bias; 4 bytes each
        ("gemm", {"m": 4, "n": 8, "k": 8}, "gemm", 4 * 8 * 8, 4 * (64 + 8), 4 * 4 * 8, 4 * 4 * 8),
        ("bmm", {"batch": 2, "m": 4, "n": 8, "k": 16}, "bmm", 2 * 4 * 8 * 16, 0, 4 * 2 * (4 * 16 + 16 * 8), 4 * 2 * 32),
        # 8 pixels, a window of 3 at stride 2 and padding 1: 4 pixels
        ("conv", CONV, "conv", 2 * 16 * 16 * 8 * 9, 4 * 16 * 8 * 9, 4 * 2 * 8 * 64, 4 * 2 * 16 * 16),
        ("conv", DEPTHWISE, "conv_depthwise", 2 * 8 * 64 * 9, 4 * 8 * 9, 4 * 2 * 8 * 64, 4 * 2 * 8 * 64),
        # scores and mixing: 2 x 3 heads of 4 x 4 x 8 each
        ("attention", ATTENTION, "attention", 2 * 6 * 4 * 4 * 8, 0, 3 * 4 * 2 * 3 * 4 * 8, 4 * 2 * 3 * 4 * 8),
        ("layer_norm", {"rows": 4, "cols": 8}, "norm.layer_norm", 0, 4 * 2 * 8, 4 * 32, 4 * 32),
        # 4 rows of 8 are looked up by 4 indices of 8 bytes
        ("embedding", {"rows": 4, "cols": 8, "table": 16}, "embedding", 0, 4 * 4 * 8, 8 * 4, 4 * 32),
    ],
)
def test_work_is_what_one_derives_by_hand(
    name: str, dims: dict[str, int], family: str, macs: int, weights: int, read: int, written: int
) -> None:
    op, batch = traced(name, dims)
    assert op.family == family
    work = (op.macs, op.weight_bytes, op.read_bytes, op.write_bytes)
    assert tuple(line.at(batch) for line in work) == (macs, weights, read, written)


@pytest.mark.parametrize("cell", cells.dispatch_cells(), ids=lambda cell: cell.name)
def test_every_cell_runs_and_no_op_of_it_is_estimated(cell: Cell) -> None:
    graph, batch = single_ops.graph(cell)
    assert graph.ops
    assert not any(op.estimated for op in graph.at(batch))
    with torch.inference_mode():
        single_ops.build(cell, CPU)()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the weight of each call lay, of a cell called "watched"."""
    places: list[int] = []

    def watched(dims: dict[str, int]) -> single_ops.Built:
        weight = torch.ones(dims["cols"])
        return single_ops.Built(lambda x, w: places.append(w.data_ptr()), (torch.ones(1),), (weight,))

    monkeypatch.setitem(single_ops.BUILDERS, "watched", watched)
    return places


@pytest.mark.parametrize(
    ("kind", "rotated", "copies"),
    [
        ("kernel", 3 * 4 * 16, 3),  # three copies of 16 numbers
        ("kernel", 1, 1),
        ("kernel", 1 << 30, single_ops.MOST_COPIES),
        ("dispatch", 1 << 30, 1),
    ],
)
def test_weights_rotate(held: list[int], monkeypatch: pytest.MonkeyPatch, kind: str, rotated: int, copies: int) -> None:
    monkeypatch.setattr(single_ops, "ROTATED_BYTES", rotated)
    call = single_ops.build(Cell(kind, "watched", {"cols": 16}), CPU)
    for _ in range(2 * copies):
        call()
    assert len(set(held[:copies])) == copies
    assert held[copies:] == held[:copies]


@pytest.mark.parametrize("name", ["read", "weights", "bandwidth", "fresh", "upload"])
def test_memory_cells_move_their_bytes(name: str) -> None:
    with FlopCounterMode(display=False) as counted:
        moved = single_ops.build(Cell("memory", name, {"bytes": 3 << 20}), CPU)()
    assert moved.shape == {"read": (), "weights": (1, 512)}.get(name, (3 << 18,))
    assert bool((moved == 0).all())
    assert 2 * counted.get_total_flops() == (3 << 20 if name == "weights" else 0)


def test_an_unknown_cell_names_the_known_ones_and_the_way_out() -> None:
    with pytest.raises(CalibrationError, match=r"no cell is called 'gem'; known: gemm, bmm.*anew with --fresh"):
        single_ops.make(Cell("kernel", "gem"))
