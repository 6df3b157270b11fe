"""The line through batches 2 and 3 gives, op by op, what a direct pass at any other batch finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from smallmodels import ARCHITECTURES, Function, build_small, inputs_of
from torch import nn

import latpred
from latpred.errors import UsageError
from latpred.graph.graph import Affine, Op
from latpred.tracing.inputs import from_example
from latpred.tracing.meta_module import make_meta_module
from latpred.tracing.op_record import OpRecord
from latpred.tracing.trace_pass import RETURN
from latpred.tracing.tracer import Naming, Tracer

OFF_THE_LINE_AT_ONE = {
    *("funnel", "nystromformer", "longformer", "deberta", "swin", "convbert", "mobilevit", "segformer", "wavlm"),
}
ON_THE_LINE_AT_ONE = {"bert", "gpt2", "resnet", "vit", "t5"}


def of_graph(op: Op, batch: int) -> tuple[object, ...]:
    dims = {name: size.at(batch) for name, size in op.dims.items() if name != "operands"}
    counts = (op.macs, op.weight_bytes, op.read_bytes, op.write_bytes)
    return (op.name, op.launches, op.syncs, dims, *(count.at(batch) for count in counts))


def of_pass(op: OpRecord) -> tuple[object, ...]:
    dims = {name: size for name, size in op.dims.items() if name != "operands"}
    return (op.name, op.launches, op.syncs, dims, op.macs, op.weight_bytes, op.read_bytes, op.write_bytes)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_count_at_other_batches(name: str) -> None:
    model = build_small(name, "meta")
    given = from_example(lambda batch: inputs_of(name, batch))
    graph = latpred.trace(model, given.make)
    for batch in (1, 5, 8):
        direct = Tracer(make_meta_module(model), given, Naming("")).one_pass(batch)
        ops = [of_graph(op, batch) for op in graph.at(batch) if op.name != RETURN]
        assert ops == [of_pass(record) for record in direct.records]
        assert graph.input_bytes.at(batch) == direct.input_bytes
    assert graph.coverage().launches == 1.0, graph.coverage().estimated_ops
    assert graph.launches(1) == graph.launches(2) or name in OFF_THE_LINE_AT_ONE
    assert graph.ops_at_one is None or name not in ON_THE_LINE_AT_ONE


def test_batch_one_has_rows_of_its_own_where_a_copy_falls_away() -> None:
    graph = latpred.trace(Function(lambda x: x.transpose(0, 1).reshape(-1, 4) * 2), torch.zeros(2, 3, 4))
    assert graph.ops_at_one is not None
    assert (graph.launches(1), graph.launches(2)) == (1, 2)
    assert [op.host_class for op in graph.at(1)] == ["view.transpose", "view.reshape", "elementwise.mul"]
    assert [op.host_class for op in graph.at(2)][1] == "copy.reshape"
    assert {op.family for op in graph.at(2)} == {"", "copy.strided", "elementwise.mul"}


def test_work_need_not_be_proportional_to_batch() -> None:
    project = nn.Linear(8, 8, bias=False)
    graph = latpred.trace(Function(lambda x: x + project(torch.zeros(6, 8))), torch.zeros(1, 6, 8))
    assert [graph.macs(batch) for batch in (1, 2, 10)] == [6 * 8 * 8] * 3


def test_what_a_first_forward_pass_keeps_is_not_counted() -> None:
    class Lazy(nn.Module):
        table: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.ones(4, device=x.device).cumsum(0)
            return x + self.table

    graph = latpred.trace(Lazy(), torch.zeros(1, 4))
    assert [op.name for op in graph.ops] == ["aten::add"]


def test_weights_that_a_pass_reads_again_say_how_much_was_touched_since() -> None:
    enter, cell, norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)

    def steps(x: torch.Tensor) -> torch.Tensor:
        x = enter(x)
        for _ in range(3):
            x = torch.tanh(norm(cell(x)))
        return x

    graph = latpred.trace(Function(steps), torch.zeros(2, 64))
    linear = [op for op in graph.ops if op.name == "aten::linear"]
    weights, values = 4 * (64 * 64 + 64 + 2 * 64), 4 * 64
    # The step before read its weights and the norm's; its three ops read and wrote a row of values for each sample.
    again = Affine(weights, 6 * values)
    assert [op.reread_after for op in linear] == [None, None, again, again]
    assert all(op.reread_after is None for op in graph.ops if op.name != "aten::linear")


def test_other_rows_or_parts_of_a_weight_are_not_read_again() -> None:
    table, joint = nn.Embedding(512, 16), nn.Parameter(torch.zeros(128, 64))
    tied = Function(lambda ids: nn.functional.linear(table(ids), table.weight))
    halves = Function(lambda x: torch.cat([nn.functional.linear(x, half) for half in joint.chunk(2)]))
    for model, example in ((tied, torch.zeros(2, 3, dtype=torch.long)), (halves, torch.zeros(2, 64))):
        graph = latpred.trace(model, example)
        assert {op.reread_after for op in graph.ops} == {None}
        assert sum(op.weight_bytes.at(1) >= 2**14 for op in graph.ops) >= 1


@pytest.mark.parametrize("batch", [0, 1.5, float("nan"), "3"])
def test_counts_of_what_is_no_batch_are_refused(batch: Any) -> None:
    graph = latpred.trace(torch.nn.Linear(4, 4), torch.zeros(1, 4))
    for count in (graph.macs, graph.bytes, graph.launches, graph.peak_bytes, graph.to_frame):
        with pytest.raises(UsageError, match=r"Batch .* is not"):
            count(batch)
