"""Calibration of torch.compile: known costs come back from networks whose every call was timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
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
from latpred.calibration.runtime_calibration.compile_calibrator import COLD_CALL, KINDS, CompileCalibrator
from latpred.calibration.session import Row
from latpred.calibration.timing.timer import Timing
from latpred.calibration.workloads import networks
from latpred.errors import CalibrationError
from latpred.graph.graph import Affine, ModelGraph, Op, Schedule
from latpred.prediction.pricing import ColdDispatch, PriceList, host_cost
from latpred.profile.document import DeviceProfile, DispatchFit
from latpred.runtimes import one_step_per_op
from latpred.runtimes.inductor.torch_compile import Compile

GUARDS_US, INPUT_US, CALL_US, GENERATED_US, CONV_US, SCALE, BYTES_PER_US = 12.0, 0.2, 0.8, 2.0, 4.0, 1.3, 8000.0


def calibrator() -> CompileCalibrator:
    """What calibrates torch.compile on a CPU."""
    made = runtime_calibration.get("compile", open_device("cpu"))
    assert isinstance(made, CompileCalibrator)
    return made


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


def conv(size: int, window: int = 1) -> Op:
    """A product as a convolution of images of one pixel."""
    one, of_gemm = Affine(1), gemm(size)
    dims = dict.fromkeys(("h_in", "w_in", "h_out", "w_out", "stride", "groups"), one)
    dims |= {"kernel_h": Affine(window), "kernel_w": Affine(window)}
    dims |= {"batch": Affine(64), "c_in": Affine(size), "c_out": Affine(size)}
    return msgspec.structs.replace(of_gemm, host_class="kernel.extern.conv", family="conv", dims=dims)


def laid_out(one: Op) -> Op:
    """A convolution as Inductor lays it out."""
    return msgspec.structs.replace(one, family=f"{one.family}.channels_last")


def network(size: int, library: Callable[[int], Op] = conv) -> ModelGraph:
    ops = (
        op("guards", python_calls=20),
        generated(size * size),
        generated(size, "kernel.generated.joined"),
        library(size),
    )
    changes = {"runtime": "compile", "target": "cpu", "precision": "fp32", "parameter_bytes": 1 << 30}
    return factories.graph(*ops, *ops[1:], **changes)


def kernels_us(profile: DeviceProfile, schedule: Schedule, precision: str = "fp32") -> list[float]:
    """What a profile says of each kernel of a schedule."""
    priced = PriceList(profile).price(schedule, precision)
    times: list[float] = (priced.times(np.array([1.0])).us[priced.kernel_row, 0] * priced.kernel_share).tolist()
    return times


def row(cell: Any, net: ModelGraph, profile: DeviceProfile) -> Row:
    """What measuring would give where the costs above hold."""
    bare = msgspec.structs.replace(profile, runtimes=dict.fromkeys(("eager", "compile"), factories.dispatch()))
    schedule = Compile().lower(net, 1)
    calls: list[float] = []
    for place, one in zip(schedule.kernel_op.tolist(), kernels_us(bare, schedule), strict=True):
        step = net.ops[place]
        moved = (step.read_bytes.at(1) + step.write_bytes.at(1)) / BYTES_PER_US
        if step.host_class.endswith("joined"):
            calls[-1] += moved
        else:
            calls.append(GENERATED_US + moved if step.family.startswith("generated") else CONV_US + SCALE * one)
    beside_us = GUARDS_US + 20 * INPUT_US + len(calls) * CALL_US
    return Row(cell, {"single": Timing((sum(calls) + beside_us) / 1e6, 0.0, 9, True)}, 1.0, "", tuple(calls))


def longer_beside(one: Row, us: float) -> Row:
    """A row whose pass takes so much longer beside its calls."""
    timing = one.timings["single"]
    return msgspec.structs.replace(
        one, timings={"single": msgspec.structs.replace(timing, median_s=timing.median_s + us / 1e6)}
    )


def with_cold_code(profile: DeviceProfile) -> DeviceProfile:
    eager = msgspec.structs.replace(profile.runtimes["eager"], cold_costs_us={"view": 2.0, "": 5.0}, cold_bytes=1e6)
    return msgspec.structs.replace(profile, runtimes={"eager": eager})


@pytest.fixture
def profile() -> DeviceProfile:
    info = factories.device(asynchronous=False, name="cpu", kind="cpu")
    return factories.profile(info, factories.kernel_fits("gemm", "conv"))


def timed_rows(
    profile: DeviceProfile,
    monkeypatch: pytest.MonkeyPatch,
    library: Callable[[int], Op] = conv,
    network_of: Callable[[int, Callable[[int], Op]], ModelGraph] = network,
) -> list[Row]:
    """Four tiny networks and eight sized ones, with a kernel of a library each."""
    drawn = itertools.islice(calibrator().cells("fp32"), 16)
    cells = [cell for cell in drawn if not schedules.network_spec(cell).holdout]
    specs = [schedules.network_spec(cell) for cell in cells]
    nets = [network_of(8 if spec.tiny else 128 * (3 + place), library) for place, spec in enumerate(specs)]
    by_spec = dict(zip(specs, nets, strict=True))
    monkeypatch.setattr(networks, "graph_in", lambda spec, *_: by_spec[spec])
    return [row(cell, net, profile) for cell, net in zip(cells, nets, strict=True)]


@pytest.fixture
def rows(profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    return timed_rows(profile, monkeypatch)


def fitted(rows: list[Row], profile: DeviceProfile) -> DispatchFit:
    return calibrator().fit(rows, profile)


def test_known_costs_come_back(rows: list[Row], profile: DeviceProfile) -> None:
    fit = fitted(rows, profile)
    tiny_us = GUARDS_US + 20 * INPUT_US + 4 * CALL_US + 2 * (GENERATED_US + CONV_US)
    fit_us = fit.fixed_us + fit.costs_us["guards"] + 20 * fit.python_call_us
    calls_us = host_cost(fit, "kernel.generated") + host_cost(fit, "kernel.extern.conv")
    assert fit_us + 2 * calls_us == pytest.approx(tiny_us, rel=0.05)
    assert host_cost(fit, "kernel.generated.joined") == 0.0
    assert host_cost(fit, "eager.gemm") == pytest.approx(host_cost(profile.runtimes["eager"], "gemm"))
    assert fit.kernel_scales["conv.pointwise"] == pytest.approx(SCALE, rel=0.1)
    assert fit.kernels["fp32"]["generated"].activation_bytes_per_us == pytest.approx(BYTES_PER_US, rel=0.25)


def test_ops_between_graphs_find_eager_s_code_as_cold_as_eager_does(rows: list[Row], profile: DeviceProfile) -> None:
    fit, warm = fitted(rows, with_cold_code(profile)), fitted(rows, profile)
    ops = (op("eager.view.expand"), op("eager.sync.item"), generated(8, "kernel.generated.joined"))
    cold = ColdDispatch.of(one_step_per_op("compile", ops), fit)
    assert cold is not None
    assert cold.most_us.sum(axis=1).tolist() == [2.0, 5.0, 0.0]
    assert cold.half_bytes == 1e6
    assert ColdDispatch.of(one_step_per_op("compile", ops), warm) is None


def test_what_takes_longer_beside_large_kernels_is_cold_code_s(rows: list[Row], profile: DeviceProfile) -> None:
    cold, longer_us = with_cold_code(profile), 40.0
    compiled = [compile_calibrator._compiled_network(one, cold) for one in rows]
    slower = [
        longer_beside(one, longer_us * net.beside_calls[COLD_CALL])
        for one, net in zip(rows, compiled, strict=True)
        if net is not None
    ]
    fit, other = fitted(rows, cold), fitted(slower, cold)
    costs = ((fit.cold_costs_us, other.cold_costs_us), (fit.costs_us, other.costs_us))
    for name in ("kernel.generated", "kernel.extern.conv"):
        cold_us, warm_us = (after[name] - before[name] for before, after in costs)
        assert 5.0 < cold_us < longer_us
        assert abs(warm_us) < cold_us / 5
    assert other.kernel_scales == pytest.approx(fit.kernel_scales, rel=0.01)


def test_products_take_what_they_take_in_eager(profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same library runs them in the same layout, whatever the few minutes of a run say."""
    fit = fitted(timed_rows(profile, monkeypatch, gemm), profile)
    assert fit.kernel_scales == {"gemm": 1.0}
    assert 0.0 < host_cost(fit, "kernel.extern.gemm") < 3 * CONV_US


def test_a_format_and_a_window_have_scales_of_their_own(rows: list[Row], profile: DeviceProfile) -> None:
    """A library that gains from another layout in one of them gains nothing in the others."""
    scales = {"conv": 3.0, "conv.3x3": 0.5, "conv.channels_last": 0.7, "gemm": 2.0, "bf16.gemm": 0.25}
    fit = msgspec.structs.replace(fitted(rows, profile), kernel_scales=scales)
    formats = {"fp32": profile.kernels["fp32"], "bf16": profile.kernels["fp32"]}
    runtimes = {**profile.runtimes, "compile": fit}
    plain = msgspec.structs.replace(profile, kernels=formats, runtimes={**runtimes, "compile": factories.dispatch()})
    scaled = msgspec.structs.replace(profile, kernels=formats, runtimes=runtimes)

    def factor(made: Op, precision: str) -> float:
        schedule = one_step_per_op("compile", (made,))
        return kernels_us(scaled, schedule, precision)[0] / kernels_us(plain, schedule, precision)[0]

    assert factor(conv(8, window=3), "fp32") == pytest.approx(0.5)
    assert factor(conv(8, window=5), "fp32") == pytest.approx(3.0)
    assert factor(laid_out(conv(8, window=3)), "fp32") == pytest.approx(0.7)
    assert factor(gemm(8), "fp32") == pytest.approx(2.0)
    assert factor(msgspec.structs.replace(gemm(8), dtype="bfloat16"), "bf16") == pytest.approx(0.25)


def test_a_layout_that_eager_lacks_tells_nothing_of_it(profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fitted(timed_rows(profile, monkeypatch, lambda size: laid_out(conv(size))), profile)
    assert fit.kernel_scales["conv.channels_last.pointwise"] == pytest.approx(SCALE, rel=0.1)
    assert "conv" not in fit.kernel_scales


def test_kernels_that_share_a_call_are_timed_together(profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy never runs alone, and with what runs beside it takes a third of what its bytes take elsewhere."""

    def copy(size: int) -> Op:
        made = generated(size * size, "kernel.generated.joined")
        return msgspec.structs.replace(made, family="generated.copy")

    def sharing(size: int, library: Callable[[int], Op]) -> ModelGraph:
        alone = network(size, library)
        ops = (*alone.ops[:2], library(size), generated(size), copy(size), library(size))
        return msgspec.structs.replace(alone, ops=ops)

    quicker = []
    for one in timed_rows(profile, monkeypatch, network_of=sharing):
        calls = list(one.calls_us)
        saved_us = 2 / 3 * (calls[2] - GENERATED_US)
        calls[2] -= saved_us
        quicker.append(msgspec.structs.replace(longer_beside(one, -saved_us), calls_us=tuple(calls)))
    runtimes = {**profile.runtimes, "compile": fitted(quicker, profile)}
    one = copy(1000)
    (us,) = kernels_us(msgspec.structs.replace(profile, runtimes=runtimes), one_step_per_op("compile", (one,)))
    assert us == pytest.approx((one.read_bytes + one.write_bytes).at(1) / BYTES_PER_US / 3, rel=0.3)


def test_networks_of_the_fit_test_fits_without_them(
    rows: list[Row], profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_calibrator, "FOLDS", 3)
    errors = calibrator().errors_by_folds(rows, profile)
    sized = [one.cell.key for one in rows if not schedules.network_spec(one.cell).tiny]
    assert sorted(error.cell for error in errors) == sorted(sized)
    assert max(abs(error.log_error) for error in errors) < 0.2
    assert calibrator().errors_by_folds(rows[:3], profile) == []  # too few to leave any out


def test_rows_that_do_not_fit_their_steps_are_left_out(rows: list[Row], profile: DeviceProfile) -> None:
    short = [msgspec.structs.replace(one, calls_us=one.calls_us[:-1]) for one in rows]
    with pytest.raises(CalibrationError, match="0 networks were compiled"):
        fitted(short, profile)


def test_a_copy_by_a_tensor_s_method_is_no_timed_call(profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    def copying(size: int, library: Callable[[int], Op]) -> ModelGraph:
        guards, *others = network(size, library).ops
        return factories.graph(guards, op("kernel.extern.other", name="aten::copy_"), *others, runtime="compile")

    assert host_cost(fitted(timed_rows(profile, monkeypatch, network_of=copying), profile), "kernel.extern.conv") > 0


def test_each_kind_has_its_turn() -> None:
    cells = list(itertools.islice(calibrator().cells("fp32"), 12))
    specs = [schedules.network_spec(cell) for cell in cells]
    assert [spec.kind for spec in specs if spec.tiny] == list(KINDS["tiny"][:3])
    assert sum(spec.holdout for spec in specs) == 3
    assert {cell.runtime for cell in cells} == {"compile"}


def test_a_network_measured_again_has_its_calls_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile loads no second wrapper for it.
    monkeypatch.setattr(compile_calibrator, "CALLS_S", 0.01)
    cell = next(calibrator().cells("fp32"))
    calls = {len(calibrator().measure(cell).calls_us) for _ in range(2)}
    assert len(calls) == 1
    assert min(calls) > 0


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

    calls_us, _ = compile_calibrator.time_calls(call, [module], ScriptedGauge(), repeats=3, budget_s=60.0)
    assert len(calls_us) == 3
    assert all(us > 0 for us in calls_us)
    assert done == ["add", "mm", "sdpa"] * 6  # each pass comes after one that is not looked at
    assert {name: vars(module)[name] for name in names} == names
