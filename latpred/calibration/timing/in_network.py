"""Times each op of a network in its place, while the network runs.

On a synchronous device an op alone in a loop is not the op that a network runs: its operands and its code are in
nearer caches. So the ops that Python issues are timed one by one during real forward passes. Ops that another op issues
from C++ share the time of the one that Python called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode

from latpred.calibration.timing import timer
from latpred.calibration.timing.reference_speed import SpeedGauge
from latpred.calibration.timing.timer import Timing
from latpred.errors import CalibrationError
from latpred.graph.graph import Op

# After one pass the next takes 5 % longer than in a loop (networks of 30 to 1,000 us on a Xeon), after four 1 %.
WARM_PASSES, WARM_S = 4, 2e-3


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
    model: Any,
    inputs: Sequence[Any],
    *,
    repeats: int,
    budget_s: float,
    gauge: SpeedGauge,
    between: Callable[[], object] | None = None,
) -> tuple[Timing, tuple[float, ...]]:
    """Time of a forward pass and microseconds of its calls, from turns with and without a clock on every op.

    Turns in slow moments do not count. `between` is called ahead of each pass, as to push its weights out of
    the cache. Without it passes follow each other, as where a model is called again and again. `repeats` and
    `budget_s` are those of `timer.turns`.
    """

    def turn() -> tuple[float, TimedCalls]:
        """Seconds of a forward pass, and the calls of another."""
        if between is None:
            _warm_up(lambda: model(*inputs))
        else:
            between()
        start = time.perf_counter()
        model(*inputs)
        forward_s = time.perf_counter() - start
        if between is not None:
            between()
        with TimedCalls() as timed:
            model(*inputs)
        return forward_s, timed

    model(*inputs)
    turns, slow = timer.turns(turn, gauge, repeats=repeats, budget_s=budget_s)
    forwards_s, timed = zip(*turns, strict=True)
    if any(each.names != timed[0].names for each in timed):
        raise CalibrationError("a generated network issued other ops when run again. Please report its spec.")
    calls_s = np.median([each.seconds for each in timed], axis=0) if timed[0].seconds else np.empty(0)
    return timer.summary(forwards_s, slow), tuple((calls_s * 1e6).tolist())


def _warm_up(call: Callable[[], object]) -> None:
    """Bring back to the caches what looking at the speed, and a clock on every op, have pushed out."""
    start = time.perf_counter()
    for _ in range(WARM_PASSES):
        call()
        if time.perf_counter() - start > WARM_S:
            return


class TimedCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
