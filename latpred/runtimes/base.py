"""What every runtime offers: how it turns a graph into a schedule, and how to build what it really runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.graph.schedule import Schedule

if TYPE_CHECKING:
    from latpred.runtimes.source import Source


@runtime_checkable
class Runtime(Protocol):
    """A way to run a model.

    Packages add one with an entry point in the group "latpred.runtimes" whose object is a Runtime, or a class or
    function that gives one when called without arguments. One whose steps are not aten ops offers what `Walker` asks
    for as well.

    Attributes
    ----------
    name : str
        What `predict(..., runtime=name)` calls it, and the key of its dispatch costs in a profile.
    needs : str, optional
        The only kind of device it runs on, "cpu" or "cuda"; runtimes without this attribute run on any.
    own_stream : bool, optional
        On CUDA its kernels run in a stream that is not PyTorch's, so that events in PyTorch's see nothing of them.
    host_classes : tuple of str, optional
        Classes of steps that a model may take even where no network that it was calibrated on does.
    waits : bool, optional
        On CUDA a call of what it builds may return only when the device is done.
    available_on : callable, optional
        As `available`, for a kind of device ("cpu" or "cuda") that not every installation serves.
    """

    name: str

    def lower(self, graph: ModelGraph, batch: int) -> Schedule:
        """The steps and kernels of one forward pass.

        Return the same object for the same graph wherever the schedule does not change with batch: the predictor then
        prices a whole curve at once.

        Raises
        ------
        RuntimeRefusalError
            When the runtime cannot run the model; says which op stands in the way.
        """
        ...

    def available(self) -> str | None:
        """None when models can be built here, else what is missing and how to get it."""
        ...

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """The real thing: a call that runs one forward pass on inputs. For measuring, never for predicting.

        What takes long (an export, a compilation) is kept for as long as the model lives.

        Parameters
        ----------
        model : torch.nn.Module
            On its device, in eval mode.
        inputs : tuple or dict
            Positional or keyword arguments of its forward.
        """
        ...


@runtime_checkable
class RuntimeTracer(Protocol):
    """A runtime that has its own graph of a model, found with its own tools.

    Attributes
    ----------
    walked_by : str
        Name under which its graphs are kept: its own, or that of the runtime whose graphs it shares.
    options : str
        Whatever else its graphs depend on (versions, settings); part of the key they are kept by.
    """

    name: str
    walked_by: str
    options: str

    def walk(self, source: Source, target: str) -> ModelGraph:
        """What the runtime runs for a model, every op's work affine in batch.

        Parameters
        ----------
        source : Source
            The model.
        target : str
            Kind of device: "cpu" or "cuda". Nothing may be asked of a device of that kind.

        Raises
        ------
        RuntimeRefusalError
            When the runtime's tools refuse the model; names the op. `estimate` is then used in its place.
        """
        ...

    def estimate(self, graph: ModelGraph, target: str) -> ModelGraph:
        """The best guess from an eager graph alone, with a note that says so."""
        ...


FIRST_DIM = 5  # of the counts: macs, bytes of weights, read, written, and alive come before


class ExecutedOp(NamedTuple):
    """One host step: `counts` are macs, weight, read and written bytes, bytes alive after it, then its dims."""

    name: str
    host_class: str
    family: str
    dtype: str
    dims: tuple[str, ...]
    counts: tuple[int, ...]
    launches: int
    syncs: int
    estimated: bool
    python_calls: int = 0

    @property
    def kind(self) -> tuple[object, ...]:
        """What two steps must share to be the same step at two batch sizes."""
        return (self.name, self.host_class, self.family, self.dtype, self.dims, self.launches, self.syncs)

    def with_lines(self, counts: Sequence[Affine]) -> Op:
        """The step as an op, its counts given for every batch size."""
        macs, weights, read, written, live, *dims = counts
        return Op(
            name=self.name,
            module="",
            host_class=self.host_class,
            family=self.family,
            dtype=self.dtype,
            dims=dict(zip(self.dims, dims, strict=True)),
            macs=macs,
            weight_bytes=weights,
            read_bytes=read,
            write_bytes=written,
            live_bytes=live,
            launches=self.launches,
            syncs=self.syncs,
            python_calls=self.python_calls,
            estimated=self.estimated,
        )


def line(at_two: int, at_three: int) -> Affine:
    """The line through what was counted at batch 2 and 3.

    >>> line(20, 30)
    Affine(constant=0, per_sample=10)
    """
    slope = at_three - at_two
    return Affine(at_two - 2 * slope, slope)


def op_through(two: ExecutedOp, three: ExecutedOp) -> Op:
    """The op that a step at batch 2 and the same step at batch 3 are."""
    return two.with_lines([line(a, b) for a, b in zip(two.counts, three.counts, strict=True)])


def ops_exactly(steps: Iterable[ExecutedOp]) -> tuple[Op, ...]:
    """Ops of one batch size alone."""
    return tuple(step.with_lines([Affine(count) for count in step.counts]) for step in steps)


def is_affine(ops: Sequence[Op], one: Sequence[ExecutedOp]) -> bool:
    """Whether ops also give what was executed at batch 1."""
    return len(ops) == len(one) and all(_fits(op, step) for op, step in zip(ops, one, strict=True))


def _fits(op: Op, step: ExecutedOp) -> bool:
    """Whether a step is on the line; of "operands" a tensor as large as the result at batch 1 is no sign."""
    if (op.name, op.host_class, op.family, tuple(op.dims)) != (step.name, step.host_class, step.family, step.dims):
        return False
    lines = (op.macs, op.weight_bytes, op.read_bytes, op.write_bytes, op.live_bytes, *op.dims.values())
    names = ("",) * FIRST_DIM + step.dims
    told = (entry for entry in zip(lines, step.counts, names, strict=True) if entry[2] != "operands")
    return all(line.at(1) == count for line, count, _ in told)
