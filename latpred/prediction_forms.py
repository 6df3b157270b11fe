"""Predictions for programs: plain values that JSON can hold, and rows of a predicted table. Computes nothing new."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from latpred.prediction import Prediction, Provenance, Setting


def asked(setting: Setting) -> dict[str, Any]:
    """What a prediction or curve was asked for, and what it rests on."""
    return {
        "model": setting.model,
        "input_kind": setting.input_kind,
        "input_size": setting.input_size,
        "precision": setting.precision,
        "runtime": setting.runtime,
        "device": setting.device,
        "protocol": setting.protocol,
        "inputs_on": setting.inputs_on,
        "provenance": origin(setting.provenance),
    }


def origin(provenance: Provenance) -> dict[str, Any]:
    """The profile that a prediction rests on."""
    return {
        "profile": provenance.profile,
        "source": provenance.source,
        "created": provenance.created,
        "cpu": provenance.machine.cpu,
        "accelerator": provenance.machine.accelerator,
        "caveats": list(provenance.caveats),
    }


def point(point: Prediction) -> dict[str, Any]:
    """The numbers at one batch size."""
    return {
        "batch": point.batch,
        "latency_ms": point.latency_ms,
        "interval_ms": list(point.interval_ms),
        "throughput_per_s": point.throughput_per_s,
        "overhead_ms": point.overhead_ms,
        "compute_ms": point.compute_ms,
        "device_busy": point.device_busy,
        "regime": point.regime,
        "peak_bytes": point.peak_bytes,
        "fits": point.fits,
        "breakdown": [
            {"name": share.name, "ops": share.ops, "host_ms": share.host_ms, "device_ms": share.device_ms}
            for share in point.breakdown
        ],
        "coverage": {
            "launches": point.coverage.launches,
            "bytes": point.coverage.bytes,
            "estimated_ops": dict(point.coverage.estimated_ops),
        },
    }


def landmarks(setting: Setting) -> dict[str, Any]:
    """Crossover and knee with their intervals."""
    crossover, knee = setting.landmarks.crossover(), setting.landmarks.knee()
    return {
        "crossover_batch": crossover.batch,
        "crossover_interval": [crossover.low, crossover.high],
        "knee_batch": knee.batch,
        "knee_interval": [knee.low, knee.high],
    }


def frame(points: tuple[Prediction, ...]) -> pd.DataFrame:
    """A predicted table (see `latpred.tables`), one row per point."""
    import pandas as pd

    from latpred.tables import machine_name

    rows = [
        {
            "machine": machine_name(point.provenance.machine),
            "device": point.device,
            "runtime": point.runtime,
            "precision": point.precision,
            "model": point.model,
            "batch": point.batch,
            "input_kind": point.setting.input_kind,
            "input_size": point.setting.input_size,
            "protocol": point.protocol,
            "latency_s": point.latency_ms / 1e3,
            "low_s": point.interval_ms[0] / 1e3,
            "high_s": point.interval_ms[1] / 1e3,
            "overhead_s": point.overhead_ms / 1e3,
            "compute_s": point.compute_ms / 1e3,
            "regime": point.regime,
        }
        for point in points
    ]
    return pd.DataFrame(rows)
