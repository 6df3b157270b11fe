"""An estimate of the groups of pointwise ops that TorchScript's fuser turns into one kernel each, on CUDA.

The fuser joins an op to the group that makes one of its arguments, as long as nothing in between needs that group's
result first. Only a CUDA build of PyTorch runs it, so which ops it would join is worked out from the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from latpred.graph import Line, Op
from latpred.ops.families import root
from latpred.runtimes.torchscript_graph import Node

FEWEST = 2  # ops that make a group
FUSED = "elementwise.fused"


def fused(nodes: Sequence[Node], groups: Sequence[list[Op]]) -> list[list[Op]]:
    """The ops of each node, those of a fused group in the place of its last member and gone from all others."""
    makers = {name: index for index, node in enumerate(nodes) for name in node.gives}
    needs = [[makers[name] for name in node.takes if name in makers] for node in nodes]
    out = [list(group) for group in groups]
    for members in _groups(needs, [_pointwise(group) for group in groups]):
        if len(members) >= FEWEST:
            for index in members:
                out[index] = []
            out[members[-1]] = [_kernel(members, needs, groups)]
    return out


def _pointwise(group: Sequence[Op]) -> bool:
    return len(group) == 1 and root(group[0].family) == "elementwise" and group[0].dtype.startswith(("float", "bfloat"))


def _groups(needs: Sequence[Sequence[int]], pointwise: Sequence[bool]) -> list[list[int]]:
    """Members of each group in order; sets of nodes are the bits of whole numbers."""
    above: list[int] = []  # everything that a node needs, directly or not
    group_of: dict[int, int] = {}
    members: list[list[int]] = []
    masks: list[int] = []
    for index, direct in enumerate(needs):
        mine = 0
        for other in direct:
            mine |= 1 << other | above[other]
        above.append(mine)
        if not pointwise[index]:
            continue
        for other in direct:
            group = group_of.get(other)
            if group is not None and not _blocked(direct, group, group_of, above, masks[group]):
                break
        else:
            group = len(members)
            members.append([])
            masks.append(0)
        group_of[index] = group
        members[group].append(index)
        masks[group] |= 1 << index
    return members


def _blocked(direct: Sequence[int], group: int, group_of: dict[int, int], above: Sequence[int], mask: int) -> bool:
    """Whether another argument needs a result of the group, which then must be done before."""
    return any(above[other] & mask for other in direct if group_of.get(other) != group)


def _kernel(members: Sequence[int], needs: Sequence[Sequence[int]], groups: Sequence[list[Op]]) -> Op:
    """One op that does the work of all members and keeps what only they read to itself."""
    inside = set(members)
    ops = [groups[index][0] for index in members]
    leaving = {other for index, direct in enumerate(needs) if index not in inside for other in direct} & inside
    used = {other for index in members for other in needs[index]} & inside
    leaving |= inside - used  # what no other node takes is a result
    reads, writes = Line(0), Line(0)
    for index, op in zip(members, ops, strict=True):
        reads = _sum(reads, op.read_bytes)
        for other in needs[index]:
            if other in inside:
                reads = _sum(reads, groups[other][0].write_bytes, -1)
        if index in leaving:
            writes = _sum(writes, op.write_bytes)
    largest = max(ops, key=lambda op: op.dims["numel"].at(2))
    outside = {other for index in members for other in needs[index]} - inside
    return msgspec.structs.replace(
        largest,
        name="prim::TensorExprGroup",
        host_class="node.fused",
        family=FUSED,
        dims={"numel": largest.dims["numel"], "operands": Line(max(1, len(outside)))},
        macs=_total([op.macs for op in ops]),
        weight_bytes=_total([op.weight_bytes for op in ops]),
        read_bytes=Line(max(0, reads.constant), max(0, reads.per_sample)),
        write_bytes=writes,
        live_bytes=ops[-1].live_bytes,
        launches=1,
        estimated=False,
    )


def _sum(line: Line, other: Line, sign: int = 1) -> Line:
    return Line(line.constant + sign * other.constant, line.per_sample + sign * other.per_sample)


def _total(lines: Sequence[Line]) -> Line:
    total = Line(0)
    for line in lines:
        total = _sum(total, line)
    return total
