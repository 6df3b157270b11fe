"""`latpred trace --check`: our counts beside those of torch's FlopCounterMode and of fvcore, and why they differ.

Neither is right for every model, which is why neither is the counter: both can silently leave out fused attention,
and both fail on models whose Python reads values. One FLOP-counter FLOP is half a multiply-add; fvcore, which only
this module uses, counts multiply-adds and calls them flops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from latpred.graph.graph import ModelGraph
from latpred.ops.families import root
from latpred.sandbox.own_thread import silenced
from latpred.tracing.inputs import placed


@dataclass(frozen=True, slots=True)
class Difference:
    """One counter beside ours, at one batch size, in multiply-adds."""

    counter: str  # "FlopCounterMode" or "fvcore"
    ours: int
    theirs: int | None  # None where it fails
    reasons: tuple[str, ...]  # why they differ, or why it fails; empty when they agree

    @property
    def ratio(self) -> float | None:
        """Theirs over ours."""
        return None if self.theirs is None or not self.ours else self.theirs / self.ours


def check(graph: ModelGraph, model: torch.nn.Module, inputs: Any, batch: int = 1) -> tuple[Difference, ...]:
    """Count a model with each other counter and explain where it differs from the model's graph.

    The model has real weights and is run, on the device it is on, with one batch of inputs of that size.
    """
    ours: Counter[str] = Counter()
    for op in graph.at(batch):
        if macs := op.macs.at(batch):
            ours[_kind(root(op.family))] += macs
    arguments = _arguments(inputs, model)
    counters = {"FlopCounterMode": _flop_counter, "fvcore": _fvcore}
    return tuple(_difference(name, count, ours, model, arguments) for name, count in counters.items())


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
    products = ("matmul", "attention")
    if kind in products and sum(ours.get(one, 0) for one in products) == sum(theirs.get(one, 0) for one in products):
        return f"{counter} runs attention as two products"
    return f"{counter} counts some of these ops by another rule, or not at all"


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
