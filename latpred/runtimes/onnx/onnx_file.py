"""`.onnx` files as models: what onnxruntime runs of one, and what is wrong with one that it cannot run.

The batch is the dimension of the inputs that is called so, else the first; a file that fixes it holds for it alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from latpred import runtimes
from latpred.errors import LatpredError, RuntimeRefusalError, UsageError
from latpred.graph.graph import ZERO, ModelGraph, alone_at, no_line, written
from latpred.query import Options, checked_batches, is_one
from latpred.runtimes import graph_store
from latpred.runtimes.base import BATCHES, MOST_REAL
from latpred.runtimes.onnx import onnx_graph, onnx_session
from latpred.runtimes.onnx.onnx_formulas import HALF_DTYPES
from latpred.runtimes.onnx.onnx_session import inputs_of
from latpred.runtimes.source import tensors_of
from latpred.tracing.inputs import as_arguments, from_example, real, whole_sizes

TOKENS, PIXELS, CHANNELS, MOST_CHANNELS = 128, 224, 3, 4
_PRECISIONS = {"float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
# By OperatorKernels.md of onnxruntime, which lists the kernels of each provider.
_NO_CUDA = re.compile(
    "ort::(QLinear.*|DynamicQuantize.*|ConvInteger|QGemm|MatMulIntegerToFloat|A(cos|sin|tan)h?|Cosh|Sinh|Tan|BitShift|"
    "Bitwise.*|Celu|Mean|Hardmax|LpNormalization|MeanVarianceNormalization|(Global)?LpPool|DFT|STFT|Unique|Det|Col2Im|"
    "MaxUnpool|.*(Classifier|Regressor|Encoder|Vectorizer)|TreeEnsemble|Scaler|Normalizer|ZipMap)"
)
_ON_CPU = (
    "onnxruntime has no CUDA kernels for {}: it runs these on the CPU, and copies what they read and write, none of "
    "which is counted"
)
# Operators whose values say how much work they, or what follows them, are.
_GO_BY_VALUE = {
    "NonZero",
    "Unique",
    "Compress",
    "NonMaxSuppression",
    "If",
    "Loop",
    "GreedySearch",
    "BeamSearch",
    "Sampling",
}
_BY_VALUE = "what {} does may depend on values: this holds for those of inputs=, without which inputs are ones"
_OF_WEIGHTS = ("float", "bfloat", "int8", "uint8", "int4", "uint4")
_TYPES = ("to", "dtype", "output_dtype", "softmax_precision")  # attributes whose number stands for a type
_INLINE = 1024  # bytes of weights that stay within a graph
_HALVED = "onnxruntime's nodes are those of the file in float32, with the bytes of {}"


def trace_file(path: str, inputs: Any, runtime: str, target: str, **options: Any) -> ModelGraph:
    """What onnxruntime runs of a file, whose external weights lie beside it.

    The options are those of `latpred.trace`: `seq` and `image` for open sizes other than the batch; precision, layout
    and attention are the file's own, but a file in fp32 may be asked for in halves for a GPU. A file that is not there,
    damaged, without its weights, too new or in need of sizes is a UsageError that says so.
    """
    check_file(path, runtime)
    asked = Options(inputs, *whole_sizes(options.get("seq"), options.get("image")))
    if options.get("attention") is not None:
        raise UsageError(f"{path} computes attention as it was exported; leave attention out.")
    if options.get("memory_format") not in (None, "contiguous"):
        raise UsageError(f"{path} has the layout that it was exported in; leave memory_format out.")
    file = Path(path)
    proto = _load(file)
    held = _precision(proto)
    precision = options.get("precision") or held
    half = HALF_DTYPES.get(precision) if held == "fp32" and target == "cuda" else None
    if precision != held and not half and (precision, held) != ("tf32", "fp32"):
        raise UsageError(f"{file} holds a model in {held}; convert the file to predict {precision}.")
    _demand_used(file, proto, asked)
    stub = _stub(file, proto, precision, asked)
    tracer: Any = runtimes.get(runtime)

    def at(proto: Any, batches: Sequence[int]) -> ModelGraph:
        feeds = {batch: _feed(file, proto, batch, asked) for batch in batches}
        key = f"{tracer.options}; {_digest(file, proto)} {_digest_of_feeds(feeds.values())}"
        make = partial(_traced, file, proto, stub, feeds, target, half)
        return graph_store.kept(stub, "onnxruntime", target, key, make)

    batches = options.get("batches", ())
    return _of_batches(file, proto, at, checked_batches(batches) if is_one(batches) or len(batches) else BATCHES)


def _of_batches(
    file: Path, proto: Any, at: Callable[[Any, Sequence[int]], ModelGraph], batches: Sequence[int]
) -> ModelGraph:
    """The graph of every batch, or where no line tells of it, of those that are asked for."""
    fixed = _fixed_batch(proto)
    if fixed is not None:
        return at(proto, [fixed])
    seen = [batch for batch in batches if batch <= MOST_REAL] or BATCHES
    try:
        graph = at(proto, BATCHES)
    except UsageError as error:
        if str(error.__cause__).startswith("onnxruntime cannot load"):
            raise
        for some in (seen, [1]):  # it may do other work at each, or hold a batch inside
            with suppress(UsageError):
                return alone_at({batch: at(_load(file), [batch]) for batch in some})
        raise error from error.__cause__
    if not onnx_graph.bends(graph):
        return graph
    exact = {batch: msgspec.structs.replace(at(_load(file), [batch]), notes=()) for batch in seen}
    return msgspec.structs.replace(graph, exact=exact, notes=(*graph.notes, no_line(written(seen))))


def check_file(path: str, runtime: str) -> None:
    """Refuse a file that is not there, or a runtime that does not run ONNX, or that cannot be used here."""
    file = Path(path)
    if not file.is_file():
        beside = sorted(one.name for one in file.parent.glob("*.onnx")) if file.parent.is_dir() else []
        there = f" There are: {', '.join(beside[:5])}." if beside else " Check the path, or export the model to it."
        raise UsageError(f"There is no file {file}.{there}")
    if getattr(runtimes.get(runtime), "traced_by", "") != "onnxruntime":
        raise UsageError(
            f"{path} is an ONNX graph, which latpred cannot predict in {runtime}. Ask for runtime='onnxruntime' "
            "(--runtime onnxruntime), or give the PyTorch model."
        )
    onnx_session.require()


def _traced(
    file: Path, proto: Any, stub: ModelGraph, feeds_at: Mapping[int, Mapping[str, Any]], target: str, half: str | None
) -> ModelGraph:
    single, feeds, left_out = onnx_graph.FLOAT, [*feeds_at.values()], []
    if target == "cuda":
        single = half or HALF_DTYPES.get(stub.precision, onnx_graph.FLOAT)
    try:
        with tempfile.TemporaryDirectory(prefix="latpred-", ignore_cleanup_errors=True) as folder:
            weights_in = _unlinked(proto, file.parent)
            if single != onnx_graph.FLOAT and not half:
                # A CPU, which has few kernels for halves, would cast around nodes, and fuse none of them.
                left_out.append("CastElimination")  # casts of halves are by now to what they are from
                try:
                    _widen(proto, weights_in, Path(folder))
                except (OSError, ValueError) as error:
                    said = "cannot be brought to float32 to work out its graph"
                    raise UsageError(
                        f"{file} {said}: {error}. Check its weights, and the room in {Path(folder).parent}."
                    ) from error
                feeds, weights_in = [_in_float(feed) for feed in feeds], Path(folder)
            if target == "cuda" and any(node.op_type == "QuantizeLinear" for node in onnx_session.nodes_of(proto)):
                left_out.append("QDQSelectorActionTransformer")  # makes nodes for the CPU of products between these
            watched = onnx_session.watch(
                _named(proto, file), feeds, target=target, threads=1, weights_in=weights_in, left_out=left_out
            )
        graph = onnx_graph.graph_of(stub, watched, feeds, target, single)
    except (RuntimeRefusalError, MemoryError) as error:
        raise _explained(error, file, proto, feeds[0]) from error
    notes = [_HALVED.format(single)] if single != onnx_graph.FLOAT else []
    on_cpu = {op.name for op in graph.ops if target == "cuda" and _NO_CUDA.fullmatch(op.name)}
    notes += [_ON_CPU.format(", ".join(sorted(on_cpu)))] if on_cpu else []
    by_value = _GO_BY_VALUE & {node.op_type for node in onnx_session.nodes_of(proto)}
    notes += [_BY_VALUE.format(", ".join(sorted(by_value)))] if by_value else []
    batch = _fixed_batch(proto)
    notes += [] if batch is None else [f"the file takes batch {batch} only: nothing is known of any other"]
    return msgspec.structs.replace(graph, only=tuple(feeds_at) if len(feeds_at) == 1 else (), notes=tuple(notes))


def _widen(proto: Any, weights_in: Path, folder: Path) -> None:
    """Make float32 of a file's halves; what is large then lies in a folder, since more than 2 GB may come of it."""
    import onnx

    with (folder / "weights").open("wb") as weights:
        for graph in onnx_session.graphs_within(proto.graph):
            for tensor in graph.initializer:
                _widen_tensor(tensor, weights_in)
                if len(tensor.raw_data) > _INLINE:
                    onnx.external_data_helper.set_external_data(tensor, "weights", weights.tell(), len(tensor.raw_data))
                    weights.write(tensor.raw_data)
                    tensor.ClearField("raw_data")
            for value in (*graph.input, *graph.output, *graph.value_info):
                if _is_half(value.type.tensor_type.elem_type):
                    value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
            for attribute in (one for node in graph.node for one in node.attribute):
                if attribute.name in _TYPES and _is_half(attribute.i):
                    attribute.i = onnx.TensorProto.FLOAT
                if attribute.HasField("t"):
                    _widen_tensor(attribute.t, weights_in)


def _widen_tensor(tensor: Any, weights_in: Path) -> None:
    """Bring a tensor's data, in float32 where it is a half, into the tensor."""
    import onnx

    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(weights_in))
        tensor.ClearField("external_data")
        tensor.data_location = onnx.TensorProto.DEFAULT
    if _is_half(tensor.data_type):
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype("float32"), tensor.name))


def _in_float(feed: Mapping[str, Any]) -> dict[str, Any]:
    """A feed whose halves are in float32."""
    return {
        name: one.astype("float32") if one.dtype.name in HALF_DTYPES.values() else one for name, one in feed.items()
    }


def _load(file: Path) -> Any:
    """The graph without its external weights."""
    import onnx.inliner
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        proto = onnx.load(str(file), load_external_data=False)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}. Check who may read it.") from error
    except (DecodeError, ValueError) as error:
        raise UsageError(
            f"{file} is no whole ONNX model: it is truncated or damaged ({error}). Export or copy it again."
        ) from error
    if proto.functions:  # onnxruntime would leave their nodes without names, in an order that nothing tells
        with suppress(RuntimeError, ValueError):  # what has no form in the file's opset, or 2 GB within the file
            proto = onnx.inliner.inline_local_functions(proto, convert_version=True)
    if not proto.ir_version or not proto.graph.node:
        raise UsageError(f"{file} is no whole ONNX model: it holds no graph. Export or copy it again.")
    for place, name in _external(proto).items():
        if not (file.parent / place).is_file():
            raise UsageError(
                f"{file} keeps its weights (among them {name}) in {place}, which is not in "
                f"{(file.parent / place).resolve().parent}. Copy that file beside it, or export the model again."
            )
    return proto


def _locations(proto: Any) -> Iterator[tuple[str, Any]]:
    """Names of the weights that lie in other files, each with the entry that says where."""
    for tensor in _weights(proto):
        yield from ((tensor.name, entry) for entry in tensor.external_data if entry.key == "location")


def _external(proto: Any) -> dict[str, str]:
    """Other files with weights, each with the name of the first of them."""
    return {entry.value: name for name, entry in reversed([*_locations(proto)])}


def _unlinked(proto: Any, folder: Path) -> Path:
    """Put the files that links stand for in their place, as in a model hub's cache, and give the folder that has all.

    onnxruntime follows no link out of the folder that it is told of, and takes no place that is named outside of it.
    """
    entries = [entry for _, entry in _locations(proto)]
    if any(Path(entry.value).is_absolute() or ".." in Path(entry.value).parts for entry in entries):
        return folder.resolve()
    files = [(folder / entry.value).resolve() for entry in entries]
    holder = Path(os.path.commonpath([file.parent for file in files])) if files else folder.resolve()
    for entry, file in zip(entries, files, strict=True):
        entry.value = file.relative_to(holder).as_posix()
    return holder


def _stub(file: Path, proto: Any, precision: str, asked: Options) -> ModelGraph:
    """All of the graph that is known without running it."""
    kind, size = _filled_with(proto, asked)
    return ModelGraph(
        model=file.name,
        input_kind=kind,
        input_size=size,
        precision=precision,
        memory_format="contiguous",
        parameters=sum(prod(one.dims) for one in _weights(proto) if _dtype(one.data_type).startswith(_OF_WEIGHTS)),
        parameter_bytes=0,
        input_bytes=ZERO,
        ops=(),
        runtime="onnxruntime",
    )


def _is_floating(code: int) -> bool:
    return _dtype(code).startswith(("float", "bfloat"))


def _is_half(code: int) -> bool:
    return _dtype(code) in HALF_DTYPES.values()


def _dtype(code: int) -> str:
    import onnx

    return str(onnx.helper.tensor_dtype_to_np_dtype(code).name) if code else ""


def _weights(proto: Any) -> Iterator[Any]:
    """The weights of a file, those that its nodes hold included."""
    for graph in onnx_session.graphs_within(proto.graph):
        yield from graph.initializer
        constants = (one for node in graph.node if node.op_type == "Constant" for one in node.attribute)
        yield from (one.t for one in constants if one.HasField("t"))


def _precision(proto: Any) -> str:
    """Precision in which most weights are held, or without weights the inputs."""
    held = [(tensor.data_type, prod(tensor.dims)) for tensor in _weights(proto)]
    given = [(value.type.tensor_type.elem_type, 1) for value in inputs_of(proto)]
    for sizes in (held, given):
        totals: Counter[str] = Counter()
        for code, size in sizes:
            if _is_floating(code):
                totals[_dtype(code)] += size
        if totals:
            return _PRECISIONS.get(totals.most_common(1)[0][0], "fp32")
    return "fp32"


def _digest(file: Path, proto: Any) -> str:
    """Of the file's bytes, and of when files beside it changed."""
    parts = [hashlib.sha256(file.read_bytes()).hexdigest()]
    for place in sorted(_external(proto)):
        state = (file.parent / place).stat()
        parts.append(f"{place} {state.st_size} {state.st_mtime_ns}")
    return "; ".join(parts)


def _digest_of_feeds(feeds: Iterable[Mapping[str, Any]]) -> str:
    """Of names, dtypes, shapes and values: a file may read any of them."""
    digest = hashlib.sha256()
    for name, array in (item for feed in feeds for item in feed.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()


def _shapes(proto: Any, batch: int | None, tokens: int | None = None) -> dict[str, list[int | None]]:
    """Sizes of each input, None where they are open; -1 is one too. An open batch has the size that is given.

    So has what larger inputs call as tokens are called, where their number is given.
    """
    axes, shapes = _batch_axes(proto), {}
    dims_of = {value.name: value.type.tensor_type.shape.dim for value in inputs_of(proto)}
    whole = [one.name for one in inputs_of(proto) if not _is_floating(one.type.tensor_type.elem_type)]
    called = {dims_of[name][1].dim_param for name in whole if len(dims_of[name]) == 2} - {""}
    for name, dims in dims_of.items():
        told = dict.fromkeys(called, tokens) if len(dims) > 2 else {}
        shapes[name] = [
            dim.dim_value
            if dim.HasField("dim_value") and dim.dim_value >= 0
            else (batch if at == axes.get(name) else told.get(dim.dim_param))
            for at, dim in enumerate(dims)
        ]
    return shapes


def _batch_axes(proto: Any) -> dict[str, int]:
    """Which dimension of inputs is the batch: the one that is called so, else the first.

    An input has none whose first has the name of a later one, as that of positions has the tokens', or another name
    where some input calls its batch so.
    """
    dims_of = {value.name: [dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in inputs_of(proto)}
    later = {name for dims in dims_of.values() for name in dims[1:]} - {""}
    called = {name: [at for at, dim in enumerate(dims) if "batch" in dim.lower()] for name, dims in dims_of.items()}
    told, axes = any(called.values()), {name: at[0] for name, at in called.items() if at}
    for name, dims in dims_of.items():
        if not (called[name] or (dims and dims[0] and (told or dims[0] in later))):
            axes[name] = 0
    return axes or dict.fromkeys(dims_of, 0)


def _fixed_batch(proto: Any) -> int | None:
    """The batch of a file whose inputs leave none open."""
    axes, shapes = _batch_axes(proto), _shapes(proto, None)
    sizes = [shape[axes[name]] for name, shape in shapes.items() if shape and name in axes]
    return sizes[0] if sizes and None not in sizes else None


def _feed(file: Path, proto: Any, batch: int, asked: Options) -> dict[str, Any]:
    """Inputs of one run by name."""
    for value in inputs_of(proto):
        if not value.type.HasField("tensor_type"):
            raise UsageError(f"{file}: input {value.name!r} is no tensor. Export the model with tensors as its inputs.")
    if asked.inputs is not None:
        return _given(file, proto, batch, asked)
    feed, shapes = {}, _shapes(proto, batch, asked.seq or TOKENS)
    for value in inputs_of(proto):
        shape = shapes[value.name]
        dtype = np.dtype(_dtype(value.type.tensor_type.elem_type))
        filled = _filled(shape, dtype, asked)
        if None in filled or not value.type.tensor_type.HasField("shape"):
            raise UsageError(
                f"{file}: input {value.name!r} has open sizes besides the batch ({_written(value)}). Give "
                "inputs= with example tensors (seq= for tokens, image= for square pictures)."
            )
        feed[value.name] = np.ones(filled, dtype=dtype)
    return feed


def _demand_used(file: Path, proto: Any, asked: Options) -> None:
    """Refuse sizes that the file's inputs leave nothing for."""
    shapes = [] if asked.inputs is not None else _shapes(proto, 1).values()
    for name, value, dims in (("seq", asked.seq, (1, 2)), ("image", asked.image, (4,))):
        if value is not None and not any(len(shape) in dims and None in shape for shape in shapes):
            why = "inputs= has its size" if asked.inputs is not None else "no input has such a size open"
            raise UsageError(f"{file}: {name}={value} changes nothing, since {why}. Leave it out.")


def _channels_last(shape: list[int | None]) -> bool:
    """Whether sizes are those of pictures whose channels come last."""
    return shape[1] is None and shape[3] is not None and shape[3] <= MOST_CHANNELS


def _is_picture(shape: list[int | None], asked: Options) -> bool:
    """Whether sizes are those of pictures: past tokens have one open side of two, too, but heads for channels."""
    told = asked.image is not None or shape[1] == CHANNELS or _channels_last(shape)
    return told or (shape[2] is None) == (shape[3] is None)


def _filled(shape: list[int | None], dtype: Any, asked: Options) -> list[Any]:
    """A shape whose open sizes are tokens or pixels; None is left where they are neither."""
    usual: list[Any] = shape
    if len(shape) <= 2 and (dtype.kind in "iub" or asked.seq is not None):
        usual = [asked.seq or TOKENS] * len(shape)
    elif len(shape) == 4 and dtype.kind == "f" and _is_picture(shape, asked):
        side = asked.image or PIXELS
        usual = [1, side if _channels_last(shape) else CHANNELS, side, side]
    return [given if size is None else size for size, given in zip(shape, usual, strict=True)]


def _filled_with(proto: Any, asked: Options) -> tuple[str, int]:
    """The kind of the sizes that the inputs leave open besides the batch, and what they are taken as."""
    shapes = [] if asked.inputs is not None else _shapes(proto, 1, asked.seq or TOKENS).values()
    dims = {max(2, len(shape)) for shape in shapes if None in shape[2 if len(shape) == 4 else 0 :]}
    sizes = {2: ("seq", asked.seq or TOKENS), 4: ("image", asked.image or PIXELS)}
    return sizes.get(dims.pop(), ("custom", 0)) if len(dims) == 1 else ("custom", 0)


def _given(file: Path, proto: Any, batch: int, asked: Options) -> dict[str, Any]:
    """The example tensors at a batch size; floating-point ones as the file takes them."""
    codes = {value.name: value.type.tensor_type.elem_type for value in inputs_of(proto)}
    names = list(codes)
    example = from_example(asked.inputs)
    made = as_arguments(asked.inputs if example.batch else example.make(batch))
    tensors, order = tensors_of(made), list(made) if isinstance(made, Mapping) else names
    if len(tensors) != len(names) or set(order) != set(names):
        raise UsageError(f"{file} takes {', '.join(names)}; give inputs= with one tensor for each of them.")
    given = dict(zip(order, tensors, strict=True))
    if example.batch:
        given |= _resized(proto, given, batch)
    feed = onnx_session.feed_of(names, tensors_of(real({name: given[name] for name in names}, torch.float32)))
    for name, array in feed.items():
        if array.dtype == np.float32 and _is_floating(codes[name]):
            feed[name] = array.astype(_dtype(codes[name]))
    return feed


def _resized(proto: Any, given: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """The example tensors that have a batch, at another one; what the file fixes in some inputs only stays."""
    fixed, shapes = _fixed_batch(proto), _shapes(proto, None)
    axes = {name: axis for name, axis in _batch_axes(proto).items() if axis < given[name].dim()}
    axes = {name: axis for name, axis in axes.items() if fixed or not shapes[name] or shapes[name][axis] is None}
    first = tuple(given[name].movedim(axis, 0) for name, axis in axes.items())
    made = from_example(first).make(batch) if first else ()
    return {name: one.movedim(0, axis) for (name, axis), one in zip(axes.items(), made, strict=True)}


def _written(value: Any) -> str:
    dims = value.type.tensor_type.shape.dim
    sizes = [str(dim.dim_value) if dim.HasField("dim_value") else (dim.dim_param or "?") for dim in dims]
    return " x ".join(sizes) or "none is told"


def _named(proto: Any, file: Path) -> bytes | str:
    """The model with a name of its own for every node, by which onnxruntime reports them."""
    seen: set[str] = set()
    for index, node in enumerate(onnx_session.nodes_of(proto)):
        if not node.name or node.name in seen:
            node.name = f"{node.op_type}_latpred_{index}"
        seen.add(node.name)
    try:
        return bytes(proto.SerializeToString())
    except ValueError:  # 2 GB and more within one file, which protobuf reads but does not write
        return str(file)


def _explained(error: Exception, file: Path, proto: Any, feed: Mapping[str, Any]) -> LatpredError:
    """An error of onnxruntime, or a lack of memory, in terms of the file."""
    text = str(error)
    newest = re.search(r"support for domain (\S+) is till opset (\d+)", text)
    versions = ", ".join(f"{name} {version}" for name, version in onnx_session.installed().items())
    if newest:
        domain = newest[1] if newest[1] != "ai.onnx" else ""
        used = next((one.version for one in proto.opset_import if one.domain in (domain, newest[1])), "?")
        return UsageError(
            f"{file} uses opset {used} of {newest[1]}, and {versions} knows up to {newest[2]}. Export it with "
            f"opset_version={newest[2]}, or upgrade: pip install -U onnxruntime"
        )
    if "IR version" in text:
        return UsageError(
            f"{file} is of IR version {proto.ir_version}, newer than {versions} reads. Upgrade it: "
            "pip install -U onnxruntime"
        )
    lacking = re.search(r"find an implementation for (\w+)|(\S+)\(-?\d+\) is not a registered", text)
    if lacking:
        return UsageError(
            f"{file}, a model in {_precision(proto)}, has the operator {lacking[1] or lacking[2]}, for which "
            "onnxruntime has no kernel on a CPU, where latpred runs files whatever the device. Export the model "
            "without it or in fp32, or give the PyTorch model."
        )
    said = re.sub("^onnxruntime cannot (load|run) the model: ", "", text)
    if not text.startswith("onnxruntime cannot run"):
        return UsageError(f"{file} cannot be run: {said}")
    sizes = ", ".join(f"{name} {' x '.join(map(str, one.shape))}" for name, one in feed.items())
    return UsageError(
        f"{file} cannot be run with {sizes}: {said}. If the export holds other sizes inside, give these with inputs= "
        "(seq= for tokens, image= for square pictures)."
    )
