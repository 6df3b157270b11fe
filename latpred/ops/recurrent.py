"""Formulas of recurrent layers, kept whole: a runtime decides how many kernels the time steps take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from latpred.ops.registry import Work, cost
from latpred.ops.shapes import Tensor, first, numel

_GATES = {4: "rnn.lstm", 3: "rnn.gru"}  # libraries run each by code of its own


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
    """All gates of all steps: every weight matrix meets every element of the sequence once.

    The recurrent ones are read again in every step, which waits for the one before.
    """
    time = 1 if batch_first and len(input.shape) == 3 else 0
    steps = input.shape[time]
    batch = numel(input) // (steps * input.shape[-1]) if steps * input.shape[-1] else 0
    matrices = sum(numel(weight) for weight in params if len(weight.shape) == 2)
    hidden, layers = first(hx).shape[-1], num_layers * (2 if bidirectional else 1)
    gates = params[0].shape[0] // hidden if params and hidden else 0
    dims = {
        "batch": batch,
        "steps": steps,
        "hidden": hidden,
        "inputs": input.shape[-1],
        "layers": layers,
        "calls": steps * layers,
        "reread": steps * layers * gates * hidden * hidden,
    }
    return Work(_GATES.get(gates, "rnn.plain"), dims, macs=batch * steps * matrices)


@cost("aten::lstm_cell", "aten::gru_cell", "aten::rnn_tanh_cell", "aten::rnn_relu_cell")
def cell(input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, *_: Any, out: Any) -> Work:
    """One step of one layer."""
    batch = numel(input) // input.shape[-1] if input.shape[-1] else 0
    hidden, inputs = w_hh.shape[-1], input.shape[-1]
    dims = {"batch": batch, "steps": 1, "hidden": hidden, "inputs": inputs, "layers": 1, "calls": 1}
    dims["reread"] = numel(w_hh)
    return Work("rnn.cell", dims, macs=batch * (numel(w_ih) + numel(w_hh)))
