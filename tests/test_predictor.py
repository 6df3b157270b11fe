"""Predictor: latencies, regimes and landmarks worked out by hand from profiles with round numbers."""

from __future__ import annotations

import copy
import math
import pickle

import msgspec
import numpy as np
import pytest
from factories import add, device, dispatch, graph, kernel_fit, linear, profile, view

from latpred.errors import ProfileError, RuntimeRefusalError, UsageError
from latpred.graph.graph import Affine, ModelGraph
from latpred.prediction.predictor import Predictor
from latpred.profile.document import DeviceProfile

CPU = device(asynchronous=False, kind="cpu", launch_us=0.0, gap_us=0.0, sync_us=0.0)


def one_gemm(**changes: object) -> ModelGraph:
    """100 MACs at 1e6 per us and 3000 + 2000 b bytes at 1e3 per us: a kernel of 2 + hypot(1e-4 b, 3 + 2 b) us."""
    work = {
        "macs": Affine(0, 100),
        "weight_bytes": Affine(3000),
        "read_bytes": Affine(0, 1000),
        "write_bytes": Affine(0, 1000),
    }
    return graph(linear(**(work | changes)))


def test_on_a_cpu_dispatch_and_kernels_add_up() -> None:
    # 20 for the call + 5 for the gemm + 2 module calls + 4 * 0.5 Python calls; 2 + 3 + 2 * 8 for the kernel.
    found = Predictor(profile(CPU)).predict(one_gemm(module_calls=2, python_calls=4), 8)
    assert found.overhead_ms == pytest.approx(0.029)
    assert found.compute_ms == pytest.approx(0.021)
    assert found.latency_ms == pytest.approx(0.050)
    assert found.regime == "framework-bound"
    assert found.throughput_per_s == pytest.approx(8 / 50e-6)
    assert found.device_busy == pytest.approx(21 / 50)


def test_crossover_knee_and_regimes() -> None:
    predictor = Predictor(profile(CPU))
    found = predictor.predict(one_gemm())
    # Overhead 25: the kernel's 5 + 2 b reaches it at b = 10.
    assert found.crossover == (10, 10, 10)
    assert predictor.curve(one_gemm(), (9, 10)).regime == ("framework-bound", "memory-bound")
    assert predictor.predict(one_gemm(macs=Affine(0, 10**8)), 50).regime == "compute-bound"
    # Latency 30 + 2 b against 32: over 1.1 x at 2 b > 5.2, over 1.9 x at 2 b > 30.8.
    assert (found.knee_batch, found.knee(1.9).batch) == (3, 16)
    factor = math.exp(1.645 * 0.2)
    assert "compute- or memory-bound from batch 10" in repr(found)
    doubts = {"fits": (kernel_fit("gemm", spread=0.2),)}, {"runtimes": {"eager": dispatch(busy_spread=0.2)}}
    for unsure in doubts:  # about the kernel, and about networks that wait for the device
        found = Predictor(profile(CPU, **unsure)).predict(one_gemm())
        assert found.crossover == (10, math.ceil((25 / factor - 5) / 2), math.ceil((25 * factor - 5) / 2))


def test_on_an_asynchronous_device_the_clocks_overlap() -> None:
    predictor = Predictor(profile())
    # Host through at 25; the kernel of 21 us starts 4 later and ends at 50; waiting costs 10.
    assert predictor.predict(one_gemm(), 8).latency_ms == pytest.approx(0.060)
    # The device needs 21 + 1 per forward, the host 25.
    assert predictor.predict(one_gemm(), 8, protocol="pipelined").latency_ms == pytest.approx(0.025)
    assert predictor.predict(one_gemm(), 100, protocol="pipelined").latency_ms == pytest.approx(0.206)


def test_dispatch_falls_back_to_the_more_general_class_and_scales() -> None:
    ops = (view("transpose"), view("expand"), view("nested.permute"), add(), linear())
    costs = dispatch(scale=2.0)
    found = Predictor(profile(CPU, runtimes={"eager": costs})).predict(graph(*ops))
    # view.transpose 3, view 2 (twice), "" 7 and gemm 5, doubled, and the call.
    assert found.overhead_ms == pytest.approx((20 + 2 * (3 + 2 + 2 + 7 + 5)) / 1e3)


def test_inputs_on_the_host_are_copied_first() -> None:
    fast = Predictor(profile(device(copy_bytes_per_us=512.0)))
    resident = fast.predict(one_gemm(), 8).latency_ms
    assert fast.predict(one_gemm(), 8, inputs_on="host").latency_ms == pytest.approx(resident + (16 + 10) / 1e3)
    with pytest.raises(ProfileError, match="does not know how fast inputs are copied"):
        Predictor(profile()).predict(one_gemm(), 8, inputs_on="host")
    on_cpu = Predictor(profile(CPU)).predict(one_gemm(), 8, inputs_on="host")  # where they are computed with
    assert on_cpu.to_dict() == Predictor(profile(CPU)).predict(one_gemm(), 8).to_dict()


def test_an_unknown_host_widens_the_interval_as_far_as_the_host_rules() -> None:
    def spreads(**changes: float) -> list[float]:
        fit = dispatch(spread=0.1, busy_spread=0.05, **changes)
        curve = Predictor(profile(runtimes={"eager": fit})).curve(one_gemm(), (1, 10_000), protocol="pipelined")
        logs = np.log(curve.interval_ms[:, 1] / curve.latency_ms) / 1.6448536
        return [*logs, curve.crossover.high / curve.crossover.low]

    known, unknown = spreads(), spreads(host_spread=0.3)
    assert known[:2] == pytest.approx([0.1, 0.05], rel=1e-3)
    assert unknown[:2] == pytest.approx([math.hypot(0.1, 0.3), 0.05], rel=1e-3)
    assert unknown[2] > 1.5 * known[2]


def test_never_and_always() -> None:
    idle = Predictor(profile(CPU)).predict(graph(view()))
    assert idle.crossover_batch is None
    assert idle.knee_batch is None
    assert idle.regime == "framework-bound"
    free = {"eager": dispatch(costs_us={"": 0.0}, fixed_us=0.0)}
    assert Predictor(profile(CPU, runtimes=free)).predict(one_gemm()).crossover_batch == 1
    for ratio in (1.0, "2"):
        with pytest.raises(UsageError, match="ratio above 1"):
            idle.knee(ratio)  # type: ignore[arg-type]


def test_a_curve_is_its_points() -> None:
    predictor = Predictor(profile(device(queue=2)))
    net = graph(linear(), view(), add(), linear(16, 64, syncs=1), add(launches=3))
    batches = [1, 2, 3, 8, 64]
    for protocol in ("single", "pipelined"):
        curve = predictor.curve(net, batches, protocol=protocol)
        alone = [predictor.predict(net, batch, protocol=protocol) for batch in batches]
        assert curve.latency_ms == pytest.approx([point.latency_ms for point in alone])
        assert curve.interval_ms == pytest.approx(np.array([point.interval_ms for point in alone]))
        assert curve.regime == tuple(point.regime for point in alone)
        assert list(curve.batches) == batches
        assert curve[2].batch == 3
        assert len(curve[1:3]) == 2


def test_batch_one_is_served_by_its_own_ops() -> None:
    predictor = Predictor(profile(CPU))
    plain = graph(linear(), add())
    special = msgspec.structs.replace(plain, ops_at_one=(linear(),))
    curve = predictor.curve(special, [2, 1, 3])
    assert curve.latency_ms[1] == pytest.approx(predictor.predict(graph(linear())).latency_ms)
    assert curve.latency_ms[[0, 2]] == pytest.approx(predictor.curve(plain, [2, 3]).latency_ms)


def test_equal_work_is_priced_once_and_counted_each_time() -> None:
    predictor = Predictor(profile(CPU))
    once, thrice = predictor.predict(graph(linear())), predictor.predict(graph(linear(), linear(), linear()))
    assert thrice.compute_ms == pytest.approx(3 * once.compute_ms)
    # An op of two kernels shares its work between them.
    assert predictor.predict(graph(linear(launches=2))).compute_ms == pytest.approx(once.compute_ms)


def test_the_interval_holds_networks_and_strange_kernels() -> None:
    known = {"eager": dispatch(spread=0.1)}
    fits = (kernel_fit("gemm", spread=0.3),)
    found = Predictor(profile(CPU, fits, known)).predict(one_gemm(), 1000)
    low, high = found.interval_ms
    # What networks showed already holds the usual spread of the fit.
    assert high / found.latency_ms == pytest.approx(math.exp(1.6449 * 0.1), rel=1e-4)
    assert found.latency_ms / low == pytest.approx(high / found.latency_ms)
    estimated = Predictor(profile(CPU, fits, known)).predict(one_gemm(estimated=True), 1000)
    assert estimated.interval_ms[1] / estimated.latency_ms > 2.5


@pytest.mark.parametrize(("runtime", "waits"), [("eager", 1), ("torchscript", 1), ("onnxruntime", 0)])
def test_what_malloc_gives_back_in_each_pass_is_waited_for(runtime: str, waits: int) -> None:
    info = msgspec.structs.replace(CPU, fresh_bytes_per_us=1000.0)
    given = [profile(device, runtimes={runtime: dispatch()}) for device in (CPU, info)]
    alive = (0, 24, 48, 72, 0)  # MiB a sample, with steps below the 32 of blocks that lie elsewhere
    large = graph(*(linear(live_bytes=Affine(0, mib << 20)) for mib in alive))
    without, with_ = (Predictor(one).predict(large, runtime=runtime) for one in given)
    assert with_.latency_ms - without.latency_ms == pytest.approx(waits * (72 << 20) / 1e6)
    assert with_.compute_ms - without.compute_ms == pytest.approx(waits * (72 << 20) / 1e6)


def test_errors_of_one_family_go_together_and_of_two_do_not() -> None:
    def spread(*families: str) -> float:
        fits = [kernel_fit(name, macs_per_us=0.0, floor_us=100.0, spread=0.2) for name in dict.fromkeys(families)]
        ops = [add(0, family=name) for name in families]
        found = Predictor(profile(CPU, fits, {"eager": dispatch(costs_us={"": 0.0}, fixed_us=0.0)})).predict(
            graph(*ops)
        )
        return math.log(found.interval_ms[1] / found.latency_ms) / 1.6449

    assert spread("elementwise", "elementwise") == pytest.approx(0.2, rel=1e-2)
    assert spread("elementwise", "reduction") == pytest.approx(0.2 / math.sqrt(2), rel=1e-2)


def test_what_was_not_measured_or_has_no_formula_is_estimated_and_said() -> None:
    ops = (linear(1, 4), add(name="custom::op", estimated=True), add(family="fft"))
    found = Predictor(profile(CPU)).predict(graph(*ops), 100)
    said = " | ".join(found.provenance.caveats)
    assert "no measurements of fft kernels" in said
    assert "no cost formula for custom::op" in said
    assert found.coverage.estimated_ops == {"custom::op": 1}
    assert found.coverage.launches == pytest.approx(2 / 3)
    assert found.interval_ms[1] > 1.2 * found.latency_ms
    unknown = Predictor(profile(CPU)).predict(graph(add(family="other", estimated=True)), 10**6)
    assert unknown.interval_ms[1] > 8 * unknown.latency_ms


def test_caveats_are_those_of_all_batches_in_whatever_order() -> None:
    ops = (linear(), add(family="fft"), add(name="custom::op", estimated=True))
    at_one = (linear(), add(name="custom::one", estimated=True))
    predictor, net = Predictor(profile(CPU)), graph(*ops, ops_at_one=at_one)
    said = [set(predictor.curve(net, batches).setting.provenance.caveats) for batches in ([1, 8], [8, 1], [1], [8])]
    none = "no cost formula for {}: estimated from bytes"
    fft = "the profile has no measurements of fft kernels: estimated"
    assert said[0] == said[1] == {fft, none.format("custom::one, custom::op")}
    assert said[2:] == [{none.format("custom::one")}, {fft, none.format("custom::op")}]


def test_kernels_that_a_measured_gpu_knows_from_its_datasheet_alone_widen_the_interval() -> None:
    rates = {"macs_per_us": 0.0, "floor_us": 100.0, "spread": 0.3}
    known = profile(device(kind="cuda"), [kernel_fit("softmax", **rates)], {"eager": dispatch(spread=0.1)})
    gpu = msgspec.structs.replace(known, device=device(kind="cuda", name="nvidia-h100-80gb-hbm3"))
    published = msgspec.structs.replace(gpu, provenance="fitted from published measurements")

    def upper(made: DeviceProfile) -> tuple[float, str]:
        found = Predictor(made).predict(graph(add(family="softmax")), protocol="pipelined")
        return math.log(found.interval_ms[1] / found.latency_ms) / 1.6449, " | ".join(found.provenance.caveats)

    width, said = upper(gpu)
    assert width == pytest.approx(math.hypot(0.1, 0.3), rel=0.01)
    assert "no measurements of softmax kernels: taken from the datasheet" in said
    for other in (known, published):
        width, said = upper(other)
        assert width == pytest.approx(0.1, rel=0.01)
        assert "taken from the datasheet" not in said
    # What whole networks alone tell of a runtime's own kernels is measured, and no better known.
    own = dispatch(spread=0.1, kernels={"fp32": {"softmax": kernel_fit("softmax", **rates)}})
    width, said = upper(profile(CPU, [kernel_fit("softmax")], {"eager": own}))
    assert width > 0.2
    assert "measurements" not in said


def test_a_leaf_that_was_not_measured_is_priced_as_its_nearest_like() -> None:
    dims = dict.fromkeys(("batch", "channels", "h_out", "w_out", "window"), Affine(4))
    flat, along = (graph(add(1000, family=name, dims=dims)) for name in ("pooling.max", "pooling.max.1d"))
    fit = kernel_fit("pooling", macs_per_us=0.0)
    slow = msgspec.structs.replace(fit, activation_bytes_per_us=500.0)
    # 12,000 bytes at 1e3 per us above a floor of 2.
    for fits, flat_us, along_us in (
        ({"pooling": msgspec.structs.replace(fit, leaf_scales={"pooling.max": 3.0})}, 38.0, 38.0),
        ({"pooling": fit, "pooling.max": slow}, 26.0, 26.0),
        ({"pooling.max": msgspec.structs.replace(slow, leaf_scales={"pooling.max.1d": 0.25})}, 26.0, 8.0),
        ({"pooling.max": slow, "pooling.max.1d": fit}, 26.0, 14.0),
    ):
        predictor = Predictor(msgspec.structs.replace(profile(CPU), kernels={"fp32": fits}))
        found = [predictor.predict(net).compute_ms for net in (flat, along)]
        assert found == pytest.approx([flat_us / 1e3, along_us / 1e3])


def test_memory() -> None:
    net = graph(linear(live_bytes=Affine(1000, 2**20)), parameter_bytes=2**30)
    predictor = Predictor(profile(device(memory_bytes=2**31)))
    small, large = predictor.predict(net, 8), predictor.predict(net, 2000)
    assert small.peak_bytes == net.peak_bytes(8)
    assert small.fits is True
    assert large.fits is False
    assert Predictor(profile(device(memory_bytes=0))).predict(net).fits is None


def test_max_batch() -> None:
    predictor = Predictor(profile(CPU))
    # Latency 30 + 2 b microseconds.
    assert predictor.max_batch(one_gemm(), 0.1005) == 35
    assert predictor.max_batch(one_gemm(), 0.031) == 0
    # 1 KiB of input each: 2 MiB hold 2,044 beside 4,000 bytes of parameters.
    tight = Predictor(profile(device(asynchronous=False, memory_bytes=2**21)))
    wide = one_gemm(live_bytes=Affine(0, 1))
    assert tight.max_batch(wide, 1e6) == (2**21 - 4000) // 1024
    assert predictor.max_batch(one_gemm(), np.float32(0.1005)) == 35
    for wrong in (-1.0, True):
        with pytest.raises(UsageError, match="positive number of milliseconds"):
            predictor.max_batch(one_gemm(), wrong)
    fixed = one_gemm(macs=Affine(100), read_bytes=Affine(1000), write_bytes=Affine(1000), live_bytes=Affine(1000))
    with pytest.raises(UsageError, match="the same at every batch, so no batch is the largest"):
        predictor.max_batch(fixed, 1.0)


def test_batches_that_a_runtime_refuses_pass_no_threshold_and_are_no_largest() -> None:
    predictor = Predictor(profile(device(kind="cuda"), runtimes={"cuda-graphs": dispatch()}))
    waits = graph(linear(syncs=1))
    line, one = msgspec.structs.replace(waits, ops_at_one=(linear(),)), graph(linear(), ops_at_one=waits.ops)
    for net, batch in ((line, 1), (one, 8)):
        found = predictor.predict(net, batch, runtime="cuda-graphs")
        assert pickle.loads(pickle.dumps(found)).to_dict() == found.to_dict()
        assert "crossover" in repr(found)
    largest = [predictor.max_batch(net, 1e3, runtime="cuda-graphs") for net in (one, graph(linear()))]
    assert largest[0] == largest[1] > 1
    assert (found.crossover_batch, found.knee_batch) == (2, 3)
    for net in (waits, line):
        with pytest.raises(RuntimeRefusalError, match="makes the host wait"):
            predictor.max_batch(net, 1e3, runtime="cuda-graphs")


def test_what_a_profile_does_not_know_is_said_with_what_to_do() -> None:
    with pytest.raises(UsageError, match="Did you mean 'eager'"):
        Predictor(profile()).check("eagre")
    with pytest.raises(ProfileError, match="no kernels in fp16"):
        Predictor(profile()).predict(graph(linear(), precision="fp16"))
    for kind, option in (("cpu", "cpu"), ("cuda", "cuda:0"), ("simulated", "simulated")):
        command = f"no dispatch costs of runtime .* with: latpred calibrate --device {option} --runtimes torchscript"
        with pytest.raises(ProfileError, match=command):
            Predictor(profile(device(kind=kind))).check("torchscript")


def test_predictions_and_predictors_travel_between_processes() -> None:
    predictor: Predictor = pickle.loads(pickle.dumps(Predictor(profile(CPU), ["as said"])))
    found = predictor.predict(one_gemm())
    again = pickle.loads(pickle.dumps(found))
    assert again.to_dict() == found.to_dict()
    assert again.provenance.caveats == ("as said",)
    assert copy.deepcopy(found).knee() == found.knee()
    with pytest.raises(UsageError, match="from another process"):
        again.knee(3.0)
