"""Formulas of recurrent layers, kept whole: a runtime decides how many kernels the time steps take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from latpred.ops.registry import Work, cost
from latpred.ops.shapes import Tensor, first, numel


@cost("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu")
def recurrent(
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
    *,
    out: Any,
) -> Work:
    """All gates of all steps: every weight matrix meets every element of the sequence once."""
    time = 1 if batch_first and len(input.shape) == 3 else 0
    steps = input.shape[time]
    batch = numel(input) // (steps * input.shape[-1]) if steps * input.shape[-1] else 0
    matrices = sum(numel(weight) for weight in params if len(weight.shape) == 2)
    dims = {
        "batch": batch,
        "steps": steps,
        "hidden": first(hx).shape[-1],
        "inputs": input.shape[-1],
        "layers": num_layers * (2 if bidirectional else 1),
        "calls": steps * num_layers * (2 if bidirectional else 1),
    }
    return Work(_family(params, dims["hidden"]), dims, macs=batch * steps * matrices)


def _family(params: Sequence[Tensor], hidden: int) -> str:
    """LSTM, GRU or plain, by the number of gates: libraries run each by code of its own."""
    gates = params[0].shape[0] // hidden if params and hidden else 0
    return {4: "rnn.lstm", 3: "rnn.gru"}.get(gates, "rnn.plain")


@cost("aten::lstm_cell", "aten::gru_cell", "aten::rnn_tanh_cell", "aten::rnn_relu_cell")
def cell(input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, *_: Any, out: Any) -> Work:
    """One step of one layer."""
    batch = numel(input) // input.shape[-1] if input.shape[-1] else 0
    dims = {"batch": batch, "steps": 1, "hidden": w_hh.shape[-1], "inputs": input.shape[-1], "layers": 1, "calls": 1}
    return Work("rnn.cell", dims, macs=batch * (numel(w_ih) + numel(w_hh)))
