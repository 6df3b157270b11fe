"""Graphs of batches whose sequences have unequal lengths: padded, nested, or packed into one row.

Every op's work is at most quadratic in the number of tokens, for each sequence by itself; so traces at three lengths
give it for any, and a packed batch does the sum over its sequences: rows of products and elements add up as tokens,
scores as their squares. That is what attention kernels for packed rows do (varlen); latpred does not trace one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import isqrt, prod
from typing import Any

import msgspec
import torch
from torch import nn

from latpred.errors import TraceError, UsageError
from latpred.graph.graph import Affine, ModelGraph, combined
from latpred.ops.families import DIMS, host_class
from latpred.sandbox.own_thread import without_modes
from latpred.tracing.inputs import (
    Inputs,
    demand_positions,
    dtype_of,
    example_tokens,
    longest,
    refuse_autocast,
    unspread,
)
from latpred.tracing.meta_module import layer_around, make_meta_module
from latpred.tracing.op_record import OpRecord, dtype_name
from latpred.tracing.trace_pass import PassWatcher
from latpred.tracing.tracer import COMPILED, Naming, Tracer, TraceRecorder, dtype_of_build, trace
from latpred.zoo import names

Tensor = torch.Tensor
aten = torch.ops.aten
UNWATCHED = "nested tensors on CUDA: the kernels are known from torch's source, not from watching them"


def trace_nested(
    encoder: nn.TransformerEncoder, lengths: Sequence[int], padded_to: int, *, target: str, precision: str | None = None
) -> ModelGraph:
    """Trace an encoder on sequences of these lengths, given padded."""
    reason = _why_not(encoder)
    if reason:
        raise UsageError(
            f"this encoder does not run nested: {reason}. Ask for execution='padded', or build it so that it does"
        )
    meta_module = make_meta_module(encoder, dtype_of(precision))
    inputs = Inputs(padded_inputs(encoder, lengths, padded_to), "seq", padded_to)
    tracer = _NestedTracer(meta_module, inputs, Naming(type(encoder).__name__, precision, target=target))
    tracer.lengths = tuple(lengths)
    graph = tracer.only([len(lengths)])
    return msgspec.structs.replace(graph, only=(), notes=(UNWATCHED,) if target == "cuda" else ())


def without_nested(encoder: nn.TransformerEncoder) -> nn.TransformerEncoder:
    """The same encoder, its weights shared, as it is when it must not use nested tensors."""
    plain = copy.copy(encoder)
    plain.use_nested_tensor = False
    return plain


def padded_inputs(encoder: nn.TransformerEncoder, lengths: Sequence[int], padded_to: int) -> Callable[[int], Any]:
    """Sequences with a mask over their padding, for any batch; lengths repeat."""
    width = encoder.layers[0].self_attn.embed_dim
    first = bool(encoder.layers[0].self_attn.batch_first)

    def make(batch: int) -> dict[str, Tensor]:
        shape = (batch, padded_to, width) if first else (padded_to, batch, width)
        mask = ~_present(lengths, padded_to, batch)
        return {"src": torch.empty(shape, device="meta"), "src_key_padding_mask": mask}

    return make


def _present(lengths: Sequence[int], padded_to: int, batch: int) -> Tensor:
    """Which tokens of a batch are no padding; lengths repeat."""
    chosen = torch.tensor([lengths[index % len(lengths)] for index in range(batch)])
    return torch.arange(padded_to)[None] < chosen[:, None]


def _why_not(encoder: nn.TransformerEncoder) -> str:
    layer: Any = encoder.layers[0]
    if not getattr(encoder, "use_nested_tensor", False):
        return "it was built with enable_nested_tensor=False, or of layers that do not allow it"
    if not getattr(layer, "activation_relu_or_gelu", 0):
        return "its activation is neither ReLU nor GELU"
    return ""


class _NestedTracer(Tracer):
    """Traces one batch of sequences of certain lengths on a kind of device."""

    lengths: tuple[int, ...]

    def recorder(self, watcher: PassWatcher | None) -> TraceRecorder:
        return _NestedRecorder(watcher, self.lengths, self._naming.target)


class _NestedRecorder(TraceRecorder):  # type: ignore[no-untyped-call]
    """Replaces the ops that make, take apart or run nested tensors."""

    def __init__(self, watcher: PassWatcher | None, lengths: tuple[int, ...], target: str) -> None:
        super().__init__(watcher)
        kernels = (_CudaKernels if target == "cuda" else _Kernels)(self, lengths)
        self._replaced: dict[str, Callable[..., Any]] = {
            "_nested_tensor_from_mask_left_aligned": _left_aligned,
            "_nested_tensor_from_mask": kernels.from_mask,
            "_transformer_encoder_layer_fwd": kernels.layer,
            "to_padded_tensor": kernels.to_padded,
        }

    def handle(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        replacement = self._replaced.get(func._schema.name.removeprefix("aten::"))
        if replacement is None:
            return super().handle(func, args, options)
        return self.inside(replacement, *args, **options)


def _left_aligned(src: Tensor, mask: Tensor) -> bool:
    sizes = _lengths_of(mask)
    aten.equal(sizes, mask.cumsum(1).select(1, -1))
    return True


def _lengths_of(mask: Tensor) -> Tensor:
    """What torch issues to find where each row of a mask ends."""
    ends = torch.cat([mask, torch.zeros(mask.shape[0], 1, dtype=mask.dtype)], 1)
    return ends.to(torch.int32).argmin(1)


class _Kernels:
    """A layer of an encoder between its conversions; on a CPU one op after another for each sequence."""

    def __init__(self, recorder: TraceRecorder, lengths: tuple[int, ...]) -> None:
        self.recorder, self.lengths = recorder, lengths
        self.sizes = torch.tensor(lengths)[:, None]

    def from_mask(self, src: Tensor, mask: Tensor, mask_check: bool = True) -> Tensor:
        """Padded to nested."""
        sizes = self.known(_lengths_of(mask)).view(-1, 1)
        sizes = torch.cat([sizes, torch.full_like(sizes, src.shape[-1])], 1)
        return self.without_padding(src, sizes)[None]

    def known(self, sizes: Tensor) -> Tensor:
        """Sizes as the host has them, which keeps the shapes of nested tensors."""
        return sizes

    def layer(self, src: Tensor, embed_dim: int, num_heads: int, *rest: Any) -> Tensor:
        """One encoder layer."""
        return layer_around(lambda x: self.attention(x, num_heads, rest[:4]), src[0], embed_dim, *rest[4:15])[None]

    def without_padding(self, padded: Tensor, sizes: Tensor) -> Tensor:
        """(batch, longest, width) to (tokens, width)."""
        longest, width = padded.shape[1:]
        sizes.unbind(0)
        masks = []
        for length in self.lengths:
            kept = torch.ones((length, width), dtype=torch.bool)
            masks.append(_pad(kept, longest).view(longest, width))
        mask = torch.stack(masks)
        mask.sum().item()
        tokens = torch.empty(sum(self.lengths) * width, dtype=padded.dtype, device="meta")
        read = (padded.numel() + mask.numel()) * padded.dtype.itemsize
        self._issue("masked_select", "index.gather", {"rows": tokens.numel(), "cols": 1}, tokens, read)
        return tokens.view(-1, width)

    def with_padding(self, tokens: Tensor, longest: int) -> Tensor:
        """(tokens, width) to (batch, longest, width)."""
        width = tokens.shape[-1]
        parts = tokens.split_with_sizes(list(self.lengths))
        return torch.stack([_pad(part.reshape(-1, width), longest).view(longest, width) for part in parts])

    def to_padded(self, nested: Tensor, padding: float, output_size: Sequence[int] | None = None) -> Tensor:
        """Nested to padded."""
        padded = self.with_padding(nested[0], max(self.lengths))
        if output_size is None or output_size[1] == padded.shape[1]:
            return padded
        return aten.constant_pad_nd(padded, [0, 0, 0, output_size[1] - padded.shape[1]])  # type: ignore[no-any-return]

    def attention(self, x: Tensor, heads: int, weights: tuple[Tensor, ...]) -> Tensor:
        """(tokens, width) to (tokens, width)."""
        qkv_weight, qkv_bias, proj_weight, proj_bias = weights
        batch, longest, width = len(self.lengths), max(self.lengths), x.shape[1]
        packed = self.with_padding(aten.mm(x, qkv_weight.t()), longest)
        q, k, v = aten._transform_bias_rescale_qkv(packed, qkv_bias, heads)
        flat = (batch * heads, longest, width // heads)
        scores = aten.bmm(q.view(flat), k.view(flat).transpose(1, 2)).view(batch, heads, longest, longest)
        weights_ = self._softmax(scores)
        context = aten.bmm(weights_.view(batch * heads, longest, longest), v.view(flat))
        merged = context.view(batch, heads, longest, -1).permute(0, 2, 1, 3).contiguous().view(batch, longest, width)
        return aten.addmm(proj_bias, self.without_padding(merged, self.sizes), proj_weight.t())  # type: ignore[no-any-return]

    def _softmax(self, scores: Tensor) -> Tensor:
        out, longest = torch.empty_like(scores), scores.shape[-1]
        for index, length in enumerate(self.lengths):
            self.sizes.select(0, index).select(0, 0).item()
            mine, done = scores.select(0, index), out.select(0, index)
            weights = aten._softmax(mine.narrow(1, 0, length).narrow(2, 0, length), -1, False)
            done.narrow(1, 0, length).narrow(2, 0, length).copy_(weights)
            done.narrow(1, 0, length).narrow(2, length, longest - length).fill_(0.0)
            done.narrow(1, length, longest - length).fill_(0.0)
        return out

    def _issue(self, op: str, family: str, dims: dict[str, int], out: Tensor, read_bytes: int, **counts: Any) -> Any:
        """Record a kernel that no op of the meta device stands for."""
        kernel = OpRecord(
            *(f"aten::{op}", host_class(op, family), family, dtype_name(out.dtype), dims),
            read_bytes=read_bytes,
            write_bytes=out.nbytes,
            new_bytes=out.nbytes,
            launches=1,
            **counts,
        )
        return self.recorder.record(kernel, out)


class _CudaKernels(_Kernels):
    """On CUDA one kernel for all sequences."""

    def known(self, sizes: Tensor) -> Tensor:
        dims = {"numel": len(sizes), "run": len(sizes)}
        made: Tensor = self._issue("to", "copy", dims, sizes, 8 * len(sizes), syncs=1)
        return made

    def without_padding(self, padded: Tensor, sizes: Tensor) -> Tensor:
        sizes.to(torch.int64, copy=True)  # the sizes go to the device
        tokens = torch.empty(sum(self.lengths), padded.shape[-1], dtype=padded.dtype, device="meta")
        return self._converted("_nested_from_padded", tokens, tokens)

    def to_padded(self, nested: Tensor, padding: float, output_size: Sequence[int] | None = None) -> Tensor:
        tokens = nested[0]
        self.sizes.to(torch.int64, copy=True)
        longest = max(self.lengths) if output_size is None else output_size[1]
        out = torch.empty(len(self.lengths), longest, tokens.shape[-1], dtype=tokens.dtype, device="meta")
        return self._converted("to_padded_tensor", tokens, out)

    def _converted(self, name: str, source: Tensor, out: Tensor) -> Tensor:
        dims = {"numel": out.numel(), "run": out.shape[-1]}
        return self._issue(name, "copy", dims, out, source.nbytes)  # type: ignore[no-any-return]

    def attention(self, x: Tensor, heads: int, weights: tuple[Tensor, ...]) -> Tensor:
        qkv_weight, qkv_bias, proj_weight, proj_bias = weights
        size = x.shape[1] // heads
        for part in aten.linear(x, qkv_weight, qkv_bias).chunk(3, 1):
            part.view(1, -1, heads, size).transpose(1, 2)
        for _ in range(2):
            self.sizes.to(torch.int32, copy=True)  # where each sequence begins, for queries and for keys
        out = torch.empty_like(x)
        squares = sum(length * length for length in self.lengths)
        typical = isqrt(squares // len(self.lengths))
        sizes = (len(self.lengths), heads, typical, typical, size, 0)
        dims = dict(zip(DIMS["attention"], sizes, strict=True))
        read, macs = 3 * x.nbytes, 2 * squares * x.shape[1]
        self._issue("scaled_dot_product_attention", "attention", dims, out, read, macs=macs)
        out = out.view(1, -1, heads, size).transpose(1, 2).reshape(out.shape)
        return aten.linear(out, proj_weight, proj_bias)  # type: ignore[no-any-return]


def _pad(part: Tensor, longest: int) -> Tensor:
    return aten.constant_pad_nd(part, [0, 0, 0, longest - part.shape[0]])  # type: ignore[no-any-return]


PACKED = "an estimate: work as of one row of all tokens, with an attention kernel that keeps sequences apart (varlen)"
_TRACED = (16, 32, 48)
_OFF = 0.1  # share of the work by which the longest sequence may be off the parabola, as by rounding
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
    batches: Sequence[int] = (),
) -> ModelGraph:
    """Trace a model on sequences of unequal lengths, in `batches` of so many where all have the padded length."""
    if execution != "padded":
        refuse_autocast(precision, f"execution={execution!r}")
    with dtype_of_build(model):
        module = names.build(model).model if isinstance(model, str) else unspread(model)
        name = model if isinstance(model, str) else type(model).__name__
        inner = getattr(module, "_orig_mod", module)  # of torch.compile's wrapper
        graph = _graph(name, inner, lengths, padded_to, execution, batches, {"precision": precision, "target": target})
    notes = graph.notes if inner is module else (*graph.notes, COMPILED)
    return msgspec.structs.replace(graph, model=name, input_kind="seq", input_size=padded_to, notes=notes)


def _graph(
    name: str,
    module: nn.Module,
    lengths: Sequence[int],
    padded_to: int,
    execution: str,
    batches: Sequence[int],
    traced: dict[str, Any],
) -> ModelGraph:
    """The graph of a module on sequences of unequal lengths."""
    if isinstance(module, nn.TransformerEncoder):
        attention = getattr(next(iter(module.layers), None), "self_attn", None)
        if not (hasattr(attention, "embed_dim") and hasattr(attention, "batch_first")):
            raise UsageError(
                f"{name} has no layers whose self_attn is as PyTorch's, so nothing tells how wide inputs are; leave "
                "lengths out, and give inputs= with a mask over the padding"
            )
        if execution == "padded":
            inputs = padded_inputs(module, sorted(lengths), padded_to)
            return trace(without_nested(module), inputs, batches=batches, **traced)
        if execution == "nested":
            return trace_nested(module, lengths, padded_to, **traced)
        raise UsageError("an nn.TransformerEncoder packs nothing; ask for execution='padded' or 'nested'")
    _demand_tokens(name, module)
    demand_positions(module, padded_to)
    if execution == "padded":
        return trace(module, _masked(module, sorted(lengths), padded_to), batches=batches, **traced)
    said = ("transformers runs nothing nested",) if execution == "nested" else ()
    packed = _packed(module, lengths, traced)
    return msgspec.structs.replace(packed, notes=(*said, PACKED, *packed.notes))


def _demand_tokens(name: str, module: Any) -> None:
    config = getattr(module, "config", None)
    if getattr(module, "main_input_name", None) != "input_ids" or config is None:
        raise UsageError(f"{name} takes no sequences of tokens; {_WHAT}")
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"{name} takes two sequences, whose lengths this cannot tell apart; give an encoder or a decoder"
        )


def _masked(module: Any, lengths: Sequence[int], padded_to: int) -> Callable[[int], Any]:
    vocabulary = getattr(module.config, "vocab_size", None)

    def make(batch: int) -> dict[str, torch.Tensor]:
        # The shortest come first, so that a batch has padding wherever the one asked for has.
        mask = _present(lengths, padded_to, batch).to(torch.int64)
        return {"input_ids": example_tokens(batch, padded_to, "meta", vocabulary), "attention_mask": mask}

    return make


def _packed(module: Any, lengths: Sequence[int], traced: dict[str, Any]) -> ModelGraph:
    most = longest(module)
    at = _TRACED if most is None or most >= _TRACED[-1] else tuple(max(1, most // share) for share in (3, 2, 1))
    graphs = [trace(module, seq=size, **traced) for size in at]
    if len({tuple((op.name, op.family, tuple(op.dims)) for op in graph.ops) for graph in graphs}) > 1:
        raise TraceError("the model issues different ops at different lengths; ask for execution='padded'")
    sums, far = _Sums(at, lengths), max(lengths)
    whole = graphs[at.index(far)] if far in at else trace(module, seq=far, **traced)
    *macs, found = (sum(op.macs.at(1) for op in one.ops) for one in (*graphs, whole))
    if abs(sums.value(macs, far) - found) > _OFF * found:  # as of models that pad to blocks of tokens
        raise TraceError(
            f"the model's work at {far} tokens is not what it is at {', '.join(map(str, at))} carried on; ask for "
            "execution='padded'"
        )
    ops = tuple(combined(group, sums.total, sums.dim) for group in zip(*(graph.ops for graph in graphs), strict=True))
    inputs = sums.total(*(graph.input_bytes for graph in graphs))
    return msgspec.structs.replace(graphs[0], ops=ops, ops_at_one=None, input_bytes=inputs)


class _Sums:
    """Sums over sequences of what was traced at three lengths, as the parabola through the three."""

    def __init__(self, at: Sequence[int], lengths: Sequence[int]) -> None:
        self._at, self._lengths = at, lengths
        self._typical = isqrt(sum(length * length for length in lengths) // len(lengths))
        self._known: dict[tuple[Affine, ...], Affine] = {}

    def total(self, *counts: Affine) -> Affine:
        """Of a count: what each sequence adds, and once what does not depend on their number."""
        if counts not in self._known:
            each = [count.per_sample for count in counts]
            once = [count.constant for count in counts]
            whole = sum(self.value(each, length) for length in self._lengths) + self.value(once, max(self._lengths))
            self._known[counts] = Affine(max(0, round(whole)))
        return self._known[counts]

    def dim(self, *sizes: Affine) -> Affine:
        """Of a dimension: summed where it grows with the batch, else that of a sequence whose square is the mean."""
        if any(size.per_sample for size in sizes):
            return self.total(*sizes)
        return Affine(max(0, round(self.value([size.constant for size in sizes], self._typical))))

    def value(self, values: Sequence[int], length: int) -> Fraction:
        """Lagrange's form of the parabola, without rounding."""
        if len(set(values)) == 1:
            return Fraction(values[0])
        total = Fraction(0)
        for here, value in zip(self._at, values, strict=True):
            others = [size for size in self._at if size != here]
            total += value * prod(Fraction(length - size, here - size) for size in others)
        return total
