"""Generated networks in a runtime: what it makes of each, timings of them from a journal, and errors on holdouts.

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
from latpred.calibration.session import Row
from latpred.calibration.workloads import networks
from latpred.calibration.workloads.networks import NetworkSpec
from latpred.graph.dtypes import dtype_of
from latpred.graph.graph import ModelGraph
from latpred.profile.document import DeviceInfo, DeviceProfile, DispatchFit
from latpred.runtimes.lowering import fitting, of_source, target_of
from latpred.runtimes.source import Source
from latpred.units import US_PER_S


class TimedNetwork(NamedTuple):
    """A network that was timed in a runtime: what that runs, and its latency with relative standard error.

    issue_us : time to issue a forward pass without waiting, on an asynchronous device where that was taken. queued_us :
    device time of one, gaps included, where several were issued before the first could start. tiny : whether next to
    nothing but dispatch takes time.
    """

    graph: ModelGraph
    batch: int
    total_us: float
    issue_us: float | None = None
    queued_us: float | None = None
    sigma: float = 0.0
    tiny: bool = False


def build_network(spec: NetworkSpec, precision: str, device: str = "cpu") -> torch.nn.Module:
    """The real network of a spec, with ordinary weights: tools that export or trace want no inference tensors."""
    with torch.inference_mode(False), torch.no_grad(), torch.device(device):
        return networks.build(spec).to(dtype_of(precision))


def network_inputs(
    spec: NetworkSpec, precision: str, device: str = "cpu", batch: int | None = None
) -> tuple[torch.Tensor, ...]:
    """Real inputs of a spec's network at its own batch or another."""
    with torch.inference_mode(False):
        return cast(networks.inputs(spec, batch, device), precision)


def network_source(spec: NetworkSpec, precision: str) -> Source:
    """A spec's network as the tools of a runtime take it."""
    return Source(
        networks.graph(spec, precision),
        lambda: build_network(spec, precision),
        lambda batch: network_inputs(spec, precision, batch=batch),
    )


def graph_of(spec: NetworkSpec, precision: str, runtime: str, kind: str) -> ModelGraph:
    """What a runtime runs for a spec's network on a kind of device.

    It is found again by its structure after the first time. The simulated device runs graphs and not models, so an
    estimated graph serves it as well as one that takes the runtime's tools seconds to find.
    """
    if kind == "simulated":
        return fitting(networks.graph(spec, precision), runtime, target_of(kind))
    source = network_source(spec, precision)
    graph = of_source(source, runtime, target_of(kind), spec.batch)
    if spec.cold and graph.parameter_bytes != source.graph.parameter_bytes:
        # A runtime that counts weights itself knows nothing of those that push a cold network's own out.
        graph = msgspec.structs.replace(graph, parameter_bytes=source.graph.parameter_bytes)
    return graph


def is_holdout(row: Row) -> bool:
    """Whether a row is of a network that no fit may see."""
    return row.cell.kind == "network" and schedules.network_spec(row.cell).holdout


def networks_of(rows: Iterable[Row], info: DeviceInfo) -> list[TimedNetwork]:
    """The networks among a runtime's rows that are no holdouts."""
    return [network_of(row, info) for row in rows if row.cell.kind == "network" and not is_holdout(row)]


def network_of(row: Row, info: DeviceInfo) -> TimedNetwork:
    """A network's row as a fit takes it."""
    spec, cell = schedules.network_spec(row.cell), row.cell
    single, issue, queued = row.timings["single"], row.timings.get("issue"), row.timings.get("queued")
    return TimedNetwork(
        graph=graph_of(spec, cell.precision, cell.runtime, info.kind),
        batch=spec.batch,
        total_us=single.median_s * US_PER_S,
        issue_us=None if issue is None else issue.median_s * US_PER_S,
        queued_us=None if queued is None else queued.median_s * US_PER_S,
        sigma=1.86 * single.spread_s / single.median_s / single.n**0.5 if single.n > 1 else 0.1,
        tiny=spec.tiny,
    )


def holdout_errors(fit: DispatchFit, rows: Sequence[Row], profile: DeviceProfile, runtime: str) -> list[HoldoutError]:
    """How a runtime's fit does on networks that it did not see."""
    whole = msgspec.structs.replace(profile, runtimes={**profile.runtimes, runtime: fit})
    timed = {row.cell.key: network_of(row, profile.device) for row in rows}
    holdouts = {key: NetworkRun(one.graph, one.batch, one.total_us) for key, one in timed.items()}
    return acceptance.holdout_errors(whole, holdouts, runtime)
