"""Graphs of batches whose sequences have unequal lengths: padded, nested, or packed into one row.

Every op's work is at most quadratic in the number of tokens, for each sequence by itself; so walks at three lengths
give it for any, and a packed batch does the sum over its sequences: rows of products and elements add up as tokens,
scores as their squares. That is what attention kernels for packed rows do (varlen); latpred does not walk one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import isqrt
from typing import Any

import msgspec
import torch
from torch import nn

from latpred.errors import TraceError, UsageError
from latpred.graph import Line, ModelGraph, Op
from latpred.tracing import names
from latpred.tracing.decoders import longest
from latpred.tracing.derive import example_tokens
from latpred.tracing.nested import padded_inputs, trace_nested, without_nested
from latpred.tracing.tracer import trace
from latpred.tracing.unwatched import without_modes

PACKED = "an estimate: work as of one row of all tokens, with an attention kernel that keeps sequences apart (varlen)"
_WALKED = (16, 32, 48)
_WHAT = "lengths= is for transformers models of tokens and for nn.TransformerEncoder"


@without_modes()
def trace_lengths(
    model: nn.Module | str,
    lengths: Sequence[int],
    padded_to: int,
    execution: str,
    *,
    target: str = "cpu",
    precision: str | None = None,
) -> ModelGraph:
    """Walk a model on sequences of unequal lengths.

    Parameters
    ----------
    model : nn.Module or str
        A transformers model of tokens, its name, or an nn.TransformerEncoder.
    lengths : sequence of int
        Tokens of each sequence.
    padded_to : int
        Tokens that each has with its padding.
    execution : {"padded", "nested", "packed"}
        Everything at the padded length; as torch's nested tensors (nn.TransformerEncoder); or as one packed row.
    target : str
        Kind of device: "cpu" or "cuda".
    precision : str, optional
        As for `latpred.trace`.

    Returns
    -------
    ModelGraph
        Padded: for every batch. Else for this very batch: its counts do not depend on batch.

    Raises
    ------
    UsageError
        When the model takes no lengths, or not as long ones.

    Examples
    --------
    >>> graph = trace_lengths("bert-base-uncased", [12, 40, 7], 40, "packed")
    >>> graph.macs() < trace_lengths("bert-base-uncased", [12, 40, 7], 40, "padded").macs(batch=3)
    True
    """
    name = model if isinstance(model, str) else type(model).__name__
    module = names.build(model).model if isinstance(model, str) else model
    if isinstance(module, nn.TransformerEncoder):
        if execution == "padded":
            given = padded_inputs(module, sorted(lengths), padded_to)
            graph = _sized(trace(without_nested(module), given, precision=precision), padded_to)
        elif execution == "nested":
            graph = trace_nested(module, lengths, padded_to, target=target, precision=precision)
        else:
            raise UsageError("an nn.TransformerEncoder packs nothing; ask for execution='padded' or 'nested'")
        return msgspec.structs.replace(graph, model=name)
    _demand_tokens(name, module, padded_to)
    if execution == "padded":
        inputs = _masked(module, sorted(lengths), padded_to)
        return _sized(msgspec.structs.replace(trace(module, inputs, precision=precision), model=name), padded_to)
    graph = _packed(module, lengths, padded_to, precision)
    said = ("transformers runs nothing nested",) if execution == "nested" else ()
    return msgspec.structs.replace(graph, model=name, input_size=padded_to, notes=(*said, PACKED))


def _sized(graph: ModelGraph, padded_to: int) -> ModelGraph:
    return msgspec.structs.replace(graph, input_kind="seq", input_size=padded_to)


def _demand_tokens(name: str, module: Any, padded_to: int) -> None:
    config = getattr(module, "config", None)
    if getattr(module, "main_input_name", None) != "input_ids" or config is None:
        raise UsageError(f"{name} takes no sequences of tokens; {_WHAT}")
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"{name} takes two sequences, whose lengths this cannot tell apart; give an encoder or a decoder"
        )
    most = longest(module)
    if most is not None and padded_to > most:
        raise UsageError(f"sequences of {padded_to} tokens are too long: {name} takes at most {most}")


def _masked(module: Any, lengths: Sequence[int], padded_to: int) -> Callable[[int], Any]:
    vocabulary = getattr(module.config, "vocab_size", None)

    def make(batch: int) -> dict[str, torch.Tensor]:
        # The shortest come first, so that a batch has padding wherever the one asked for has.
        chosen = torch.tensor([lengths[index % len(lengths)] for index in range(batch)])
        mask = (torch.arange(padded_to)[None] < chosen[:, None]).to(torch.int64)
        return {"input_ids": example_tokens(batch, padded_to, "meta", vocabulary), "attention_mask": mask}

    return make


def _packed(module: Any, lengths: Sequence[int], padded_to: int, precision: str | None) -> ModelGraph:
    most = longest(module)
    at = _WALKED if most is None or most >= _WALKED[-1] else tuple(max(1, most // share) for share in (3, 2, 1))
    walks = [trace(module, seq=size, precision=precision) for size in at]
    first = walks[0]
    if len({tuple((op.name, op.family, tuple(op.dims)) for op in walk.ops) for walk in walks}) > 1:
        raise TraceError("the model issues different ops at different lengths; ask for execution='padded'")
    sums = _Sums(at, lengths)
    ops = tuple(_op(group, sums) for group in zip(*(walk.ops for walk in walks), strict=True))
    inputs = Line(sums.total([walk.input_bytes for walk in walks]))
    return msgspec.structs.replace(first, ops=ops, ops_at_one=None, input_kind="seq", input_bytes=inputs)


class _Sums:
    """Sums over sequences of what was walked at three lengths, as the parabola through the three."""

    def __init__(self, at: Sequence[int], lengths: Sequence[int]) -> None:
        self._at, self._lengths = at, lengths
        self._typical = isqrt(sum(length * length for length in lengths) // len(lengths))
        self._known: dict[tuple[Line, ...], int] = {}

    def total(self, lines: Sequence[Line]) -> int:
        """Of a count: what each sequence adds, and once what does not depend on their number."""
        key = tuple(lines)
        if key not in self._known:
            each = [Fraction(line.per_sample) for line in lines]
            once = [Fraction(line.constant) for line in lines]
            whole = sum(self._value(each, length) for length in self._lengths) + self._value(once, max(self._lengths))
            self._known[key] = max(0, round(whole))
        return self._known[key]

    def dim(self, lines: Sequence[Line]) -> int:
        """Of a dimension: summed where it grows with the batch, else that of a sequence whose square is the mean."""
        if any(line.per_sample for line in lines):
            return self.total(lines)
        return max(0, round(self._value([Fraction(line.constant) for line in lines], self._typical)))

    def _value(self, values: Sequence[Fraction], length: int) -> Fraction:
        if len(set(values)) == 1:
            return values[0]
        total = Fraction(0)
        for index, value in enumerate(values):
            others = [size for place, size in enumerate(self._at) if place != index]
            share = Fraction(1)
            for size in others:
                share *= Fraction(length - size, self._at[index] - size)
            total += value * share
        return total


def _op(group: Sequence[Op], sums: _Sums) -> Op:
    first = group[0]

    def total(name: str) -> Line:
        return Line(sums.total([getattr(op, name) for op in group]))

    return msgspec.structs.replace(
        first,
        dims={name: Line(sums.dim([op.dims[name] for op in group])) for name in first.dims},
        macs=total("macs"),
        weight_bytes=total("weight_bytes"),
        read_bytes=total("read_bytes"),
        write_bytes=total("write_bytes"),
        live_bytes=total("live_bytes"),
    )
