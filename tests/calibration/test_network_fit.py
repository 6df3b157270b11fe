"""Any runtime: true costs come back from whole networks."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice

import msgspec
import numpy as np
import pytest
from factories import add, device, dispatch, graph, kernel_fit, linear, profile, view

from latpred import host
from latpred.calibration import runtime_calibration, schedules
from latpred.calibration.devices import open_device
from latpred.calibration.fitting.dispatch_fit import TimedNetwork
from latpred.calibration.fitting.linear_system import System
from latpred.calibration.runtime_calibration import network_fit
from latpred.calibration.runtime_calibration.network_fit import fit_networks
from latpred.calibration.session import Row
from latpred.calibration.timing.timer import Timing
from latpred.calibration.workloads import networks
from latpred.errors import CalibrationError
from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.prediction.predictor import Predictor
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
    drawn = []
    for index in range(number):
        tiny = index % 3 == 0
        rows, width = (1, 8) if tiny else (rng.choice((16, 64, 256)), rng.choice((64, 128, 256)))
        ops = [linear(rows, width) for _ in range(rng.randint(1, 40))]
        ops += [add(8 if tiny else rng.choice((1000, 30_000, 100_000))) for _ in range(rng.randint(1, 40))]
        ops += [view() for _ in range(rng.randint(0, 60))]
        drawn.append(graph(*ops, *extra(rng)))
    return drawn


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


@pytest.mark.parametrize(("longer", "expected_ms"), [(0.8, 1.25), (1.0, 1.0), (1.3, 1 / 1.3)])
def test_rows_are_brought_to_the_speed_that_eager_was_measured_at(longer: float, expected_ms: float) -> None:
    usual_us = dict.fromkeys((host.DISPATCH, host.PRODUCT, host.CONVOLUTION, host.CACHE), 100.0)
    spec = networks.draw(0)
    timing = Timing(1e-3, 1e-5, 9, True)
    now_us = {kind: us * longer for kind, us in usual_us.items()}
    rows = [
        Row(schedules.network_cell(spec, "fp32", "torchscript"), {"single": timing}, 0.1, "", speed=now_us)
        for _ in range(3)
    ]
    brought = network_fit.at_profile_speed(rows, msgspec.structs.replace(synchronous(), speed=usual_us))
    assert [row.timings["single"].median_s * 1e3 for row in brought] == pytest.approx([expected_ms] * 3)


def fitted(
    nets: list[ModelGraph],
    true_us: Callable[[ModelGraph, int], float] = latency_us,
    whole: DeviceProfile | None = None,
    noise: Callable[[], float] = lambda: 1.0,
) -> DispatchFit:
    """The fit of networks that take what is true of them, with noise."""
    timed = [TimedNetwork(net, 2, true_us(net, 2) * noise(), sigma=0.02) for net in nets]
    return fit_networks(timed, whole or synchronous(), "eager")


@pytest.mark.parametrize("seed", range(2))
def test_true_costs_come_back_and_predict_networks_that_were_never_seen(seed: int) -> None:
    fit = fitted(networks_of(seed), noise=noisy(seed))
    for family, scale in SCALES.items():
        assert fit.kernel_scales[family] == pytest.approx(scale, rel=0.08)
    assert host_cost(fit, "gemm.linear") == pytest.approx(3.0, rel=0.3)
    assert host_cost(fit, "elementwise.add") == pytest.approx(2.0, rel=0.3)
    assert host_cost(fit, "view.transpose") == pytest.approx(0.5, rel=0.4)
    assert all(value >= 0 for value in (*fit.costs_us.values(), *fit.kernel_scales.values(), fit.fixed_us))
    predictor = Predictor(msgspec.structs.replace(synchronous(), runtimes={"eager": fit}))
    errors = sorted(
        abs(predictor.predict(net, batch).latency_ms * 1e3 / latency_us(net, batch) - 1)
        for net in networks_of(8, 30)
        for batch in (1, 8)
    )
    assert errors[len(errors) // 2] < 0.02
    assert errors[-1] < 0.12


def test_cold_code_of_pytorch_s_own_ops_is_neither_dispatch_nor_kernels() -> None:
    cold = {"cold_costs_us": {"gemm": 30.0, "elementwise": 20.0, "view": 9.0}, "cold_bytes": 1e5}
    slowed = msgspec.structs.replace(eager(), **cold | {"cold_costs_us": {"": 25.0, **cold["cold_costs_us"]}})
    whole = msgspec.structs.replace(synchronous(), runtimes={"eager": slowed})

    def with_cold_us(net: ModelGraph, batch: int) -> float:
        longer = ColdDispatch.of(get("eager").lower(net, batch), slowed)
        assert longer is not None
        return latency_us(net, batch) + float(longer.at(np.array([float(batch)])).sum())

    fit = fitted(networks_of(4), with_cold_us, whole)
    assert fit.cold_costs_us == cold["cold_costs_us"]  # a node or a compiled kernel, of no such class, has none
    assert fit.cold_bytes == 1e5
    for family, scale in SCALES.items():
        assert fit.kernel_scales[family] == pytest.approx(scale, rel=0.08)
    assert host_cost(fit, "gemm.linear") == pytest.approx(3.0, rel=0.3)


def test_kernels_of_eager_are_not_blamed_for_a_machine_that_changed_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(get("eager")), "eager_kernels", True, raising=False)

    def latency_as_eager_us(net: ModelGraph, batch: int) -> float:
        kernels_us = sum(kernel_us(op, batch) for op in net.at(batch) if op.family)
        return 6.0 + sum(COSTS[op.host_class] for op in net.at(batch)) + kernels_us

    fit = fitted(networks_of(5), latency_as_eager_us)
    slower = fitted(networks_of(5), lambda net, batch: 1.05 * latency_as_eager_us(net, batch))
    assert fit.kernel_scales == slower.kernel_scales == {"": 1.0}
    assert host_cost(fit, "gemm.linear") == pytest.approx(3.0, rel=0.1)
    assert host_cost(fit, "elementwise.add") == pytest.approx(2.0, rel=0.1)
    assert host_cost(slower, "gemm.linear") == pytest.approx(3.0, rel=0.3)


def test_few_networks_move_little_from_the_priors() -> None:
    few = networks_of(1, network_fit.FEWEST)
    assert 0.3 < fitted(few).kernel_scales["gemm"] < 1.2
    with pytest.raises(CalibrationError, match=r"5 networks were timed in eager, too few.* as with --budget 3m$"):
        fitted(few[1:])


@pytest.mark.parametrize("halves", [0, 9], ids=["in no precision", "in fp16 alone"])
def test_kernels_of_a_family_that_the_profile_lacks_get_times_of_their_own(halves: int) -> None:
    priced = kernel_fit("fft", floor_us=80.0)
    whole = msgspec.structs.replace(synchronous(), kernels={**synchronous().kernels, "fp16": {"fft": priced}})

    def spectrum(rng: random.Random) -> list[Op]:
        size = rng.choice((16, 4096, 65536, 262_144))
        dims = {"rows": Affine(1), "cols": Affine(0, size)}
        moved = {"read_bytes": Affine(0, 4 * size), "write_bytes": Affine(0, 4 * size)}
        op = view("fft", family="fft.fftn", host_class="view.transpose", dims=dims, launches=1, **moved)
        half = view("fft", family="fft.fftn", host_class="view.transpose", dims=dims, launches=1, dtype="float16")
        return [op] * rng.randint(1, 9) + [half] * rng.randint(0, halves)

    def with_spectrum_us(net: ModelGraph, batch: int) -> float:
        plain = graph(*(op for op in net.ops if not op.family.startswith("fft")))
        special = [op for op in net.ops if op.family.startswith("fft")]
        moved = sum(op.read_bytes.at(batch) + op.write_bytes.at(batch) for op in special)
        us = sum(80.0 if op.dtype == "float16" else 12.0 for op in special)
        return latency_us(plain, batch) + 0.5 * len(special) + us + moved / 4e3

    fit = fitted(networks_of(3, extra=spectrum), with_spectrum_us, whole)
    own = fit.kernels["fp32"]["fft"]
    assert own.activation_bytes_per_us == pytest.approx(4e3, rel=0.15)
    assert own.floor_us == pytest.approx(12.0, rel=0.25)
    assert fit.kernel_scales.get("fft", 1.0) == pytest.approx(1.0, rel=0.1)
    assert ("fft" in fit.kernel_scales) == (halves > 0)


def test_outliers_do_not_move_a_system() -> None:
    system = System()
    for value in (2.0, 2.02, 1.98, 2.01, 9.0):
        system.measured({("x",): 1.0}, value, 0.02)
    system.prior({("y",): 1.0, ("x",): -1.0}, 0.0, 0.1)
    values = system.solve()
    assert values["x",] == pytest.approx(2.0, abs=0.03)
    assert values["y",] == pytest.approx(values["x",])


def test_cells_are_the_runtimes_own_and_holdouts_come_early() -> None:
    drawn = {}
    for name in ("simulated", "cpu"):
        cells = list(islice(runtime_calibration.get("halved", open_device(name)).cells("fp16"), 30))
        assert {(cell.runtime, cell.precision) for cell in cells} == {("halved", "fp16")}
        assert len({cell.key for cell in cells}) == 30
        drawn[name] = [schedules.network_spec(cell) for cell in cells]
    first = drawn["cpu"][: len(networks.KINDS)]
    assert {spec.kind for spec in first} == set(networks.KINDS)
    assert all(spec.tiny for spec in first)
    assert sum(spec.holdout for spec in drawn["cpu"]) == 5
    sized, tiny, holdout = [(spec.tiny, spec.holdout) for spec in drawn["simulated"][:3]]
    assert (sized, tiny, holdout) == ((False, False), (True, False), (False, True))
