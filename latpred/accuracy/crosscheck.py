"""Check: our counts beside those of torch's FlopCounterMode and of fvcore, with the reason for each difference.

Neither is right for every model, which is why neither is the counter: both can silently leave out fused attention,
and both fail on models whose Python reads values. One FLOP-counter FLOP is half a multiply-add; fvcore counts
multiply-adds and calls them flops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from latpred.graph.graph import ModelGraph, Op
from latpred.ops.families import root
from latpred.sandbox.own_thread import silenced
from latpred.tracing.inputs import placed


@dataclass(frozen=True, slots=True)
class Difference:
    """One counter beside ours, at one batch size.

    Attributes
    ----------
    counter : str
        "FlopCounterMode" or "fvcore".
    ours, theirs : int or None
        Multiply-adds; theirs is None where it fails.
    reasons : tuple of str
        Why they differ, or why it fails; empty when they agree.
    """

    counter: str
    ours: int
    theirs: int | None
    reasons: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        """Theirs over ours."""
        return None if self.theirs is None or not self.ours else self.theirs / self.ours


def check(graph: ModelGraph, model: torch.nn.Module, inputs: Any, batch: int = 1) -> tuple[Difference, ...]:
    """Count a model with other counters and explain where they differ from its graph.

    Parameters
    ----------
    graph : ModelGraph
        What `trace` made of the model.
    model : torch.nn.Module
        A model with real weights, in evaluation mode; it is run on the device it is on.
    inputs : tensor, tuple or dict
        One batch.
    batch : int
        Its size.

    Returns
    -------
    tuple of Difference
        One for each counter.
    """
    counters: tuple[tuple[str, Callable[..., Mapping[str, int]]], ...] = (
        ("FlopCounterMode", _flop_counter),
        ("fvcore", _fvcore),
    )
    ops = graph.at(batch)
    ours = _by_kind(ops, batch)
    return tuple(_difference(name, count, ours, model, _arguments(inputs, model)) for name, count in counters)


def _arguments(inputs: Any, model: torch.nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    parameter = next(model.parameters(), None)
    there = placed(inputs, str(parameter.device) if parameter is not None else "cpu")
    if isinstance(there, dict):
        return (), there
    return (tuple(there) if isinstance(there, (tuple, list)) else (there,)), {}


def _difference(
    name: str,
    count: Callable[..., Mapping[str, int]],
    ours: Counter[str],
    model: torch.nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
) -> Difference:
    total = sum(ours.values())
    try:
        theirs = count(model, *arguments)
    except Exception as error:
        text = " ".join(str(error).split())[:160]
        return Difference(name, total, None, (f"it fails with {type(error).__name__}: {text}",))
    reasons = [
        f"{kind}: ours {ours.get(kind, 0):,}, theirs {theirs.get(kind, 0):,} ({_reason(name, kind, ours, theirs)})"
        for kind in sorted(set(ours) | set(theirs))
        if ours.get(kind, 0) != theirs.get(kind, 0)
    ]
    return Difference(name, total, sum(theirs.values()), tuple(reasons))


def _reason(counter: str, kind: str, ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    if kind == "other":
        return f"{counter} counts normalisation and pooling, which have no multiply-adds in a product's sense"
    if not theirs.get(kind):
        return {
            "attention": f"{counter} silently leaves out fused attention",
            "rnn": f"{counter} does not know recurrent layers",
            "convolution": f"{counter} does not know convolutions with padding given as a word",
        }.get(kind, f"{counter} does not know the op")
    if kind in ("matmul", "attention") and ours.get("matmul", 0) + ours.get("attention", 0) == theirs.get(
        "matmul", 0
    ) + theirs.get("attention", 0):
        return f"{counter} runs attention as two products"
    return f"{counter} counts some of these ops by another rule, or not at all"


def _by_kind(ops: tuple[Op, ...], batch: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for op in ops:
        macs = op.macs.at(batch)
        if macs:
            counts[_kind(root(op.family))] += macs
    return counts


def _kind(family: str) -> str:
    if family.startswith("conv"):
        return "convolution"
    return "matmul" if family in ("gemm", "bmm") else family


def _flop_counter(model: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Mapping[str, int]:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*args, **options)
    counts: Counter[str] = Counter()
    for op, flops in counter.get_flop_counts()["Global"].items():
        counts[_their_kind(str(op))] += flops // 2
    return counts


def _fvcore(model: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Mapping[str, int]:
    with silenced(), torch.no_grad():
        from fvcore.nn import FlopCountAnalysis

        analysis = FlopCountAnalysis(_Called(model, len(args), tuple(options)).eval(), (*args, *options.values()))
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
        counts: Counter[str] = Counter()
        for op, macs in analysis.by_operator().items():
            counts[_their_kind(op)] += int(macs)
        return counts


class _Called(torch.nn.Module):
    """A model with its keyword arguments bound by position: fvcore passes no others."""

    def __init__(self, model: torch.nn.Module, positional: int, keywords: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.positional = positional
        self.keywords = keywords

    def forward(self, *values: Any) -> Any:
        named = dict(zip(self.keywords, values[self.positional :], strict=True))
        return self.model(*values[: self.positional], **named)


def _their_kind(op: str) -> str:
    if "conv" in op:
        return "convolution"
    if "attention" in op:
        return "attention"
    if any(word in op for word in ("norm", "pool", "upsample", "interpolate", "sampler")):
        return "other"
    return "matmul"
