"""The entry of this package: a model, or its name, becomes a ModelGraph."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from latpred.errors import LatpredError, TraceError, UsageError
from latpred.graph.dtypes import DTYPES, dtype_of, precision_name
from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.sandbox.own_thread import uncompiled, without_modes
from latpred.sandbox.restore import put_back
from latpred.tracing.affine_ops import TracePass, demand_same, in_line, is_affine, ops_exactly, ops_through, same_ops
from latpred.tracing.handlers import HANDLERS, UnknowableError
from latpred.tracing.inputs import (
    Inputs,
    arguments,
    demand_one,
    demand_positions,
    derived,
    example_call,
    from_example,
    is_function,
    nbytes,
    sequence_first,
    tensors_in,
)
from latpred.tracing.meta_module import MetaModule, enabled, make_meta_module, usual_dtype
from latpred.tracing.op_record import CACHE, Kind, OpRecord, describe, place, unknown
from latpred.tracing.python_calls import HostWork
from latpred.zoo import names

_NO_OPTIONS: dict[str, Any] = {}
_HANDLERS = tuple(HANDLERS[kind] for kind in Kind)  # by number: a dict would ask the kind for its hash at every op


class TraceRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops issued while it is active.

    Parameters
    ----------
    host : HostWork or None
        Watches the Python between the ops and the memory they hold, at some cost.

    Attributes
    ----------
    entries : list[Entry]
        One for each op, in order.
    nested : list[bool]
        Whether another op issued it, rather than Python.
    current : str
        Name of the op being handled, "" between ops.
    stale : set[int]
        Storages of real tensors whose values are no longer known.
    generator : torch.Generator
        Gives the random numbers that the walk needs.
    value : tuple of int and Tensor, or None
        The last value that was made a tensor of, and the position of its entry.
    """

    def __init__(self, host: HostWork | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[OpRecord] = []
        self.nested: list[bool] = []
        self.current = ""
        self.stale: set[int] = set()
        self.value: tuple[int, torch.Tensor] | None = None
        self.known, self.infos = CACHE.tables()
        self.generator = torch.Generator().manual_seed(0)
        self._host = host
        self._depth = 0
        self._inner = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler, seconds of work, to keep this mode out of compiled code.
        return False

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        host = self._host
        if host is None or self._depth:
            return self._handle(func, args, kwargs or _NO_OPTIONS)
        host.pause()
        try:
            return self._handle(func, args, kwargs or _NO_OPTIONS)
        finally:
            host.resume()

    def _handle(self, func: OpOverload[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        info = self.infos.get(func)
        if info is None:
            info = self.infos[func] = describe(func)
        self.current = info.name
        out = _HANDLERS[info.kind](self, func, info, args, options)
        self.current = ""
        return out

    @property
    def within(self) -> bool:
        """Whether what is handled is part of another op."""
        return self._depth > 0

    def record(self, entry: OpRecord, out: Any) -> Any:
        """Keep one op's entry and pass its result on."""
        self.entries.append(entry)
        if self._depth:
            self.nested.append(self._inner > 0)
            self._inner += 1
        else:
            self.nested.append(False)
        if self._host is not None:
            self._host.after(entry, out)
        return out

    def inside(self, function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Call a function whose own ops are recorded as parts of the current one."""
        if not self._depth:
            self._inner = 0
        self._depth += 1
        try:
            with self:
                return function(*args, **options)
        finally:
            self._depth -= 1


_FORMATS = ("contiguous", "channels_last")
_LOCK = threading.RLock()
COMPILED = "the model is compiled with torch.compile and priced as eager runs it; for compiled ask for runtime compile"
FAR = 64  # the largest batch that is walked where no larger one is asked for
MOST_IDS = 2**15  # integers are computed with: beyond so many of them a walk takes several times as long
FIXED_INPUTS = "inputs= gives the same inputs whatever the batch: every batch is predicted as that one"
SEQUENCE_FIRST = (
    "{} has batch_first=False, so the second dimension of its inputs is its batch, and the first was taken for it: "
    "build it with batch_first=True, or give inputs= as a function of the batch"
)
NO_LINE = "the model's work is no line in batch"


@without_modes()
def trace(
    model: torch.nn.Module | str | ModelGraph,
    inputs: Any = None,
    *,
    seq: int | None = None,
    image: int | None = None,
    precision: str | None = None,
    memory_format: str = "contiguous",
    strict: bool = False,
    batches: Sequence[int] = (),
) -> ModelGraph:
    """Walk a model without computing anything and say what one forward pass does, for every batch size.

    The model itself is never changed, moved or run: a twin of its structure on the meta device is walked, in evaluation
    mode and under inference mode whatever mode the model is in. What the model holds (caches, lists, counters, objects
    written in Python) is copied with it, and what the code of its classes and functions keeps elsewhere is put back;
    see "What a prediction leaves alone" in docs/limits.md for the few things that cannot be.

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
    precision : {"fp32", "tf32", "fp16", "bf16", "fp64"}, optional
        As what the weights and floating-point inputs count; the model's own by default.
    memory_format : {"contiguous", "channels_last"}
        Layout of 4-d weights and inputs.
    strict : bool
        Refuse ops without a cost formula instead of estimating them from their bytes.
    batches : sequence of int
        Batch sizes that will be asked for. A model whose work is no line in batch, or that takes certain batch sizes
        alone, is walked at each of them.

    Returns
    -------
    ModelGraph
        Every op with its work affine in batch, and the exact ops of batch 1 where they differ. Where that line misses a
        larger batch, its `notes` say so.

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
    demand_one(inputs, seq, None if isinstance(model, str) else image)  # by its name a model is built for a size
    if isinstance(model, str) and not names.is_file(model):
        with usual_dtype():
            return _traced(model, inputs, seq, image, precision, memory_format, strict, batches)
    return _traced(model, inputs, seq, image, precision, memory_format, strict, batches)


def _traced(
    model: torch.nn.Module | str,
    inputs: Any,
    seq: int | None,
    image: int | None,
    precision: str | None,
    memory_format: str,
    strict: bool,
    batches: Sequence[int],
) -> ModelGraph:
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
    if given.kind == "seq":
        demand_positions(model, given.size)
    channels_last = memory_format == "channels_last"
    with _no_collection():
        said = (name, precision, memory_format)
        graph = _walked(model, given, DTYPES.get(precision or ""), channels_last, said, batches)
    if strict:
        _demand_known(graph)
    if inputs is not None and not is_function(inputs) and sequence_first(model):
        return msgspec.structs.replace(graph, notes=(*graph.notes, SEQUENCE_FIRST.format(name)))
    return graph


def _walked(
    model: torch.nn.Module,
    given: Inputs,
    dtype: torch.dtype | None,
    channels_last: bool,
    said: tuple[str, str | None, str],
    batches: Sequence[int],
) -> ModelGraph:
    """The graph of a model; one that does not bear a second forward pass, as with a cache that grows, starts anew.

    A model that fails then as well takes certain batch sizes alone, or none.
    """

    def renew() -> MetaModule:
        return make_meta_module(model, dtype, channels_last)

    def along(tracer: Tracer) -> ModelGraph | None:
        try:
            return tracer.noted(tracer.graph(*said, batches))
        except TraceError:
            return None

    graph = along(Tracer(renew(), given, channels_last)) or along(Tracer(renew(), given, channels_last, renew))
    if graph is not None:
        return graph
    tracer = Tracer(renew(), given, channels_last)
    return tracer.noted(tracer.only(batches or (given.batch,), *said))


def as_written(graph: ModelGraph) -> ModelGraph:
    """A graph without the word that its model was compiled."""
    if COMPILED not in graph.notes:
        return graph
    return msgspec.structs.replace(graph, notes=tuple(note for note in graph.notes if note != COMPILED))


class Tracer:
    """The walks of one model: at batch 2, at a large one, and at 1 to see whether all three are on one line.

    Where they are not, a walk at 3 tells whether it is batch 1 that differs, or whether there is no line. One more is
    made of a model that issues other ops at batch 1, to watch its Python and memory there, or that keeps what it
    computed in its first forward pass.
    """

    def __init__(
        self, meta_model: MetaModule, inputs: Inputs, channels_last: bool, renew: Callable[[], MetaModule] | None = None
    ) -> None:
        self._meta_model = meta_model
        self._renew = renew  # makes the twin for the next walk, where each is to have its own
        self._inputs = inputs
        self._channels_last = channels_last
        self.compiled = meta_model.compiled  # whether some of it would run under torch.compile

    def graph(
        self, name: str, precision: str | None, memory_format: str, batches: Sequence[int] | None = None
    ) -> ModelGraph:
        """Walk the model and put the walks together; with `batches` look at large ones, and at each without a line."""
        with self.alone():
            if batches is None:
                return self._line(name, precision, memory_format, 3)[0]
            far = self._far(batches)
            graph, straight = self._line(name, precision, memory_format, far, asked=far <= max(batches, default=0))
            if straight:
                fixed = self._inputs.kind == "custom" and not graph.input_bytes.per_sample
                return msgspec.structs.replace(graph, notes=(FIXED_INPUTS,)) if fixed else graph
            sizes = dict.fromkeys(batches or (far,))
            walked = {batch: self._alone(batch, name, precision, memory_format) for batch in sizes}
            seen = _listed(batches) if batches else f"1, 2, 3 and {far} (more with trace(..., batches=[...]))"
            note = f"{NO_LINE}: walked at {seen}; what is said of any other batch is a guess"
            return msgspec.structs.replace(graph, walked=walked, notes=(note,))

    def graph_at(self, batch: int, name: str, precision: str | None) -> ModelGraph:
        """The graph of one batch alone: its counts do not depend on batch."""
        with self.alone():
            return self._exactly(batch, name, precision, "contiguous")

    def only(self, batches: Sequence[int], name: str, precision: str | None, memory_format: str) -> ModelGraph:
        """The graph of a model that takes certain batch sizes alone, or does other work at each."""
        graphs: dict[int, ModelGraph] = {}
        with self.alone():
            for batch in batches:
                try:
                    graphs[batch] = self._alone(batch, name, precision, memory_format)
                except TraceError as error:
                    if not graphs:
                        raise
                    raise TraceError(f"{error}; it takes batch {_listed(graphs)}: ask for that alone") from error
        taken = tuple(sorted(graphs))
        note = f"walked at batch {_listed(taken)} alone: nothing is known of any other batch"
        walked = graphs if len(graphs) > 1 else {}
        return msgspec.structs.replace(graphs[taken[0]], only=taken, walked=walked, notes=(note,))

    def _alone(self, batch: int, name: str, precision: str | None, memory_format: str) -> ModelGraph:
        return msgspec.structs.replace(self._exactly(batch, name, precision, memory_format), only=(batch,))

    def _exactly(self, batch: int, name: str, precision: str | None, memory_format: str) -> ModelGraph:
        self.walk(batch)
        host = HostWork(self._meta_model.paths)
        done = self.walk(batch, host)
        return self._made(name, precision, memory_format, Affine(done.input_bytes), ops_exactly(done, host), None)

    def _line(
        self, name: str, precision: str | None, memory_format: str, far: int, *, asked: bool = False
    ) -> tuple[ModelGraph, bool]:
        """The graph of the line through batch 2 and a larger one, and whether the walk at `far` is on it."""
        large = self._attempt(far) if far > 3 else None
        three = self.walk(3) if large is None else None
        # The second walk is the watched one: what Python does only once, filling caches, is behind it.
        host = HostWork(self._meta_model.paths)
        two = self.walk(2, host)
        if large is not None and not same_ops(two.entries, large.entries):
            large = self.walk(far)
        one = self.walk(1)

        def made(other: TracePass, ops: tuple[Op, ...], exact: tuple[Op, ...] | None) -> ModelGraph:
            slope = (other.input_bytes - two.input_bytes) // (other.batch - 2)
            input_bytes = Affine(two.input_bytes - 2 * slope, slope)
            return self._made(name, precision, memory_format, input_bytes, ops, exact)

        if large is not None and in_line(one, two, large):
            ops = ops_through(two, large, host)
            if is_affine(ops, one, two, large, host):
                return made(large, ops, None), True
        three = three or self.walk(3)
        if not same_ops(two.entries, three.entries):
            three = self.walk(3)
        demand_same(two, three, host)
        ops = ops_through(two, three, host)
        graph = made(three, ops, self._at_one(one, two, three, ops, host))
        if large is None:
            return graph, not asked or far <= 3
        # A function may have no more samples to give than are asked for.
        short = not asked and graph.input_bytes.at(far) != large.input_bytes
        return graph, short or in_line(two, three, large)

    def _at_one(
        self, one: TracePass, two: TracePass, three: TracePass, ops: tuple[Op, ...], host: HostWork
    ) -> tuple[Op, ...] | None:
        """The ops of batch 1 where the line does not give them."""
        if not same_ops(one.entries, two.entries):
            watched = HostWork(self._meta_model.paths)
            return ops_exactly(self.walk(1, watched), watched)
        return None if is_affine(ops, one, two, three, host) else ops_exactly(one, host)

    def _far(self, batches: Sequence[int]) -> int:
        """The large batch to walk at: the largest asked for, unless so many integers would have to be computed with."""
        try:
            with torch.inference_mode():
                given = arguments(self._inputs, 2, self._meta_model.dtype, self._channels_last)
        except Exception:  # the walk will say what is wrong
            return 3
        ids = sum(tensor.numel() for tensor in tensors_in(given) if not tensor.is_meta) // 2
        return max(3, min(max((FAR, *batches)), MOST_IDS // max(1, ids)))

    def _attempt(self, batch: int) -> TracePass | None:
        """A walk that may fail, of a batch that nobody may have asked for."""
        try:
            return self.walk(batch)
        except Exception:
            self._next_meta_model()
            return None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep everything away from some walks, and their traces from everything outside the twin."""
        with _LOCK, _no_collection(), put_back(self._meta_model.reached.roots), uncompiled() as met:
            yield
        self.compiled = self.compiled or bool(met)

    def noted(self, graph: ModelGraph) -> ModelGraph:
        """The graph, with a word on torch.compile where that would run some of the model."""
        return msgspec.structs.replace(graph, notes=(*graph.notes, COMPILED)) if self.compiled else graph

    def _made(
        self,
        name: str,
        precision: str | None,
        memory_format: str,
        input_bytes: Affine,
        ops: tuple[Op, ...],
        exact: tuple[Op, ...] | None,
    ) -> ModelGraph:
        return ModelGraph(
            model=name,
            input_kind=self._inputs.kind,
            input_size=self._inputs.size,
            precision=precision or precision_name(self._meta_model.format),
            memory_format=memory_format,
            parameters=self._meta_model.parameters,
            parameter_bytes=self._meta_model.parameter_bytes,
            input_bytes=input_bytes,
            ops=ops,
            ops_at_one=exact,
            stack=stack(),
        )

    def walk(self, batch: int, host: HostWork | None = None) -> TracePass:
        """One forward pass at one batch size."""
        walk, target = self.recorder(host), self.target()
        with torch.inference_mode(), _LOCK, enabled(), _no_collection():
            args, options = arguments(self._inputs, batch, self._meta_model.dtype, self._channels_last)
            try:
                with walk, host or nullcontext():
                    target(*args, **options)
            except SystemExit as end:
                raise TraceError(
                    f"the forward pass ended in sys.exit({end.code!r}) in {self._where(end)}; raise an error instead"
                ) from end
            except UnknowableError as error:
                raise TraceError(f"{error} in {self._where(error)}, {_ADVICE}") from None
            except LatpredError:
                raise
            except Exception as error:
                raise TraceError(self._failure(walk, error, batch)) from error
        self._next_meta_model()
        return TracePass(batch, walk.entries, walk.nested, nbytes(args, options))

    def _next_meta_model(self) -> None:
        if self._renew is not None:
            self._meta_model = self._renew()

    def recorder(self, host: HostWork | None) -> TraceRecorder:
        """What records one walk."""
        return TraceRecorder(host)

    def target(self) -> Callable[..., Any]:
        """What is called with the inputs: the model itself."""
        return self._meta_model.module

    def _failure(self, walk: TraceRecorder, error: Exception, batch: int) -> str:
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
        call = example_call(self._meta_model.module, made if isinstance(made, dict) else ())
        return f"; it may need several, as in {call}" if call else ""

    def _where(self, error: BaseException) -> str:
        """The innermost module that the traceback passes through, and the line of the model's own code."""
        path, line, trail = "", "", error.__traceback__
        call = torch.nn.Module._call_impl.__code__
        while trail is not None:
            code = trail.tb_frame.f_code
            if code is call:
                path = self._meta_model.paths.get(id(trail.tb_frame.f_locals["self"]), path)
            elif not code.co_filename.startswith(_OWN):
                line = f" ({Path(code.co_filename).name}:{trail.tb_lineno})"
            trail = trail.tb_next
        return place(path) + line


_ADVICE = "which no trace can know; take that part out of forward, or trace the parts of the model on either side of it"
_OWN = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector away for a few milliseconds: what it frees, and when, would be counted as the model's.

    It has one switch for all threads, so the first who asks turns it off and the last who leaves turns it on again.
    """
    with _COLLECTION.lock:
        if not _COLLECTION.walks:
            _COLLECTION.enabled_before = gc.isenabled()
            gc.disable()
        _COLLECTION.walks += 1
    try:
        yield
    finally:
        with _COLLECTION.lock:
            _COLLECTION.walks -= 1
            if not _COLLECTION.walks and _COLLECTION.enabled_before:
                gc.enable()


class _Collection:
    """How many walks want no collection, and whether there was any before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.walks = 0
        self.enabled_before = True


_COLLECTION = _Collection()


def _listed(batches: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(batches)))


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
