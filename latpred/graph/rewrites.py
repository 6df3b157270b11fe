"""Graphs made of graphs, without another trace: attention in parts or as CUDA runs it, and a wider model.

The fused call of attention becomes products with a softmax between them. PyTorch's own encoder layers, which a trace
takes apart as CPUs do, get one kernel of attention. A wider model has more channels and more heads
of the same size. That is an estimate from the graph alone: every dimension that follows the width grows with it, the
work of products with its square. What stays: image channels, sequence lengths, and everything computed on integers. A
real wider model may differ by what it rounds to, and its last product has no more classes or words, of which a graph
knows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from latpred.errors import UsageError
from latpred.graph.graph import Affine, ModelGraph, Op, all_ops, op_by_op, rewritten
from latpred.ops.families import CAUSAL, GROUPED, MATH, STRIDED_MASK, root
from latpred.query import HALVES

_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float64": 8}
_FUSED = "scaled_dot_product_"  # in the names of calls that compute it as a whole
REWRITTEN = "attention in parts is worked out from the fused calls of the model"
OLDER = (
    "attention is computed in parts, as in the PyTorch 1.12 of the profile: where yours computes it in one call, "
    "ask with attention='sdpa' (--attention sdpa)"
)
_PRODUCTS = ("bmm", "attention", "gemm", "conv")


def attended(graph: ModelGraph, attention: str) -> ModelGraph:
    """The graph with attention as asked for; an error where it would have to be fused by the model itself."""
    if graph.attention == attention:
        return graph
    exact = {batch: attended(alone, attention) for batch, alone in graph.exact.items()}
    if attention == "eager":
        if graph.runtime != "eager":
            raise UsageError(
                f"this graph is what {graph.runtime} runs; trace the model again with attention='eager', or pass it."
            )
        graph = unfused(graph, REWRITTEN)
    elif any(map(in_parts, (graph.ops, graph.ops_at_one or ()))):
        raise UsageError(
            f"{graph.model} computes attention as products and softmax, which attention='sdpa' cannot change; trace a "
            "model that calls torch.nn.functional.scaled_dot_product_attention, or leave attention out."
        )
    return msgspec.structs.replace(graph, attention=attention, exact=exact)


def in_parts(ops: Sequence[Op]) -> bool:
    """Whether the product after some softmax is one of many small ones, as of scores with values."""
    softmax = False
    for op in ops:
        family = root(op.family)
        if softmax and family == "bmm":
            return True
        softmax = family == "softmax" or (softmax and family not in _PRODUCTS)
    return False


def unfused(graph: ModelGraph, note: str, *, scales_scores: bool = False) -> ModelGraph:
    """The graph with the parts of every call of attention in its place, and a note where there is one.

    The products of one sample need no copies. Queries are scaled, as models of today do it, or the scores where no mask
    is added to them, as older ones did it (`scales_scores`).
    """
    # Where weights are in fp32, what a graph of one kind of device has in half precision is so by autocast.
    autocast = bool(graph.target) and graph.precision not in HALVES
    of_one = graph.only[:1] == (1,)  # the ops of a graph of single batches are those of the first of them

    def rewrite(ops: tuple[Op, ...], *, at_one: bool) -> tuple[Op, ...]:
        parts = (_parts_of(ops, place, at_one, autocast, scales_scores) for place in range(len(ops)))
        return tuple(part for each in parts for part in each)

    if not any(map(_is_fused, all_ops(graph))):
        return graph
    return msgspec.structs.replace(
        graph,
        ops=rewrite(graph.ops, at_one=of_one),
        ops_at_one=None if of_one else rewrite(graph.at(1), at_one=True),
        exact={batch: unfused(alone, note, scales_scores=scales_scores) for batch, alone in graph.exact.items()},
        notes=(*graph.notes, note),
    )


def _is_fused(op: Op) -> bool:
    """Whether an op is attention in one call."""
    return _FUSED in op.name and op.dims.keys() >= {"batch", "heads", "queries", "keys", "head_dim"}


def _is_causal(op: Op) -> bool:
    return op.family.startswith(CAUSAL)


def itemsize(op: Op) -> int:
    """Bytes of each number that an op computes with."""
    return _ELEMENT_BYTES.get(op.dtype, 4)


def _parts_of(ops: Sequence[Op], place: int, at_one: bool, autocast: bool, scales_scores: bool) -> Iterator[Op]:
    """The ops that did the work of one call of attention among others; any other op as it is.

    Heads lie beside each other in queries, keys and values. A batch of several is copied to where the products want it,
    and what they give is copied back, unless the next kernel does so; a batch of one (`at_one`) has those products
    without copies.
    """
    op = ops[place]
    if not _is_fused(op):
        yield op
        return
    head_dim, (queries, keys, scores, rows) = op.dims["head_dim"], _sizes(op)
    masked = _is_causal(op) or bool(op.dims.get("masked", Affine(0)).constant)
    scales_scores = scales_scores and not masked
    scaled = elementwise(op, "mul", "elementwise.mul", scores if scales_scores else queries)
    scaled = msgspec.structs.replace(scaled, **op.calls._asdict())
    if not scales_scores:
        yield scaled
    yield view(op, "view.transpose")
    if at_one:
        yield _product(op, "matmul", "keys", "head_dim")
    else:
        yield view(op, "view.expand")
        yield _copy(op, "nested.reshape", queries, head_dim)
        yield view(op, "view.nested.expand")
        yield _copy(op, "nested.reshape", keys, Affine(1))
        yield _product(op, "nested.bmm", "keys", "head_dim")
        yield view(op, "view.nested.view")
    if scales_scores:
        yield scaled
    if masked:
        yield elementwise(op, "add", "elementwise.add", scores)
    yield from _softmax(op, scores, rows, autocast)
    if at_one:
        yield _product(op, "matmul", "head_dim", "keys")
    else:
        yield view(op, "view.expand")
        yield view(op, "view.nested.reshape")
        yield view(op, "view.nested.expand")
        yield _copy(op, "nested.reshape", keys, head_dim)
        yield _product(op, "nested.bmm", "head_dim", "keys")
        yield view(op, "view.nested.view")
    after = next((later for later in ops[place + 1 :] if later.launches), None)
    if after is None or (after.family, after.read_bytes) != ("copy.strided", op.write_bytes):
        yield _copy(op, "reshape", queries, head_dim)  # which a view does where heads come out side by side


def _sizes(op: Op) -> tuple[Affine, Affine, Affine, dict[str, Affine]]:
    """How many numbers the queries, the keys and the scores of a call of attention have, and the rows of these."""
    rows = op.dims["batch"] * op.dims["heads"] * op.dims["queries"]
    keys = op.dims["batch"] * op.dims["heads"] * op.dims["keys"]
    scores = {"rows": rows, "cols": op.dims["keys"]}
    return rows * op.dims["head_dim"], keys * op.dims["head_dim"], rows * op.dims["keys"], scores


def _softmax(half: Op, scores: Affine, rows: dict[str, Affine], autocast: bool) -> Iterator[Op]:
    """The softmax of attention: under autocast it gives fp32, reading fp16 or a cast of bf16, which is cast back."""
    op = half
    single = msgspec.structs.replace(op, dtype="float32")
    wide = autocast and itemsize(op) < itemsize(single)
    if wide and op.dtype == "bfloat16":
        yield _cast(op, scores, single)
        op = single
    softmax = _kernel(op, "softmax", "softmax.softmax", "softmax.softmax", rows, scores, scores)
    given = scores * itemsize(single if wide else op)
    both = softmax.read_bytes + given  # scores and result are there at once
    yield msgspec.structs.replace(softmax, write_bytes=given, live_bytes=op.live_bytes + both)
    if wide:
        yield _cast(single, scores, half)


def _cast(op: Op, elements: Affine, other: Op) -> Op:
    """A cast by autocast of elements of one op to the format of another, which no Python calls."""
    dims = {"numel": elements, "run": elements}
    cast = _kernel(op, "to", "copy.nested.to", "copy.cast", dims, elements, elements)
    return msgspec.structs.replace(cast, write_bytes=elements * itemsize(other))


def view(op: Op, host_class: str) -> Op:
    """Another look at a tensor of an op, by the name that its class ends in."""
    return Op(f"aten::{host_class.rpartition('.')[2]}", op.module, host_class, "", "", {}, live_bytes=op.live_bytes)


def elementwise(op: Op, name: str, host_class: str, elements: Affine) -> Op:
    """One pass over elements of an op."""
    family = f"elementwise.{name.rstrip('_')}"
    return _kernel(op, name, host_class, family, {"numel": elements, "operands": Affine(1)}, elements, elements)


def _copy(op: Op, leaf: str, elements: Affine, run: Affine) -> Op:
    """A copy of elements of an op to contiguous memory."""
    return _kernel(op, "reshape", f"copy.{leaf}", "copy.strided", {"numel": elements, "run": run}, elements, elements)


def _product(op: Op, leaf: str, columns: str, inner: str) -> Op:
    """A product for each head, of as many columns as one dimension of an op and summed over another."""
    heads, m, n, k = op.dims["batch"] * op.dims["heads"], op.dims["queries"], op.dims[columns], op.dims[inner]
    dims = {"batch": heads, "m": m, "n": n, "k": k}
    read, written = heads * m * k + heads * n * k, heads * m * n
    made = _kernel(op, leaf.rpartition(".")[2], f"bmm.{leaf}", "bmm", dims, read, written)
    return msgspec.structs.replace(made, macs=heads * m * n * k)


def _kernel(
    op: Op, name: str, host_class: str, family: str, dims: dict[str, Affine], read: Affine, written: Affine
) -> Op:
    """A kernel that reads and writes so many elements, in the place and precision of an op."""
    return Op(
        name=f"aten::{name}",
        module=op.module,
        host_class=host_class,
        family=family,
        dtype=op.dtype,
        dims=dims,
        read_bytes=read * itemsize(op),
        write_bytes=written * itemsize(op),
        live_bytes=op.live_bytes,
        launches=1,
    )


def as_run_on_cuda(graph: ModelGraph) -> ModelGraph:
    """The graph as today's PyTorch runs it on CUDA, where a trace has what CPUs run."""
    return causal_on_cuda(biases_on_cuda(math_attention_on_cuda(self_attention_on_cuda(graph))))


NODE = "node"  # the most general host class of a scripted graph
_SPLIT = "aten::_transform_bias_rescale_qkv"  # on CPUs it makes queries, keys and values of one product
_PARTS = ("aten::bmm", "aten::_softmax", "aten::bmm", "aten::addmm")  # what CPUs launch after it, without a mask
_MERGE = "aten::contiguous"  # puts heads side by side before the last product; one token has them so already
_AVERAGE = "reduction.nested.sum"  # of the weights of all heads, where the caller wants them
_FUSED_DTYPES = ("float32", "float16", "bfloat16")
_HEAD_MULTIPLE = 8  # heads of another size are computed in parts


def self_attention_on_cuda(graph: ModelGraph) -> ModelGraph:
    """The graph with the self-attention of `torch.nn.MultiheadAttention` as eager PyTorch 2 runs it on CUDA.

    A trace has what CPUs run of it in inference: the scores go through memory, from kernel to kernel. On CUDA one
    product makes queries, keys and values, `scaled_dot_product_attention` is one kernel, and a product follows. Where
    there is a mask, where the weights are wanted, and where numbers or heads do not suit that kernel, CUDA runs the
    same parts as a CPU (`native_multi_head_attention_cuda` in PyTorch's sources). Weights that are wanted of each head
    by itself cannot be told from none.
    """
    if graph.runtime not in ("eager", "cuda-graphs") or graph.attention == "eager":
        return graph
    return rewritten(graph, attention_on_cuda)


def attention_on_cuda(ops: Sequence[Op]) -> list[Op]:
    """Ops in order, with one kernel in place of the parts that self-attention has on a CPU."""
    made = list(ops)
    for split in reversed([place for place, op in enumerate(ops) if op.name == _SPLIT]):
        first = max((place for place in range(split) if ops[place].name == "aten::mm"), default=0)
        last = next((place for place in range(split, len(ops)) if ops[place].name == "aten::addmm"), split)
        parts = [op for op in ops[split + 1 : last + 1] if op.launches and op.name != _MERGE]
        averaged = any(op.host_class == _AVERAGE for op in ops[last + 1 : last + 3])
        known = tuple(op.name for op in parts) == _PARTS and not averaged
        if known and parts[0].dtype in _FUSED_DTYPES and parts[0].dims["k"].at(1) % _HEAD_MULTIPLE == 0:
            # The last product and the view of what it gives follow.
            made[first : last + 2] = _one_kernel(ops[first : last + 2], split - first, last - first)
    return made


# Kernels pass by blocks of scores that a causal mask hides whole. Blocks on the diagonal and uneven shares cost as much
# as this many keys more: in the tutorial of Triton 1024, 4096 and 8192 tokens take 63, 54 and 51 % of the time they
# take without a mask.
_CAUSAL_BLOCK = 256


def causal_on_cuda(graph: ModelGraph) -> ModelGraph:
    """The graph whose causal attention counts the scores that CUDA's kernels compute: little more than half of many."""
    return rewritten(graph, _with_causal)


def _passes_by(op: Op) -> bool:
    """Whether a kernel computes less than all scores of a call of attention."""
    queries, keys = op.dims.get("queries"), op.dims.get("keys", Affine(0))
    in_kernel = _is_fused(op) and _is_causal(op) and not _runs_as_math(op)
    return in_kernel and queries == keys and keys.constant > _CAUSAL_BLOCK and not keys.per_sample


def _as_seen(op: Op) -> Iterator[Op]:
    if _passes_by(op):
        keys = op.dims["keys"].constant
        seen = (keys + _CAUSAL_BLOCK) // 2
        op = msgspec.structs.replace(op, macs=op.macs // keys * seen, dims={**op.dims, "keys": Affine(seen)})
    yield op


_with_causal = op_by_op(_as_seen)


def has_no_kernel(op: Op) -> bool:
    """Whether an op is attention of other than four dimensions, or of rows in pieces."""
    return _is_fused(op) and op.family.endswith(MATH)


def _runs_as_math(op: Op) -> bool:
    """Whether an op is attention that no kernel of CUDA takes.

    No kernel takes other than four dimensions or rows in pieces, of a mask as well, as models of some versions of
    transformers (5.17) make it while they are captured or scripted. Heads of keys that serve several of queries are
    taken in half precision without a mask alone.
    """
    if _is_fused(op) and op.family.endswith(GROUPED):
        return itemsize(op) > 2 or bool(op.dims["masked"].constant)
    return has_no_kernel(op) or (_is_fused(op) and op.family.endswith(STRIDED_MASK))


def math_attention_on_cuda(
    graph: ModelGraph, which: Callable[[Op], bool] = _runs_as_math, *, older: bool = False
) -> ModelGraph:
    """The graph with the calls of attention that `which` names in many kernels; `older` is before PyTorch 2.5."""
    return rewritten(
        graph, lambda ops: [part for op in ops for part in (_issued_by(op, older) if which(op) else (op,))]
    )


def _issued_by(op: Op, older: bool) -> list[Op]:
    """The parts of a call of attention, which C++ issues, for Python or for an interpreter of a scripted graph."""
    first, *others = _math_on_cuda(op, older)
    parts = [msgspec.structs.replace(first, **op.calls._asdict()), *others]
    if root(op.host_class) != NODE:
        return parts
    return [msgspec.structs.replace(part, host_class=f"{NODE}.{root(part.host_class)}.nested") for part in parts]


def _math_on_cuda(op: Op, older: bool) -> Iterator[Op]:
    """What CUDA runs for a call of attention that none of its kernels takes (`_scaled_dot_product_attention_math`).

    It computes in fp32; before PyTorch 2.5 it computed in half precision what came so, and had a plain softmax. Heads
    of keys and values that serve several are repeated. A batch of several is copied to where the products want it. The
    weights are cast back as well, though nobody asks for them.
    """
    head_dim, (queries, keys, scores, _) = op.dims["head_dim"], _sizes(op)
    grouped, several = op.family.endswith(GROUPED), op.dims["batch"] != Affine(1)
    half = itemsize(op) < 4 and not older
    single = msgspec.structs.replace(op, dtype="float32") if half else op
    held = (op.read_bytes // itemsize(op) - queries) // 2 if grouped else keys  # elements of keys, as of values
    for elements in (queries, held, held) if half else ():
        yield _cast(op, elements, single)
    yield elementwise(single, "mul", "elementwise.nested.mul", queries)
    if _is_causal(op):
        yield from _causal_mask(single)
    for _ in range(2 * grouped):
        yield _kernel(
            single, "clone", "copy.nested.clone", "copy.strided", {"numel": keys, "run": head_dim}, held, keys
        )
    yield elementwise(single, "mul", "elementwise.nested.mul", keys)
    if several:
        yield _copy(single, "nested.reshape", queries, head_dim)
        if not grouped:
            yield _copy(single, "nested.reshape", keys, Affine(1))
    yield _product(single, "nested.bmm", "keys", "head_dim")
    if _is_causal(op) or op.dims["masked"].constant:
        yield elementwise(single, "add_", "elementwise.nested.add_", scores)
    yield from [_plain_softmax(single)] if older else _safe_softmax(single)
    if several and not grouped:
        yield _copy(single, "nested.reshape", keys, head_dim)
    if half:
        yield _cast(single, scores, op)
    yield _product(single, "nested.bmm", "head_dim", "keys")
    if half:
        yield _cast(single, queries, op)
    if not op.family.endswith(MATH):  # whose results were traced as they come out
        yield _copy(op, "reshape", queries, head_dim)  # which a view does where heads come out side by side


def _plain_softmax(op: Op) -> Op:
    *_, scores, rows = _sizes(op)
    return _kernel(op, "softmax", "softmax.nested.softmax", "softmax.softmax", rows, scores, scores)


def _safe_softmax(op: Op) -> Iterator[Op]:
    """The softmax of scores; rows that are masked whole become zeros, which takes four more kernels, mask or none."""
    *_, scores, rows = _sizes(op)
    yield _plain_softmax(op)
    yield _of_truth(elementwise(op, "isneginf", "elementwise.nested.isneginf", scores), written=scores)
    whole = _kernel(op, "all", "reduction.nested.all", "reduction.any", rows, Affine(0), Affine(0))
    yield _of_truth(whole, read=scores)
    yield _number(op)
    yield elementwise(op, "where", "elementwise.nested.where", scores)


def _causal_mask(op: Op) -> Iterator[Op]:
    """A mask of truth values that hides what comes later, and numbers made of it."""
    size = op.dims["queries"] * op.dims["keys"]
    ones = _kernel(op, "ones", "factory.nested.ones", "factory", {"numel": size}, Affine(0), size)
    yield _of_truth(ones, written=size)
    yield _of_truth(elementwise(op, "tril", "elementwise.nested.tril", size), read=size, written=size)
    yield _number(op)
    yield _number(op)
    yield _of_truth(elementwise(op, "where", "elementwise.nested.where", size), read=size)


def _number(op: Op) -> Op:
    """One number that is made a tensor of."""
    one = {"numel": Affine(1)}
    return _kernel(op, "scalar_tensor", "factory.nested.scalar_tensor", "factory", one, Affine(0), Affine(1))


def _of_truth(op: Op, read: Affine | None = None, written: Affine | None = None) -> Op:
    """A kernel that reads or writes so many truth values, of a byte each."""
    reads, writes = op.read_bytes if read is None else read, op.write_bytes if written is None else written
    return msgspec.structs.replace(op, read_bytes=reads, write_bytes=writes)


def biases_on_cuda(graph: ModelGraph) -> ModelGraph:
    """The graph with biases of convolutions as eager PyTorch and TorchScript have CUDA add them: by themselves."""
    if graph.runtime not in ("eager", "cuda-graphs", "torchscript"):
        return graph
    return rewritten(graph, _with_biases)


def _with_bias(op: Op) -> Iterator[Op]:
    scripted = root(op.host_class) == NODE
    return bias_added(op, f"{NODE}.elementwise.nested" if scripted else "elementwise.nested.add_")


_with_biases = op_by_op(_with_bias)


def bias_added(op: Op, host_class: str) -> Iterator[Op]:
    """A convolution without its bias, and the kernel that adds it to what cudnn gives; any other op as it is.

    PyTorch's own kernel of depthwise convolutions adds biases itself. It runs those that do not lie channels last.
    """
    bias = _bias_bytes(op)
    if not bias:
        yield op
        return
    held = "weight_bytes" if op.weight_bytes.constant else "read_bytes"  # under autocast copies, which are activations
    yield msgspec.structs.replace(op, **{held: getattr(op, held) - Affine(bias)})
    added = elementwise(op, "add_", host_class, op.write_bytes // itemsize(op))
    yield msgspec.structs.replace(added, weight_bytes=Affine(bias))


def _bias_bytes(op: Op) -> int:
    """Bytes that a convolution of cudnn reads beside its input and filters: of its bias, or none."""
    family = root(op.family)
    if not family.startswith("conv") or (family == "conv_depthwise" and "channels_last" not in op.family):
        return 0
    # At batch 1: where each sample makes filters of its own, channels and groups are proportional to the batch.
    size = {name: count.at(1) for name, count in op.dims.items()}
    filters = size["c_out"] * size["c_in"] // size["groups"] * size["kernel_h"] * size["kernel_w"]
    given = size["batch"] * size["c_in"] * size["h_in"] * size["w_in"]
    bias = size["c_out"] * itemsize(op)
    return bias if (op.weight_bytes + op.read_bytes).at(1) - (filters + given) * itemsize(op) >= bias else 0


def _one_kernel(parts: Sequence[Op], split: int, last: int) -> Iterator[Op]:
    """What CUDA runs for the ops from one product to another, among them that which splits heads."""
    product, bias, before_last = parts[0], parts[split], parts[last - 1]
    scores, context = (op for op in parts if op.name == "aten::bmm")
    yield msgspec.structs.replace(product, weight_bytes=product.weight_bytes + bias.weight_bytes)
    yield from parts[1:split]
    for name in ("chunk", *("view", "transpose") * 3):  # queries, keys and values
        yield view(product, f"view.nested.{name}")
    heads = product.dims["n"].at(1) // (3 * scores.dims["k"].at(1))
    attention = msgspec.structs.replace(
        scores,
        name="aten::scaled_dot_product_attention",
        host_class="attention.nested.sdpa",
        family="attention",
        dims={
            "batch": scores.dims["batch"] // heads,
            "heads": Affine(heads),
            "queries": scores.dims["m"],
            "keys": scores.dims["n"],
            "head_dim": scores.dims["k"],
            "masked": Affine(0),
        },
        macs=scores.macs + context.macs,
        read_bytes=bias.write_bytes,
        write_bytes=context.write_bytes,
        live_bytes=product.live_bytes + context.write_bytes,
    )
    yield attention
    for name in ("transpose", "reshape", "t"):
        yield view(attention, f"view.nested.{name}")
    freed = before_last.live_bytes - attention.live_bytes  # what the parts keep in memory beside
    for op in parts[last:]:
        yield msgspec.structs.replace(op, live_bytes=op.live_bytes - freed)


IMAGE_CHANNELS = 4  # a convolution of at most so many inputs reads an image, whose channels a wider model leaves alone
# How the work of a family follows the width: exponent of its multiply-adds and weights, and which dims grow.
_CHANNELS = ("c_in", "c_out")
GROWTHS: dict[str, tuple[int, tuple[str, ...]]] = {
    "gemm": (2, ("n", "k")),
    "bmm": (1, ("batch",)),
    **dict.fromkeys(("conv", "conv_grouped", "conv_transpose"), (2, _CHANNELS)),
    "conv_depthwise": (1, (*_CHANNELS, "groups")),
    "attention": (1, ("heads",)),
    "rnn": (2, ("hidden", "inputs", "reread", "weights")),
    **dict.fromkeys(("batch_norm", "pooling"), (1, ("channels",))),
    **dict.fromkeys(("norm", "index", "embedding", "fft"), (1, ("cols",))),
    **dict.fromkeys(("softmax", "reduction"), (1, ("rows",))),
    **dict.fromkeys(("elementwise", "copy", "cat", "other"), (1, ("numel",))),
    "generated": (1, ("numel", "plain", "math", "strided", "looked_up")),
}
_SQUARED = ("reread", "weights")  # dimensions that are products of two widths
_INTEGERS = ("int", "uint", "bool")


def widened(graph: ModelGraph, factor: float) -> ModelGraph:
    """The graph of the same model, so many times as wide.

    >>> import torch, latpred
    >>> graph = latpred.trace(torch.nn.Linear(64, 64), torch.zeros(1, 64))
    >>> widened(graph, 2.0).macs() / graph.macs()
    4.0
    """
    parameters = sum(op.weight_bytes.constant for op in graph.ops)
    wide = rewritten(graph, lambda ops: [_wide(op, factor) for op in ops])
    grown = sum(op.weight_bytes.constant for op in wide.ops) / parameters if parameters else 1.0
    sizes = {"parameters": round(graph.parameters * grown), "parameter_bytes": round(graph.parameter_bytes * grown)}
    return msgspec.structs.replace(wide, **sizes)


def _wide(op: Op, factor: float) -> Op:
    if root(op.family) not in GROWTHS or op.dtype.startswith(_INTEGERS):
        return op
    power, growing = GROWTHS[root(op.family)]
    first = power == 2 and "c_in" in op.dims and op.dims["c_in"].constant <= IMAGE_CHANNELS
    grown = factor if first else factor**power
    return msgspec.structs.replace(
        op,
        dims={
            name: _times(size, factor**2 if name in _SQUARED else factor)
            if name in growing and not (first and name == "c_in")
            else size
            for name, size in op.dims.items()
        },
        macs=_times(op.macs, grown),
        weight_bytes=_times(op.weight_bytes, grown),
        read_bytes=op.read_bytes if first else _times(op.read_bytes, factor),
        write_bytes=_times(op.write_bytes, factor),
        live_bytes=_times(op.live_bytes, factor),
        reread_after=op.reread_after and _times(op.reread_after, factor),
    )


def _times(count: Affine, factor: float) -> Affine:
    """A count so many times as large; nothing that there is becomes nothing."""
    constant, per_sample = round(count.constant * factor), round(count.per_sample * factor)
    return Affine(constant or int(count.constant > 0), per_sample or int(count.per_sample > 0))
