"""How well a calibration finds out what a device costs: prints, never asserts. `python examples/simulated_recovery.py`.

The simulated device knows its own truth, so each seed of its noise shows how far off every cost is, and whole models in
both protocols, and where the crossover and knee batches are predicted on a grid of powers of two. A few minutes for all
20 seeds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

os.environ.setdefault("OMP_NUM_THREADS", "1")

from latpred import storage
from latpred.calibration import calibrate
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec
from latpred.calibration.devices.simulated_costs import OpWork, program
from latpred.graph.graph import ModelGraph
from latpred.prediction.clocks import KNEE_RATIO
from latpred.prediction.predictor import Predictor
from latpred.profile.document import DeviceProfile
from latpred.tracing import trace

MODELS = (
    *("bert-base-uncased", "distilbert-base-uncased", "albert-base-v2", "mobilebert-uncased", "squeezebert-uncased"),
    *("funnel-transformer-small", "fnet-base", "nystromformer-512", "longformer-base-4096", "deberta-base", "gpt2"),
    *("wav2vec2-base", "vit-base-patch16-224", "resnet-18", "resnet-50"),
)
PRECISIONS = ("fp32", "fp16")
PROTOCOLS = ("single", "pipelined")
BATCHES = (1, 4, 16, 64)
GRID = tuple(2**power for power in range(11))
CELLS = 2400
LINE = "{:>4}  {:<32} {:<48} {:>5}  {}"


@dataclass(frozen=True)
class Truth:
    """What a noiseless device does with one model: latencies by protocol and batch, crossover and knee on the grid."""

    graph: ModelGraph
    latency_s: Mapping[tuple[str, int], float]
    crossover: int | None
    knee: int | None


@dataclass
class Found:
    """What one seed's calibration got wrong: relative errors by what they are of, and distances in grid steps."""

    costs: dict[str, float] = field(default_factory=dict)
    models: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> None:
    """Calibrate for each seed and print one line, then what they come to."""
    options = _options(arguments)
    truths = {(name, precision): truth_of(name, precision) for name in options.models for precision in PRECISIONS}
    print(f"{len(options.models)} models in {', '.join(PRECISIONS)}; {options.cells} cells a calibration")
    print(LINE.format("seed", "worst cost", "worst model", "exact", "off by"))
    every = []
    for seed in range(options.seeds):
        start = time.monotonic()
        found = recovered(seed, options.cells, truths)
        every.append(found)
        exact = sum(steps == 0 for steps in found.steps.values()) / len(found.steps)
        off = f"{max(found.steps.values())}  ({time.monotonic() - start:.0f} s)"
        print(LINE.format(seed, _worst(found.costs), _worst(found.models), f"{exact:.0%}", off), flush=True)
    summarise(every)


def recovered(seed: int, cells: int, truths: Mapping[tuple[str, str], Truth]) -> Found:
    """Errors of a profile calibrated under one seed's noise."""
    device = SimulatedDevice(SimulatedSpec(seed=seed))
    with tempfile.TemporaryDirectory() as folder:
        os.environ[storage.VARIABLE] = folder
        profile = calibrate(device, cells=cells)
    return errors_of(profile, device, truths)


def errors_of(profile: DeviceProfile, device: SimulatedDevice, truths: Mapping[tuple[str, str], Truth]) -> Found:
    """What a profile of the device got wrong."""
    found = Found({name: value / true - 1 for name, value, true in costs(profile, device)})
    predictor = Predictor(profile)
    for (name, precision), truth in truths.items():
        for (protocol, batch), seconds in truth.latency_s.items():
            predicted_ms = predictor.predict(truth.graph, batch, protocol=protocol).latency_ms
            found.models[f"{name} {precision} {protocol} {batch}"] = predicted_ms / (seconds * 1e3) - 1
        points = predictor.curve(truth.graph, GRID).points
        crossover = next((p.batch for p in points if p.regime != "framework-bound"), None)
        knee = next((p.batch for p in points if p.latency_ms > KNEE_RATIO * points[0].latency_ms), None)
        found.steps[f"{name} {precision} crossover"] = _steps(crossover, truth.crossover)
        found.steps[f"{name} {precision} knee"] = _steps(knee, truth.knee)
    return found


def costs(profile: DeviceProfile, device: SimulatedDevice) -> Iterator[tuple[str, float, float]]:
    """Every cost that a profile holds: its name, its value, the true one."""
    true, dispatch, info = device.spec.costs, profile.runtimes["eager"], profile.device
    for name, us in dispatch.costs_us.items():
        if name not in ("", "python"):
            yield name, us * dispatch.scale, true.dispatch(name)
    yield "module call", dispatch.module_call_us * dispatch.scale, true.module_call_us
    yield "Python call", dispatch.python_call_us * dispatch.scale, true.python_call_us
    yield "attribute read", dispatch.attribute_read_us * dispatch.scale, true.attribute_read_us
    yield "forward pass", dispatch.fixed_us, true.forward_us
    yield "launch", info.launch_us, true.launch_us
    yield "gap", info.gap_us, true.gap_us
    yield "synchronisation", info.sync_us, true.sync_us
    yield "queue", info.queue, device.spec.queue
    yield "upload", info.copy_bytes_per_us, true.copy_bytes_per_us
    copied = 2**30
    copy_us = true.kernel_us("copy", OpWork(0, 0, copied, copied, copied / 4), "fp32")
    yield "bandwidth", info.bandwidth_bytes_per_us, 2 * copied / copy_us


def truth_of(name: str, precision: str) -> Truth:
    """Trace a model by name and run it on a noiseless device."""
    graph, device = trace(name, precision=precision), SimulatedDevice()
    return Truth(
        graph,
        {(way, batch): device.true_latency_s(graph, batch, protocol=way) for way in PROTOCOLS for batch in BATCHES},
        true_crossover(device, graph),
        true_knee(device, graph),
    )


def true_crossover(device: SimulatedDevice, graph: ModelGraph) -> int | None:
    """The first batch of the grid whose kernels and gaps take as long as its dispatch; None when none does."""
    gap_us = device.spec.costs.gap_us
    for batch in GRID:
        steps = program(device.spec.costs, graph, batch, "eager")
        device_us = sum(sum(one.kernels) + len(one.kernels) * gap_us for one in steps)
        if device_us >= sum(sum(one.host) for one in steps):
            return batch
    return None


def true_knee(device: SimulatedDevice, graph: ModelGraph) -> int | None:
    """The first batch of the grid whose single latency exceeds `KNEE_RATIO` times that of one; None when none does."""
    flat_s = device.true_latency_s(graph, GRID[0])
    return next((batch for batch in GRID if device.true_latency_s(graph, batch) > KNEE_RATIO * flat_s), None)


def summarise(every: Sequence[Found]) -> None:
    """Print what all seeds come to."""
    within = sum(max(map(abs, found.costs.values())) <= 0.02 for found in every)
    errors = sorted(abs(error) for found in every for error in found.models.values())
    steps = [step for found in every for step in found.steps.values()]
    print(f"all costs within 2 %: {within} of {len(every)} seeds")
    print(
        f"whole models: median {errors[len(errors) // 2]:.1%}, "
        f"within 3 % {sum(error <= 0.03 for error in errors) / len(errors):.1%}, worst {errors[-1]:.1%}"
    )
    exact = sum(step == 0 for step in steps) / len(steps)
    print(f"crossover and knee: exact {exact:.1%}, worst {max(steps)} steps off")
    _show_largest(every)


def _show_largest(every: Sequence[Found]) -> None:
    """Print the errors that are largest over all seeds, each name once."""
    for title, tables in (("costs", [f.costs for f in every]), ("models", [f.models for f in every])):
        worst = {name: max((table[name] for table in tables if name in table), key=abs) for name in tables[0]}
        largest = sorted(worst.items(), key=lambda item: -abs(item[1]))[:8]
        print(f"largest of {title}: " + ", ".join(f"{name} {error:+.1%}" for name, error in largest))


def _worst(errors: Mapping[str, float]) -> str:
    name, error = max(errors.items(), key=lambda item: abs(item[1]))
    return f"{error:+.1%} {name}"


def _steps(found: int | None, true: int | None) -> int:
    """Grid steps between two batches; None lies one step behind the grid's end."""
    places = {batch: place for place, batch in enumerate((*GRID, None))}
    return abs(places[found] - places[true])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="how many calibrations, each under noise of its own")
    parser.add_argument("--cells", type=int, default=CELLS, help="cells a calibration measures")
    parser.add_argument("--models", nargs="+", default=MODELS, help="names of models")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
