"""Prediction and Curve: what a user reads, at one batch size and over many.

They hold numbers; `prediction.predictor` makes them. How they look is `prediction.prediction_page`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from latpred.graph.features import Floats
from latpred.graph.graph import CONTIGUOUS, Coverage
from latpred.prediction.clocks import KNEE_RATIO, Z90, BatchThreshold, BatchThresholds, CurveSamples, Sampler
from latpred.prediction.prediction_page import curve_page, prediction_page
from latpred.profile.document import Machine

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from latpred.plot.curves import Measured

SCHEMA = "latpred.prediction/1"
CURVE_SCHEMA = "latpred.curve/1"


@dataclass(frozen=True, slots=True)
class Share:
    """One line of a breakdown: a class of ops, how many there are, and their part of the overhead and the compute."""

    name: str
    ops: int
    overhead_ms: float
    compute_ms: float


class ClassCosts(NamedTuple):
    """Names of the classes of ops, how many ops each has, and microseconds of host and device."""

    names: tuple[str, ...]
    ops: NDArray[np.int64]
    host_us: NDArray[np.float64]
    device_us: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a prediction rests on: a profile, and as `caveats` sentences about what may not hold."""

    profile: str  # its name
    source: str  # "measured", "fitted from published measurements" or "datasheet", and ", adapted" where corrected
    created: str  # ISO 8601
    machine: Machine  # where it was measured
    caveats: tuple[str, ...]  # plain sentences about what may not hold


@dataclass(frozen=True, slots=True)
class Setting:
    """What was asked: the same for all points of a curve."""

    model: str
    input_kind: str
    input_size: int
    precision: str
    runtime: str
    device: str
    protocol: str
    inputs_on: str
    provenance: Provenance
    thresholds: BatchThresholds = field(repr=False, compare=False)
    memory_format: str = CONTIGUOUS
    attention: str = ""  # as was asked for; "" is as the model has it

    @property
    def setup(self) -> tuple[str, ...]:
        """The precision, and the memory format and the attention where they are not the usual ones."""
        layout = () if self.memory_format == CONTIGUOUS else (self.memory_format,)
        return (self.precision, *layout, *((f"{self.attention} attention",) if self.attention else ()))


class _Thresholds:
    __slots__ = ()
    setting: Setting

    @property
    def crossover_batch(self) -> int | None:
        """Batch from which on none is framework-bound; None if there is none up to 65,536."""
        return self.crossover.batch

    @property
    def knee_batch(self) -> int | None:
        """Batch from which on latency exceeds 1.1 times that of batch 1; None if there is none up to 65,536."""
        return self.knee().batch

    @property
    def crossover(self) -> BatchThreshold:
        """Crossover batch with its 90 % interval."""
        return self.setting.thresholds.crossover()

    def knee(self, ratio: float = KNEE_RATIO) -> BatchThreshold:
        """Batch from which on latency exceeds `ratio` times that of batch 1, with its 90 % interval."""
        return self.setting.thresholds.knee(ratio)


@dataclass(frozen=True, slots=True, repr=False)
class Prediction(_Thresholds):
    """How long one forward pass takes at one batch size, why, and how sure that is.

    Attributes
    ----------
    setting : Setting
        Model, runtime, device, precision, protocol and provenance.
    batch : int
        Batch size.
    latency_ms : float
        Milliseconds of one forward pass.
    interval_ms : tuple[float, float]
        Its 90 % interval.
    overhead_ms : float
        Dispatch: what the host does. On a GPU it is the same at every batch.
    compute_ms : float
        What the device does, gaps between kernels included.
    device_busy : float
        Share of the latency in which the device executes kernels, 0 to 1.
    regime : str
        "framework-bound", "compute-bound" or "memory-bound".
    peak_bytes : int
        Parameters and the most activations alive at once.
    fits : bool or None
        Whether that fits the device's memory; None when its size is not known.
    coverage : Coverage
        How much of the model rests on cost formulas.
    costs : ClassCosts
        What `breakdown` is read from.
    """

    setting: Setting
    batch: int
    latency_ms: float
    interval_ms: tuple[float, float]
    overhead_ms: float
    compute_ms: float
    device_busy: float
    regime: str
    peak_bytes: int
    fits: bool | None
    coverage: Coverage
    costs: ClassCosts = field(repr=False, compare=False)

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.setting.model

    @property
    def runtime(self) -> str:
        """Runtime it was predicted in."""
        return self.setting.runtime

    @property
    def device(self) -> str:
        """Device it was predicted on."""
        return self.setting.device

    @property
    def precision(self) -> str:
        """fp32, tf32, fp16, bf16 or fp64."""
        return self.setting.precision

    @property
    def protocol(self) -> str:
        """Whether each forward is waited for (single) or they follow each other (pipelined)."""
        return self.setting.protocol

    @property
    def provenance(self) -> Provenance:
        """Profile the prediction rests on."""
        return self.setting.provenance

    @property
    def throughput_per_s(self) -> float:
        """Samples per second."""
        return self.batch * 1e3 / self.latency_ms if self.latency_ms else 0.0

    @property
    def breakdown(self) -> tuple[Share, ...]:
        """Time by class of op, the most expensive first."""
        costs = self.costs
        lines = zip(costs.names, costs.ops.tolist(), costs.host_us.tolist(), costs.device_us.tolist(), strict=True)
        shares = [Share(name, ops, host / 1e3, device / 1e3) for name, ops, host, device in lines]
        return tuple(sorted(shares, key=lambda share: -(share.overhead_ms + share.compute_ms)))

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values that JSON can hold."""
        return {"schema": SCHEMA, **_question(self.setting), **_point(self), **_thresholds(self.setting)}

    def to_frame(self) -> pd.DataFrame:
        """One row of a predicted table (see `latpred.tables`)."""
        return _frame(self.setting, (self,))

    def __repr__(self) -> str:
        return prediction_page(self).text()

    def _repr_html_(self) -> str:
        return prediction_page(self).html()


@dataclass(frozen=True, slots=True, repr=False)
class Curve(_Thresholds):
    """Predictions over batch sizes, a sequence of `Prediction`.

    Attributes
    ----------
    setting : Setting
        Model, runtime, device, precision, protocol and provenance.
    points : tuple[Prediction, ...]
        In the order of the batches asked for.
    """

    setting: Setting
    points: tuple[Prediction, ...]

    @property
    def batches(self) -> NDArray[np.int64]:
        """Batch sizes."""
        return np.array([point.batch for point in self.points], dtype=np.int64)

    @property
    def latency_ms(self) -> NDArray[np.float64]:
        """Milliseconds at each batch."""
        return np.array([point.latency_ms for point in self.points])

    @property
    def overhead_ms(self) -> NDArray[np.float64]:
        """Dispatch time at each batch."""
        return np.array([point.overhead_ms for point in self.points])

    @property
    def compute_ms(self) -> NDArray[np.float64]:
        """Device time at each batch."""
        return np.array([point.compute_ms for point in self.points])

    @property
    def interval_ms(self) -> NDArray[np.float64]:
        """Low and high ends of the 90 % interval, shape (batches, 2)."""
        return np.array([point.interval_ms for point in self.points])

    @property
    def throughput_per_s(self) -> NDArray[np.float64]:
        """Samples per second at each batch."""
        return np.array([point.throughput_per_s for point in self.points])

    @property
    def regime(self) -> tuple[str, ...]:
        """Regime at each batch."""
        return tuple(point.regime for point in self.points)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values that JSON can hold."""
        return {
            "schema": CURVE_SCHEMA,
            **_question(self.setting),
            **_thresholds(self.setting),
            "points": [_point(point) for point in self.points],
        }

    def to_frame(self) -> pd.DataFrame:
        """A predicted table (see `latpred.tables`), one row per batch."""
        return _frame(self.setting, self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.points)

    @overload
    def __getitem__(self, index: int) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> Curve: ...
    def __getitem__(self, index: int | slice) -> Prediction | Curve:
        """The prediction at a position, or a part of the curve."""
        if isinstance(index, slice):
            return Curve(self.setting, self.points[index])
        return self.points[index]

    def plot(self, ax: Axes | None = None, *, measured: Measured | None = None) -> Axes:
        """Draw latency against batch: interval, overhead and compute, regimes and crossover; measured points over it.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; a new figure without it. `latpred.plot.latencies` draws several curves into one.
        measured : mapping, DataFrame or path, optional
            Measured milliseconds by batch, or a measurement table (`latpred measure -o measured.csv`).

        Raises
        ------
        MissingPackageError
            When matplotlib is not installed.
        TableError
            When the table holds nothing of this model, runtime, precision and protocol.

        Examples
        --------
        >>> latpred.predict("bert-base-uncased", batch=[1, 8, 64]).plot()  # doctest: +SKIP
        """
        from latpred import plot

        return plot.curve(self, ax, measured=measured)

    def __repr__(self) -> str:
        return curve_page(self).text()

    def _repr_html_(self) -> str:
        return curve_page(self).html()


_COARSE = "crossover and knee are read off straight lines through the batches asked for"


def _question(setting: Setting) -> dict[str, Any]:
    names = ("model", "input_kind", "input_size", "precision", "runtime", "device", "protocol", "inputs_on")
    asked = {name: getattr(setting, name) for name in names}
    return {**asked, **_further_keys(setting), "provenance": origin(setting.provenance)}


def _further_keys(setting: Setting) -> dict[str, str]:
    """What tells cells apart beside the keys of every table; attention only where it was asked for."""
    attention = {"attention": setting.attention} if setting.attention else {}
    return {"memory_format": setting.memory_format, **attention}


def origin(provenance: Provenance) -> dict[str, Any]:
    """The profile that a prediction rests on, as plain values."""
    return {
        "profile": provenance.profile,
        "source": provenance.source,
        "created": provenance.created,
        "cpu": provenance.machine.cpu,
        "accelerator": provenance.machine.accelerator,
        "caveats": list(provenance.caveats),
    }


def _point(point: Prediction) -> dict[str, Any]:
    clocks = ("throughput_per_s", "overhead_ms", "compute_ms", "device_busy", "regime", "peak_bytes", "fits")
    return {
        "batch": point.batch,
        "latency_ms": point.latency_ms,
        "interval_ms": list(point.interval_ms),
        **{name: getattr(point, name) for name in clocks},
        "breakdown": [asdict(share) for share in point.breakdown],
        "coverage": msgspec.to_builtins(point.coverage),
    }


def _thresholds(setting: Setting) -> dict[str, Any]:
    crossover, knee = setting.thresholds.crossover(), setting.thresholds.knee()
    return {
        "crossover_batch": crossover.batch,
        "crossover_interval": [crossover.low, crossover.high],
        "knee_batch": knee.batch,
        "knee_interval": [knee.low, knee.high],
    }


def _frame(setting: Setting, points: tuple[Prediction, ...]) -> pd.DataFrame:
    import pandas as pd

    asked = setting.input_kind, setting.input_size, setting.protocol
    return pd.DataFrame([predicted_row(point, point, *asked) | _further_keys(setting) for point in points])


def predicted_row(about: Any, timed: Any, input_kind: str, input_size: int, protocol: str) -> dict[str, Any]:
    """One row of a predicted table (see `latpred.tables`): what is predicted, and the times of it or of a part."""
    from latpred.tables import machine_name, seconds

    return {
        "machine": machine_name(about.provenance.machine),
        **{name: getattr(about, name) for name in ("device", "runtime", "precision", "model", "batch")},
        "input_kind": input_kind,
        "input_size": input_size,
        "protocol": protocol,
        **seconds(timed),
        "regime": timed.regime,
    }


def joined(points: Sequence[Prediction], notes: Sequence[str] = (), *, asynchronous: bool) -> Curve:
    """The curve of predictions at one batch each, with the caveats of all and the notes of what they have in common.

    `asynchronous` says that host and device of them work at the same time.
    """
    first = points[0].setting
    of_points = (caveat for point in points for caveat in point.provenance.caveats)
    caveats = dict.fromkeys([*of_points, *notes, _COARSE])
    setting = replace(
        first,
        provenance=replace(first.provenance, caveats=tuple(caveats)),
        thresholds=BatchThresholds(_interpolated(points, asynchronous)),
    )
    return Curve(setting, tuple(replace(point, setting=setting) for point in points))


def _interpolated(points: Sequence[Prediction], asynchronous: bool) -> Sampler:
    """A curve as straight lines between its points, and in proportion to the batch outside of them."""

    def both(compute: Floats, overhead: Floats) -> Floats:
        """What the two clocks take together."""
        return np.maximum(compute, overhead) if asynchronous else compute + overhead

    ordered = sorted(points, key=lambda point: point.batch)
    known = np.array([point.batch for point in ordered], dtype=float)
    compute_us, overhead_us, latency_us = (
        1e3 * np.array([(point.compute_ms, point.overhead_ms, point.latency_ms) for point in ordered]).T
    )
    rest_us = latency_us - both(compute_us, overhead_us)
    log_std = float(np.log(ordered[-1].interval_ms[1] / ordered[-1].latency_ms)) / Z90

    def sample(batches: NDArray[np.int64], shift: float) -> CurveSamples:
        inside = np.clip(batches.astype(float), known[0], known[-1])
        compute = np.interp(inside, known, compute_us) * (batches / inside) * np.exp(shift * log_std)
        overhead = np.interp(inside, known, overhead_us)
        return CurveSamples(overhead, compute, both(compute, overhead) + np.interp(inside, known, rest_us))

    return sample
