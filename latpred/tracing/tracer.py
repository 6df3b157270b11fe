"""The entry of this package: a model, or its name, becomes a ModelGraph."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from latpred.errors import LatpredError, TraceError, UsageError
from latpred.graph import Line, ModelGraph, Op
from latpred.tracing import names
from latpred.tracing.derive import derived, example_call
from latpred.tracing.entry import place, unknown
from latpred.tracing.fastpath import enabled
from latpred.tracing.handlers import UnknowableError
from latpred.tracing.hostwork import HostWork
from latpred.tracing.inputs import Inputs, arguments, from_example, nbytes
from latpred.tracing.lines import Pass, demand_same, on_the_line, ops_exactly, ops_through, same_ops
from latpred.tracing.precisions import DTYPES, dtype_of
from latpred.tracing.twin import Twin, make_twin
from latpred.tracing.walk import Walk

_FORMATS = ("contiguous", "channels_last")
_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_LOCK = threading.RLock()


def trace(
    model: torch.nn.Module | str | ModelGraph,
    inputs: Any = None,
    *,
    seq: int | None = None,
    image: int | None = None,
    precision: str | None = None,
    memory_format: str = "contiguous",
    strict: bool = False,
) -> ModelGraph:
    """Walk a model without computing anything and say what one forward pass does, for every batch size.

    The model itself is never changed, moved or run: a twin of its structure on the meta device is walked, in evaluation
    mode and under inference mode whatever mode the model is in.

    Parameters
    ----------
    model : torch.nn.Module, str or ModelGraph
        A model on any device, a name (`latpred models` lists them), or a graph, which is returned.
    inputs : tensor, tuple, dict or callable, optional
        What the model is called with: one example batch (the first dimension of its first tensor is the batch, and so
        is that of every tensor which shares its size), or a function of the batch size. Of floating-point tensors
        only the shape matters. By default it follows from the model's config, default_cfg or first convolution.
    seq : int, optional
        Tokens, or samples of audio, when `inputs` is not given.
    image : int, optional
        Pixels of an image's side, when `inputs` is not given.
    precision : {"fp32", "tf32", "fp16", "bf16"}, optional
        As what the weights and floating-point inputs count; the model's own by default.
    memory_format : {"contiguous", "channels_last"}
        Layout of 4-d weights and inputs.
    strict : bool
        Refuse ops without a cost formula instead of estimating them from their bytes.

    Returns
    -------
    ModelGraph
        Every op with its work affine in batch, and the exact ops of batch 1 where they differ.

    Raises
    ------
    TraceError
        When the model cannot be walked; names the op and the module.
    UnknownOpError
        With `strict`, for an op without a formula.
    UnknownModelError
        When no model goes by the name.
    UsageError
        When an argument is wrong.

    Examples
    --------
    >>> import torch, latpred
    >>> graph = latpred.trace(torch.nn.Linear(64, 10), torch.zeros(1, 64))
    >>> graph.macs(batch=8), graph.launches()
    (5120, 1)
    """
    if isinstance(model, ModelGraph):
        return model
    _check(precision, memory_format, seq, image)
    name = model if isinstance(model, str) else type(model).__name__
    if isinstance(model, str):
        built = names.build(model, seq=seq, image=image)
        model = built.model
        given = (
            Inputs(lambda batch: built.inputs(batch, "meta"), built.input_kind, built.input_size)
            if inputs is None
            else from_example(inputs)
        )
    elif not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"an object of type {type(model).__name__} cannot be traced; give an nn.Module or a model's name"
        )
    else:
        given = derived(model, seq, image) if inputs is None else from_example(inputs)
    channels_last = memory_format == "channels_last"
    with _no_collection():
        twin = make_twin(model, DTYPES.get(precision or ""), channels_last)
        graph = Tracer(twin, given, channels_last).graph(name, precision, memory_format)
    if strict:
        _demand_known(graph)
    return graph


class Tracer:
    """The walks of one model: two for the line, one to see whether batch 1 is on it.

    A fourth walk is made of a model that issues other ops at batch 1, to watch its Python and memory there, or that
    keeps what it computed in its first forward pass.
    """

    def __init__(self, twin: Twin, inputs: Inputs, channels_last: bool) -> None:
        self._twin = twin
        self._inputs = inputs
        self._channels_last = channels_last

    def graph(self, name: str, precision: str | None, memory_format: str) -> ModelGraph:
        """Walk the model and put the walks together."""
        with _no_collection():
            return self._graph(name, precision, memory_format)

    def _graph(self, name: str, precision: str | None, memory_format: str) -> ModelGraph:
        three = self.walk(3)
        # The second walk is the watched one: what Python does only once, filling caches, is behind it.
        host = HostWork(self._twin.paths)
        two = self.walk(2, host)
        if not same_ops(two.entries, three.entries):
            three = self.walk(3)
        demand_same(two, three, host)
        ops = ops_through(two, three, host)
        one = self.walk(1)
        exact = None
        if not same_ops(one.entries, two.entries):
            watched = HostWork(self._twin.paths)
            exact = ops_exactly(self.walk(1, watched), watched)
        elif not on_the_line(ops, one, two, three, host):
            exact = ops_exactly(one, host)
        slope = three.input_bytes - two.input_bytes
        input_bytes = Line(two.input_bytes - 2 * slope, slope)
        return self._made(name, precision, memory_format, input_bytes, ops, exact)

    def graph_at(self, batch: int, name: str, precision: str | None) -> ModelGraph:
        """The graph of one batch alone: its counts do not depend on batch."""
        with _no_collection():
            self.walk(batch)
            host = HostWork(self._twin.paths)
            done = self.walk(batch, host)
            return self._made(name, precision, "contiguous", Line(done.input_bytes), ops_exactly(done, host), None)

    def _made(
        self,
        name: str,
        precision: str | None,
        memory_format: str,
        input_bytes: Line,
        ops: tuple[Op, ...],
        exact: tuple[Op, ...] | None,
    ) -> ModelGraph:
        return ModelGraph(
            model=name,
            input_kind=self._inputs.kind,
            input_size=self._inputs.size,
            precision=precision or _NAMES.get(self._twin.dtype, "fp32"),
            memory_format=memory_format,
            parameters=self._twin.parameters,
            parameter_bytes=self._twin.parameter_bytes,
            input_bytes=input_bytes,
            ops=ops,
            ops_at_one=exact,
            stack=stack(),
        )

    def walk(self, batch: int, host: HostWork | None = None) -> Pass:
        """One forward pass at one batch size."""
        walk, target = self.recorder(host), self.target()
        # A collection would run the finalizers of others, whose Python calls would be counted.
        with torch.inference_mode(), _LOCK, enabled(), _no_collection():
            args, options = arguments(self._inputs, batch, self._twin.dtype, self._channels_last)
            try:
                with walk, host or nullcontext():
                    target(*args, **options)
            except UnknowableError as error:
                raise TraceError(f"{error} in {self._where(error)}, {_ADVICE}") from None
            except LatpredError:
                raise
            except Exception as error:
                raise TraceError(self._failure(walk, error, batch)) from error
        return Pass(batch, walk.entries, walk.nested, nbytes(args, options))

    def recorder(self, host: HostWork | None) -> Walk:
        """What records one walk."""
        return Walk(host)

    def target(self) -> Callable[..., Any]:
        """What is called with the inputs: the model itself."""
        return self._twin.module

    def _failure(self, walk: Walk, error: Exception, batch: int) -> str:
        message = (" ".join(str(error).split()) or "no message").rstrip(".")
        op = f" at {walk.current}" if walk.current else ""
        return (
            f"the forward pass failed{op} in {self._where(error)} at batch {batch}: "
            f"{type(error).__name__}: {message}; check the model and the shapes of its inputs (inputs=, seq=, image=)"
            f"{self._several_inputs(batch)}"
        )

    def _several_inputs(self, batch: int) -> str:
        """What to call a model with that takes more than follows from it, where nobody said; part of a sentence."""
        if self._inputs.kind == "custom":
            return ""
        made = self._inputs.make(batch)
        call = example_call(self._twin.module, made if isinstance(made, dict) else ())
        return f"; it may need several, as in {call}" if call else ""

    def _where(self, error: BaseException) -> str:
        """The innermost module that the traceback passes through, and the line of the model's own code."""
        path, line, trail = "", "", error.__traceback__
        call = torch.nn.Module._call_impl.__code__
        while trail is not None:
            code = trail.tb_frame.f_code
            if code is call:
                path = self._twin.paths.get(id(trail.tb_frame.f_locals["self"]), path)
            elif not code.co_filename.startswith(_OWN):
                line = f" ({Path(code.co_filename).name}:{trail.tb_lineno})"
            trail = trail.tb_next
        return place(path) + line


_ADVICE = "which no trace can know; take that part out of forward, or trace the parts of the model on either side of it"
_OWN = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from searching all of torch's objects several times during a few milliseconds."""
    enabled_before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled_before:
            gc.enable()


def _check(precision: str | None, memory_format: str, seq: int | None, image: int | None) -> None:
    if precision is not None:
        dtype_of(precision)  # which says when there is no such precision
    if memory_format not in _FORMATS:
        raise UsageError(f"memory_format {memory_format!r} is not known; choose one of {', '.join(_FORMATS)}")
    for name, value in (("seq", seq), ("image", image)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UsageError(f"{name}={value!r} is not a length; give a whole number of at least 1")


def _demand_known(graph: ModelGraph) -> None:
    for op in (*graph.ops, *(graph.ops_at_one or ())):
        if op.estimated:
            raise unknown(op.name, op.module)


def stack() -> dict[str, str]:
    """Versions of what decides which ops a model issues."""
    versions = {"python": ".".join(map(str, sys.version_info[:3])), "torch": str(torch.__version__)}
    for name in ("transformers", "torchvision", "timm"):
        module = sys.modules.get(name)
        if module is not None:
            versions[name] = str(getattr(module, "__version__", ""))
    return versions
