"""The entry of this package: a model, or its name, becomes a ModelGraph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from latpred.errors import LatpredError, TraceError, UsageError, raise_stop
from latpred.graph.graph import CONTIGUOUS, Affine, ModelGraph, Op, alone_at, no_line, written
from latpred.graph.rewrites import OLDER, attended
from latpred.query import Options, check_attention, checked_batches, is_one
from latpred.sandbox.own_thread import no_collection, uncompiled, uncounted, unhooked, without_modes
from latpred.sandbox.untouched import put_back
from latpred.tracing.autocast import OWN, Autocast, EntersAutocastError, means_autocast
from latpred.tracing.handlers import HANDLERS, UnknowableError, UnknownValues, plain
from latpred.tracing.inputs import (
    AUTOCAST,
    CHANNELS_LAST,
    SEQUENCE_FIRST,
    Inputs,
    arguments,
    demand_one,
    demand_positions,
    derived,
    diagnosis,
    dtype_of,
    from_example,
    kept_dtypes,
    lies_channels_last,
    more_inputs,
    nbytes,
    precision_name,
    sequence_first,
    tensors_in,
    whole_sizes,
)
from latpred.tracing.meta_module import MetaModule, attend, fast_paths_on_meta, make_meta_module, usual_dtype
from latpred.tracing.op_record import Call, OpRecord, demand_known, describe, learnt, leaves, place
from latpred.tracing.trace_pass import (
    DRAWN,
    MODULE_CALL,
    NOT_THE_MODELS,
    PassWatcher,
    TracePass,
    demand_same,
    finish,
    input_bytes,
    on_one_line,
    one_is_on_line,
    ops_exactly,
    ops_through,
    same_ops,
    stack,
)
from latpred.zoo import names


class TraceRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops issued while it is active; a watcher adds the Python between them, at some cost."""

    valueless = True  # whether large new tensors may go without values

    def __init__(self, watcher: PassWatcher | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[OpRecord] = []  # one for each op, in order
        self.nested: list[bool] = []  # whether another op issued it, rather than Python
        self.current = ""  # name of the op being handled, "" between ops
        self.unknown = UnknownValues()
        # The last value that was made a tensor of, and the position of its record.
        self.value: tuple[int, torch.Tensor] | None = None
        self.known, self.infos = learnt()
        self.generator = torch.Generator().manual_seed(0)  # gives the random numbers that the pass needs
        self.watcher = watcher
        # Handles ops in place of `handle`, to which it hands them on, as torch.autocast does.
        self.intercept: Callable[[OpOverload[..., Any], Sequence[Any], dict[str, Any]], Any] | None = None
        self.target, self.asked_target = "cuda", False  # kind of device, and whether anything depended on it
        self.supports_higher_order_operators = True
        self.notes: set[str] = set()  # what the graph is to say of this pass
        self.depth = 0  # how many ops what is handled is part of
        self._inner, self._outer = 0, ""  # how many parts the outermost op has so far, and its name
        self._arguments: Sequence[Any] = ()  # of the op being handled, while a watcher looks on

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler, seconds of work, to keep this mode out of compiled code.
        return False

    @uncounted
    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not isinstance(func, OpOverload):  # it is given functions, and calls them in Python
            self.notes |= {OPERATORS} if func.name().startswith("flex_attention") else set()
            with self:
                return plain(func)(*args, **(kwargs or {}))
        watcher, handle = self.watcher, self.intercept or self.handle
        if watcher is None or self.depth:
            return handle(func, args, kwargs or {})
        watcher.pause()
        try:
            return handle(func, args, kwargs or {})
        finally:
            watcher.resume()

    def handle(self, func: OpOverload[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Make an op's result and record what it amounts to."""
        info = self.infos.get(func)
        if info is None:
            info = self.infos[func] = describe(func)
        self.current = info.name
        if self.watcher is not None:
            self._arguments = args
        out = HANDLERS[info.kind](self, self.unknown.hidden_in(Call(func, info, args, options)))
        self.current, self._arguments = "", ()
        return out

    def record(self, record: OpRecord, out: Any) -> Any:
        """Keep the record of one op and pass its result on."""
        self.records.append(record)
        self.nested.append(self.depth > 0 and self._inner > 0)
        self._inner += 1
        if self.watcher is not None:
            self.watcher.after(record, out, leaves(self._arguments) if record.weight_bytes else ())
        return out

    def inside(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        """Call a function whose own ops are recorded as parts of the current one."""
        if not self.depth:
            self._inner, self._outer = 0, self.current
        self.depth += 1
        try:
            with self:
                return function(*args, **options)
        finally:
            self.depth -= 1

    def on_cuda(self) -> bool:
        """Whether CUDA is what ops are traced for; to be asked only where that makes a difference."""
        self.asked_target = True
        return self.target == "cuda"

    def reading(self) -> str:
        """That Python, or an op of which that is a part, reads a value, which is of the last op; part of a sentence."""
        reader = self._outer if self.depth and self._outer not in _ASKED else "the model's Python"
        return f"{reader} reads a value" + (f" that {self.records[-1].name} made" if self.records else "")

    def finished(self, batch: int, input_bytes: int) -> TracePass:
        """What was recorded."""
        return TracePass(batch, self.records, self.nested, input_bytes, self.watcher)


_FORMATS = (CONTIGUOUS, "channels_last")
_TARGETS = ("cuda", "cpu")
COMPILED = "the model is compiled with torch.compile and priced as eager runs it; for compiled ask for runtime compile"
HOOKLESS = "the model's forward hooks are left out: with them it cannot be traced, as where they look at values"
OPERATORS = "where nothing compiles flex_attention or its like, a call takes the host milliseconds that are not counted"
FAR = 64  # the largest batch that is traced where no larger one is asked for
MOST_IDS = 2**15  # integers are computed with: beyond so many of them a pass takes several times as long
FIXED_INPUTS = "inputs= gives the same inputs whatever the batch: every batch is predicted as that one"
WITHOUT = "{} also takes {}, beside or in place of what it was traced with; give inputs= for what it does with these"


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
    batches: int | Sequence[int] = (),
    attention: str | None = None,
    target: str = "cuda",
) -> ModelGraph:
    """Trace a model without computing anything and say what one forward pass does, for every batch size.

    The model itself is never changed, moved or run: a copy of its structure on the meta device is, in evaluation
    mode and under inference mode whatever mode the model is in. What the model holds (caches, lists, counters, objects
    written in Python) is copied with it, and tensors that its code keeps elsewhere are taken out again; see
    "What a prediction leaves alone" in docs/limits.md for the few things that cannot be.

    Parameters
    ----------
    model : torch.nn.Module, str or ModelGraph
        A model on any device, a name (`latpred models` lists them), or a graph, which is only checked against what is
        asked for, and given that `attention`.
    inputs : tensor, tuple, dict or callable, optional
        What the model is called with: one example batch (the first dimension of its first tensor is the batch, and so
        is that of every tensor which shares its size), or a function of the batch size. A list stands for a tuple of
        arguments; one that a function gives is a single argument. Of floating-point tensors only the shape matters,
        and the dtype where the model has weights of it; any other becomes the model's. By default it follows from the
        model's config, default_cfg or first convolution.
    seq : int, optional
        Tokens, or samples of audio, when `inputs` is not given.
    image : int, optional
        Pixels of an image's side, when `inputs` is not given.
    precision : {"fp32", "tf32", "fp16", "bf16", "fp64", "amp-fp16", "amp-bf16"}, optional
        As what the weights and floating-point inputs count; the model's own by default. "amp-fp16" and "amp-bf16":
        fp32, and the forward pass under `torch.autocast`, entered for each pass.
    memory_format : {"contiguous", "channels_last"}
        Layout of 4-d weights and inputs.
    strict : bool
        Refuse ops without a cost formula instead of estimating them from their bytes.
    batches : int or sequence of int
        Batch sizes that will be asked for. A model whose work is not affine in batch, or that takes certain batch sizes
        alone, is traced at each of them.
    attention : {"eager", "sdpa"}, optional
        How attention is computed, in the words of transformers: as products and softmax, or in one call. By default as
        the model does.
    target : {"cuda", "cpu"}
        Kind of device to trace for. Where the two run other ops, as under autocast or in RMSNorm, the graph names it.

    Returns
    -------
    ModelGraph
        Every op with its work affine in batch, and the exact ops of batch 1 where they differ. Where that line misses a
        larger batch, its `notes` say so.

    Raises
    ------
    TraceError
        When the model cannot be traced; names the op and the module.
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
    check(precision, memory_format, target)
    check_attention(attention)
    seq, image = whole_sizes(seq, image)
    sizes = checked_batches(batches) if is_one(batches) or len(batches) else ()  # type: ignore[arg-type]
    if isinstance(model, ModelGraph):
        layout = None if memory_format == CONTIGUOUS else memory_format
        return _as_asked(Options(inputs, seq, image, precision, layout).checked(model), attention, strict)
    demand_one(inputs, seq, None if isinstance(model, str) else image)  # by its name a model is built for a size
    name = model if isinstance(model, str) else type(model).__name__
    naming = Naming(name, precision, memory_format, target)
    with dtype_of_build(model):
        with names.attention(attention):
            module, given = with_inputs(model, inputs, seq, image)
        with no_collection():
            return _as_asked(_graph(module, given, naming, attention, sizes), attention, strict)


def dtype_of_build(model: object) -> AbstractContextManager[None]:
    """Where a published model is built and traced: it is float32 whatever the process's default is."""
    return usual_dtype() if isinstance(model, str) and not names.is_file(model) else nullcontext()


def _as_asked(graph: ModelGraph, attention: str | None, strict: bool) -> ModelGraph:
    """The graph with attention as asked for; with `strict` an error where no formula knows an op."""
    if attention is not None:
        graph = attended(graph, attention)
    if strict:
        demand_known(graph)
    return graph


def with_inputs(
    model: torch.nn.Module | str, inputs: Any, seq: int | None, image: int | None
) -> tuple[torch.nn.Module, Inputs]:
    """The module to trace and what it is called with."""
    if isinstance(model, str):
        built = names.build(model, seq=seq, image=image, inputs=inputs)
        own = Inputs(lambda batch: built.inputs(batch, "meta"), built.input_kind, built.input_size, built.batch)
        module, given = built.model, own if inputs is None else from_example(inputs)
    elif isinstance(model, torch.nn.Module):
        module, given = model, derived(model, seq, image) if inputs is None else from_example(inputs)
    else:
        raise UsageError(
            f"an object of type {type(model).__name__} cannot be traced; give an nn.Module, as the .module() of an "
            "ExportedProgram or AutoModel.from_config(config), a model's name, or the path of an .onnx file"
        )
    if given.kind == "seq":
        demand_positions(module, given.size)
    return module, given


def _graph(
    model: torch.nn.Module, given: Inputs, naming: Naming, attention: str | None, batches: Sequence[int]
) -> ModelGraph:
    """The graph of a model; one that does not bear a second forward pass, as with a cache that grows, starts anew.

    A model that fails then as well takes certain batch sizes alone, or none. Then it is tried without its forward
    hooks: many look at values, which a trace does not have.
    """

    def renew(hooks: bool) -> MetaModule:
        made = make_meta_module(model, dtype_of(naming.precision), naming.channels_last, hooks=hooks)
        attend(made.module, attention)
        return made

    failures: list[TraceError] = []
    for hooks in (True, False):
        make = partial(renew, hooks)
        for each_anew, alone in ((None, False), (make, False), (None, True)):
            made = make()
            tracer = Tracer(made, given, naming, each_anew)
            try:
                graph = tracer.only(batches or (given.batch or 1,)) if alone else tracer.graph(batches)
                return tracer.noted(graph, *(() if hooks else (HOOKLESS,)))
            except TraceError as error:
                failures.append(error)
        if not made.reached.hooked:
            break
    try:
        raise failures[2]  # of the model with all its hooks, at the batch sizes that were asked for
    finally:
        failures.clear()  # each holds this frame, and the model with it


def as_written(graph: ModelGraph) -> ModelGraph:
    """A graph without words on what its model compiles, or does not."""
    notes = tuple(note for note in graph.notes if note not in (COMPILED, OPERATORS))
    return graph if notes == graph.notes else msgspec.structs.replace(graph, notes=notes)


@dataclass(frozen=True, slots=True)
class Naming:
    """What a graph says of the model that it is of."""

    model: str
    precision: str | None = None  # the weights' own where it is None
    memory_format: str = "contiguous"
    target: str = "cuda"  # kind of device whose kernels and whose autocast are meant

    @property
    def channels_last(self) -> bool:
        """Whether 4-d tensors lie channels-last."""
        return self.memory_format == "channels_last"


class Tracer:
    """The passes of one model: at batch 2, at a large one, and at 1 to see whether all three are on one line.

    Where they are not, a pass at 3 tells whether it is batch 1 that differs, or whether there is no line. One more is
    made of a model that issues other ops at batch 1, to watch its Python and memory there, or that keeps what it
    computed in its first forward pass.
    """

    def __init__(
        self, meta_module: MetaModule, inputs: Inputs, naming: Naming, renew: Callable[[], MetaModule] | None = None
    ) -> None:
        self._meta_module = meta_module
        self._renew = renew  # makes the meta module of the next pass, where each is to have its own
        self._inputs = inputs
        self._naming = naming
        self._autocast = Autocast(naming.target, follows=naming.precision in AUTOCAST)
        self.compiled = meta_module.reached.compiled  # whether some of it would run under torch.compile
        self._asked_target = False  # whether some op is another on another kind of device
        self._met: set[str] = set()  # notes of the passes

    def graph(self, batches: Sequence[int] | None = None) -> ModelGraph:
        """Put the passes together; with `batches` look at large ones, and without a line at each."""
        with self.alone():
            if batches is None:
                return self._line(3)[0]
            far = self._far(batches)
            graph, straight = self._line(far, max(batches, default=0))
            if straight:
                return graph
            exact = {batch: self._exactly(batch) for batch in dict.fromkeys(batches or (far,))}
            seen = written(batches) if batches else f"1, 2, 3 and {far} (more with trace(..., batches=[...]))"
            return msgspec.structs.replace(graph, exact=exact, notes=(no_line(seen),))

    def only(self, batches: Sequence[int]) -> ModelGraph:
        """The graph of a model that takes certain batch sizes alone, or does other work at each."""
        graphs: dict[int, ModelGraph] = {}
        with self.alone():
            for batch in batches:
                try:
                    graphs[batch] = self._exactly(batch)
                except TraceError as error:
                    if not graphs:
                        raise
                    raise TraceError(f"{error}; it takes batch {written(graphs)}: ask for that alone") from error
        return alone_at(graphs)

    def _exactly(self, batch: int) -> ModelGraph:
        self.one_pass(batch)
        done = self.one_pass(batch, watched=True)
        return self._made(Affine(done.input_bytes), ops_exactly(done), only=(batch,))

    def _line(self, far: int, most: int = 0) -> tuple[ModelGraph, bool]:
        """The graph of the line through batch 2 and one beyond, and whether `far`, or the most asked for, is on it."""
        tried = (self._attempt(batch) for batch in dict.fromkeys((far, most)) if 3 < batch <= far)
        large = next(filter(None, tried), None) or self.one_pass(3)
        # The second pass is the watched one: what Python does only once, filling caches, is behind it.
        two = self.one_pass(2, watched=True)
        large = self._like(two, large)
        one = self.one_pass(1)
        straight = one_is_on_line(one, two, large)
        three = large if straight or large.batch == 3 else self._like(two, self.one_pass(3))
        demand_same(two, three)
        exact = None if straight else self._at_one(one, two, three)
        graph = self._made(input_bytes(two, three), ops_through(two, three), exact)
        if three is large:
            return graph, large.batch >= min(far, most)
        # A function may have no more samples to give than are asked for.
        short = far > most and graph.input_bytes.at(large.batch) != large.input_bytes
        return graph, short or on_one_line(two, three, large)

    def _like(self, two: TracePass, other: TracePass) -> TracePass:
        """A pass, made anew where it did what only a first one does, such as to read a buffer that it then replaced."""
        reads = [[bool(record.weight_bytes) for record in each.records] for each in (two, other)]
        return other if same_ops(two.records, other.records) and reads[0] == reads[1] else self.one_pass(other.batch)

    def _at_one(self, one: TracePass, two: TracePass, three: TracePass) -> tuple[Op, ...] | None:
        """The ops of batch 1 where the line does not give them."""
        if not same_ops(one.records, two.records):
            return ops_exactly(self.one_pass(1, watched=True))
        return None if one_is_on_line(one, two, three) else ops_exactly(one, two.watcher)

    def _far(self, batches: Sequence[int]) -> int:
        """The large batch to trace: the largest asked for, unless so many integers would have to be computed with."""
        try:
            given = self._arguments(2)
        except Exception as error:  # the pass will say what is wrong
            raise_stop(error)
            return 3
        ids = sum(tensor.numel() for tensor in tensors_in(given) if not tensor.is_meta) // 2
        return max(3, min(max((FAR, *batches)), MOST_IDS // max(1, ids)))

    def _attempt(self, batch: int) -> TracePass | None:
        """A pass that may fail, of a batch that nobody may have asked for."""
        try:
            return self.one_pass(batch)
        except Exception as error:
            raise_stop(error)
            self._next_meta_module()
            return None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep everything away from some passes, and their traces from everything outside the meta module."""
        roots = self._meta_module.reached.roots
        with no_collection(), put_back(roots), unhooked(), uncompiled() as met:
            yield
        self.compiled = self.compiled or bool(met)

    def noted(self, graph: ModelGraph, *more_notes: str) -> ModelGraph:
        """The graph, with a word on inputs that say little of batches, and on the model's own compiler and autocast."""
        name, given = self._naming.model, self._inputs
        more, _ = more_inputs(self._meta_module.module, given)
        said = (
            (FIXED_INPUTS, given.kind == "custom" and not (graph.input_bytes.per_sample or graph.exact or graph.only)),
            (COMPILED, self.compiled),
            (OLDER, names.in_older_parts(self._meta_module.module)),
            (CHANNELS_LAST, not self._naming.channels_last and lies_channels_last(self._meta_module.module)),
            (OWN.format(self._naming.target), self._autocast.entered and self._naming.precision not in AUTOCAST),
            (WITHOUT.format(name, more), more),
            (SEQUENCE_FIRST.format(name), given.batch and sequence_first(self._meta_module.module)),
        )
        notes = [*(note for note, holds in said if holds), *sorted(self._met), *more_notes]
        return msgspec.structs.replace(graph, notes=(*graph.notes, *notes)) if notes else graph

    def _made(
        self,
        input_bytes: Affine,
        ops: tuple[Op, ...],
        ops_at_one: tuple[Op, ...] | None = None,
        only: tuple[int, ...] = (),
    ) -> ModelGraph:
        return ModelGraph(
            model=self._naming.model,
            input_kind=self._inputs.kind,
            input_size=self._inputs.size,
            precision=self._naming.precision or precision_name(self._meta_module.format),
            memory_format=self._naming.memory_format,
            parameters=self._meta_module.parameters,
            parameter_bytes=self._meta_module.parameter_bytes,
            input_bytes=input_bytes,
            ops=ops,
            ops_at_one=ops_at_one,
            stack=stack(),
            target=self._naming.target if self._asked_target else "",
            only=only,
        )

    def one_pass(self, batch: int, *, watched: bool = False) -> TracePass:
        """One forward pass, twice where the model turns out to enter torch.autocast; to be called within `alone`."""
        try:
            return self._pass(batch, watched)
        except EntersAutocastError:
            self._autocast.follows = True
            self._next_meta_module()
            return self._pass(batch, watched)

    def _pass(self, batch: int, watched: bool) -> TracePass:
        recorder = self.recorder(PassWatcher(self._meta_module.paths) if watched else None)
        recorder.target = self._naming.target
        target, dtype = self.target(), AUTOCAST.get(self._naming.precision or "")
        with torch.inference_mode(), self._autocast.of(recorder, dtype), fast_paths_on_meta():
            args, options = self._arguments(batch)
            taken = nbytes(args, options)  # before the model writes into them, as into a cache
            try:
                with recorder, recorder.watcher or nullcontext():
                    out = target(*args, **options)
                    finish(out)
            except SystemExit as end:
                raise TraceError(
                    f"the forward pass ended in sys.exit({end.code!r}) in {self._where(end)}; raise an error instead"
                ) from end
            except UnknowableError as error:
                raise TraceError(f"{error} in {self._where(error)}, {_ADVICE}") from None
            except LatpredError:
                raise
            except Exception as error:
                raise_stop(error)
                if means_autocast(error) and not self._autocast.follows:
                    raise EntersAutocastError from error
                if any(words in str(error) for words in _READS):
                    raise TraceError(f"{recorder.reading()} in {self._where(error)}, {_ADVICE}") from None
                raise TraceError(self._failure(recorder, error, batch)) from error
        self._next_meta_module()
        self._asked_target |= recorder.asked_target
        self._met |= recorder.notes | ({DRAWN} if recorder.watcher and recorder.watcher.draws else set())
        return recorder.finished(batch, taken)

    def _arguments(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with torch.inference_mode():
            made = self._meta_module
            kept = kept_dtypes(self._inputs, made.module)
            return arguments(self._inputs, batch, made.dtype, self._naming.channels_last, kept)

    def _next_meta_module(self) -> None:
        if self._renew is not None:
            self._meta_module = self._renew()

    def recorder(self, watcher: PassWatcher | None) -> TraceRecorder:
        """What records one pass."""
        return TraceRecorder(watcher)

    def target(self) -> Callable[..., Any]:
        """What is called with the inputs: the model itself."""
        return self._meta_module.module

    def _failure(self, recorder: TraceRecorder, error: Exception, batch: int) -> str:
        op = f" at {recorder.current}" if recorder.current else ""
        _, call = more_inputs(self._meta_module.module, self._inputs)
        several = f"; it may need several, as in {call}" if call else ""
        where = f"{op} in {self._where(error)} at batch {batch}"
        return f"the forward pass failed{where}: {diagnosis(error)}{several}"

    def _where(self, error: BaseException) -> str:
        """The innermost module that the traceback passes through, and the line of the model's own code."""
        path, line, trail = "", "", error.__traceback__
        while trail is not None:
            code = trail.tb_frame.f_code
            if code is MODULE_CALL:
                path = self._meta_module.paths.get(id(trail.tb_frame.f_locals["self"]), path)
            elif not code.co_filename.startswith(NOT_THE_MODELS):
                line = f" ({Path(code.co_filename).name}:{trail.tb_lineno})"
            trail = trail.tb_next
        return place(path) + line


# What torch says where Python asks a meta tensor for its values by a call that is no op: tolist() or numpy().
_READS = "tensor with unallocated storage", "meta device type tensor to numpy", "item() cannot be called on meta"
_ASKED = "aten::item", "aten::is_nonzero"  # by which Python asks for a value
_ADVICE = "which no trace can know; take that part out of forward, or trace the parts of the model on either side of it"


def check(precision: str | None, memory_format: str, target: str) -> None:
    """Refuse a precision, a format or a kind of device that nobody knows."""
    dtype_of(precision)  # which says when there is no such precision
    if memory_format not in _FORMATS:
        raise UsageError(f"memory_format {memory_format!r} is not known; choose one of {', '.join(_FORMATS)}")
    if target not in _TARGETS:
        raise UsageError(f"target {target!r} is not known; choose one of {', '.join(_TARGETS)}")
