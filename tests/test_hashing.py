"""Graphs are keys of a user's caches and of tables of candidates: equal ones have equal hashes."""

from __future__ import annotations

import torch
from torch import nn

import latpred

X = torch.zeros(1, 8)


def test_equal_graphs_have_equal_hashes_and_others_have_others() -> None:
    one, other = (latpred.trace(nn.Linear(8, 8), X) for _ in range(2))
    assert one is not other
    assert len({one, other}) == 1
    assert len({hash(latpred.trace(nn.Linear(8, width), X)) for width in (1, 2, 3)}) == 3
