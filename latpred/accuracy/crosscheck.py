"""`latpred trace --check`: our counts beside those of torch's FlopCounterMode and of fvcore, and why they differ.

Neither is right for every model, which is why neither is the counter: both can silently leave out fused attention,
and both fail on models whose Python reads values. One FLOP-counter FLOP is half a multiply-add; fvcore, which only
this module uses, counts multiply-adds and calls them flops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from latpred.graph.graph import ModelGraph
from latpred.ops.families import root
from latpred.runtimes.source import FlatModel, tensors_of
from latpred.sandbox.own_thread import silenced
from latpred.tracing.inputs import placed


@dataclass(frozen=True, slots=True)
class Difference:
    """One counter beside ours, at one batch size, in multiply-adds."""

    counter: str  # "FlopCounterMode" or "fvcore"
    ours: int
    theirs: int | None  # None where it fails
    reasons: tuple[str, ...]  # why they differ, or why it fails; empty when they agree


def check(graph: ModelGraph, model: torch.nn.Module, inputs: Any, batch: int = 1) -> tuple[Difference, ...]:
    """Count a model with each other counter and explain where it differs from the model's graph.

    The model has real weights and is run, on the device it is on, with one batch of inputs of that size.
    """
    ours: Counter[str] = Counter()
    for op in graph.at(batch):
        if macs := op.macs.at(batch):
            ours[_kind(root(op.family))] += macs
    parameter = next(model.parameters(), None)
    given = placed(inputs, "cpu" if parameter is None else str(parameter.device))
    given = (given,) if isinstance(given, torch.Tensor) else given
    flat, tensors = FlatModel(model, given).eval(), tuple(tensors_of(given))  # fvcore passes no keyword arguments
    counters = {"FlopCounterMode": _flop_counter, "fvcore": _fvcore}
    return tuple(_difference(name, partial(count, flat, tensors), ours) for name, count in counters.items())


def _difference(name: str, count: Callable[[], Counter[str]], ours: Counter[str]) -> Difference:
    total = ours.total()
    try:
        theirs = count()
    except Exception as error:
        text = " ".join(str(error).split())[:160]
        return Difference(name, total, None, (f"it fails with {type(error).__name__}: {text}",))
    reasons = [
        f"{kind}: ours {ours[kind]:,}, theirs {theirs[kind]:,} ({_reason(name, kind, ours, theirs)})"
        for kind in sorted(set(ours) | set(theirs))
        if ours[kind] != theirs[kind]
    ]
    return Difference(name, total, theirs.total(), tuple(reasons))


def _reason(counter: str, kind: str, ours: Counter[str], theirs: Counter[str]) -> str:
    if kind == "other":
        return f"{counter} counts normalisation and pooling, which have no multiply-adds in a product's sense"
    if not theirs[kind]:
        return {
            "attention": f"{counter} silently leaves out fused attention",
            "rnn": f"{counter} does not know recurrent layers",
            "convolution": f"{counter} does not know convolutions with padding given as a word",
        }.get(kind, f"{counter} does not know the op")
    products = ("matmul", "attention")
    if kind in products and sum(ours[one] for one in products) == sum(theirs[one] for one in products):
        return f"{counter} runs attention as two products"
    return f"{counter} counts some of these ops by another rule, or not at all"


def _kind(family: str) -> str:
    if family.startswith("conv"):
        return "convolution"
    return "matmul" if family in ("gemm", "bmm") else family


def _flop_counter(model: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> Counter[str]:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*tensors)
    counts: Counter[str] = Counter()
    # There is no "Global" where no op was counted.
    for op, flops in counter.get_flop_counts().get("Global", {}).items():
        counts[_their_kind(str(op))] += flops // 2
    return counts


def _fvcore(model: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> Counter[str]:
    with silenced(), torch.no_grad():
        from fvcore.nn import FlopCountAnalysis

        analysis = FlopCountAnalysis(model, tensors)
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
        counts: Counter[str] = Counter()
        for op, macs in analysis.by_operator().items():
            counts[_their_kind(op)] += int(macs)
        return counts


def _their_kind(op: str) -> str:
    if "conv" in op:
        return "convolution"
    if "attention" in op:
        return "attention"
    if any(word in op for word in ("norm", "pool", "upsample", "interpolate", "sampler")):
        return "other"
    return "matmul"
