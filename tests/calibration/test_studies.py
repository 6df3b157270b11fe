"""Studies of runtimes: true costs come back from whole networks, whatever the runtime."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from factories import add, device, dispatch, graph, kernel_fit, linear, profile, view

from latpred.calibration import runtime_calibration, schedules
from latpred.calibration.cells import Cell
from latpred.calibration.devices import open_device
from latpred.calibration.fitting.linear_system import System
from latpred.calibration.runtime_calibration import runs, whole_fit
from latpred.calibration.runtime_calibration.runs import Run
from latpred.calibration.runtime_calibration.whole_fit import own_work
from latpred.calibration.workloads import networks
from latpred.errors import CalibrationError
from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.prediction.pricing import ColdDispatch, host_cost
from latpred.profile.document import DeviceProfile, DispatchFit
from latpred.runtimes import get

COSTS = {"gemm.linear": 3.0, "elementwise.add": 2.0, "view.transpose": 0.5}
SCALES = {"gemm": 0.9, "elementwise": 0.5}


def eager() -> DispatchFit:
    """What the profile says of eager."""
    return dispatch(costs_us={"": 7.0, "gemm": 5.0, "elementwise": 4.0, "view": 1.5}, fixed_us=10.0)


def networks_of(
    seed: int, number: int = 60, extra: Callable[[random.Random], list[Op]] = lambda _: []
) -> list[ModelGraph]:
    """Random networks; every third is so small that its kernels take nothing but their floor."""
    rng = random.Random(seed)
    found = []
    for index in range(number):
        tiny = index % 3 == 0
        rows, width = (1, 8) if tiny else (rng.choice((16, 64, 256)), rng.choice((64, 128, 256)))
        ops = [linear(rows, width) for _ in range(rng.randint(1, 40))]
        ops += [add(8 if tiny else rng.choice((1000, 30_000, 100_000))) for _ in range(rng.randint(1, 40))]
        ops += [view() for _ in range(rng.randint(0, 60))]
        found.append(graph(*ops, *extra(rng)))
    return found


def kernel_us(op: Op, batch: int) -> float:
    """What the profile's plain rooflines say of a kernel."""
    macs, moved = op.macs.at(batch), (op.weight_bytes.at(batch) + op.read_bytes.at(batch) + op.write_bytes.at(batch))
    return 2.0 + ((macs / 1e6) ** 2 + (moved / 1e3) ** 2) ** 0.5


def latency_us(net: ModelGraph, batch: int) -> float:
    """The truth: 6 us, the steps, and kernels that take other times than in eager."""
    total = 6.0
    for op in net.at(batch):
        total += COSTS[op.host_class]
        if op.family:
            total += SCALES[op.family.partition(".")[0]] * kernel_us(op, batch)
    return total


def synchronous() -> DeviceProfile:
    """A CPU's profile."""
    return profile(device(asynchronous=False, kind="cpu"), runtimes={"eager": eager()})


def noisy(seed: int) -> Callable[[], float]:
    """Factors of 3 %, one in twenty of them half as large again."""
    rng = random.Random(seed)
    return lambda: rng.lognormvariate(0, 0.03) * (1.5 if rng.random() < 0.05 else 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_true_costs_come_back_from_whole_networks(seed: int) -> None:
    noise = noisy(seed)
    runs = [Run(net, 2, latency_us(net, 2) * noise(), sigma=0.02) for net in networks_of(seed)]
    fit = whole_fit.fit_runs(runs, synchronous(), "eager")
    for family, scale in SCALES.items():
        assert fit.kernel_scales[family] == pytest.approx(scale, rel=0.08)
    assert host_cost(fit, "gemm.linear") == pytest.approx(3.0, rel=0.3)
    assert host_cost(fit, "elementwise.add") == pytest.approx(2.0, rel=0.3)
    assert host_cost(fit, "view.transpose") == pytest.approx(0.5, rel=0.4)
    assert all(value >= 0 for value in (*fit.costs_us.values(), *fit.kernel_scales.values(), fit.fixed_us))


def test_cold_code_of_pytorch_s_own_ops_is_neither_dispatch_nor_kernels() -> None:
    cold = {"cold_costs_us": {"gemm": 30.0, "elementwise": 20.0, "view": 9.0}, "cold_bytes": 1e5}
    whole = synchronous()
    slowed = msgspec.structs.replace(eager(), **cold | {"cold_costs_us": {"": 25.0, **cold["cold_costs_us"]}})
    whole = msgspec.structs.replace(whole, runtimes={"eager": slowed})

    def with_cold_us(net: ModelGraph, batch: int) -> float:
        longer = ColdDispatch.of(get("eager").lower(net, batch), slowed)
        assert longer is not None
        return latency_us(net, batch) + float(longer.at(np.array([float(batch)])).sum())

    fit = whole_fit.fit_runs([Run(net, 2, with_cold_us(net, 2), sigma=0.02) for net in networks_of(4)], whole, "eager")
    assert fit.cold_costs_us == cold["cold_costs_us"]  # a node or a compiled kernel, of no such class, has none
    assert fit.cold_bytes == 1e5
    for family, scale in SCALES.items():
        assert fit.kernel_scales[family] == pytest.approx(scale, rel=0.08)
    assert host_cost(fit, "gemm.linear") == pytest.approx(3.0, rel=0.3)


def test_networks_that_were_never_seen_are_predicted() -> None:
    from latpred.prediction.predictor import Predictor

    noise = noisy(7)
    runs = [Run(net, 2, latency_us(net, 2) * noise(), sigma=0.02) for net in networks_of(7)]
    whole = synchronous()
    fit = whole_fit.fit_runs(runs, whole, "eager")
    predictor = Predictor(msgspec.structs.replace(whole, runtimes={"eager": fit}))
    errors = sorted(
        abs(predictor.predict(net, batch).latency_ms * 1e3 / latency_us(net, batch) - 1)
        for net in networks_of(8, 30)
        for batch in (1, 8)
    )
    assert errors[len(errors) // 2] < 0.02
    assert errors[-1] < 0.12


def test_one_network_alone_moves_little_from_what_is_believed() -> None:
    few = [Run(net, 2, latency_us(net, 2)) for net in networks_of(1, whole_fit.FEWEST)]
    fit = whole_fit.fit_runs(few, synchronous(), "eager")
    assert 0.3 < fit.kernel_scales["gemm"] < 1.2
    with pytest.raises(
        CalibrationError, match=r"5 networks were timed in eager, too few.*--runtimes eager --budget 3m"
    ):
        whole_fit.fit_runs(few[1:], synchronous(), "eager")


def test_kernels_of_a_family_that_the_profile_lacks_get_times_of_their_own() -> None:
    def spectrum(rng: random.Random) -> list[Op]:
        size = rng.choice((16, 4096, 65536, 262_144))
        dims = {"rows": Affine(1), "cols": Affine(0, size)}
        moved = {"read_bytes": Affine(0, 4 * size), "write_bytes": Affine(0, 4 * size)}
        return [
            view("fft", family="fft.fftn", host_class="view.transpose", dims=dims, launches=1, **moved)
        ] * rng.randint(1, 9)

    def with_spectrum_us(net: ModelGraph, batch: int) -> float:
        plain = graph(*(op for op in net.ops if not op.family.startswith("fft")))
        special = [op for op in net.ops if op.family.startswith("fft")]
        moved = sum(op.read_bytes.at(batch) + op.write_bytes.at(batch) for op in special)
        return latency_us(plain, batch) + 0.5 * len(special) + 12.0 * len(special) + moved / 4e3

    runs = [Run(net, 2, with_spectrum_us(net, 2), sigma=0.01) for net in networks_of(3, extra=spectrum)]
    fit = whole_fit.fit_runs(runs, synchronous(), "eager")
    own = fit.kernels["fp32"]["fft"]
    assert own.activation_bytes_per_us == pytest.approx(4e3, rel=0.15)
    assert own.floor_us == pytest.approx(12.0, rel=0.25)
    assert "fft" not in fit.kernel_scales


def test_kernels_of_its_own_belong_to_the_precision_that_prices_them() -> None:
    kernels = {precision: {"gemm": kernel_fit("gemm")} for precision in ("fp16", "fp32")}
    dims = {"rows": Affine(1), "cols": Affine(0, 64)}
    spectra = [view("fft", family="fft.fftn", dims=dims, launches=1, dtype=dtype) for dtype in ("float16", "float32")]
    schedule = get("eager").lower(graph(*spectra, precision="fp16"), 1)
    found = own_work(schedule, "fp16", 1, msgspec.structs.replace(profile(), kernels=kernels))
    assert {(own.precision, own.family): launches for own, (launches, *_) in found.items()} == {
        ("fp16", "fft"): 1,
        ("fp32", "fft"): 1,
    }


def test_on_an_asynchronous_device_hosts_come_from_issuing_and_scales_stay_at_one() -> None:
    whole = profile(device(), runtimes={"eager": eager()})

    def host_us(net: ModelGraph) -> float:
        return 6.0 + sum(COSTS[op.host_class] for op in net.ops)

    def device_us(net: ModelGraph, factor: float) -> float:
        kernels = [factor * kernel_us(op, 2) + 1.0 for op in net.ops if op.family]
        return max(host_us(net), sum(kernels)) + 4.0 + 10.0

    for factor in (1.0, 0.8):
        runs = [
            Run(net, 2, device_us(net, factor), issue_us=host_us(net) if index % 3 == 0 else None, tiny=index % 3 == 0)
            for index, net in enumerate(networks_of(5))
        ]
        fit = whole_fit.fit_runs(runs, whole, "eager")
        assert host_cost(fit, "gemm.linear") == pytest.approx(3.0, rel=0.05)
        assert fit.fixed_us == pytest.approx(6.0, rel=0.2)
        assert list(fit.kernel_scales.values()) == pytest.approx([factor] * len(fit.kernel_scales), rel=0.07)


def test_what_pushes_weights_out_of_the_cache_counts_in_every_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = graph(linear(), parameter_bytes=8)
    monkeypatch.setattr(runs, "of_source", lambda *_: counted)
    warm = msgspec.structs.replace(next(schedules.holdout_networks()), cold=False)
    cold = msgspec.structs.replace(warm, cold=True)
    assert runs.graph_of(warm, "fp32", "onnxruntime", "cpu") is counted
    found = runs.graph_of(cold, "fp32", "onnxruntime", "cpu")
    assert found.parameter_bytes == networks.graph(cold).parameter_bytes > networks.EVICTING_BYTES
    assert found.ops == counted.ops


def test_outliers_do_not_move_a_system() -> None:
    system = System()
    for value in (2.0, 2.02, 1.98, 2.01, 9.0):
        system.measured({("x",): 1.0}, value, 0.02)
    system.believed({("y",): 1.0, ("x",): -1.0}, 0.0, 0.1)
    found = system.solve()
    assert found["x",] == pytest.approx(2.0, abs=0.03)
    assert found["y",] == pytest.approx(found["x",])


def test_cells_of_a_study_are_its_own_and_judges_come_early() -> None:
    study = runtime_calibration.get("halved")
    kinds = {}
    for name in ("simulated", "cpu"):
        cells = study.cells(open_device(name), "fp16")
        first: list[Cell] = [next(cells) for _ in range(30)]
        assert {cell.runtime for cell in first} == {"halved"}
        assert {cell.precision for cell in first} == {"fp16"}
        assert len({cell.key for cell in first}) == 30
        kinds[name] = [schedules.network_spec(cell) for cell in first]
    count = len(networks.KINDS)
    assert {spec.kind for spec in kinds["cpu"][:count]} == set(networks.KINDS)
    assert all(spec.tiny for spec in kinds["cpu"][:count])
    assert sum(spec.holdout for spec in kinds["cpu"]) == 5
    assert [(spec.tiny, spec.holdout) for spec in kinds["simulated"][:3]] == [
        (False, False),
        (True, False),
        (False, True),
    ]
