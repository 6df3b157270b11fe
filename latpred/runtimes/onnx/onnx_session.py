"""Sessions of onnxruntime: which package is here, how a model is loaded, run and watched node by node.

Knows nothing of PyTorch's models (`onnx_export` does) nor of what a node costs.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from latpred import host
from latpred.errors import MissingPackageError, RuntimeRefusalError, one_line
from latpred.runtimes.base import out_of_memory
from latpred.runtimes.onnx.onnx_formulas import NCHWC

COMPILED = ("onnxruntime", "onnx")  # whose parts may not fit this machine
PACKAGES = (*COMPILED, "onnxscript")
PIP = "pip install 'latpred[onnx]'"
PIP_ON_GPU = "pip install 'latpred[onnx-gpu]'"
GPU_PIP = f"pip uninstall onnxruntime && {PIP_ON_GPU}"
# Distributions that install the same Python package, each over the other.
DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-qnn")
LAYOUTS = ("NchwcTransformer", "NhwcTransformer")  # lay channels in blocks, or last
# What the CPU provider alone has kernels for; without these the graph is as the CUDA provider gets it.
CPU_ONLY = (
    "DynamicQuantizeMatMulFusion",
    "MatMulIntegerToFloatFusion",
    "ConvActivationFusion",
    "ConvAddActivationFusion",
    "GemmActivationFusion",
    *LAYOUTS,
)
CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
SILENT = 4
_KERNEL = "_kernel_time"
_EXTERNAL = "weights.bin"
_MOST_TEXT = 500


class Event(NamedTuple):
    """One node that was executed: its name, type, microseconds, and dtype and shape of each output.

    And those of its inputs, without weights that were packed.
    """

    name: str
    op_type: str
    us: float
    outputs: tuple[tuple[str, tuple[int, ...]], ...]
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Watched(NamedTuple):
    """The graph that onnxruntime made of a model, and what it executed in each run."""

    proto: Any
    runs: tuple[tuple[Event, ...], ...]
    before: Any = None  # the graph before channels lay in blocks, None where none do


def installed() -> dict[str, str]:
    """Versions of the distributions that offer onnxruntime here."""
    return host.versions(*DISTRIBUTIONS)


def absent() -> list[str]:
    """The packages that are needed and not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


def missing(target: str = "cpu", *, imports: bool = True) -> str | None:
    """None when models can be exported and run on a kind of device, else what is missing and how to get it.

    Without `imports`, which take half a second, packages that are installed are believed to work.
    """
    lacking = absent()
    if lacking:
        verb = "is" if len(lacking) == 1 else "are"
        return f"{' and '.join(lacking)} {verb} not installed; run: {_pip()}"
    for name in COMPILED if imports else ():
        try:
            import_module(name)
        except Exception as error:  # compiled parts that do not fit raise what they like
            distribution = next(iter(installed()), name) if name == "onnxruntime" else name
            again = f"pip install --force-reinstall --no-deps {distribution}"
            return f"{name} cannot be imported: {one_line(error)}; run: {again}"
    there = target == "cpu" or CUDA in providers()
    return None if there else f"this onnxruntime has no CUDA provider; run: {GPU_PIP}"


def _pip() -> str:
    """What installs it: beside a GPU the distribution with a CUDA provider, which the plain one would overwrite."""
    with suppress(Exception):  # a torch that cannot be imported raises what it likes
        import torch

        if torch.cuda.is_available():
            return PIP_ON_GPU
    return PIP


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
    gpu: int | None = None,
    cuda_graph: bool = False,
    tf32: bool = False,
    profile: Path | None = None,
    optimised: Path | None = None,
    weights_in: Path | None = None,
    left_out: Sequence[str] = (),
) -> Any:
    """A session of a serialised model, or of the path of one; a model that onnxruntime cannot load is refused.

    threads : those within a node.
    target : "cuda" without a `gpu` (its index) leaves out what only a CPU has kernels for.
    cuda_graph : whether the CUDA provider captures what it runs, once for each "gpu_graph_id" of a run's options.
    tf32 : whether float32 may be multiplied in TF32 on a GPU.
    profile : prefix of the file in which `end_profiling` puts the time of every node.
    optimised : file for the graph that is really run, its weights beside it.
    weights_in : folder of the weights that a serialised model keeps outside of it.
    left_out : names of optimisations that are not made.
    """
    import onnxruntime  # type: ignore[import-untyped]

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = SILENT
    settings.intra_op_num_threads = threads
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    if profile is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(profile)
    if optimised is not None:
        settings.optimized_model_filepath = str(optimised)
        settings.add_session_config_entry("session.optimized_model_external_initializers_file_name", _EXTERNAL)
        settings.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    if weights_in is not None:
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights_in))
    cpu_only = CPU_ONLY if target == "cuda" and gpu is None else ()
    options = {"device_id": gpu, "enable_cuda_graph": int(cuda_graph), "use_tf32": int(tf32)}  # which it does by itself
    cuda = (CUDA, {name: str(value) for name, value in options.items()})
    providers: list[Any] = [CPU] if gpu is None else [cuda, CPU]
    try:
        # Without a fallback: what fails on the GPU would be run again on the CPU, and be timed there.
        more = {"disabled_optimizers": [*left_out, *cpu_only], "enable_fallback": 0}
        made = onnxruntime.InferenceSession(model, settings, providers=providers, **more)
    except Exception as error:  # onnxruntime's own exceptions share no base class
        raise failure(error, "load") from error
    if gpu is not None and CUDA not in made.get_providers():  # it goes on without a word, on the CPU
        raise MissingPackageError(
            "onnxruntime's CUDA provider cannot be loaded here, which needs the CUDA and cuDNN that it was built for; "
            f"see what `import onnxruntime; onnxruntime.preload_dlls()` says, or run: {GPU_PIP}"
        )
    return made


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
    left_out: Sequence[str] = (),
    between: Callable[[], object] = tuple,
) -> Watched:
    """Run a model once for each of the feeds with onnxruntime's profiler on; no file is left behind.

    `between` is called ahead of each run.
    """
    import onnx

    with tempfile.TemporaryDirectory(prefix="latpred-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        kept = folder / "optimised.onnx"
        files: dict[str, Any] = {"profile": folder / "profile", "optimised": kept, "weights_in": weights_in}
        running = session(model, target=target, threads=threads, left_out=left_out, **files)
        proto = onnx.load(str(kept), load_external_data=False)
        try:
            for feed in feeds:
                between()
                running.run(None, dict(feed))
        except Exception as error:
            raise failure(error, "run") from error
        finally:
            report = Path(running.end_profiling())
        del running  # another session follows, with weights of its own
        before = None
        if any(node.domain == NCHWC for node in nodes_of(proto)):
            kept = folder / "before.onnx"
            unblocked = (*left_out, *LAYOUTS, "ConvAddActivationFusion")  # which follows these
            session(model, target="cpu", threads=1, optimised=kept, weights_in=weights_in, left_out=unblocked)
            before = onnx.load(str(kept), load_external_data=False)
        return Watched(proto, _runs(json.loads(report.read_text(encoding="utf-8"))), before)


def graphs_within(graph: Any) -> Iterator[Any]:
    """A graph and those within its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs_within(attribute.g)


def weights_of(graph: Any) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Names, ONNX's numbers for dtypes, and shapes of the weights that a graph itself has."""
    return ((one.name, one.data_type, tuple(one.dims)) for one in graph.initializer)


def nodes_of(proto: Any) -> Iterator[Any]:
    """The nodes of a model, those of graphs within them included."""
    return (node for graph in graphs_within(proto.graph) for node in graph.node)


def feed_of(names: Sequence[str], tensors: Sequence[Any]) -> dict[str, Any]:
    """Inputs of a run by name, from tensors in the order of the names."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in zip(names, tensors, strict=True)}


def failure(error: Exception, doing: str) -> Exception:
    """What to raise where onnxruntime cannot load, run or capture a model: a refusal, unless memory ran out."""
    if out_of_memory(error):
        return MemoryError(reason(error))
    return RuntimeRefusalError(f"onnxruntime cannot {doing} the model: {reason(error)}")


def reason(error: Exception) -> str:
    """What onnxruntime says, without its codes and in one line."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", one_line(error))
    text = re.sub(r"^.*\) (?=ONNX Runtime)", "", text)  # where in its sources it gave up
    return text[:_MOST_TEXT]


def _runs(events: Sequence[Mapping[str, Any]]) -> tuple[tuple[Event, ...], ...]:
    """Events in the order of execution; those between two ends of a run belong to the later one."""
    runs: list[tuple[Event, ...]] = []
    current: list[Event] = []
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith(_KERNEL):
            told = event["args"]
            outputs, inputs = (_shapes(told.get(f"{end}_type_shape", ())) for end in ("output", "input"))
            current.append(
                Event(name.removesuffix(_KERNEL), str(told["op_name"]), float(event["dur"]), outputs, inputs)
            )
        elif event.get("cat") == "Session" and name == "model_run":
            runs.append(tuple(current))
            current = []
    return tuple(runs)


def _shapes(told: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((str(dtype), tuple(int(size) for size in shape)) for one in told for dtype, shape in one.items())


def providers() -> tuple[str, ...]:
    import onnxruntime

    return tuple(onnxruntime.get_available_providers())


def input_names(model: bytes | str) -> list[str]:
    """Names of a model's inputs, in order."""
    import onnx

    proto = (
        onnx.load_model_from_string(model) if isinstance(model, bytes) else onnx.load(model, load_external_data=False)
    )
    return [value.name for value in inputs_of(proto)]


def inputs_of(proto: Any) -> list[Any]:
    """A model's inputs, without those that have a weight as their default."""
    weights = {name for name, *_ in weights_of(proto.graph)}
    return [value for value in proto.graph.input if value.name not in weights]
