"""WholeNetworks: the study that serves any runtime, by timing generated networks whole.

A runtime that compiles or exports what it runs cannot be watched op by op, but what its steps cost can be told from
networks that take different numbers of them. How the costs are found is `wholefit`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle

import numpy as np
import torch

from latpred.calibration import networks, suite
from latpred.calibration.cells import Cell
from latpred.calibration.device import Device
from latpred.calibration.networks import NetworkSpec
from latpred.calibration.session import Row, Sampled
from latpred.calibration.studies import queues, runs, wholefit
from latpred.calibration.studies.queues import WARM
from latpred.calibration.tempo import TEMPO, Metronome
from latpred.calibration.timing import Timing
from latpred.profile import DeviceProfile, DispatchFit

SECONDS = 90.0
FIRST_TINY = len(networks.KINDS)  # one of each kind, before anything else
TURN = ("sized", "judge", "tiny", "sized")  # what comes after them, again and again
TINY_REPEATS, TINY_S = 40, 0.15
SIZED_REPEATS, SIZED_S = 12, 0.15
JUDGE_REPEATS, JUDGE_S = 15, 0.5
FEWEST = 3  # timed forward passes of a network, however long they take


class WholeNetworks:
    """The study of a runtime that nothing special is known of.

    Parameters
    ----------
    runtime : str
        Its name.
    seconds : float
        What a full calibration spends on it.

    Examples
    --------
    >>> from latpred.calibration.device import open_device
    >>> next(WholeNetworks("torchscript").cells(open_device("cpu"), "fp32")).runtime
    'torchscript'
    """

    def __init__(self, runtime: str, seconds: float = SECONDS) -> None:
        self.runtime = runtime
        self.seconds = seconds
        self.folds = 0
        self._metronome = Metronome()
        self._filler: torch.Tensor | None = None

    def cells(self, device: Device, precision: str) -> Iterator[Cell]:
        """A tiny network of each kind; then sized ones to learn and to judge from, and more tiny ones.

        Where a network's host time can be taken by itself, sized ones tell of it too: tiny ones need not come first.
        """
        drawn = {
            "tiny": iter(suite.tiny_networks(10 * FIRST_TINY)),
            "judge": suite.judging_networks(),
            "sized": (spec for spec in suite.sized_networks() if not spec.judge),
        }
        first = () if device.asynchronous else ("tiny",) * FIRST_TINY
        for kind in chain(first, cycle(queues.TURN if device.asynchronous else TURN)):
            spec = next(drawn[kind], None)  # the tiny ones come to an end
            if spec is not None:
                yield suite.network_cell(spec, precision, self.runtime)

    def measure(self, cell: Cell, device: Device) -> Sampled:
        """Time a network whole, once the runtime has taken it apart for the fit."""
        spec = suite.network_spec(cell)
        graph = runs.graph_on(spec, cell.precision, self.runtime, device.info().kind)
        device.use_precision(cell.precision)
        if device.asynchronous:
            return Sampled(queues.timed(device, cell, spec, graph))
        model, inputs = runs.built(spec, cell.precision), runs.inputs_of(spec, cell.precision)
        call = device.prepare_model(model, inputs, self.runtime)
        before = self._evict if spec.cold else call
        forward, tempo = in_turns(call, before, self._metronome.beat, *effort(spec))
        return Sampled({"single": forward, TEMPO: tempo})

    def fit(self, rows: Sequence[Row], profile: DeviceProfile) -> DispatchFit:
        """Host costs by class and factors on kernel times, from the networks that do not judge."""
        return wholefit.fit_runs(runs.runs_of(rows, profile.device), profile, self.runtime)

    def _evict(self) -> None:
        """Fill the last-level cache, as the layers of a larger model would."""
        if self._filler is None:
            self._filler = torch.zeros(networks.EVICTING_BYTES // 4)
        self._filler.sum()


def effort(spec: NetworkSpec) -> tuple[int, float]:
    """Forward passes and seconds to spend on a network."""
    if spec.tiny:
        return TINY_REPEATS, TINY_S
    return (JUDGE_REPEATS, JUDGE_S) if spec.judge else (SIZED_REPEATS, SIZED_S)


def in_turns(
    call: Callable[[], object],
    before: Callable[[], object],
    beat: Callable[[], object],
    repeats: int,
    budget_s: float,
) -> tuple[Timing, Timing]:
    """Time a call on a synchronous device in turns with a beat: work that is always the same and tells the tempo.

    Parameters
    ----------
    call, before : callable
        What is timed, and what leaves the caches as the call shall find them: a call of itself, as where a model is
        called again and again, or what evicts its weights.
    beat : callable
        The second of two tells the tempo: the first finds in the caches whatever the call has left there.
    repeats, budget_s : int, float
        Turns, and seconds after which there is no other once there were a few.

    Returns
    -------
    tuple of Timing
        Of the call, and of the beat.
    """
    for _ in range(WARM):
        call()
    forwards: list[float] = []
    tempos: list[float] = []
    start = time.perf_counter()
    while len(forwards) < FEWEST or (len(forwards) < repeats and time.perf_counter() - start < budget_s):
        beat()
        tempos.append(_seconds(beat))
        before()
        forwards.append(_seconds(call))
    return _summary(forwards), _summary(tempos)


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _summary(seconds: Sequence[float]) -> Timing:
    low, median, high = np.percentile(seconds, (25, 50, 75))
    return Timing(float(median), float(high - low) / 2, len(seconds), True)
