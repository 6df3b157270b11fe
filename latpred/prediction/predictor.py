"""Predictor: a profile applied to graphs. Lowers, prices, runs the two clocks and says how sure it is. Numpy only.

Nothing here traces a model or reads a file: see `latpred.api` for the call that does all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from latpred import runtimes
from latpred.caches import IdentityCache
from latpred.errors import ProfileError, UsageError
from latpred.graph.graph import Coverage, ModelGraph
from latpred.graph.schedule import Schedule
from latpred.host import SAME, Slowdown
from latpred.prediction import clocks
from latpred.prediction.clocks import Floats
from latpred.prediction.crossover import Z90, BatchThresholds, CurveSamples, first_true
from latpred.prediction.fallbacks import least_spread
from latpred.prediction.kernel_times import resident_share
from latpred.prediction.prediction import ClassCosts, Curve, Prediction, Provenance, Setting, joined
from latpred.prediction.pricing import Priced, PriceList
from latpred.profile import datasheet, gpus
from latpred.profile.document import ADAPTED, DeviceInfo, DeviceProfile
from latpred.runtimes import estimated_runtimes, lowering
from latpred.runtimes.legacy_torch import REWRITTEN, as_run_in

if TYPE_CHECKING:
    import pandas as pd

MOST_BATCH = 2**20
PROTOCOLS = ("single", "pipelined")
PLACES = ("device", "host")

_NUDGE = 0.05  # relative change of kernel times by which the latency's sensitivity to them is found


class Asked(NamedTuple):
    """What stays the same over a curve."""

    graph: ModelGraph
    runtime: str
    protocol: str
    inputs_on: str


class Evaluated(NamedTuple):
    """Everything about some batches that one schedule serves; arrays have the batches as their last axis.

    overhead, compute and latency are what a `Prediction` has; executing leaves out the gaps between kernels.
    latency_spread : standard deviation of the log of the latency. class_host_us, class_us : host and device time,
    (classes, batches).
    """

    priced: Priced
    overhead_us: Floats
    compute_us: Floats
    executing_us: Floats
    latency_us: Floats
    latency_spread: Floats
    memory_bound: NDArray[np.bool_]
    class_host_us: Floats
    class_us: Floats


class Predictor:
    """Predicts with one profile; keep it where many graphs or batches are asked for.

    What it learns of a graph is kept for as long as the graph lives, so asking again is cheaper.

    Parameters
    ----------
    profile : DeviceProfile
        What was measured on a device. Of a GPU that was not measured itself, runtimes that the profile lacks are
        estimated, and predictions say so.
    caveats : iterable of str
        Sentences about what may not hold, which every prediction repeats.
    slowdown : Slowdown
        How much slower the machine is than when the profile was measured.
    """

    def __init__(self, profile: DeviceProfile, caveats: Iterable[str] = (), slowdown: Slowdown = SAME) -> None:
        self.given = profile  # without estimates
        self.profile = estimated_runtimes.with_estimates(profile)
        self.caveats = tuple(caveats)
        self.slowdown = slowdown
        self._prices = PriceList(self.profile, slowdown)
        self._priced: dict[tuple[str, float], IdentityCache[Schedule, Priced]] = {}
        self._touched: IdentityCache[Schedule, tuple[int, int]] = IdentityCache()

    def predict(
        self,
        graph: ModelGraph,
        batch: int = 1,
        *,
        runtime: str = "eager",
        protocol: str = "single",
        inputs_on: str = "device",
    ) -> Prediction:
        """Predict one forward pass.

        Parameters
        ----------
        graph : ModelGraph
            What `latpred.trace` gives.
        batch : int
            Batch size.
        runtime : str
            Name of a runtime that the profile has dispatch costs of.
        protocol : str
            "single": each forward is waited for. "pipelined": forwards follow each other.
        inputs_on : str
            "device", or "host" to add the copy of the inputs.

        Raises
        ------
        UsageError
            When an argument is wrong.
        ProfileError
            When the profile does not cover the runtime or the precision.
        """
        return self.curve(graph, (batch,), runtime=runtime, protocol=protocol, inputs_on=inputs_on).points[0]

    def curve(
        self,
        graph: ModelGraph,
        batches: Sequence[int] | NDArray[np.int64],
        *,
        runtime: str = "eager",
        protocol: str = "single",
        inputs_on: str = "device",
    ) -> Curve:
        """Predict over batch sizes; parameters and errors as for `predict`."""
        sizes = checked_batches(batches)
        graph.check_batches(sizes.tolist())
        _check_choice("protocol", protocol, PROTOCOLS)
        _check_choice("inputs_on", inputs_on, PLACES)
        if not (graph.walked or graph.only):
            return self._along(Asked(self.lowered(graph, runtime), runtime, protocol, inputs_on), sizes)
        points = []
        for batch in sizes.tolist():
            alone = self.lowered(graph.walked.get(batch, graph), runtime)
            points.append(self._along(Asked(alone, runtime, protocol, inputs_on), np.array([batch]))[0])
        return joined(points, graph.notes)

    def _along(self, asked: Asked, sizes: NDArray[np.int64]) -> Curve:
        """The curve of one graph that serves all of its batches."""
        points: list[Prediction | None] = [None] * len(sizes)
        setting: Setting | None = None
        for schedule, resident, positions in self._served_together(asked, sizes):
            found = self._evaluate(asked, schedule, resident, sizes[positions], 0.0)
            if setting is None:
                setting = self._setting(asked, found.priced)
            for position, point in zip(positions, self._points(setting, asked, found, sizes[positions]), strict=True):
                points[position] = point
        assert setting is not None
        return Curve(setting, tuple(point for point in points if point is not None))

    def check(self, runtime: str, precision: str | None = None) -> None:
        """Make sure that a runtime, and a precision where it is known, can be predicted, before anything takes time.

        Raises
        ------
        UsageError
            When no runtime goes by the name, or it cannot run on the device.
        ProfileError
            When the profile has no dispatch costs of it, or no kernels in the precision; the message says what to do.
        """
        lowering.demand_suited(runtime, lowering.target_of(self.profile.device.kind))
        self._prices.dispatch(runtime)
        if precision is not None:
            self._prices.fits(precision)

    def max_batch(
        self, graph: ModelGraph, latency_ms: float, *, runtime: str = "eager", protocol: str = "single"
    ) -> int:
        """The largest batch within a latency that also fits the device's memory; 0 when there is none.

        Raises
        ------
        UsageError
            When the latency is not a positive number.
        """
        if not (isinstance(latency_ms, int | float) and 0 < latency_ms < np.inf):
            raise UsageError(f"latency_ms must be a positive number of milliseconds, not {latency_ms!r}.")
        if graph.walked:
            raise UsageError(
                f"The work of {graph.model} is no line in batch, so no largest batch can be worked out. "
                "Predict the batches in question: latpred.predict(model, batch=[...])."
            )
        asked = Asked(self.lowered(graph, runtime), runtime, protocol, "device")
        memory = self.profile.device.memory_bytes or np.inf

        def too_large(batches: NDArray[np.int64]) -> NDArray[np.bool_]:
            latency = self._course(asked, batches, 0.0).latency_us
            peaks = np.array([asked.graph.peak_bytes(batch) for batch in batches.tolist()])
            over: NDArray[np.bool_] = (latency > latency_ms * 1e3) | (peaks > memory)
            return over

        if graph.only:
            (only,) = graph.only
            return 0 if too_large(np.array([only]))[0] else only
        first = first_true(too_large, MOST_BATCH)
        return MOST_BATCH if first is None else first - 1

    def priced(
        self, graph: ModelGraph, batch: int = 1, *, runtime: str = "eager"
    ) -> tuple[Schedule, Priced, DeviceInfo]:
        """What one forward pass is made of: a runtime's schedule at a batch size, its costs, and the device's clock."""
        graph.check_batches([batch])
        lowered = self.lowered(graph.walked.get(batch, graph), runtime)
        schedule = runtimes.get(runtime).lower(lowered, batch)
        resident = self._resident(schedule, lowered, batch)
        return schedule, self._price(schedule, lowered, resident), self._device(runtime)

    def predict_many(self, candidates: Iterable[Any], **asked: Any) -> pd.DataFrame:
        """Predict many candidates of a search; parameters, table and errors as for `latpred.predict_many`."""
        from latpred.search import many

        return many.predict_many(self, candidates, **asked)

    def __getstate__(self) -> dict[str, Any]:
        """The profile, the caveats and the speed; prices are made anew."""
        return {"profile": self.given, "caveats": self.caveats, "slowdown": self.slowdown}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start afresh from the profile."""
        self.__init__(**state)  # type: ignore[misc]

    def lowered(self, graph: ModelGraph, runtime: str) -> ModelGraph:
        """The graph that the runtime lowers; an eager walk may have to do for an estimate."""
        era, target = self.profile.protocol.get("era", ""), lowering.target_of(self.profile.device.kind)
        rewritten = era and runtime in REWRITTEN
        name = self.profile.device.name
        gpu = gpus.spec(name) if gpus.known(name) else None
        return as_run_in(era, lowering.fitting(graph, "eager" if rewritten else runtime, target), runtime, gpu)

    def _estimated(self, runtime: str) -> tuple[str, ...]:
        """What an estimated runtime's predictions rest on."""
        return () if runtime in self.given.runtimes else (estimated_runtimes.caveat(runtime),)

    def _device(self, runtime: str) -> DeviceInfo:
        """The device as a runtime has it: kernels of a replayed graph follow each other faster than in a stream."""
        gap_us = self.profile.runtimes[runtime].gap_us
        device = self.profile.device
        return device if gap_us is None else msgspec.structs.replace(device, gap_us=gap_us)

    def _price(self, schedule: Schedule, graph: ModelGraph, resident: float) -> Priced:
        precision = graph.precision
        cache = self._priced.setdefault((precision, resident), IdentityCache())
        return cache.get(schedule, lambda fresh: self._prices.price(fresh, precision, resident=resident))

    def _served_together(self, asked: Asked, batches: NDArray[np.int64]) -> list[tuple[Schedule, float, list[int]]]:
        """Schedules and the share of weights that stays in the cache, with the positions of batches that have it."""
        runtime = runtimes.get(asked.runtime)
        served: dict[tuple[int, float], tuple[Schedule, float, list[int]]] = {}
        for position, batch in enumerate(batches.tolist()):
            schedule = runtime.lower(asked.graph, batch)
            resident = self._resident(schedule, asked.graph, batch)
            served.setdefault((id(schedule), resident), (schedule, resident, []))[2].append(position)
        return list(served.values())

    def _resident(self, schedule: Schedule, graph: ModelGraph, batch: int) -> float:
        device = self.profile.device
        if not 0 < graph.parameter_bytes <= (2 * device.resident_bytes or device.cache_bytes):
            return 0.0  # most models, without a look at what they touch
        constant, per_sample = self._touched.get(schedule, _touched_bytes)
        return resident_share(graph.parameter_bytes, constant + per_sample * batch, device)

    def _evaluate(
        self, asked: Asked, schedule: Schedule, resident: float, batches: NDArray[np.int64], shift: float
    ) -> Evaluated:
        priced = self._price(schedule, asked.graph, resident)
        device = self._device(schedule.runtime)
        rows = priced.rows_at(batches.astype(float))
        row_us = priced.row_counts[:, None] * rows.us
        executing = row_us.sum(axis=0)
        known, busy = self._network_spreads(schedule.runtime)
        host_spread = self.profile.runtimes[schedule.runtime].host_spread
        device_spread = np.sqrt(known**2 + _kernel_variance(priced, rows.spread, row_us, known))
        slower = np.exp(shift * np.hypot(device_spread, host_spread))  # one clock over the other
        kernels = rows.us[priced.kernel_row] * (priced.kernel_share[:, None] * slower)
        gaps = len(kernels) * device.gap_us if device.asynchronous else 0.0
        nudged = np.concatenate((kernels, kernels * (1.0 + _NUDGE)), axis=1)
        host = priced.host_at(batches.astype(float))
        steps = priced.host_us if priced.cold is None else np.concatenate((host, host), axis=1)
        plain, more = np.split(clocks.latency(priced.timeline, steps, nudged, device, asked.protocol), 2)
        sensitivity = np.log(more / plain) / np.log1p(_NUDGE) if len(kernels) else np.zeros(len(batches))
        kernel_part = (device_spread**2 - known**2) * sensitivity**2
        by_device = np.clip(sensitivity, 0.0, 1.0)
        whole = known + by_device * (busy - known)
        host_part = (host_spread * (1.0 - by_device)) ** 2
        return Evaluated(
            priced=priced,
            overhead_us=host.sum(axis=0),
            compute_us=executing * slower + gaps,
            executing_us=executing * slower,
            latency_us=plain + self._copy_us(asked, batches),
            latency_spread=np.sqrt(whole**2 + kernel_part + host_part),
            memory_bound=2.0 * (row_us * rows.memory_bound).sum(axis=0) > executing,
            class_host_us=priced.class_host_at(host),
            class_us=priced.class_rows @ rows.us,
        )

    def _network_spreads(self, runtime: str) -> tuple[float, float]:
        """Spread of whole networks where the host sets the pace, and where the device does."""
        fit, least = self.profile.runtimes[runtime], least_spread(self.profile, runtime)
        return max(fit.spread, least), max(fit.spread if fit.busy_spread is None else fit.busy_spread, least)

    def _course(self, asked: Asked, batches: NDArray[np.int64], shift: float) -> CurveSamples:
        overhead, compute, latency = np.empty((3, len(batches)))
        for schedule, resident, positions in self._served_together(asked, batches):
            found = self._evaluate(asked, schedule, resident, batches[positions], shift)
            overhead[positions] = found.overhead_us
            compute[positions], latency[positions] = found.compute_us, found.latency_us
        return CurveSamples(overhead, compute, latency)

    def _copy_us(self, asked: Asked, batches: NDArray[np.int64]) -> Floats:
        device = self.profile.device
        if asked.inputs_on == "device" or not device.asynchronous:
            return np.zeros(len(batches))
        if not device.copy_bytes_per_us:
            raise ProfileError(
                f"Profile {self.profile.name!r} does not know how fast inputs are copied to the device. "
                'Calibrate again, or ask with inputs_on="device".'
            )
        constant, per_sample = asked.graph.input_bytes
        copied: Floats = (constant + per_sample * batches) / device.copy_bytes_per_us + device.sync_us
        return copied

    def _points(
        self, setting: Setting, asked: Asked, found: Evaluated, batches: NDArray[np.int64]
    ) -> Iterable[Prediction]:
        priced, memory = found.priced, self.profile.device.memory_bytes
        factor = np.exp(Z90 * found.latency_spread)
        peaks = _peak_bytes(asked.graph, priced, batches)
        coverage = Coverage(1.0, 1.0, {})
        for index, batch in enumerate(batches.tolist()):
            latency_us = float(found.latency_us[index])
            bound = "memory-bound" if found.memory_bound[index] else "compute-bound"
            yield Prediction(
                setting=setting,
                batch=batch,
                latency_ms=latency_us / 1e3,
                interval_ms=(latency_us / 1e3 / float(factor[index]), latency_us / 1e3 * float(factor[index])),
                overhead_ms=float(found.overhead_us[index]) / 1e3,
                compute_ms=float(found.compute_us[index]) / 1e3,
                device_busy=min(1.0, float(found.executing_us[index]) / latency_us) if latency_us else 0.0,
                regime="framework-bound" if found.overhead_us[index] > found.compute_us[index] else bound,
                peak_bytes=int(peaks[index]),
                fits=bool(peaks[index] <= memory) if memory else None,
                coverage=asked.graph.coverage(batch) if priced.estimated else coverage,
                costs=ClassCosts(
                    priced.classes, priced.class_ops, found.class_host_us[:, index], found.class_us[:, index]
                ),
            )

    def _setting(self, asked: Asked, priced: Priced) -> Setting:
        graph, profile = asked.graph, self.profile
        return Setting(
            model=graph.model,
            input_kind=graph.input_kind,
            input_size=graph.input_size,
            precision=graph.precision,
            runtime=asked.runtime,
            device=profile.device.name,
            protocol=asked.protocol,
            inputs_on=asked.inputs_on,
            provenance=Provenance(
                profile=profile.name,
                source=f"{profile.provenance}, adapted" if ADAPTED in profile.protocol else profile.provenance,
                created=profile.created,
                machine=profile.machine,
                caveats=(*self.caveats, *_own_caveats(profile, asked, priced), *self._estimated(asked.runtime)),
            ),
            thresholds=BatchThresholds(lambda batches, shift: self._course(asked, batches, shift)),
        )


def is_one(batch: Any) -> bool:
    """Whether a batch stands for itself, and not for several: a number, or what is none and checked as one."""
    if isinstance(batch, bool | float | str):
        return True
    try:
        len(batch)
    except TypeError:  # a tensor of no dimensions has a length, but cannot tell it
        return True
    return False


def checked_batches(batches: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Batch sizes as an array.

    Raises
    ------
    UsageError
        When there are none, or one is not a whole number from 1 to 2**20.
    """
    if isinstance(batches, str) or not len(batches):
        raise UsageError(f"{batches!r} names no batch size; give whole numbers of 1 or more, as in [1, 8, 32].")
    for batch in batches:
        if isinstance(batch, bool | np.bool_) or not isinstance(batch, Integral):
            raise UsageError(f"Batch {batch!r} is not a whole number; give 1 or more, as in batch=8.")
        if int(batch) < 1:
            raise UsageError(f"Batch {batch} is not possible; the smallest batch is 1.")
        if int(batch) > MOST_BATCH:
            raise UsageError(
                f"Batch {batch} is beyond anything a device holds; the largest that is predicted is {MOST_BATCH}."
            )
    return np.array([int(batch) for batch in batches], dtype=np.int64)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}={value!r} is not known; choose from: {', '.join(choices)}.")


def _touched_bytes(schedule: Schedule) -> tuple[int, int]:
    """Bytes that all ops read and write, weights included: their constant and what each sample adds."""
    lines = [line for op in schedule.ops for line in (op.weight_bytes, op.read_bytes, op.write_bytes)]
    return sum(line.constant for line in lines), sum(line.per_sample for line in lines)


def _kernel_variance(priced: Priced, spread: Floats, row_us: Floats, known: float) -> Floats:
    """Variance of the log device time: errors go together within a family and not between families.

    What whole networks of the calibration showed (`known`) already holds the usual error of each fit, so only what
    exceeds it counts: rows far from every sample, and estimated ones.
    """
    usual = priced.usual_spread[:, None] if known else 0.0
    excess = np.sqrt(np.maximum(spread**2 - usual**2, 0.0))
    by_family = priced.families @ (row_us * excess)
    total = row_us.sum(axis=0)
    variance: Floats = (by_family**2).sum(axis=0) / np.maximum(total, 1e-12) ** 2
    return variance


def _peak_bytes(graph: ModelGraph, priced: Priced, batches: NDArray[np.int64]) -> Floats:
    live = priced.live[:, :1] + priced.live[:, 1:] * batches
    inputs = graph.input_bytes.constant + graph.input_bytes.per_sample * batches
    peak: Floats = graph.parameter_bytes + np.maximum(live.max(axis=0, initial=0.0), inputs)
    return peak


def _own_caveats(profile: DeviceProfile, asked: Asked, priced: Priced) -> list[str]:
    graph, runtime = asked.graph, asked.runtime
    said = list(graph.notes)
    if profile.provenance == datasheet.PROVENANCE:
        said.append(datasheet.CAVEAT)
    elif not profile.acceptance.passed:
        said.append(f"the profile failed its acceptance gate; see: latpred profiles show {profile.name}")
    elif not profile.acceptance.runtimes.get(runtime, True):
        see = f"latpred profiles show {profile.name}"
        said.append(f"what the profile says of {runtime} failed its acceptance gate; see: {see}")
    untested = profile.runtimes[runtime].untested
    if untested:
        models = f"{untested} measured architecture{'s' * (untested != 1)}"
        said.append(f"corrected by {models}, too few to leave one out: nothing vouches for the correction")
    if graph.memory_format == "channels_last" and "channels_last" not in profile.protocol.get("memory_format", ""):
        said.append("convolutions were measured in the contiguous format: in channels_last they may differ")
    said += priced.caveats
    if priced.estimated:
        names = sorted({op.name for op in graph.ops if op.estimated})
        said.append(f"no cost formula for {', '.join(names)}: estimated from bytes")
    if priced.unmeasured:
        said.append(f"the profile has no measurements of {', '.join(priced.unmeasured)} kernels: estimated")
    return said
