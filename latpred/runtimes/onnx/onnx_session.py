"""Sessions of onnxruntime: which package is here, how a model is loaded, run and watched node by node.

Knows nothing of PyTorch's models (`onnx_export` does) nor of what a node costs.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from latpred.errors import MissingPackageError, RuntimeRefusalError
from latpred.runtimes.onnx.onnx_formulas import NCHWC, Value

_BLOCKED = re.compile(r"_nchwc(_token_\d+)?$")  # what follows, in the name of a node in blocks, its result's old name
_NORMALISED = "_bn"  # and comes before that where a normalisation became a convolution


class _Kernel(NamedTuple):
    """Weights of a convolution: their shape, and the number of groups."""

    shape: tuple[int, ...]
    groups: int


def in_blocks(proto: Any) -> bool:
    """Whether any node of a model works on blocks."""
    return any(node.domain == NCHWC for node in _nodes(proto.graph))


def unfilled(proto: Any, before: Any | None) -> Any:
    """A model with the weights of convolutions in the shapes, and groups, that they had before they lay in blocks."""
    if before is None:
        return proto
    kernels = _kernels(before.graph)
    shapes: dict[str, tuple[int, ...]] = {}
    changed = type(proto)()
    changed.CopyFrom(proto)
    for node in _nodes(changed.graph):
        kernel = kernels.get(_BLOCKED.sub("", node.name)) if (node.domain, node.op_type) == (NCHWC, "Conv") else None
        if kernel is None:
            continue
        shapes.update(zip(node.input[1:3], (kernel.shape, kernel.shape[:1]), strict=False))
        for attribute in node.attribute:
            if attribute.name == "group":
                attribute.i = kernel.groups
    for graph in _graphs(changed.graph):
        for tensor in graph.initializer:
            if tensor.name in shapes:
                tensor.dims[:] = shapes[tensor.name]
    return changed


class Blocks:
    """Tensors of one run that lie in blocks.

    Examples
    --------
    >>> from onnx import helper
    >>> blocks, x = Blocks(), Value((1, 20, 7, 7), "float")
    >>> node = helper.make_node("ReorderInput", ["x"], ["y"], domain=NCHWC)
    >>> (y,) = blocks.own(node, [x], [Value((1, 32, 7, 7), "float")])
    >>> y.shape
    (1, 20, 7, 7)
    >>> blocks.own(helper.make_node("Relu", ["y"], ["z"]), [y], [Value((1, 32, 7, 7), "float")]) == [y]
    True
    """

    def __init__(self) -> None:
        self._names: set[str] = set()

    def own(self, node: Any, inputs: Sequence[Value | None], outputs: Sequence[Value]) -> list[Value]:
        """Results of a node, with as many channels as the model has; nodes are given in the order of execution.

        Parameters
        ----------
        node : NodeProto
            With the weights that `unfilled` gives.
        inputs, outputs : sequence of Value
            Inputs as this gave them, outputs as they were executed.
        """
        read = [value for name, value in zip(node.input, inputs, strict=True) if name in self._names]
        if node.op_type == "ReorderOutput" or not (read or node.domain == NCHWC):
            return list(outputs)
        self._names.update(name for name in node.output if name)
        channels = _channels(node, inputs, read)
        # A block may be a dimension of its own, the last of five.
        return [
            value if channels is None else value._replace(shape=(value.shape[0], channels, *value.shape[2:4]))
            for value in outputs
        ]


def _channels(node: Any, inputs: Sequence[Value | None], read: Sequence[Value | None]) -> int | None:
    """Channels of what a node writes in blocks; `read` is what it reads in blocks. None where nothing tells."""
    if node.op_type == "Concat":
        return sum(value.shape[1] for value in read if value is not None)
    source = inputs[1 if node.op_type == "Conv" else 0]
    if source is None:
        return None
    if node.op_type == "Conv":
        return source.shape[0]
    last = node.op_type == "ReorderInput" and _number(node, "channels_last", 0)
    return source.shape[-1 if last else 1]


def _kernels(graph: Any) -> dict[str, _Kernel]:
    """Convolutions, and normalisations that may become some, by the name of their result."""
    shapes = {tensor.name: tuple(tensor.dims) for one in _graphs(graph) for tensor in one.initializer}
    found = {}
    for node in _nodes(graph):
        shape = shapes.get(node.input[1]) if len(node.input) > 1 else None
        if shape and node.op_type in ("Conv", "FusedConv"):
            found[node.output[0]] = _Kernel(shape, _number(node, "group", 1))
        elif shape and node.op_type == "BatchNormalization":
            found[node.output[0] + _NORMALISED] = _Kernel((shape[0], 1, 1, 1), shape[0])
    return found


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph and those within it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _nodes(graph: Any) -> Iterator[Any]:
    return (node for one in _graphs(graph) for node in one.node)


def _number(node: Any, name: str, default: int) -> int:
    return next((int(one.i) for one in node.attribute if one.name == name), default)


PIP = "pip install 'latpred[onnx]'"
GPU_PIP = "pip uninstall onnxruntime && pip install 'latpred[onnx-gpu]'"
# Distributions that install the same Python package, each over the other.
DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-qnn")
# What the CPU provider alone has kernels for; without these the graph is as the CUDA provider gets it.
CPU_ONLY = (
    "ConvActivationFusion",
    "ConvAddActivationFusion",
    "GemmActivationFusion",
    "NchwcTransformer",
    "NhwcTransformer",
)
CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
SILENT = 4
_KERNEL = "_kernel_time"
_MOST_TEXT = 500
_EXTERNAL = "weights.bin"


class Event(NamedTuple):
    """One node that was executed: its name, type, microseconds, and dtype and shape of each output."""

    name: str
    op_type: str
    us: float
    outputs: tuple[tuple[str, tuple[int, ...]], ...]


class Watched(NamedTuple):
    """The graph that onnxruntime made of a model, and what it executed in each run.

    before : the graph as it was before channels lay in blocks, None where none do.
    """

    proto: Any
    runs: tuple[tuple[Event, ...], ...]
    before: Any = None


def installed() -> dict[str, str]:
    """Versions of the distributions that offer onnxruntime here."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def missing() -> str | None:
    """None when models can be exported and run, else what is missing and how to get it."""
    lacking = [name for name in ("onnxruntime", "onnx", "onnxscript") if find_spec(name) is None]
    if not lacking:
        return None
    verb = "is" if len(lacking) == 1 else "are"
    return f"{' and '.join(lacking)} {verb} not installed; run: {PIP}"


def require() -> None:
    """Raise when onnxruntime or what it needs is not here."""
    problem = missing()
    if problem is not None:
        raise MissingPackageError(f"The onnxruntime runtime cannot be used: {problem}")


def session(
    model: bytes | str,
    *,
    target: str,
    threads: int,
    provider: str = CPU,
    device_id: int = 0,
    cuda_graph: bool = False,
    profile: Path | None = None,
    optimised: Path | None = None,
    weights_in: Path | None = None,
    layout: bool = True,
) -> Any:
    """A session with every optimisation that the target has.

    Parameters
    ----------
    model : bytes or str
        A serialised model, or the path of one.
    target : str
        Kind of device the graph is for; "cuda" on the CPU provider leaves out what only a CPU has kernels for.
    threads : int
        Threads within a node.
    provider, device_id : str, int
        What executes it.
    cuda_graph : bool
        Whether the CUDA provider captures what it runs, once for each "gpu_graph_id" of the options of a run.
    profile : Path, optional
        Prefix of the file in which `end_profiling` puts the time of every node.
    optimised : Path, optional
        File to write the graph to that is really run; its weights go beside it.
    weights_in : Path, optional
        Folder of the external weights of a model given as bytes.
    layout : bool
        Whether the graph may be laid out as the CPU likes it; that comes after all other optimisations.

    Raises
    ------
    RuntimeRefusalError
        When onnxruntime cannot load the model, with its reason.
    """
    import onnxruntime  # type: ignore[import-untyped]

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = SILENT
    settings.intra_op_num_threads = threads
    levels = onnxruntime.GraphOptimizationLevel
    settings.graph_optimization_level = levels.ORT_ENABLE_ALL if layout else levels.ORT_ENABLE_EXTENDED
    if profile is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(profile)
    if optimised is not None:
        settings.optimized_model_filepath = str(optimised)
        settings.add_session_config_entry("session.optimized_model_external_initializers_file_name", _EXTERNAL)
        settings.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    if weights_in is not None:
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights_in))
    left_out = list(CPU_ONLY) if target == "cuda" and provider == CPU else None
    cuda = {"device_id": str(device_id), "enable_cuda_graph": str(int(cuda_graph))}
    providers: list[Any] = [CPU] if provider == CPU else [(CUDA, cuda), CPU]
    try:
        return onnxruntime.InferenceSession(model, settings, providers=providers, disabled_optimizers=left_out)
    except Exception as error:  # onnxruntime's own exceptions share no base class
        raise RuntimeRefusalError(f"onnxruntime cannot load the model: {reason(error)}") from error


def run_options(graph_id: int | None = None) -> Any:
    """Options of a run that does not wait for the GPU, as far as onnxruntime can do without."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    if graph_id is not None:
        options.add_run_config_entry("gpu_graph_id", str(graph_id))
    return options


def watch(
    model: bytes | str,
    feeds: Sequence[Mapping[str, Any]],
    *,
    target: str,
    threads: int,
    weights_in: Path | None = None,
    between: Callable[[], object] = tuple,
) -> Watched:
    """Run a model once for each of the feeds with onnxruntime's profiler on; no file is left behind.

    `between` is called ahead of each run.
    """
    import onnx

    with tempfile.TemporaryDirectory(prefix="latpred-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        kept = folder / "optimised.onnx"
        running = session(
            model, target=target, threads=threads, profile=folder / "profile", optimised=kept, weights_in=weights_in
        )
        proto = onnx.load(str(kept), load_external_data=False)
        try:
            for feed in feeds:
                between()
                running.run(None, dict(feed))
        except Exception as error:
            raise RuntimeRefusalError(f"onnxruntime cannot run the model: {reason(error)}") from error
        finally:
            report = Path(running.end_profiling())
        del running  # another session follows, with weights of its own
        before = _before_blocks(model, folder, weights_in) if in_blocks(proto) else None
        return Watched(proto, _runs(json.loads(report.read_text())), before)


def _before_blocks(model: bytes | str, folder: Path, weights_in: Path | None) -> Any:
    """The graph of a model for a CPU as it is before channels lie in blocks."""
    import onnx

    kept = folder / "before.onnx"
    session(model, target="cpu", threads=1, optimised=kept, weights_in=weights_in, layout=False)
    return onnx.load(str(kept), load_external_data=False)


def feeds_of(running: Any, tensors: Sequence[Any]) -> dict[str, Any]:
    """Inputs of a session by name from tensors in its order."""
    names = [one.name for one in running.get_inputs()]
    return {name: tensor.detach().cpu().numpy() for name, tensor in zip(names, tensors, strict=True)}


def reason(error: Exception) -> str:
    """What onnxruntime says, without its codes and in one line."""
    text = " ".join(str(error).split())
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"^.*\) (?=ONNX Runtime)", "", text)  # where in its sources it gave up
    return text[:_MOST_TEXT]


def _runs(events: Sequence[Mapping[str, Any]]) -> tuple[tuple[Event, ...], ...]:
    """Events in the order of execution; those between two ends of a run belong to the later one."""
    runs: list[tuple[Event, ...]] = []
    current: list[Event] = []
    for event in events:
        if event.get("cat") == "Node" and str(event["name"]).endswith(_KERNEL):
            current.append(_event(event))
        elif event.get("cat") == "Session" and event["name"] == "model_run":
            runs.append(tuple(current))
            current = []
    return tuple(runs)


def _event(event: Mapping[str, Any]) -> Event:
    arguments = event["args"]
    outputs = tuple(
        (str(dtype), tuple(int(size) for size in shape))
        for one in arguments.get("output_type_shape", ())
        for dtype, shape in one.items()
    )
    return Event(str(event["name"])[: -len(_KERNEL)], str(arguments["op_name"]), float(event["dur"]), outputs)


def providers() -> tuple[str, ...]:
    """What this onnxruntime can execute on."""
    import onnxruntime

    return tuple(onnxruntime.get_available_providers())


def input_names(model: bytes | str) -> list[str]:
    """Names of a model's inputs, in order, without those that have a weight as their default."""
    import onnx

    proto = (
        onnx.load_model_from_string(model) if isinstance(model, bytes) else onnx.load(model, load_external_data=False)
    )
    weights = {tensor.name for tensor in proto.graph.initializer}
    return [value.name for value in proto.graph.input if value.name not in weights]
