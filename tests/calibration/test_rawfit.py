"""Profiles from raw samples: known costs come back from a simulated machine, and bad folders are told apart."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from latpred.calibration import fit_raw, rawcells, rawmodels, suite
from latpred.calibration.asynchronous import Asynchronous
from latpred.calibration.session import JOURNAL, LAST, Session
from latpred.calibration.simulated import SimulatedDevice, SimulatedSpec, TrueCosts
from latpred.calibration.simulated_costs import op_work
from latpred.errors import CalibrationError
from latpred.graph import Line, ModelGraph, Op
from latpred.pricing import host_cost
from latpred.profile import DeviceProfile

COSTS = replace(TrueCosts(), forward_us=0.0)
QUEUE = 400
SPEC = SimulatedSpec(seed=5, spikes=0.0, clock_us=0.0, queue=QUEUE, costs=COSTS)
ENVIRONMENT = {
    "python": "3.12.1",
    "platform": "Linux-6.1.0-x86_64-with-glibc2.36",
    "torch": "2.11.0",
    "cpu": "CPU(s):                  32\nModel name:              A Server  Processor\nL3 cache:   60 MiB",
    "threads": 1,
    "gpu": "NVIDIA H200",
    "sms": 108,
    "memory": 150_000_000_000,
    "l2": 0,
    "nvidia_smi": "name, driver_version, clocks.sm\nNVIDIA H200, 570.12, 1980 MHz",
    "timm": "absent: ModuleNotFoundError",
    "numpy": "absent: ModuleNotFoundError",
}
MODELS = ("alexnet", "bert-base-s8", "distilbert", "googlenet", "mnasnet", "resnet18", "shufflenet", "squeezenet")
BATCHES = (1, 8, 64)


def alone(ops: Iterable[Op]) -> ModelGraph:
    return ModelGraph("cell", "custom", 0, "fp32", "contiguous", 0, 0, Line(0), tuple(ops))


def bare(ops: Iterable[Op]) -> ModelGraph:
    """Ops as a cell issues them, with no Python of a model around them."""
    own = [op for op in ops if op.name != "python::return"]
    return alone(msgspec.structs.replace(op, module_calls=0, python_calls=0) for op in own)


def stats(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    n = len(ordered)
    return {"median": ordered[n // 2], "p10": ordered[n // 10], "p90": ordered[9 * n // 10], "min": ordered[0], "n": n}


def elapsed(device: SimulatedDevice, call: Callable[[], None], count: int) -> tuple[float, float]:
    """Seconds to issue some calls, and until they are done."""
    device.synchronize()
    start = device.clock()
    for _ in range(count):
        call()
    issued = device.clock() - start
    device.synchronize()
    return issued, device.clock() - start


def forward(device: SimulatedDevice, call: Callable[[], None], count: int) -> dict[str, Any]:
    issued, done = elapsed(device, call, count)
    singles = [elapsed(device, call, 1)[1] for _ in range(count)]
    return {"single": stats(singles), "pipelined": done / count, "pipelined_spread": 0.0, "host_issue": issued / count}


def dispatch_rows(device: SimulatedDevice) -> Iterable[dict[str, Any]]:
    for name in (*rawcells.OPS, *rawcells.MODULES, "item_sync"):
        ops = rawcells.dispatched(name)
        if name in rawcells.MODULES:
            quiet = [op if op.name == "python::return" else msgspec.structs.replace(op, python_calls=0) for op in ops]
        call = device.prepare_model(alone(quiet) if name in rawcells.MODULES else bare(ops), 1)
        for precision in ("fp16", "fp32"):
            times = [elapsed(device, call, 30)[0] / 30 for _ in range(9)]
            yield {"cell": f"{precision}/{name}", "op": name, "precision": precision, **stats(times)}
    tiny = bare(rawcells.dispatched("add_scalar")).ops
    for op, runtime, lengths in (
        ("cuda_graph_nodes", "cuda-graphs", (1, 10, 100, 1000)),
        ("eager_chain", "eager", (1, 2, 5, 10, 20, 50, 200, 3000)),
    ):
        for nodes in lengths:
            call = device.prepare_model(alone(tiny * nodes), 1, runtime)
            yield {"cell": f"{op}/{nodes}", "op": op, "nodes": nodes, **forward(device, call, 9 if nodes > 99 else 60)}
    idle = [elapsed(device, lambda: None, 1)[1] for _ in range(100)]
    yield {"cell": "sync_idle", "op": "sync_idle", **stats(idle)}


def model_rows(device: SimulatedDevice) -> Iterable[dict[str, Any]]:
    for name in MODELS:
        graph = rawmodels.graph(name, "fp32")
        for runtime, simulated in (("eager", "eager"), ("cuda_graphs", "cuda-graphs")):
            for batch in BATCHES:
                call = device.prepare_model(graph, batch, simulated)
                yield {
                    "cell": f"{name}/fp32/{runtime}/{batch}",
                    "model": name,
                    "precision": "fp32",
                    "runtime": runtime,
                    "batch": batch,
                    **forward(device, call, 12),
                }


def launch_rows() -> Iterable[dict[str, Any]]:
    for name in MODELS:
        graph = rawmodels.graph(name, "fp32")
        for batch in BATCHES:
            ops = [op for op in graph.at(batch) if op.launches]
            us = [op.launches * COSTS.kernel_us(op.family, op_work(op, batch), "fp32", 1 / op.launches) for op in ops]
            yield {
                "cell": f"{name}/fp32/{batch}",
                "model": name,
                "precision": "fp32",
                "batch": batch,
                "kernels": sum(op.launches for op in ops),
                "kernel_s": sum(us) * 1e-6,
            }


def kernel_dims() -> Iterable[tuple[str, tuple[int | str, ...]]]:
    rng = random.Random(3)

    def size(low: int, high: int) -> int:
        return max(1, round(low * (high / low) ** rng.random() / 8) * 8)

    for _ in range(60):
        yield "gemm", (size(1, 8192), size(64, 4096), size(64, 4096))
    for _ in range(50):
        side, kernel = rng.choice((7, 14, 28, 56, 112)), rng.choice((1, 3, 3, 5))
        yield "conv", (size(1, 64), rng.choice((3, 16, 64, 256)), size(16, 512), side, kernel, rng.choice((1, 2)), 1)
        channels = size(16, 512)
        yield "conv", (size(1, 64), channels, channels, side, 3, rng.choice((1, 2)), channels)
    for _ in range(20):
        yield "sdpa", (size(1, 64), rng.choice((4, 12)), size(8, 256), 64, False)
    for op in rawcells._ROWS:
        for _ in range(14):
            yield "rows", (op, size(1, 65536), size(32, 4096))
    for op in rawcells._MAPS:
        for _ in range(14):
            yield "maps", (op, size(1, 64), size(16, 512), rng.choice((7, 14, 28, 56)))


def kernel_rows(device: SimulatedDevice) -> Iterable[dict[str, Any]]:
    for family, dims in kernel_dims():
        call = device.prepare_model(bare(rawcells.kernel(family, dims, "fp32")), 1)
        times = [(device.time_replayed(call, 20) or 0.0) / 20 for _ in range(3)]
        cell = f"{family}/fp32/" + "x".join(map(str, dims))
        yield {"cell": cell, "family": family, "dims": dims, "precision": "fp32", **stats(times), "bytes": 1}


def write(folder: Path, part: str, rows: Iterable[dict[str, Any]]) -> None:
    (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of samples of the simulated device."""
    folder = tmp_path_factory.mktemp("raw")
    device = SimulatedDevice(SPEC)
    (folder / "env.json").write_text(json.dumps(ENVIRONMENT))
    write(folder, "dispatch", dispatch_rows(device))
    write(folder, "models", model_rows(device))
    write(folder, "launches", launch_rows())
    write(folder, "kernels", kernel_rows(device))
    return folder


@pytest.fixture(scope="module")
def fitted(sampled: Path) -> DeviceProfile:
    return fit_raw(sampled)


@pytest.fixture
def folder(sampled: Path, tmp_path: Path) -> Path:
    """A copy to do damage to."""
    return Path(shutil.copytree(sampled, tmp_path / "copy"))


def add(folder: Path, part: str, *rows: dict[str, Any] | str) -> None:
    with (folder / f"{part}.jsonl").open("a") as file:
        file.writelines(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


def same_numbers(one: DeviceProfile, other: DeviceProfile) -> bool:
    return (one.runtimes, one.kernels, one.device, one.acceptance) == (
        other.runtimes,
        other.kernels,
        other.device,
        other.acceptance,
    )


def test_the_clock_constants_come_back(fitted: DeviceProfile) -> None:
    device = fitted.device
    assert device.asynchronous
    assert device.sync_us == pytest.approx(COSTS.sync_us, rel=0.03)
    assert device.gap_us == pytest.approx(COSTS.gap_us, rel=0.1)
    assert device.launch_us == pytest.approx(COSTS.launch_us, rel=0.05)
    assert device.queue == pytest.approx(QUEUE, rel=0.15)


def test_the_dispatch_costs_come_back(fitted: DeviceProfile) -> None:
    fit = fitted.runtimes["eager"]
    assert fit.scale == pytest.approx(1.0, abs=0.03)
    for name in ("gemm.linear", "conv.conv2d", "norm.layer_norm", "elementwise.add", "view.view", "bmm.matmul"):
        assert host_cost(fit, name) * fit.scale == pytest.approx(COSTS.dispatch(name), rel=0.03), name
    assert fit.module_call_us * fit.scale == pytest.approx(COSTS.module_call_us, rel=0.03)
    assert fit.python_call_us * fit.scale == pytest.approx(COSTS.python_call_us, rel=0.1)


def test_a_class_that_never_comes_alone_gets_what_the_others_leave(fitted: DeviceProfile) -> None:
    costs = fitted.runtimes["eager"].costs_us
    assert costs["copy.contiguous"] == pytest.approx(COSTS.dispatch("copy"), rel=0.05)
    assert costs["elementwise.masked_fill"] == pytest.approx(COSTS.dispatch("elementwise"), rel=0.05)


def test_kernels_and_whole_models_come_back(fitted: DeviceProfile) -> None:
    families = fitted.kernels["fp32"]
    assert {"gemm", "conv", "conv_depthwise", "attention", "norm", "elementwise", "copy", "index"} <= set(families)
    assert families["embedding"].floor_us == pytest.approx(families["index"].floor_us, rel=0.1)
    assert families["gemm"].error < 0.08
    assert families["elementwise"].floor_us == pytest.approx(COSTS.law("elementwise").floor_us, rel=0.15)
    assert fitted.acceptance.passed, fitted.acceptance.checks
    assert fitted.runtimes["eager"].spread < 0.15
    full_us = 0.8 * COSTS.activation_bytes_per_us
    assert fitted.device.bandwidth_bytes_per_us == pytest.approx(full_us, rel=0.1)


def test_the_machine_is_the_one_that_was_sampled(fitted: DeviceProfile) -> None:
    assert (fitted.name, fitted.device.name, fitted.device.kind) == ("nvidia-h200", "nvidia-h200", "cuda")
    assert (fitted.device.multiprocessors, fitted.device.memory_bytes) == (108, 150_000_000_000)
    machine = fitted.machine
    assert (machine.cpu, machine.cores, machine.system) == ("A Server Processor", 32, "Linux x86_64")
    assert (machine.accelerator, machine.driver) == ("NVIDIA H200", "570.12")
    assert machine.stack == {"python": "3.12.1", "torch": "2.11.0"}


def test_held_out_models_are_in_nothing(folder: Path, fitted: DeviceProfile) -> None:
    absurd = {"single": {"median": 9.0, "n": 5}, "pipelined": 9.0, "host_issue": 9.0}
    for name in ("vgg16", "mobilebert", "t5-encoder"):
        key = {"model": name, "precision": "fp32", "batch": 1}
        add(folder, "models", {"cell": f"{name}/eager", "runtime": "eager", **key, **absurd})
        add(folder, "models", {"cell": f"{name}/graphs", "runtime": "cuda_graphs", **key, **absurd})
        add(folder, "launches", {"cell": name, "kernels": 5, "kernel_s": 0.001, **key})
    again = fit_raw(folder, name="mine")
    assert same_numbers(again, fitted)
    assert again.samples == fitted.samples
    assert again.name == "mine"
    assert "3 cells of models held out for tests" in again.protocol["left out"]


def test_what_cannot_be_used_is_left_out_and_counted(folder: Path, fitted: DeviceProfile) -> None:
    add(folder, "dispatch", {"cell": "fp16/nova", "op": "nova", "precision": "fp16", "median": 1e-6, "n": 3})
    add(folder, "dispatch", {"cell": "fp16/bad", "op": "view", "precision": "fp16", "median": -1.0, "n": 3})
    timed = {"single": {"median": 0.1, "n": 5}, "pipelined": 0.1, "host_issue": 0.1, "precision": "fp32"}
    add(folder, "models", {"cell": "nova/1", "model": "nova", "runtime": "eager", "batch": 1, **timed})
    add(folder, "models", {"cell": "huge/1", "error": "OutOfMemoryError: CUDA out of memory"})
    add(folder, "kernels", {"cell": "k1", "family": "warp", "dims": [1], "precision": "fp32", "median": 1e-5, "n": 3})
    add(folder, "kernels", {"cell": "k2", "family": "gemm", "dims": [1], "precision": "fp32", "median": 1e-5, "n": 3})
    add(folder, "kernels", {"cell": "k3", "skipped": "larger than 12 GB"}, '{"cell": "k4", "median": NaN}\n', '{"ce')
    again = fit_raw(folder)
    assert same_numbers(again, fitted)
    said = again.protocol["left out"]
    for part in (
        "1 dispatch cells of the unknown op nova",
        "1 lines without times in dispatch",
        "1 cells of nova, which is not known",
        "1 failed cells in models",
        "1 kernels of warp with unknown dims",
        "1 kernels of gemm with unknown dims",
        "1 skipped cells in kernels",
        "2 damaged lines in kernels",
    ):
        assert part in said, part


def test_gzipped_lines_are_read_up_to_where_they_are_torn(folder: Path, fitted: DeviceProfile) -> None:
    for part in ("dispatch", "models", "launches", "kernels"):
        plain = folder / f"{part}.jsonl"
        (folder / f"{part}.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    assert same_numbers(fit_raw(folder), fitted)
    torn = folder / "kernels.jsonl.gz"
    torn.write_bytes(torn.read_bytes()[: 3 * torn.stat().st_size // 4])
    assert "1 torn ends of kernels" in fit_raw(folder).protocol["left out"]


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("env.json", r"cannot read .*env\.json.*journal\.jsonl"),
        ("dispatch.jsonl", r"cannot read .*dispatch\.jsonl"),
        ("kernels.jsonl", r"cannot read .*kernels\.jsonl"),
        ("models.jsonl", r"0 whole models .* it takes 2 \(nothing left out\)\. Sample more models"),
    ],
)
def test_a_folder_that_lacks_something_says_what(folder: Path, missing: str, said: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(CalibrationError, match=said):
        fit_raw(folder)


def test_folders_that_hold_nothing_usable(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"no folder .*nowhere"):
        fit_raw(tmp_path / "nowhere")
    (folder / "env.json").write_text('{"python": "3.11"')
    with pytest.raises(CalibrationError, match="does not describe a machine"):
        fit_raw(folder)
    (folder / "env.json").write_text(json.dumps(ENVIRONMENT))
    write(folder, "kernels", [{"cell": "k", "error": "RuntimeError"}])
    with pytest.raises(CalibrationError, match=r"no cell that can be used \(1 failed cells in kernels"):
        fit_raw(folder)


def test_an_asynchronous_device_needs_its_chains(folder: Path) -> None:
    lines = (folder / "dispatch.jsonl").read_text().splitlines(keepends=True)
    (folder / "dispatch.jsonl").write_text("".join(line for line in lines if "eager_chain" not in line))
    with pytest.raises(CalibrationError, match="0 cells of cuda_graph_nodes and eager_chain"):
        fit_raw(folder)


def test_without_a_gpu_kernels_are_what_dispatch_leaves_of_calls(folder: Path, fitted: DeviceProfile) -> None:
    (folder / "env.json").write_text(json.dumps({**ENVIRONMENT, "gpu": ""}))
    profile = fit_raw(folder)
    assert (profile.name, profile.device.asynchronous, profile.runtimes["eager"].scale) == ("cpu", False, 1.0)
    # The cells' times, less the host's part, are what is left for kernels.
    large = max(profile.kernels["fp32"]["gemm"].points)
    assert large
    assert profile.runtimes["eager"].costs_us["gemm"] == fitted.runtimes["eager"].costs_us["gemm"]


def test_a_journal_of_latpreds_own_is_fitted_too(tmp_path: Path) -> None:
    device = SimulatedDevice(SimulatedSpec(seed=2))
    campaign = Asynchronous(device, ("fp32",))
    with Session(tmp_path, device.machine(), "any") as session:
        for cell in suite.memory_cells():
            session.run(cell, campaign.measure)
        for number, cell in enumerate(campaign.cells()):
            if number >= 140:
                break
            session.run(cell, campaign.measure)
    profile = fit_raw(tmp_path, name="journalled")
    assert (profile.name, profile.device.name) == ("journalled", "simulated")
    assert profile.device.sync_us == pytest.approx(TrueCosts().sync_us, rel=0.03)
    (tmp_path / JOURNAL).rename(tmp_path / LAST)
    assert same_numbers(fit_raw(tmp_path), profile)
    newer = (tmp_path / LAST).read_text()
    (tmp_path / LAST).write_text(newer.replace('"cold":', '"warmth":'))
    with pytest.raises(CalibrationError, match="another version of latpred: its cells lack 'cold'"):
        fit_raw(tmp_path)
    (tmp_path / LAST).write_text("not a journal\n")
    with pytest.raises(CalibrationError, match="no calibration journal"):
        fit_raw(tmp_path)


def test_a_profile_that_nothing_judges_fails_its_gate(folder: Path) -> None:
    (folder / "env.json").write_text(json.dumps({**ENVIRONMENT, "gpu": ""}))
    (folder / "models.jsonl").unlink()
    profile = fit_raw(folder)
    assert not profile.acceptance.passed
    assert profile.acceptance.checks["networks to judge by at least 5"] == "0: failed"
