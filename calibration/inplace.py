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

    forward : without anybody watching. calls_us : for each op that Python issued, microseconds.
    """

    forward: Timing
    calls_us: tuple[float, ...]


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
    model: Any, inputs: Sequence[Any], *, repeats: int, budget_s: float, before: Callable[[], object] | None = None
) -> Placed:
    """Run a model in turns with and without a clock on every op; `before` is called ahead of each pass, untimed.

    Raises
    ------
    CalibrationError
        When two forward passes do not issue the same ops.
    """
    prepare = before or _nothing
    model(*inputs)
    forwards: list[float] = []
    watched: list[list[float]] = []
    names: list[str] = []
    start = time.perf_counter()
    while len(watched) < FEWEST or (len(watched) < repeats and time.perf_counter() - start < budget_s):
        prepare()
        begun = time.perf_counter()
        model(*inputs)
        forwards.append(time.perf_counter() - begun)
        prepare()
        with _Clocked() as clocked:
            model(*inputs)
        watched.append(clocked.seconds)
        if names and names != clocked.names:
            raise CalibrationError("a generated network issued other ops when run again. Please report its spec.")
        names = clocked.names
    low, median, high = np.percentile(forwards, (25, 50, 75))
    whole = Timing(float(median), float(high - low) / 2, len(forwards), True)
    return Placed(whole, tuple((np.median(watched, axis=0) * 1e6).tolist()))


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


def _nothing() -> None:
    """The cache stays as the last pass left it."""
