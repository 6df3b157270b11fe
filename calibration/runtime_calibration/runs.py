"""Generated networks in a runtime: what it makes of each, and a journal's rows of them as runs that a fit can use.

Nothing is timed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import torch

from latpred.calibration import schedules
from latpred.calibration.devices.conditions import cast
from latpred.calibration.fitting import acceptance
from latpred.calibration.fitting.acceptance import HoldoutError
from latpred.calibration.fitting.dispatch_fit import NetworkRun
from latpred.calibration.runtime_calibration.base import Study
from latpred.calibration.session import Row
from latpred.calibration.workloads import networks
from latpred.calibration.workloads.networks import NetworkSpec
from latpred.errors import CalibrationError
from latpred.graph.dtypes import dtype_of
from latpred.graph.graph import ModelGraph
from latpred.profile.document import DeviceInfo, DeviceProfile, DispatchFit
from latpred.runtimes.lowering import fitting, of_source, target_of
from latpred.runtimes.source import Source
from latpred.units import US_PER_S


class Run(NamedTuple):
    """A network that was timed in a runtime.

    Attributes
    ----------
    graph : ModelGraph
        What the runtime runs.
    batch : int
        Batch size.
    total_us : float
        Latency of one forward pass.
    issue_us : float or None
        Time to issue one without waiting, on an asynchronous device where that was taken.
    queued_us : float or None
        Device time of one, gaps included, where several were issued before the first could start.
    sigma : float
        Relative standard error of the latency.
    tiny : bool
        Whether next to nothing but dispatch takes time.
    """

    graph: ModelGraph
    batch: int
    total_us: float
    issue_us: float | None = None
    queued_us: float | None = None
    sigma: float = 0.0
    tiny: bool = False


def built(spec: NetworkSpec, precision: str, device: str = "cpu") -> torch.nn.Module:
    """The real network of a spec, with ordinary weights: tools that export or trace want no inference tensors."""
    with torch.inference_mode(False), torch.no_grad(), torch.device(device):
        return networks.build(spec).to(dtype_of(precision))


def inputs_of(
    spec: NetworkSpec, precision: str, device: str = "cpu", batch: int | None = None
) -> tuple[torch.Tensor, ...]:
    """Real inputs of a spec's network at its own batch or another."""
    with torch.inference_mode(False):
        return cast(networks.inputs(spec, batch, device), precision)


def source_of_spec(spec: NetworkSpec, precision: str) -> Source:
    """A spec's network as the tools of a runtime take it."""
    return Source(
        networks.graph(spec, precision),
        lambda: built(spec, precision),
        lambda batch: inputs_of(spec, precision, batch=batch),
    )


def graph_of(spec: NetworkSpec, precision: str, runtime: str, target: str) -> ModelGraph:
    """What a runtime runs for a spec's network at its batch; found again by its structure after the first time."""
    source = source_of_spec(spec, precision)
    graph = of_source(source, runtime, target, spec.batch)
    if spec.cold and graph.parameter_bytes != source.graph.parameter_bytes:
        # A runtime that counts weights itself knows nothing of those that push a cold network's own out.
        graph = msgspec.structs.replace(graph, parameter_bytes=source.graph.parameter_bytes)
    return graph


def graph_on(spec: NetworkSpec, precision: str, runtime: str, kind: str) -> ModelGraph:
    """What a runtime runs for a spec's network on a kind of device.

    The simulated device runs graphs and not models, so an estimated graph serves it as well as one that takes the
    runtime's tools seconds to find.
    """
    if kind == "simulated":
        return fitting(networks.graph(spec, precision), runtime, target_of(kind))
    return graph_of(spec, precision, runtime, target_of(kind))


def runs_of(rows: Iterable[Row], info: DeviceInfo, *, judges: bool = False) -> list[Run]:
    """The networks among a runtime's rows: those that judge, or all others."""
    chosen = [row for row in rows if row.cell.kind == "network" and _judges(row) == judges]
    return [_run(row, info) for row in chosen]


def judged(
    fit: DispatchFit, rows: Sequence[Row], profile: DeviceProfile, runtime: str, others: Sequence[HoldoutError] = ()
) -> tuple[DispatchFit, list[HoldoutError]]:
    """A runtime's fit with the spread of the networks that were kept out of it, and how it did on each.

    Without such networks the fit stays as it is. `others` are verdicts on networks of the fit by fits without them:
    they tell of the spread too.
    """
    found = _verdicts(fit, [row for row in rows if _judges(row)], profile, runtime)
    if not found:
        return fit, []
    return msgspec.structs.replace(fit, spread=acceptance.network_spread([*found, *others])), found


def left_out(study: Study, rows: Sequence[Row], profile: DeviceProfile, folds: int) -> list[HoldoutError]:
    """How fits of all but a few networks do on those few; tiny networks, which tell of the host alone, stay in all."""
    judged = [row for row in rows if row.cell.kind == "network" and not _judges(row) and not _tiny(row)]
    found: list[HoldoutError] = []
    for fold in range(min(folds, len(judged))):
        out = {row.cell.key for row in judged[fold::folds]}
        try:
            fit = study.fit([row for row in rows if row.cell.key not in out], profile)
        except CalibrationError:
            return []  # so few networks that every one is needed
        found += _verdicts(fit, judged[fold::folds], profile, study.runtime)
    return found


def _judges(row: Row) -> bool:
    return row.cell.kind == "network" and schedules.network_spec(row.cell).holdout


def _tiny(row: Row) -> bool:
    return schedules.network_spec(row.cell).tiny


def _verdicts(fit: DispatchFit, rows: Sequence[Row], profile: DeviceProfile, runtime: str) -> list[HoldoutError]:
    whole = msgspec.structs.replace(profile, runtimes={**profile.runtimes, runtime: fit})
    found = (_run(row, profile.device) for row in rows)
    judges = {
        row.cell.key: NetworkRun(run.graph, run.batch, run.total_us) for row, run in zip(rows, found, strict=True)
    }
    return acceptance.holdout_errors(whole, judges, runtime)


def _run(row: Row, info: DeviceInfo) -> Run:
    spec, cell = schedules.network_spec(row.cell), row.cell
    graph = graph_on(spec, cell.precision, cell.runtime, info.kind)
    single, issue, queued = row.timings["single"], row.timings.get("issue"), row.timings.get("queued")
    return Run(
        graph=graph,
        batch=spec.batch,
        total_us=single.median_s * US_PER_S,
        issue_us=None if issue is None else issue.median_s * US_PER_S,
        queued_us=None if queued is None else queued.median_s * US_PER_S,
        sigma=1.86 * single.spread_s / single.median_s / single.n**0.5 if single.n > 1 else 0.1,
        tiny=spec.tiny,
    )
