"""The calls that Inductor's wrapper makes, timed one by one where they stand.

A compiled model runs a Python function that calls generated kernels and library kernels by names of its module. Those
names are given timed stand-ins for a while; nothing is compiled differently.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from latpred.calibration import timing
from latpred.calibration.reference_speed import SpeedGauge
from latpred.calibration.timing import Timing
from latpred.units import US_PER_S

_LIBRARIES = ("extern_kernels", "torch", "aten")


class Placed(NamedTuple):
    """Passes whose calls were timed: median microseconds of each call, and what a pass takes beside them all.

    There are no calls where passes made different numbers of them.
    """

    calls_us: tuple[float, ...]
    outside: Timing


@contextlib.contextmanager
def wrappers() -> Iterator[list[ModuleType]]:
    """The wrappers that are loaded while the context lasts; the list is filled when it ends."""
    from torch._inductor.codecache import PyCodeCache

    before = {id(module) for module in PyCodeCache.modules}
    found: list[ModuleType] = []
    yield found
    found += [module for module in PyCodeCache.modules if id(module) not in before]


def time_calls(
    call: Callable[[], object],
    modules: Sequence[ModuleType],
    before: Callable[[], object],
    gauge: SpeedGauge,
    *,
    repeats: int,
    budget_s: float,
) -> Placed:
    """Time each call that the wrappers make in one forward pass, in order.

    Parameters
    ----------
    call : callable
        Runs the forward pass.
    modules : sequence of module
        Its wrappers.
    before : callable
        Run before each pass.
    gauge : SpeedGauge
        Tells slow moments, whose passes do not count.
    repeats, budget_s : int, float
        Passes, and seconds after which there is no other once there were three.
    """
    seconds: list[float] = []

    def turn() -> tuple[float, list[float]]:
        before()
        seconds.clear()
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun - sum(seconds), list(seconds)

    with _watched(modules, seconds):
        done, slow = timing.turns(turn, gauge, repeats=repeats, budget_s=budget_s)
    outside, passes = [one[0] for one in done], [one[1] for one in done]
    beside = timing.summary(outside, slow)
    if len({len(one) for one in passes}) != 1:
        return Placed((), beside)
    return Placed(tuple(float(us) for us in np.median(np.array(passes), axis=0) * US_PER_S), beside)


@contextlib.contextmanager
def _watched(modules: Sequence[ModuleType], seconds: list[float]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in modules:
            names = vars(module)
            stack.callback(names.update, dict(names))
            for name, value in list(names.items()):
                if name.startswith("cpp_") and callable(value):
                    names[name] = _timed(value, seconds)
                elif name in _LIBRARIES:
                    names[name] = _Library(value, seconds, name != "torch")
        yield


class _Library:
    """A namespace of kernels whose calls are timed; what is no kernel is passed on."""

    def __init__(self, inside: Any, seconds: list[float], kernels: bool) -> None:
        self._inside, self._seconds, self._kernels = inside, seconds, kernels

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inside, name)
        if name == "ops" or (self._kernels and not callable(value)) or hasattr(value, "overloads"):
            value = _Library(value, self._seconds, True)
        elif self._kernels and callable(value):
            value = _timed(value, self._seconds)
        self.__dict__[name] = value
        return value


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    clock = time.perf_counter

    def timed(*args: Any, **options: Any) -> Any:
        begun = clock()
        out = function(*args, **options)
        seconds.append(clock() - begun)
        return out

    return timed
