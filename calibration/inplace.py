"""Times each op of a network in its place, while the network runs.

On a synchronous device an op alone in a loop is not the op that a network runs: its operands and its code are in
nearer caches. So the ops that Python issues are timed one by one during real forward passes. Ops that another op issues
from C++ share the time of the one that Python called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode

from latpred.calibration.timing import Timing
from latpred.errors import CalibrationError
from latpred.graph import Op

FEWEST = 3


class Placed(NamedTuple):
    """One forward pass, timed whole and op by op.

    forward : without anybody watching. calls_us : for each op that Python issued, microseconds. tempo : of a piece of
    work that is always the same, done between the passes.
    """

    forward: Timing
    calls_us: tuple[float, ...]
    tempo: Timing


def calls(ops: Sequence[Op]) -> list[list[Op]]:
    """Ops grouped by the call from Python that issued them."""
    groups: list[list[Op]] = []
    for op in ops:
        if op.name == "python::return":
            continue
        if not groups or ".nested." not in op.host_class:
            groups.append([])
        groups[-1].append(op)
    return groups


def time_ops(
    model: Any, inputs: Sequence[Any], *, repeats: int, budget_s: float, between: Callable[[], object]
) -> Placed:
    """Run a model in turns with and without a clock on every op.

    Parameters
    ----------
    model, inputs
        A module and the arguments of its forward.
    repeats, budget_s : int, float
        Turns, and seconds after which there is no other once there were `FEWEST`.
    between : callable
        Called ahead of each pass; the time it takes is the tempo.

    Raises
    ------
    CalibrationError
        When two forward passes do not issue the same ops.
    """
    model(*inputs)
    forwards: list[float] = []
    tempos: list[float] = []
    watched: list[list[float]] = []
    names: list[str] = []
    start = time.perf_counter()
    while len(watched) < FEWEST or (len(watched) < repeats and time.perf_counter() - start < budget_s):
        tempos.append(_seconds(between))
        forwards.append(_seconds(lambda: model(*inputs)))
        tempos.append(_seconds(between))
        with _Clocked() as clocked:
            model(*inputs)
        watched.append(clocked.seconds)
        if names and names != clocked.names:
            raise CalibrationError("a generated network issued other ops when run again. Please report its spec.")
        names = clocked.names
    calls_us = tuple((np.median(watched, axis=0) * 1e6).tolist())
    return Placed(_summary(forwards), calls_us, _summary(tempos))


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _summary(seconds: Sequence[float]) -> Timing:
    low, median, high = np.percentile(seconds, (25, 50, 75))
    return Timing(float(median), float(high - low) / 2, len(seconds), True)


class _Clocked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times every op that Python issues, composite ops whole."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds: list[float] = []
        self.names: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler, seconds of work, to keep this mode out of compiled code.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        start = time.perf_counter()
        out = func(*args, **options)
        self.seconds.append(time.perf_counter() - start)
        self.names.append(func._schema.name)
        return out
