"""Predictor: a profile applied to models. It traces, lowers, prices, runs the two clocks, and says how sure it is.

The road of a prediction is `trace`, then in `_passes` the runtime's `lower`, `_price` and `_clock`. Only tracing a
model imports torch, and nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property, lru_cache
from itertools import chain
from numbers import Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from latpred import runtimes
from latpred.errors import ProfileError, RuntimeRefusalError, UsageError
from latpred.graph.features import Floats
from latpred.graph.graph import CONTIGUOUS, Coverage, Ints, ModelGraph, Schedule, grows
from latpred.graph.rewrites import OLDER, as_run_on_cuda, attended, in_parts
from latpred.host import Slowdown
from latpred.prediction import clocks, fallbacks, host_swap
from latpred.prediction.clocks import Z90, BatchThresholds, CurveSamples, last_false
from latpred.prediction.kernel_times import LARGE_BLOCK, resident_share, trimmed_bytes
from latpred.prediction.prediction import ClassCosts, Curve, Prediction, Provenance, Setting, joined
from latpred.prediction.pricing import Priced, PriceList, moved
from latpred.profile import datasheet
from latpred.profile.document import ADAPTED, UNSURE, DeviceInfo, DeviceProfile, DispatchFit
from latpred.query import MOST_BATCH, Options, checked_batches
from latpred.runtimes import lowering
from latpred.runtimes.base import Runtime
from latpred.runtimes.legacy_torch import as_run_in, rewrites, traced_for
from latpred.storage import IdentityCache

if TYPE_CHECKING:
    from latpred.query import Model

_NUDGE = 0.05  # relative change of kernel times by which the latency's sensitivity to them is found
_ALLOCATING = frozenset({fallbacks.EAGER, fallbacks.TORCHSCRIPT})  # runtimes that make memory for each result
_MOST_UNPICKLED = 4  # predictors that a worker keeps


class _RuntimeFit(NamedTuple):
    """What is the same for all graphs in one runtime."""

    runtime: Runtime
    traced_by: str  # whose graphs it lowers
    device: DeviceInfo  # as the runtime has it
    dispatch: DispatchFit  # with spreads no narrower than the errors that the profile's gate found
    busy_spread: float  # of that, where the device sets the pace


class _Passes(NamedTuple):
    """Forward passes at the batches that one schedule serves; arrays have the batches as their last axis."""

    positions: list[int]  # of the batches among those that were asked for
    batches: Ints
    priced: Priced
    overhead_us: Floats
    compute_us: Floats
    executing_us: Floats  # compute without the gaps between kernels
    latency_us: Floats
    log_std: Floats  # of the latency
    host_log_std: Floats  # what of that is the asker's host
    memory_bound: NDArray[np.bool_]
    class_host_us: Floats  # (classes, batches)
    class_us: Floats  # of the device


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
    slowdown : Slowdown, optional
        How much slower the machine is than at the profile's full speed; default: as in the usual moments of its
        calibration.

    Examples
    --------
    >>> import latpred.profile
    >>> predictor = Predictor(latpred.profile.load("rtx-8000"))
    >>> predictor.profile.device.multiprocessors
    72
    """

    def __init__(self, profile: DeviceProfile, caveats: Iterable[str] = (), slowdown: Slowdown | None = None) -> None:
        if not isinstance(profile, DeviceProfile):
            raise UsageError(
                f"a Predictor takes a profile, not a {type(profile).__name__}; load one first, as in "
                "latpred.Predictor(latpred.profile.load('rtx-8000'))."
            )
        self.given = profile  # without estimates
        self.profile = fallbacks.with_estimates(profile)
        self.caveats = tuple(caveats)
        self.slowdown = Slowdown.usual(profile.usual) if slowdown is None else slowdown
        self.target = lowering.target_of(profile.device.kind)
        self.era = profile.protocol.get("era", "")
        self._prices = PriceList(self.profile, self.slowdown)
        self._priced: dict[tuple[str, str, float], IdentityCache[Schedule, Priced]] = {}
        self._touched: IdentityCache[Schedule, list[float]] = IdentityCache()
        self._lowered: IdentityCache[ModelGraph, dict[str, ModelGraph]] = IdentityCache()
        self._runtimes: dict[str, _RuntimeFit] = {}
        self._slower: dict[Slowdown, Predictor] = {}

    def at(self, slowdown: Slowdown) -> Predictor:
        """The same for a machine that is so much slower than the profile's full speed; each is made once."""
        if slowdown == self.slowdown:
            return self
        if slowdown not in self._slower:
            slower = Predictor(self.given, self.caveats, slowdown)
            slower._prices = PriceList(self.profile, slowdown, self._prices.models)
            slower._lowered = self._lowered
            self._slower[slowdown] = slower
        return self._slower[slowdown]

    def trace(self, model: Model, options: Options | None = None, batches: Sequence[int] = ()) -> ModelGraph:
        """The graph that the runtime of `options` lowers on this device, with the PyTorch that the profile is of."""
        options = options or Options()
        if isinstance(model, ModelGraph):
            given = options.checked(model)
            return given if options.attention is None else attended(given, options.attention)
        with traced_for(self.era) if self.era else nullcontext():
            return lowering.trace_for_runtime(
                model, runtime=options.runtime, target=self.target, batches=batches, **options.tracing
            )

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
        batch, runtime, protocol, inputs_on
            As for `latpred.predict`.

        Raises
        ------
        UsageError, ProfileError
            As for `latpred.predict`.
        """
        return self.curve(graph, (batch,), runtime=runtime, protocol=protocol, inputs_on=inputs_on).points[0]

    def curve(
        self,
        graph: ModelGraph,
        batches: Sequence[int] | Ints,
        *,
        runtime: str = "eager",
        protocol: str = "single",
        inputs_on: str = "device",
    ) -> Curve:
        """Predict over batch sizes; parameters and errors as for `predict`."""
        sizes = checked_batches(batches)
        _demand_graph(graph)
        graph.check_batches(sizes)
        options = Options(runtime=runtime, protocol=protocol, inputs_on=inputs_on)
        if not (graph.exact or graph.only):
            return self._curve(self.lowered(graph, runtime), sizes, options)
        points = []
        for batch in sizes:
            alone = self.lowered(graph.exact.get(batch, graph), runtime)
            points.append(self._curve(alone, (batch,), options)[0])
        return joined(points, graph.notes, asynchronous=self.profile.device.asynchronous)

    def check(self, runtime: str, precision: str | None = None) -> None:
        """Make sure that a runtime, and a precision where it is known, can be predicted, before anything takes time.

        Raises
        ------
        UsageError
            When no runtime goes by the name, or it cannot run on the device.
        ProfileError
            When the profile has no dispatch costs of it, or no kernels in the precision; the message says what to do.
        """
        self._runtime_fit(runtime)
        if precision is not None:
            self._prices.fits(precision)

    def max_batch(
        self, graph: ModelGraph, latency_ms: float, *, runtime: str = "eager", protocol: str = "single"
    ) -> int:
        """The largest batch within a latency that also fits the device's memory; 0 when there is none.

        1,048,576 is the largest that is tried: it stands for that and more.

        Raises
        ------
        UsageError
            When the latency is not a positive number, or the work is not affine in batch or the same at every batch.
        """
        _demand_graph(graph)
        if not (isinstance(latency_ms, Real) and not isinstance(latency_ms, bool) and 0 < latency_ms < np.inf):
            raise UsageError(f"latency_ms must be a positive number of milliseconds, not {latency_ms!r}.")
        if graph.exact:
            raise UsageError(
                f"The work of {graph.model} is not affine in batch, so no largest batch can be worked out. "
                "Predict the batches in question: latpred.predict(model, batch=[...])."
            )
        if not (graph.only or grows(graph)):
            raise UsageError(
                f"The work of {graph.model} is the same at every batch, so no batch is the largest. "
                "Give inputs= whose first dimension is the batch, or as a function of the batch."
            )
        lowered, options = self.lowered(graph, runtime), Options(runtime=runtime, protocol=protocol)
        self._runtime_fit(runtime).runtime.lower(lowered, 2)  # refuses what runs at no batch but 1
        memory = self.profile.device.memory_bytes or np.inf

        def too_large(batches: Ints) -> NDArray[np.bool_]:
            latency_us = self._samples(lowered, batches, options, 0.0).latency_us
            peaks = np.array([lowered.peak_bytes(batch) for batch in batches.tolist()])
            within: NDArray[np.bool_] = (latency_us <= latency_ms * 1e3) & (peaks <= memory)
            return ~within  # what the runtime refuses is not within either

        if graph.only:
            (only,) = graph.only
            return 0 if too_large(np.array([only]))[0] else only
        return last_false(too_large, MOST_BATCH)

    def priced(
        self, graph: ModelGraph, batch: int = 1, *, runtime: str = "eager"
    ) -> tuple[Schedule, Priced, DeviceInfo, float]:
        """Schedule, costs and device of one forward pass, and what it waits for beside, in us: a CPU for memory."""
        graph.check_batches([batch])
        lowered, fit = self.lowered(graph.exact.get(batch, graph), runtime), self._runtime_fit(runtime)
        schedule = fit.runtime.lower(lowered, batch)
        priced = self._price(schedule, lowered, self._resident(schedule, lowered, batch))
        beside_us = self._beside_us(lowered, priced, np.array([batch]), Options(runtime=runtime))
        return schedule, priced, fit.device, float(np.sum(beside_us))

    def host_log_std(
        self, graph: ModelGraph, batch: int = 1, *, runtime: str = "eager", protocol: str = "single"
    ) -> float:
        """What of the standard deviation of a log latency comes from the asker's host, the same in all runtimes."""
        options = Options(runtime=runtime, protocol=protocol)
        lowered = self.lowered(graph.exact.get(batch, graph), runtime)
        (passes,) = self._passes(lowered, np.array([batch]), options)
        return float(passes.host_log_std[0])

    def lowered(self, graph: ModelGraph, runtime: str) -> ModelGraph:
        """The graph that the runtime lowers; an eager trace may have to do for an estimate."""
        lowering.demand_autocast(runtime, graph.precision)
        if graph.runtime != self._runtime_fit(runtime).traced_by or graph.target not in ("", self.target):
            graph = lowering.fitting(graph, "eager" if rewrites(self.era, runtime) else runtime, self.target)
        measured = self.profile.provenance == "measured" and not self.era
        if measured and self.profile.device.kind != "cuda":
            return graph
        by_runtime = self._lowered.get(graph, lambda _: {})
        if runtime not in by_runtime:
            # What was fitted to tables of whole models has their host classes; kernels as small as those of attention
            # under some masks are not known well enough there to be many.
            by_runtime[runtime] = (
                as_run_on_cuda(graph) if measured else as_run_in(self.era, graph, runtime, self._prices.gpu)
            )
        return by_runtime[runtime]

    def __reduce__(self) -> tuple[Any, ...]:
        """The profile, packed, the caveats and the speed: processes that get it several times make it once."""
        return _unpickled, (self._packed, self.caveats, self.slowdown)

    @cached_property
    def _packed(self) -> bytes:
        return msgspec.msgpack.encode(self.given)

    def _runtime_fit(self, runtime: str) -> _RuntimeFit:
        if runtime not in self._runtimes:
            lowering.demand_suited(runtime, self.target)
            dispatch = fallbacks.as_wide_as_gate(self.profile, runtime, self._prices.dispatch(runtime))
            device = self.profile.device
            if dispatch.gap_us is not None:  # kernels of a replayed graph follow each other faster than in a stream
                device = msgspec.structs.replace(device, gap_us=dispatch.gap_us)
            traced_by = lowering.traced_by(runtime, self.era)
            named, busy_spread = runtimes.get(runtime), dispatch.device_spread
            self._runtimes[runtime] = _RuntimeFit(named, traced_by, device, dispatch, busy_spread)
        return self._runtimes[runtime]

    def _curve(self, graph: ModelGraph, sizes: Sequence[int], options: Options) -> Curve:
        """The curve of one graph that serves all of its batches."""
        points: dict[int, Prediction] = {}
        served = list(self._passes(graph, np.array(sizes, dtype=np.int64), options))
        setting = self._setting(graph, options, served)
        for passes in served:
            points |= zip(passes.positions, self._points(setting, graph, passes), strict=True)
        return Curve(setting, tuple(map(points.__getitem__, range(len(sizes)))))

    def _samples(self, graph: ModelGraph, batches: Ints, options: Options, shift: float) -> CurveSamples:
        """What crossover, knee and largest batch depend on; device times are exp(shift * their log_std) as long."""
        overhead, compute, latency = np.full((3, len(batches)), np.nan)
        for passes in self._passes(graph, batches, options, shift, refuse=False):
            overhead[passes.positions], compute[passes.positions] = passes.overhead_us, passes.compute_us
            latency[passes.positions] = passes.latency_us
        return CurveSamples(overhead, compute, latency)

    def _passes(
        self, graph: ModelGraph, batches: Ints, options: Options, shift: float = 0.0, *, refuse: bool = True
    ) -> Iterator[_Passes]:
        """Forward passes by the schedule that serves them; batches that the runtime refuses raise, or are left out."""
        fit = self._runtime_fit(options.runtime)
        served: dict[tuple[int, float], tuple[Schedule, list[int]]] = {}
        for position, batch in enumerate(batches.tolist()):
            try:
                schedule = fit.runtime.lower(graph, batch)
            except RuntimeRefusalError:
                if refuse:
                    raise
                continue
            resident = self._resident(schedule, graph, batch)
            served.setdefault((id(schedule), resident), (schedule, []))[1].append(position)
        for (_, resident), (schedule, positions) in served.items():
            priced = self._price(schedule, graph, resident)
            yield self._clock(priced, graph, positions, batches[positions], options, shift)

    def _resident(self, schedule: Schedule, graph: ModelGraph, batch: int) -> float:
        """Share of the weights that stays in the cache."""
        device = self.profile.device
        if not 0 < graph.parameter_bytes <= (2 * device.resident_bytes or device.cache_bytes):
            return 0.0  # most models, without a look at what they touch
        constant, per_sample = self._touched.get(schedule, lambda new: moved(new.ops)["bytes"].sum(axis=0).tolist())
        return resident_share(graph.parameter_bytes, constant + per_sample * batch, device)

    def _price(self, schedule: Schedule, graph: ModelGraph, resident: float) -> Priced:
        precision, memory_format = graph.precision, graph.memory_format
        cache = self._priced.setdefault((precision, memory_format, resident), IdentityCache())
        return cache.get(schedule, lambda new: self._prices.price(new, precision, memory_format, resident=resident))

    def _clock(
        self, priced: Priced, graph: ModelGraph, positions: list[int], batches: Ints, options: Options, shift: float
    ) -> _Passes:
        fit = self._runtime_fit(options.runtime)
        device, spread, busy_spread = fit.device, fit.dispatch.spread, fit.busy_spread
        rows, host = priced.times(batches.astype(float)), priced.host_at(batches.astype(float))
        row_us = priced.class_rows.sum(axis=0)[:, None] * rows.us
        executing = row_us.sum(axis=0)
        kernel_variance = _kernel_variance(priced, rows.log_std, row_us, spread)
        # One clock over the other.
        slower = np.exp(shift * np.sqrt(busy_spread**2 + kernel_variance + fit.dispatch.host_spread**2))
        kernels = rows.us[priced.kernel_row] * (priced.kernel_share[:, None] * slower)
        beside = self._beside_us(graph, priced, batches, options)
        idle = len(kernels) * device.gap_us if device.asynchronous else beside
        nudge = np.full(len(batches), _NUDGE)
        if device.asynchronous and (priced.unmeasured or priced.estimated):
            # A guess may be so far off that the device, and not the host, sets the latency.
            nudge = np.maximum(nudge, np.expm1(Z90 * np.sqrt(kernel_variance)))
        latency_us, by_kernels, by_host = _paced(priced, host, kernels, nudge, fit, options.protocol)
        network = spread + np.clip(by_kernels, 0.0, 1.0) * (busy_spread - spread)
        host_log_std = fit.dispatch.host_spread * by_host
        return _Passes(
            positions=positions,
            batches=batches,
            priced=priced,
            overhead_us=host.sum(axis=0),
            compute_us=executing * slower + idle,
            executing_us=executing * slower,
            latency_us=latency_us + beside,
            log_std=np.sqrt(network**2 + kernel_variance * by_kernels**2 + host_log_std**2),
            host_log_std=host_log_std,
            memory_bound=2.0 * (row_us * rows.memory_bound).sum(axis=0) > executing,
            class_host_us=priced.class_steps @ host,
            class_us=priced.class_rows @ rows.us,
        )

    def _beside_us(self, graph: ModelGraph, priced: Priced, batches: Ints, options: Options) -> Floats | float:
        """What a pass waits for beside its steps and kernels: inputs on their way, or on a CPU the system's memory."""
        device = self.profile.device
        if not device.asynchronous:
            live = priced.live_at(batches)
            given = options.runtime in _ALLOCATING and live.max(initial=0.0) > 2 * LARGE_BLOCK
            return trimmed_bytes(live) / device.fresh_bytes_per_us if given and device.fresh_bytes_per_us else 0.0
        if options.inputs_on == "device":
            return 0.0
        if not device.copy_bytes_per_us:
            raise ProfileError(
                f"Profile {self.profile.name!r} does not know how fast inputs are copied to the device. "
                'Calibrate again, or ask with inputs_on="device".'
            )
        constant, per_sample = graph.input_bytes
        return (constant + per_sample * batches) / device.copy_bytes_per_us + device.sync_us

    def _points(self, setting: Setting, graph: ModelGraph, passes: _Passes) -> Iterator[Prediction]:
        priced, batches, memory = passes.priced, passes.batches, self.profile.device.memory_bytes
        latency_ms, factor = passes.latency_us / 1e3, np.exp(Z90 * passes.log_std)
        clocks_ms = (passes.overhead_us / 1e3, passes.compute_us / 1e3, passes.executing_us / 1e3)
        live = priced.live_at(batches).max(axis=0, initial=0.0)
        inputs = graph.input_bytes.constant + graph.input_bytes.per_sample * batches
        peaks = graph.parameter_bytes + np.maximum(live, inputs)
        each = (batches, latency_ms, latency_ms / factor, latency_ms * factor, *clocks_ms, passes.memory_bound, peaks)
        rows = zip(*(column.tolist() for column in each), passes.class_host_us.T, passes.class_us.T, strict=True)
        coverage = Coverage(1.0, 1.0, {})
        for batch, latency, low, high, overhead, compute, executing, memory_bound, peak, host_us, device_us in rows:
            bound = "memory-bound" if memory_bound else "compute-bound"
            yield Prediction(
                setting=setting,
                batch=batch,
                latency_ms=latency,
                interval_ms=(low, high),
                overhead_ms=overhead,
                compute_ms=compute,
                device_busy=min(1.0, executing / latency) if latency else 0.0,
                regime="framework-bound" if overhead > compute else bound,
                peak_bytes=int(peak),
                fits=peak <= memory if memory else None,
                coverage=graph.coverage(batch) if priced.estimated else coverage,
                costs=ClassCosts(priced.classes, priced.class_ops, host_us, device_us),
            )

    def _setting(self, graph: ModelGraph, options: Options, served: Sequence[_Passes]) -> Setting:
        profile, runtime = self.profile, options.runtime
        estimated = () if runtime in self.given.runtimes else (fallbacks.caveat(runtime),)
        return Setting(
            model=graph.model,
            input_kind=graph.input_kind,
            input_size=graph.input_size,
            precision=graph.precision,
            runtime=runtime,
            device=profile.device.name,
            protocol=options.protocol,
            inputs_on=options.inputs_on if profile.device.asynchronous else "device",  # a CPU computes where they are
            provenance=Provenance(
                profile=profile.name,
                source=f"{profile.provenance}, adapted" if ADAPTED in profile.protocol else profile.provenance,
                created=profile.created,
                machine=profile.machine,
                caveats=(
                    *self.caveats,
                    *self._host_caveat(runtime, served),
                    *_caveats(profile, graph, runtime, served),
                    *estimated,
                ),
            ),
            thresholds=BatchThresholds(lambda batches, shift: self._samples(graph, batches, options, shift)),
            memory_format=graph.memory_format,
            attention=graph.attention,
        )

    def _host_caveat(self, runtime: str, served: Sequence[_Passes]) -> list[str]:
        """Whose dispatch it is, where nobody said and a host would set one of the latencies."""
        if not self.given.device.asynchronous or self._unnamed_host is None:  # a CPU is its own host
            return []
        if ADAPTED in self.given.protocol and not self._runtime_fit(runtime).dispatch.host_spread:  # its rows told
            return []
        caveat, slowest = self._unnamed_host
        slow = any((passes.overhead_us * slowest > passes.compute_us).any() for passes in served)
        return [caveat] if slow else []

    @cached_property
    def _unnamed_host(self) -> tuple[str, float] | None:
        return host_swap.unnamed(self.given)


def _demand_graph(graph: object) -> None:
    """Refuse a model that was not traced yet."""
    if not isinstance(graph, ModelGraph):
        raise UsageError(
            f"a Predictor predicts graphs, not a {type(graph).__name__}; trace the model first, as in "
            "predictor.predict(predictor.trace(model))."
        )


@lru_cache(maxsize=_MOST_UNPICKLED)
def _unpickled(profile: bytes, caveats: tuple[str, ...], slowdown: Slowdown) -> Predictor:
    return Predictor(msgspec.msgpack.decode(profile, type=DeviceProfile), caveats, slowdown)


def _paced(
    priced: Priced, host: Floats, kernels: Floats, nudge: Floats, fit: _RuntimeFit, protocol: str
) -> tuple[Floats, Floats, Floats]:
    """Latency, and the powers of kernel times and of the host's that it goes with; `nudge` is how far kernels may be.

    A host that is slower by what nobody told may set the latency where this one does not: all else is then faster.
    """
    varied = [kernels, kernels * (1.0 + nudge)]
    host_within = Z90 * fit.dispatch.host_spread * bool(len(kernels))
    if host_within:
        varied.append(kernels * np.exp(-host_within))
    steps = host[:, 0] if priced.cold is None else np.concatenate([host] * len(varied), axis=1)
    latencies = clocks.latency(priced.timeline, steps, np.concatenate(varied, axis=1), fit.device, protocol)
    plain, more, *less = latencies.reshape(len(varied), -1)
    by_kernels = np.log(more / plain) / np.log1p(nudge) if len(kernels) else np.zeros(len(nudge))
    with_host = np.log(plain / less[0]) / host_within if less else np.clip(by_kernels, 0.0, 1.0)
    return plain, by_kernels, 1.0 - with_host


def _kernel_variance(priced: Priced, log_std: Floats, row_us: Floats, network_log_std: float) -> Floats:
    """Variance of the log device time: errors go together within a family and not between families.

    What whole networks of the calibration showed already holds the usual error of each fit, so only what exceeds it
    counts: rows far from every sample, and estimated ones.
    """
    usual = priced.usual_log_std[:, None] if network_log_std else 0.0
    excess = np.sqrt(np.maximum(log_std**2 - usual**2, 0.0))
    by_family = priced.families @ (row_us * excess)
    variance: Floats = (by_family**2).sum(axis=0) / np.maximum(row_us.sum(axis=0), 1e-12) ** 2
    return variance


def untested(fit: DispatchFit) -> Iterator[str]:
    """What nothing vouches for in a correction by measured architectures, and what to add for that."""
    if fit.untested:
        models = f"{fit.untested} measured architecture{'s' * (fit.untested != 1)}"
        yield (
            f"corrected by {models}, too few to leave one out: nothing vouches for the correction; add rows of others, "
            "ten are plenty"
        )
    if len(fit.tested_batches) == 1:
        yield (
            f"corrected by rows of batch {fit.tested_batches[0]} alone: nothing vouches for the correction at others; "
            "add rows of another batch"
        )


def _caveats(profile: DeviceProfile, graph: ModelGraph, runtime: str, served: Sequence[_Passes]) -> list[str]:
    """What may not hold of a graph's prediction, whichever schedules serve its batches."""
    said = list(graph.notes)
    if OLDER in said and (graph.attention or not in_parts(graph.ops)):
        said.remove(OLDER)
    gate, see = profile.acceptance, f"see: latpred profiles show {profile.name}"
    if profile.provenance == datasheet.PROVENANCE:
        said.append(datasheet.ADAPTED_CAVEAT if ADAPTED in profile.protocol else datasheet.CAVEAT)
    elif not gate.passed:
        said.append(f"the profile failed its acceptance gate; {see}")
    elif not gate.runtimes.get(runtime, True):
        said.append(f"what the profile says of {runtime} failed its acceptance gate; {see}")
    elif unsure := gate.checks.get(f"{runtime}: {UNSURE}" if runtime in gate.runtimes else UNSURE):
        said.append(f"{runtime} passed its acceptance gate, but {unsure}; {see}")
    said += untested(profile.runtimes[runtime])
    # A runtime with kernels of its own has them in the layouts that it was measured in.
    measured = profile.runtimes[runtime].kernels or profile.kernels
    if graph.memory_format != CONTIGUOUS and not any(graph.memory_format in name for name in measured):
        said.append(f"convolutions were measured in the contiguous format: in {graph.memory_format} they may differ")
    said += _all_of(served, "caveats")
    if estimated := _all_of(served, "estimated"):
        said.append(f"no cost formula for {', '.join(sorted(estimated))}: estimated from bytes")
    if unmeasured := _all_of(served, "unmeasured"):
        said.append(f"the profile has no measurements of {', '.join(unmeasured)} kernels: estimated")
    if told := _all_of(served, "from_datasheet"):
        said.append(f"the profile has no measurements of {', '.join(told)} kernels: taken from the datasheet")
    return said


def _all_of(served: Sequence[_Passes], names: str) -> list[str]:
    """What the costs of all schedules have under an attribute, each once."""
    return list(dict.fromkeys(chain.from_iterable(map(attrgetter(f"priced.{names}"), served))))
