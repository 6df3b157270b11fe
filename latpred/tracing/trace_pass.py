"""A forward pass at one batch size: what the host does between its ops, which memory is alive, and the ops of several.

Python's profiler hook sees every Python function that is entered; entering `nn.Module._call_impl` is a module call.
Frames of the recorder do not count: it pauses the hook while it handles an op. Memory is followed through weak
references to storages, so no tensor lives longer for being watched. What passes at several batch sizes have in common
becomes ops whose every count is affine in batch.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, compress
from pathlib import Path
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, GeneratorType
from typing import Any

import msgspec
import torch
from torch._library import simple_registry
from torch.multiprocessing.reductions import StorageWeakRef

from latpred.errors import TraceError
from latpred.graph.graph import NO_CALLS, Affine, Calls, Op
from latpred.ops.families import nested_class
from latpred.sandbox.own_thread import UNCOUNTED, profiled_by, uncounted
from latpred.sandbox.untouched import LIBRARIES, package
from latpred.tracing.op_record import OpRecord, leaves, place

MODULE_CALL: CodeType = torch.nn.Module._call_impl.__code__
_READ: CodeType = torch.nn.Module.__getattr__.__code__
uncounted(torch.nn.Module._wrapped_call_impl)  # it only calls the one above
# What torch asks in Python before it hands an op to a mode; there is no such question without one.
_LOOKUP: CodeType | None = getattr(getattr(simple_registry, "find_torch_dispatch_rule", None), "__code__", None)
_GONE: Callable[[int], bool] = torch.UntypedStorage._expired  # type: ignore[assignment]
# Setting the hook anew makes Python 3.12 and later instrument every function again; there a flag silences it instead.
CHEAP_HOOK = sys.version_info < (3, 12)


class PassWatcher:
    """Watches one pass."""

    def __init__(self, paths: dict[int, str]) -> None:
        self.modules: list[str] = []  # path of the innermost module around each op
        # Those since the previous op; one element more than there are ops, for what follows the last.
        self.calls: list[Calls] = []
        # Storage and offset of the first parameter that each op reads, and what it reads of parameters; None for most.
        self.weights: list[tuple[int, int, int] | None] = []
        self.deaths: dict[int, int] = {}  # for each op whose memory is gone before the end: the first op without it
        self._alive: dict[int, tuple[list[int], StorageWeakRef]] = {}  # by storage: the ops that gave it
        self._storages: dict[int, int] = {}  # of each op, those that are alive
        self._stack = [""]
        self._calls = [0, 0, 0, 0, 0]  # those of `Calls`, whether the recorder is at work, and whether Python draws
        self._hook = _hook(paths, self._stack, self._calls)
        self._previous: Any = None

    def __enter__(self) -> PassWatcher:
        self._previous = sys.getprofile()
        sys.setprofile(self._hook)
        return self

    @uncounted
    def __exit__(self, *_: object) -> None:
        profiled_by(self._previous)
        self._flush()

    @uncounted
    def pause(self) -> None:
        """Stop counting: the recorder's own work begins."""
        if CHEAP_HOOK:
            sys.setprofile(None)
        self._calls[3] = 1

    def resume(self) -> None:
        """Go on counting."""
        self._calls[3] = 0
        if CHEAP_HOOK:
            sys.setprofile(self._hook)

    def forget_module(self) -> None:
        """Take back a module call that was not the model's."""
        self._calls[0] -= 1

    def so_far(self) -> tuple[int, Calls]:
        """How many ops there were, and the calls since the last of them; to be asked in a pause."""
        return len(self.modules), Calls(*self._calls[:3])

    @property
    def draws(self) -> bool:
        """Whether Python drew a random number."""
        return bool(self._calls[4])

    def maker(self, tensor: torch.Tensor) -> int | None:
        """The op that made a tensor's memory; None for memory that was there before."""
        made = self._alive.get(_watched(tensor).cdata)
        return None if made is None else made[0][0]

    def after(self, record: OpRecord, out: Any, given: Sequence[torch.Tensor] = ()) -> None:
        """Note an op that was just handled, and the memory that went since; `given` an op with parameters was."""
        index = len(self.modules)
        self.modules.append(self._stack[-1])
        weight = next((tensor for tensor in given if not tensor.is_inference()), None)
        self.weights.append(read_of(weight, record.weight_bytes))
        self._flush()
        # Asked of torch itself, without Python in between: dozens of storages are alive at each of hundreds of ops.
        for storage in list(compress(self._alive, map(_GONE, self._alive))):
            for birth in self._alive.pop(storage)[0]:
                self._storages[birth] -= 1
                if not self._storages[birth]:
                    self.deaths[birth] = index
        if record.new_bytes:
            made = list(map(_watched, leaves(out)))
            self._storages[index] = len(made)
            for watched in made:
                self._alive.setdefault(watched.cdata, ([], watched))[0].append(index)

    def live_bytes(self, records: Sequence[OpRecord], input_bytes: int) -> list[int]:
        """Activation bytes alive just after each op, inputs included; of these very ops at any batch size."""
        change = [record.new_bytes for record in records]
        for birth, death in self.deaths.items():
            change[death] -= records[birth].new_bytes
        if change:
            change[0] += input_bytes
        return list(accumulate(change))

    def _flush(self) -> None:
        self.calls.append(Calls(*self._calls[:3]))
        self._calls[:3] = NO_CALLS


def read_of(weight: torch.Tensor | None, weight_bytes: int, offset: int | None = None) -> tuple[int, int, int] | None:
    """What tells a read of parameters from others: parts of one tensor, as of queries and keys, are not the same.

    Of few weights nobody cares where they come from; and equal ones, as norms have, may be one constant.
    """
    if weight is None or weight_bytes < LEAST_WEIGHTS:
        return None
    place = weight.storage_offset() if offset is None else offset
    return weight.untyped_storage()._cdata, int(place), weight_bytes


def _watched(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _hook(paths: dict[int, str], stack: list[str], calls: list[int]) -> Callable[[FrameType, str, Any], None]:
    """The profiler hook; a closure because it is called thousands of times in a pass."""

    def hook(frame: FrameType, event: str, called: Any) -> None:
        if calls[3]:
            return
        if event == "call":
            code = frame.f_code
            if code is _LOOKUP:
                calls[3] = 1
                if CHEAP_HOOK:
                    sys.setprofile(None)  # until the recorder has handled the op that is looked up
                return
            if code is MODULE_CALL:
                calls[0] += 1
                stack.append(paths.get(id(frame.f_locals["self"]), stack[-1]))
                return
            caller = frame.f_back
            if id(code) not in UNCOUNTED and (caller is None or caller.f_code is not MODULE_CALL):
                calls[1] += 1
                if code is _READ:
                    calls[2] += 1
        elif event == "return":
            if frame.f_code is MODULE_CALL:
                stack.pop()
        elif event == "c_call" and isinstance(getattr(called, "__self__", None), random.Random):
            calls[4] = 1

    return hook


DRAWN = (
    "the forward pass draws random numbers in Python: where they decide which layers it runs, this is what one draw of "
    "them takes; fix what is drawn, and predict each architecture by itself"
)
ASSUMED = (
    "the model asks for all() or any() of values that no trace knows: all() was taken to hold and any() not to; what "
    "it does at the other answer, as another branch or more rounds of a loop, is not counted"
)


NOT_THE_MODELS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))  # where code lies that is not


def model_asks() -> bool:
    """Whether code of the user's own, rather than a library's, called the op that is handled."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_MODELS):
        if frame.f_code is MODULE_CALL or frame.f_code.co_filename.startswith(torch.distributions.__path__[0]):
            return False  # which asks whether its arguments are valid, and else raises an error
        frame = frame.f_back
    return frame is not None and package(frame.f_globals.get("__name__")) not in LIBRARIES


@uncounted
def finish(result: Any) -> None:
    """Have the generator that a forward pass gives, which has done nothing yet, do its work; refuse a coroutine."""
    if type(result) is GeneratorType:
        deque(result, maxlen=0)
    elif isinstance(result, CoroutineType | AsyncGeneratorType):
        if isinstance(result, CoroutineType):
            result.close()  # or Python warns that nobody awaited it
        raise TraceError(
            "the model's forward is async, so calling it does nothing; give a model whose forward is a plain function"
        )


RETURN = "python::return"
LEAST_WEIGHTS = 1 << 14  # bytes


@dataclass(frozen=True, slots=True)
class TracePass:
    """One forward pass at one batch size: its op records, which of them another op issued, bytes of its inputs.

    `watcher` saw the Python between the ops and the memory they hold; None where nobody looked.
    """

    batch: int
    records: list[OpRecord]
    nested: list[bool]
    input_bytes: int
    watcher: PassWatcher | None = None

    @property
    def watched(self) -> PassWatcher:
        """The watcher of a pass that had one."""
        assert self.watcher is not None
        return self.watcher


def same_ops(one: Sequence[OpRecord | Op], other: Sequence[OpRecord | Op]) -> bool:
    """Whether two passes, or graphs, have the same ops in the same order."""
    # Equal layers share their records, so there are far fewer pairs than ops.
    return len(one) == len(other) and all(a is b or alike(a, b) for a, b in set(zip(one, other, strict=True)))


def alike(a: OpRecord | Op, b: OpRecord | Op) -> bool:
    """Whether two ops differ in sizes at most."""
    return (a.name, a.family, a.launches, a.syncs, *a.dims) == (b.name, b.family, b.launches, b.syncs, *b.dims)


def demand_same(two: TracePass, other: TracePass) -> None:
    """Refuse passes that differ in more than sizes."""
    if same_ops(two.records, other.records):
        return
    pairs = enumerate(zip(two.records, other.records, strict=False))
    last = min(len(two.records), len(other.records)) - 1
    index = next((i for i, (a, b) in pairs if not alike(a, b)), last)
    first = f", first at {two.records[index].name} in {place(two.watched.modules[index])}" if two.records else ""
    raise TraceError(
        f"the model issues different ops at batch 2 and {other.batch}{first}: its work is not affine in batch"
    )


def ops_through(two: TracePass, other: TracePass) -> tuple[Op, ...]:
    """The ops that serve every batch >= 2, from passes at 2 and a larger batch; only at 3 is any difference a slope."""
    return _ops(two, other, two.watched, lambda a, b: Affine.through((two.batch, a), (other.batch, b)))


def ops_exactly(done: TracePass, watcher: PassWatcher | None = None) -> tuple[Op, ...]:
    """The ops of one pass, constant in batch; `watcher` is that of a pass with the same ops, where it had none."""
    return _ops(done, done, watcher or done.watched, lambda value, _: Affine(value))


def _ops(
    done: TracePass, other: TracePass, watcher: PassWatcher, through: Callable[[int, int], Affine]
) -> tuple[Op, ...]:
    count = cache(through)  # a graph has thousands of counts and few different ones
    known: dict[tuple[OpRecord, OpRecord], Op] = {}
    ops = []
    alive = zip(*(watcher.live_bytes(each.records, each.input_bytes) for each in (done, other)), strict=True)
    places = zip(watcher.modules, watcher.calls, strict=False)
    rows = zip(done.records, other.records, done.nested, alive, places, strict=False)
    again = [touched_since(map(_touched, each.records), watcher.weights) for each in (done, other)]
    for index, (a, b, nested, live, (module, calls)) in enumerate(rows):
        op = known.get((a, b))
        if op is None:
            op = known[a, b] = op_of(a, [count(x, y) for x, y in zip(a.counts, b.counts, strict=True)])
        ops.append(
            msgspec.structs.replace(
                op,
                module=module,
                host_class=nested_class(op.host_class) if nested else op.host_class,
                live_bytes=count(*live),
                **calls._asdict(),
                reread_after=count(again[0][index], again[1][index]) if index in again[0] else None,
            )
        )
    if any(watcher.calls[-1]):
        ops.append(closing(ops[-1].live_bytes if ops else Affine(0), watcher.calls[-1]))
    return tuple(ops)


def _touched(record: OpRecord) -> int:
    return record.weight_bytes + record.read_bytes + record.write_bytes


def touched_since(touched: Iterable[int], weights: Sequence[Hashable]) -> dict[int, int]:
    """For each op that reads parameters once more, the bytes that ops have `touched` since the last time.

    `weights` tell which ones each op reads; None for few.
    """
    last: dict[Hashable, int] = {}
    pairs = []
    for index, weight in enumerate(weights):
        if weight is not None:
            if weight in last:
                pairs.append((last[weight], index))
            last[weight] = index
    if not pairs:
        return {}
    done = list(accumulate(touched, initial=0))
    return {index: done[index] - done[before] for before, index in pairs}


def op_of(record: OpRecord, counts: Sequence[Affine]) -> Op:
    """What every call with a record has in common."""
    macs, weight_bytes, read_bytes, write_bytes, _, *dims = counts
    return Op(
        name=record.name,
        module="",
        host_class=record.host_class,
        family=record.family,
        dtype=record.dtype,
        dims=dict(zip(record.dims, dims, strict=True)),
        macs=macs,
        weight_bytes=weight_bytes,
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        launches=record.launches,
        syncs=record.syncs,
        estimated=record.estimated,
    )


def closing(live_bytes: Affine, calls: Calls) -> Op:
    """What Python does after the last op."""
    return Op(
        name=RETURN,
        module="",
        host_class="python.return",
        family="",
        dtype="",
        dims={},
        live_bytes=live_bytes,
        **calls._asdict(),
    )


def on_one_line(one: TracePass, two: TracePass, three: TracePass) -> bool:
    """Whether three passes issued the same ops, and all of their counts lie on lines."""
    if not (same_ops(one.records, two.records) and same_ops(two.records, three.records)):
        return False
    near, far = two.batch - one.batch, three.batch - two.batch
    for a, b, c in set(zip(one.records, two.records, three.records, strict=True)):
        counts = zip(_compared(a), _compared(b), _compared(c), strict=True)
        if any((y - x) * far != (z - y) * near for x, y, z in counts):
            return False
        if b.dims.get("operands") != c.dims.get("operands"):
            return False
    return True


def one_is_on_line(one: TracePass, two: TracePass, other: TracePass) -> bool:
    """Whether batch 1 is on the line through two others, in its ops and, as memory counts them, its inputs."""
    return on_one_line(one, two, other) and input_bytes(two, other).at(1) == one.input_bytes


def input_bytes(two: TracePass, other: TracePass) -> Affine:
    """Bytes of the inputs, on the line through batch 2 and another."""
    return Affine.through((2, two.input_bytes), (other.batch, other.input_bytes))


def _compared(record: OpRecord) -> tuple[int, ...]:
    """Counts without "operands": at batch 1, a tensor broadcast over the batch is as large as the result."""
    return record.counts[:-1] if "operands" in record.dims else record.counts


def stack() -> dict[str, str]:
    """Versions of what decides which ops a model issues."""
    versions = {"python": ".".join(map(str, sys.version_info[:3])), "torch": str(torch.__version__)}
    for name in ("transformers", "torchvision", "timm"):
        module = sys.modules.get(name)
        if module is not None:
            versions[name] = str(getattr(module, "__version__", ""))
    return versions
