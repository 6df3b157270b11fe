"""Calibration of torch.compile: known costs come back from networks whose every call was timed."""

from __future__ import annotations

import itertools
from types import ModuleType, SimpleNamespace
from typing import Any

import factories
import msgspec
import numpy as np
import pytest
from gauges import ScriptedGauge

from latpred.calibration import runtime_calibration, schedules
from latpred.calibration.devices import open_device
from latpred.calibration.runtime_calibration import compile_calibrator
from latpred.calibration.runtime_calibration.compile_calibrator import KINDS, PUSHING_US, CompileCalibrator
from latpred.calibration.session import Row
from latpred.calibration.timing.timer import Timing
from latpred.calibration.workloads import networks
from latpred.errors import CalibrationError
from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.prediction.pricing import ColdDispatch, PriceList, host_cost
from latpred.profile.document import DeviceProfile, DispatchFit
from latpred.runtimes import one_step_per_op
from latpred.runtimes.inductor.torch_compile import Compile

GUARDS_US, INPUT_US, CALL_US, GENERATED_US, GEMM_US, SCALE, BYTES_PER_US = 12.0, 0.2, 0.8, 2.0, 4.0, 1.3, 8000.0


def op(host_class: str, family: str = "", **changes: Any) -> Op:
    fields = {"name": host_class, "module": "", "dtype": "float32" if family else "", "dims": {}} | changes
    return Op(host_class=host_class, family=family, launches=int(bool(family)), **fields)


def generated(size: int, host_class: str = "kernel.generated") -> Op:
    dims = {"numel": Affine(size), "cols": Affine(1), "parts": Affine(1)}
    moved = {"read_bytes": Affine(4 * size), "write_bytes": Affine(4 * size)}
    return op(host_class, "generated.pointwise", dims=dims, **moved)


def gemm(size: int) -> Op:
    dims = {"m": Affine(64), "n": Affine(size), "k": Affine(size)}
    work = {
        "macs": Affine(64 * size * size),
        "weight_bytes": Affine(4 * size * size),
        "write_bytes": Affine(256 * size),
    }
    return op("kernel.extern.gemm", "gemm", dims=dims, read_bytes=Affine(256 * size), **work)


def network(size: int) -> ModelGraph:
    ops = (
        op("guards", python_calls=20),
        generated(size * size),
        generated(size, "kernel.generated.joined"),
        gemm(size),
    )
    changes = {"runtime": "compile", "target": "cpu", "precision": "fp32", "parameter_bytes": 1 << 30}
    return factories.graph(*ops, *ops[1:], **changes)


def row(cell: Any, net: ModelGraph, profile: DeviceProfile) -> Row:
    """What measuring would give where the costs above hold."""
    bare = factories.profile(profile.device, runtimes={"eager": factories.dispatch(), "compile": factories.dispatch()})
    schedule = Compile().lower(net, 1)
    priced = PriceList(bare).price(schedule, "fp32")
    times = priced.times(np.array([1.0])).us[:, 0][priced.kernel_row] * priced.kernel_share
    calls: list[float] = []
    for place, one in zip(schedule.kernel_op.tolist(), times.tolist(), strict=True):
        step = net.ops[place]
        moved = (step.read_bytes.at(1) + step.write_bytes.at(1)) / BYTES_PER_US
        if step.host_class.endswith("joined"):
            calls[-1] += moved
        else:
            calls.append(GENERATED_US + moved if step.family != "gemm" else GEMM_US + SCALE * one)
    outside_us = GUARDS_US + 20 * INPUT_US + len(calls) * CALL_US
    timing = Timing((sum(calls) + outside_us) / 1e6, 0.0, 9, True)
    return Row(cell, {"single": timing, "outside": Timing(outside_us / 1e6, 0.0, 9, True)}, 1.0, "", tuple(calls))


def outside(one: Row, us: float) -> Row:
    """A row whose pass takes so much beside its calls."""
    timing = msgspec.structs.replace(one.timings["outside"], median_s=us / 1e6)
    return msgspec.structs.replace(one, timings={**one.timings, "outside": timing})


def is_tiny(one: Row) -> bool:
    return schedules.network_spec(one.cell).tiny


@pytest.fixture
def profile() -> DeviceProfile:
    return factories.profile(factories.device(asynchronous=False, name="cpu", kind="cpu"))


@pytest.fixture
def rows(profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """Four tiny networks and eight sized ones."""
    drawn = itertools.islice(CompileCalibrator().cells(open_device("cpu"), "fp32"), 16)
    cells = [cell for cell in drawn if not schedules.network_spec(cell).holdout]
    specs = [schedules.network_spec(cell) for cell in cells]
    nets = [network(8 if spec.tiny else 128 * (3 + place)) for place, spec in enumerate(specs)]
    by_spec = dict(zip(specs, nets, strict=True))
    monkeypatch.setattr(networks, "graph_in", lambda spec, *_: by_spec[spec])
    return [row(cell, net, profile) for cell, net in zip(cells, nets, strict=True)]


def fitted(rows: list[Row], profile: DeviceProfile) -> DispatchFit:
    return CompileCalibrator().fit(rows, profile)


def test_known_costs_come_back(rows: list[Row], profile: DeviceProfile) -> None:
    fit = fitted(rows, profile)
    tiny_us = 20 * INPUT_US + 4 * CALL_US + GUARDS_US
    fit_us = fit.fixed_us + fit.costs_us["guards"] + 20 * fit.python_call_us
    per_call_us = host_cost(fit, "kernel.generated") - GENERATED_US
    assert fit_us + 4 * per_call_us == pytest.approx(tiny_us, rel=0.05)
    assert host_cost(fit, "kernel.generated.joined") == 0.0
    assert host_cost(fit, "eager.gemm") == pytest.approx(host_cost(profile.runtimes["eager"], "gemm"))
    assert fit.kernel_scales["gemm"] == pytest.approx(SCALE, rel=0.1)
    assert fit.kernels["fp32"]["generated"].activation_bytes_per_us == pytest.approx(BYTES_PER_US, rel=0.25)


def test_ops_between_graphs_find_eager_s_code_as_cold_as_eager_does(rows: list[Row], profile: DeviceProfile) -> None:
    eager = msgspec.structs.replace(profile.runtimes["eager"], cold_costs_us={"view": 2.0, "": 5.0}, cold_bytes=1e6)
    fit, warm = fitted(rows, msgspec.structs.replace(profile, runtimes={"eager": eager})), fitted(rows, profile)
    ops = (op("guards"), op("eager.view.expand"), generated(10**6), op("eager.sync.item"), gemm(8))
    cold = ColdDispatch.of(one_step_per_op("compile", ops), fit)
    assert cold is not None
    assert cold.most_us.tolist() == [0.0, 2.0, 0.0, 5.0, 0.0]
    assert cold.half_bytes == 1e6
    assert ColdDispatch.of(one_step_per_op("compile", ops), warm) is None
    assert fit.costs_us == warm.costs_us


def test_what_passes_beside_a_call_is_no_part_of_its_kernel(rows: list[Row], profile: DeviceProfile) -> None:
    slower = [outside(one, 3e6 * one.timings["outside"].median_s) for one in rows]
    fit, other = fitted(rows, profile), fitted(slower, profile)
    assert host_cost(other, "kernel.generated") > host_cost(fit, "kernel.generated")
    widths = [one.kernels["fp32"]["generated"].activation_bytes_per_us for one in (other, fit)]
    assert widths[0] == pytest.approx(widths[1], rel=0.03)
    assert other.kernel_scales == pytest.approx(fit.kernel_scales, rel=0.03)


def test_what_takes_longer_beside_large_kernels_than_beside_tiny_ones_is_theirs(
    rows: list[Row], profile: DeviceProfile
) -> None:
    refill_us, slower = 60.0, []
    for one in rows:
        longer_us = 0.0 if is_tiny(one) else sum(refill_us * us / (us + PUSHING_US) for us in one.calls_us)
        slower.append(outside(one, one.timings["outside"].median_s * 1e6 + longer_us))
    fit, other = fitted(rows, profile), fitted(slower, profile)
    gemm_us = np.median([us for one in rows for us in one.calls_us[1::2] if us > 100]) / SCALE
    longer_us = host_cost(other, "kernel.extern.gemm") - host_cost(fit, "kernel.extern.gemm")
    longer_us += gemm_us * (other.kernel_scales["gemm"] - fit.kernel_scales["gemm"])
    assert 0.5 * refill_us < longer_us < 2.0 * refill_us
    assert host_cost(other, "kernel.generated") == pytest.approx(host_cost(fit, "kernel.generated"))


def test_a_family_that_tiny_networks_only_make_work_hard_keeps_its_scale(
    rows: list[Row], profile: DeviceProfile
) -> None:
    """Nothing is left of a call beyond the median of its like, but that does not make its kernel take no time."""
    hard = [msgspec.structs.replace(one, calls_us=tuple(us + 50.0 for us in one.calls_us)) for one in rows]
    mixed = [other if is_tiny(one) else one for one, other in zip(rows, hard, strict=True)]
    assert fitted(mixed, profile).kernel_scales["gemm"] == pytest.approx(SCALE, rel=0.15)


def test_networks_of_the_fit_test_fits_without_them(rows: list[Row], profile: DeviceProfile) -> None:
    calibrator = CompileCalibrator()
    errors = calibrator.errors_by_folds(rows, profile, 3)
    assert sorted(error.cell for error in errors) == sorted(one.cell.key for one in rows if not is_tiny(one))
    assert max(abs(error.log_error) for error in errors) < 0.2
    assert calibrator.errors_by_folds(rows[:3], profile, 3) == []  # too few to leave any out
    assert calibrator.errors_by_folds(rows, profile, 0) == []


def test_rows_that_do_not_fit_their_steps_are_left_out(rows: list[Row], profile: DeviceProfile) -> None:
    short = [msgspec.structs.replace(one, calls_us=one.calls_us[:-1]) for one in rows]
    with pytest.raises(CalibrationError, match="0 networks were compiled"):
        fitted(short, profile)


def test_each_kind_has_its_turn() -> None:
    calibrator = runtime_calibration.get("compile")
    assert isinstance(calibrator, CompileCalibrator)
    cells = list(itertools.islice(calibrator.cells(open_device("cpu"), "fp32"), 12))
    specs = [schedules.network_spec(cell) for cell in cells]
    assert [spec.kind for spec in specs if spec.tiny] == list(KINDS["tiny"][:3])
    assert sum(spec.holdout for spec in specs) == 3
    assert {cell.runtime for cell in cells} == {"compile"}


def test_calls_of_a_wrapper_are_timed_where_they_stand() -> None:
    done: list[str] = []
    module = ModuleType("wrapper")
    packet = SimpleNamespace(default=lambda *_: done.append("sdpa"), overloads=())
    names = {
        "cpp_fused_add_0": lambda *_: done.append("add"),
        "extern_kernels": SimpleNamespace(mm=lambda *_: done.append("mm")),
        "torch": SimpleNamespace(float32="float32", ops=SimpleNamespace(aten=SimpleNamespace(sdpa=packet))),
    }
    vars(module).update(names)

    def call() -> None:
        space = vars(module)
        space["cpp_fused_add_0"]()
        space["extern_kernels"].mm(space["torch"].float32)
        space["torch"].ops.aten.sdpa.default()

    calls_us, _ = compile_calibrator.time_calls(
        call, [module], lambda: done.append("between"), ScriptedGauge(), repeats=3, budget_s=60.0
    )
    assert len(calls_us) == 3
    assert all(us > 0 for us in calls_us)
    assert done == ["between", "add", "mm", "sdpa"] * 3
    assert {name: vars(module)[name] for name in names} == names
