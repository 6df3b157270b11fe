"""`.onnx` files as models: what onnxruntime runs of one, and what is wrong with one that it cannot run.

The first dimension of the inputs is the batch where it is open; a file with a fixed one holds for that batch alone.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from latpred.errors import LatpredError, RuntimeRefusalError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.runtimes import graph_store
from latpred.runtimes.onnx import onnx_session

SUFFIX = ".onnx"
TOKENS, PIXELS, CHANNELS = 128, 224, 3
_PRECISIONS = {"float16": "fp16", "bfloat16": "bf16"}


def is_file(model: object) -> bool:
    """Whether a model is named by the path of an .onnx file.

    >>> is_file("models/net.onnx"), is_file("resnet50")
    (True, False)
    """
    return isinstance(model, (str, os.PathLike)) and str(os.fspath(model)).lower().endswith(SUFFIX)


def walk_file(
    path: str | os.PathLike[str],
    inputs: Any = None,
    *,
    target: str,
    options: str,
    seq: int | None = None,
    image: int | None = None,
    precision: str | None = None,
) -> ModelGraph:
    """What onnxruntime runs of a file.

    Parameters
    ----------
    path : str or path
        The file; its external weights lie beside it.
    inputs : tuple or dict, optional
        Example tensors, for inputs with open sizes other than the batch.
    target : str
        Kind of device: "cpu" or "cuda".
    options : str
        What else the result depends on; see `Walker.options`.
    seq, image : int, optional
        Tokens, or pixels of a side, where those are open.
    precision : str, optional
        Only that of the file is possible.

    Raises
    ------
    UsageError
        When there is no such file, it is damaged, its weights are missing, its operators are newer than onnxruntime, an
        input has a size that nobody gave, or another precision is asked for.
    MissingPackageError
        When onnxruntime is not installed.
    """
    file = check_file(path)
    proto = _load(file)
    held = _precision(proto)
    if precision not in (None, held) and (precision, held) != ("tf32", "fp32"):
        raise UsageError(f"{file} holds a model in {held}; convert the file to predict {precision}.")
    stub = _stub(file, proto, precision or held)
    given = f"{_digest(file, proto)} {seq} {image} {_signature(inputs)}"
    return graph_store.kept(
        stub,
        "onnxruntime",
        target,
        f"{options}; {given}",
        lambda: _walked(file, proto, stub, inputs, target, seq, image),
    )


def check_file(path: str | os.PathLike[str], runtime: str = "onnxruntime") -> Path:
    """The path of a file that is there, once onnxruntime is too.

    Raises
    ------
    UsageError
        When there is no such file, or the runtime does not run ONNX.
    MissingPackageError
        When onnxruntime is not installed.
    """
    file = Path(path)
    if not file.is_file():
        raise _missing(file)
    if not runtime.startswith("onnxruntime"):
        raise refuse(path, runtime)
    onnx_session.require()
    return file


def _missing(file: Path) -> UsageError:
    beside = sorted(one.name for one in file.parent.glob(f"*{SUFFIX}")) if file.parent.is_dir() else []
    there = f" There are: {', '.join(beside[:5])}." if beside else " Check the path, or export the model to it."
    return UsageError(f"There is no file {file}.{there}")


def refuse(path: str | os.PathLike[str], runtime: str) -> UsageError:
    """The error of asking another runtime for a file, or for one that is not there."""
    if not Path(path).is_file():
        return _missing(Path(path))
    return UsageError(
        f"{path} is an ONNX graph, which {runtime} cannot run. Ask for runtime='onnxruntime' "
        "(--runtime onnxruntime), or give the PyTorch model."
    )


def _walked(
    file: Path, proto: Any, stub: ModelGraph, inputs: Any, target: str, seq: int | None, image: int | None
) -> ModelGraph:
    import msgspec

    from latpred.runtimes.onnx import onnx_graph

    batch = _fixed_batch(proto)
    sizes = onnx_graph.BATCHES if batch is None else (batch,)
    feeds = [_feed(file, proto, size, inputs, seq, image) for size in sizes]
    try:
        watched = onnx_session.watch(
            _named(proto, file), feeds, target=target, threads=1, weights_in=file.resolve().parent
        )
        found = onnx_graph.walked(watched, feeds, target)
    except RuntimeRefusalError as error:
        raise _explained(error, file, proto) from error
    return msgspec.structs.replace(
        stub,
        ops=found.ops,
        ops_at_one=found.ops_at_one,
        input_bytes=found.input_bytes,
        parameter_bytes=found.weight_bytes,
        target=target,
        stack=onnx_session.installed(),
        only=() if batch is None else (batch,),
        notes=() if batch is None else (f"the file takes batch {batch} only: nothing is known of any other",),
    )


def _load(file: Path) -> Any:
    """The graph without its external weights."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        proto = onnx.load(str(file), load_external_data=False)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}. Check who may read it.") from error
    except (DecodeError, ValueError) as error:
        raise UsageError(
            f"{file} is no whole ONNX model: it is truncated or damaged ({error}). Export or copy it again."
        ) from error
    if not proto.ir_version or not proto.graph.node:
        raise UsageError(f"{file} is no whole ONNX model: it holds no graph. Export or copy it again.")
    for name, place in _external(proto):
        weights = file.parent / place
        if not weights.is_file():
            raise UsageError(
                f"{file} keeps its weights (among them {name}) in {place}, which is not in "
                f"{weights.resolve().parent}. Copy that file beside it, or export the model again."
            )
    return proto


def _external(proto: Any) -> Iterator[tuple[str, str]]:
    """Weights in other files, and those files."""
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                yield tensor.name, entry.value


def _stub(file: Path, proto: Any, precision: str) -> ModelGraph:
    """All of the graph that is known without running it."""
    from latpred.graph.graph import Affine

    return ModelGraph(
        model=file.name,
        input_kind="custom",
        input_size=0,
        precision=precision,
        memory_format="contiguous",
        parameters=sum(_count(tensor) for tensor in proto.graph.initializer if _is_floating(tensor)),
        parameter_bytes=0,
        input_bytes=Affine(0),
        ops=(),
        runtime="onnxruntime",
    )


def _count(tensor: Any) -> int:
    return prod(tensor.dims)


def _is_floating(tensor: Any) -> bool:
    return _dtype(tensor.data_type).startswith(("float", "bfloat"))


def _dtype(code: int) -> str:
    import onnx

    return str(onnx.helper.tensor_dtype_to_np_dtype(code).name)


def _precision(proto: Any) -> str:
    """Precision in which most weights are held."""
    totals: dict[str, int] = {"float32": 0}
    for tensor in proto.graph.initializer:
        if _is_floating(tensor):
            totals[_dtype(tensor.data_type)] = totals.get(_dtype(tensor.data_type), 0) + _count(tensor)
    return _PRECISIONS.get(max(totals, key=lambda name: totals[name]), "fp32")


def _digest(file: Path, proto: Any) -> str:
    """Of the file's bytes, and of when files beside it changed."""
    parts = [hashlib.sha256(file.read_bytes()).hexdigest()]
    for place in sorted({place for _, place in _external(proto)}):
        state = (file.parent / place).stat()
        parts.append(f"{place} {state.st_size} {state.st_mtime_ns}")
    return "; ".join(parts)


def _signature(inputs: Any) -> str:
    from latpred.runtimes.onnx.onnx_export import tensors_of

    if inputs is None:
        return ""
    return str([(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors_of(_several(inputs))])


def _several(inputs: Any) -> Any:
    return inputs if isinstance(inputs, (tuple, list, Mapping)) else (inputs,)


def _inputs(proto: Any) -> list[Any]:
    weights = {tensor.name for tensor in proto.graph.initializer}
    return [value for value in proto.graph.input if value.name not in weights]


def _sizes(value: Any) -> list[int | None]:
    """Sizes of an input, None where they are open; -1 is one too."""
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]
    return [size if size is not None and size >= 0 else None for size in sizes]


def _fixed_batch(proto: Any) -> int | None:
    """The batch of a file whose inputs leave none open."""
    leading = [sizes[0] for value in _inputs(proto) if (sizes := _sizes(value))]
    return leading[0] if leading and all(size is not None for size in leading) else None


def _feed(file: Path, proto: Any, batch: int, inputs: Any, seq: int | None, image: int | None) -> dict[str, Any]:
    import numpy as np

    _demand_used(file, proto, inputs, seq, image)
    if inputs is not None:
        return _given(file, proto, batch, inputs)
    feed = {}
    for value in _inputs(proto):
        if not value.type.HasField("tensor_type"):
            raise UsageError(f"{file}: input {value.name!r} is no tensor. Export the model with tensors as its inputs.")
        sizes = _sizes(value)
        dtype = np.dtype(_dtype(value.type.tensor_type.elem_type))
        if 0 in sizes:
            raise UsageError(
                f"{file}: input {value.name!r} has a size of 0 ({_written(value)}), so it does no work. Export the "
                "model from an example that is not empty."
            )
        shape = [batch if index == 0 and size is None else size for index, size in enumerate(sizes)]
        filled = _filled(shape, dtype, seq, image)
        if filled is None:
            raise UsageError(
                f"{file}: input {value.name!r} has open sizes besides the batch ({_written(value)}). Give "
                "inputs= with example tensors (seq= for tokens, image= for square pictures)."
            )
        try:
            feed[value.name] = np.ones(filled, dtype=dtype)
        except (MemoryError, ValueError):
            size = " x ".join(map(str, filled))
            raise UsageError(
                f"{file}: input {value.name!r} of {size} does not fit into memory. Export the model for smaller "
                "inputs, or with open sizes."
            ) from None
    return feed


def _demand_used(file: Path, proto: Any, inputs: Any, seq: int | None, image: int | None) -> None:
    """Refuse sizes that the file's inputs leave nothing for."""
    shapes = [] if inputs is not None else [_sizes(v) for v in _inputs(proto) if v.type.HasField("tensor_type")]
    for name, value, dims in (("seq", seq, 2), ("image", image, 4)):
        if value is not None and not any(len(shape) == dims and None in shape[1:] for shape in shapes):
            why = "inputs= has its size" if inputs is not None else "no input has such a size open"
            raise UsageError(f"{file}: {name}={value} changes nothing, since {why}. Leave it out.")


def _filled(shape: list[int | None], dtype: Any, seq: int | None, image: int | None) -> list[int] | None:
    """A shape whose open sizes are tokens or pixels; None where they are neither."""
    usual: list[int] | None = None
    if len(shape) == 2 and (dtype.kind in "iub" or seq is not None):
        usual = [1, seq or TOKENS]
    elif len(shape) == 4 and dtype.kind == "f":
        usual = [1, CHANNELS, image or PIXELS, image or PIXELS]
    if usual is None:
        return None if any(size is None for size in shape) else [size for size in shape if size is not None]
    return [given if size is None else size for size, given in zip(shape, usual, strict=True)]


def _given(file: Path, proto: Any, batch: int, inputs: Any) -> dict[str, Any]:
    import torch

    from latpred.runtimes.onnx.onnx_export import tensors_of
    from latpred.tracing.inputs import from_example, real

    names = [value.name for value in _inputs(proto)]
    several = _several(inputs)
    tensors = tensors_of(real(from_example(several).make(batch), torch.float32))
    if isinstance(several, Mapping):
        tensors = [
            tensor for _, tensor in sorted(zip(several, tensors, strict=True), key=lambda p: _place(names, p[0]))
        ]
        known = set(several) <= set(names)
    else:
        known = True
    if not known or len(tensors) != len(names):
        raise UsageError(f"{file} takes {', '.join(names)}; give inputs= with one tensor for each of them.")
    return {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}


def _place(names: list[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


def _written(value: Any) -> str:
    dims = value.type.tensor_type.shape.dim
    return " x ".join(str(dim.dim_value) if dim.HasField("dim_value") else (dim.dim_param or "?") for dim in dims)


def _named(proto: Any, file: Path) -> bytes | str:
    """The model with a name of its own for every node, by which onnxruntime reports them."""
    seen: set[str] = set()
    for index, node in enumerate(_all_nodes(proto.graph)):
        if not node.name or node.name in seen:
            node.name = f"{node.op_type}_latpred_{index}"
        seen.add(node.name)
    try:
        return bytes(proto.SerializeToString())
    except ValueError:  # 2 GB and more within one file, which protobuf reads but does not write
        return str(file)


def _all_nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _all_nodes(attribute.g)


def _explained(error: RuntimeRefusalError, file: Path, proto: Any) -> LatpredError:
    """An error of onnxruntime in terms of the file."""
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
    return UsageError(f"{file} cannot be run: {text.removeprefix('onnxruntime cannot ')}")
