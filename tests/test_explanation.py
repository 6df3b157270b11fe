"""latpred.explain from a profile and a graph: who is compared, who is faster, and what may grow."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch
from explanationdata import explanation, headroom, prediction
from factories import add, device, graph, kernel_fit, linear
from reportdata import EAGER, REPLAYED, network, saved
from transformers.utils.import_utils import is_cuda_stream_capturing

import latpred
from latpred.errors import ProfileError, RuntimeRefusalError, TraceError, UsageError
from latpred.explanation.explain import PIXELS, TOKENS, axis_headroom
from latpred.explanation.explanation import CHEAP, NEARLY_FREE, Choice, Excluded, ratio, shares
from latpred.explanation.explanation import caveats as caveats_of
from latpred.prediction.clocks import Z90
from latpred.query import MOST_BATCH, PROTOCOLS
from latpred.runtimes.cuda_graphs import CudaGraphs
from latpred.tables import PREDICTED, check


def test_runtimes_side_by_side_the_fastest_first() -> None:
    found = latpred.explain(network(), 4, device=saved())
    assert isinstance(found, latpred.Explanation)
    assert [choice.runtime for choice in found.choices] == ["cuda-graphs", "eager"]
    assert (found.batch, found.fastest.runtime, found.rivals) == (4, "cuda-graphs", ())
    eager, replayed = found.eager, found.fastest
    assert eager is not None
    assert (eager.steps, eager.launches, replayed.steps, replayed.launches) == (16, 16, 1, 16)
    assert eager.speedup == ratio(eager, eager)
    assert replayed.speedup is not None
    assert replayed.speedup.times == eager.prediction.latency_ms / replayed.prediction.latency_ms
    assert replayed.speedup.longer
    expected = latpred.predict(network(), 4, device="gpu", runtime="cuda-graphs")
    assert replayed.prediction.latency_ms == pytest.approx(expected.latency_ms)
    assert found.advice.startswith("Run it in cuda-graphs, ")


def test_every_other_runtime_is_listed_with_its_reason() -> None:
    found = latpred.explain(network(), device=saved())
    reasons = {one.runtime: one for one in found.excluded}
    assert set(reasons) | {"eager", "cuda-graphs"} == set(latpred.runtimes.names())
    assert reasons["torchscript"].kind == "uncalibrated"
    command = "latpred calibrate --device simulated --runtimes"
    assert reasons["torchscript"].reason == f"not calibrated; run: {command} torchscript"
    # What needs no GPU to be calibrated on the simulated device is not said to lack one.
    assert reasons["onnxruntime-cuda-graphs"].reason == f"not calibrated; run: {command} onnxruntime-cuda-graphs"
    assert reasons["tensorrt"].kind == "missing"
    info = device(name="cpu", kind="cpu", asynchronous=False)
    cpu = latpred.explain(network(), device=saved("cpu-there", info))
    unsuited = next(one for one in cpu.excluded if one.runtime == "cuda-graphs")
    assert unsuited.kind == "unsuited"
    assert "needs a CUDA device" in unsuited.reason


def test_a_runtime_that_refuses_the_model_is_no_choice() -> None:
    found = latpred.explain(graph(linear(), add(syncs=1)), device=saved())
    (refused,) = [one for one in found.excluded if one.kind == "refused"]
    assert refused.runtime == "cuda-graphs"
    assert "aten::add" in refused.reason
    assert [choice.runtime for choice in found.choices] == ["eager"]
    with pytest.raises(RuntimeRefusalError, match="aten::add"):
        latpred.explain(graph(linear(), add(syncs=1)), device="gpu", runtimes=["cuda-graphs"])


@pytest.mark.parametrize(("error", "width"), [(RuntimeRefusalError, 32), (TraceError, 33), (UsageError, 34)])
def test_tools_that_refuse_a_model_are_not_replaced_by_their_estimate(
    error: type[Exception], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaGraphs, "trace", Mock(side_effect=error("cuda-graphs cannot capture aten::nonzero")))
    module = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.ReLU())
    found = latpred.explain(module, inputs=torch.zeros(1, 32), device=saved())
    assert Excluded("cuda-graphs", "refused", "cuda-graphs cannot capture aten::nonzero") in found.excluded


class Checking(torch.nn.Module):
    """Looks at a number, as some models check their masks, but not while it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 8, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if not is_cuda_stream_capturing():
            assert torch.arange(4).max().item() == 3
        return torch.relu(self.layer(image))


def test_a_model_that_reads_numbers_unless_it_is_captured_is_explained() -> None:
    found = latpred.explain(Checking(), image=64, device=saved())
    assert [choice.runtime for choice in found.choices] == ["cuda-graphs", "eager"]
    assert [found.headrooms[name].room("image") is None for name in ("cuda-graphs", "eager")] == [True, False]


def test_a_path_is_explained_in_runtimes_with_tools_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "models.py"
    file.write_text("from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())\n")
    found = latpred.explain(Path(f"{file}:build"), image=32, device=saved(eager=EAGER, torchscript=REPLAYED))
    assert {choice.runtime for choice in found.choices} == {"eager", "torchscript"}


def test_where_the_time_goes_is_said_without_a_headroom() -> None:
    found = latpred.explain(network(only=(4,)), 4, device=saved())
    assert found.headrooms == {}
    assert "where the time goes" in repr(found)
    assert shares(found).heads[1::2] == ("cuda-graphs overhead", "eager overhead")


def test_inputs_that_are_the_same_at_every_batch_leave_no_headroom() -> None:
    found = latpred.explain(torch.nn.Conv2d(3, 8, 3), inputs=lambda _: torch.zeros(1, 3, 8, 8), device=saved())
    assert found.headrooms == {}


def test_the_largest_batches_are_explained_too() -> None:
    doubled = latpred.explain(network(), MOST_BATCH, device=saved()).headrooms["eager"].doubled
    assert doubled == pytest.approx(2.0, rel=0.01)


def test_only_some_runtimes() -> None:
    name = saved(eager=EAGER, cuda_graphs=REPLAYED, torchscript=REPLAYED)
    both = ["cuda-graphs", "eager"]
    asked = (("cuda-graphs", both), (iter(["cuda-graphs"]), both), ([], ["eager"]), (iter(()), ["eager"]))
    for runtimes, compared in asked:
        found = latpred.explain(network(), device=name, runtimes=runtimes)
        assert [choice.runtime for choice in found.choices] == compared
        assert found.excluded == ()
    with pytest.raises(UsageError, match="Did you mean 'torchscript'"):
        latpred.explain(network(), device=name, runtimes=["torchscrpt"])
    with pytest.raises(ProfileError, match="latpred calibrate --device simulated --runtimes torchscript"):
        latpred.explain(network(), device=saved("less"), runtimes=["torchscript"])


def test_a_graph_of_another_runtime_is_explained_in_that_alone() -> None:
    name = saved(eager=EAGER, onnxruntime=REPLAYED)
    of_onnx = network(runtime="onnxruntime")
    for runtimes in (None, ["onnxruntime"]):
        found = latpred.explain(of_onnx, device=name, runtimes=runtimes)
        assert [choice.runtime for choice in found.choices] == ["onnxruntime"]
    assert "this is a graph of onnxruntime, which says nothing of others" in [one.reason for one in found.excluded]


def test_the_intervals_decide_what_is_faster() -> None:
    assert explanation(prediction("eager", 10.0, 1.1), prediction("compile", 9.5, 1.1)).rivals == ("eager",)
    apart = explanation(prediction("eager", 10.0, 1.1), prediction("compile", 7.0, 1.1))
    assert apart.rivals == ()
    sure = ratio(*reversed(apart.choices))
    assert (sure.longer, sure.equal) == (True, False)
    assert sure.low < sure.times < sure.high


def test_what_kernel_times_are_off_by_cancels_between_runtimes_that_share_them() -> None:
    points = prediction("eager", 10.0, 2.0), prediction("compile", 8.0, 2.0)
    unsure = ratio(*(Choice(point, 1, 1) for point in points))
    sure = ratio(*(Choice(point, 1, 1, kernel_error=0.69) for point in points))
    assert (unsure.equal, sure.longer) == (True, True)
    assert sure.times == unsure.times


def test_what_is_not_known_of_the_host_is_no_error_of_kernels_and_cancels_where_both_wait_for_it() -> None:
    eager, replayed = (msgspec.structs.replace(fit, host_spread=0.34, busy_spread=0.3) for fit in (EAGER, REPLAYED))
    name = saved(eager=eager, cuda_graphs=replayed, torchscript=eager)
    found = {choice.runtime: choice for choice in latpred.explain(network(), device=name).choices}
    waits, runs, scripted = (found[runtime] for runtime in ("eager", "cuda-graphs", "torchscript"))
    host = 0.34 * Z90
    assert waits.kernel_error < 0.1 < runs.kernel_error
    assert waits.host_error == pytest.approx(host, rel=0.1)
    assert runs.host_error < host / 2

    def width(other: Choice) -> float:
        times = ratio(waits, other)
        return math.log(times.high / times.times)

    assert width(scripted) < host / 2 < host < width(runs)


def test_kernels_of_a_runtime_s_own_are_no_common_error() -> None:
    own = msgspec.structs.replace(REPLAYED, kernels={"fp32": {"gemm": kernel_fit("gemm")}})
    found = latpred.explain(network(), device=saved(eager=EAGER, cuda_graphs=own))
    assert found.fastest.kernel_error == 0.0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_may_grow_stays_within_its_limits(protocol: str) -> None:
    device, net = saved(), network()

    def latency_ms(runtime: str, batch: int) -> float:
        return latpred.predict(net, batch, device=device, runtime=runtime, protocol=protocol).latency_ms

    for runtime, ahead in latpred.explain(net, 4, device=device, protocol=protocol).headrooms.items():
        now = latency_ms(runtime, 4)
        batch = ahead.room("batch")
        assert batch is not None
        for value, times in ((batch.nearly_free, NEARLY_FREE), (batch.cheap, CHEAP)):
            assert value is not None
            assert latency_ms(runtime, int(value)) <= times * now < latency_ms(runtime, int(value) + 1)
        assert ahead.doubled == pytest.approx(latency_ms(runtime, 8) / now)
        assert ahead.halved <= 1.0
        assert ahead.room("seq") is None  # a graph cannot be traced again


def test_batch_does_not_grow_beyond_the_memory() -> None:
    small = device(memory_bytes=4000 + 8 * 4 * 256 * 8)
    batch = latpred.explain(network(), 4, device=saved(info=small)).headrooms["eager"].room("batch")
    assert batch is not None
    assert batch.cheap is not None
    assert network().peak_bytes(int(batch.cheap)) <= small.memory_bytes


@pytest.mark.parametrize(
    ("name", "runtime", "axis", "factors"),
    [
        ("distilbert", "eager", "seq", TOKENS),
        ("resnet-18", "eager", "image", PIXELS),
        ("resnet-18", "cuda-graphs", "image", PIXELS),
    ],
)
def test_larger_inputs_are_predicted_as_traced(name: str, runtime: str, axis: str, factors: tuple[float, ...]) -> None:
    def latency_ms(size: int) -> float:
        return latpred.predict(name, runtime=runtime, **asked, **{axis: size}).latency_ms

    asked = {"batch": 64, "device": "rtx-8000", "precision": "fp16"}
    sizes = [round(64 * factor) for factor in factors]
    room = latpred.explain(name, **asked, **{axis: 64}, runtimes=[runtime]).headrooms[runtime].room(axis)
    grown = ((size, latency_ms(size)) for size in sizes)
    assert room == axis_headroom(axis, 64, latency_ms(64), grown, sizes[-1], estimate=False)
    assert 64 < room.nearly_free < room.cheap


class Joined(torch.nn.Module):
    """Halves the image five times and doubles it again, as a U-net does: its side is a multiple of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.AvgPool2d(32))
        self.up = torch.nn.Upsample(scale_factor=32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.down(x))  # type: ignore[no-any-return]


def test_a_side_that_layers_do_not_divide_by_is_no_end() -> None:
    room = latpred.explain(Joined(), image=32, device=saved()).headrooms["eager"].room("image")  # next: 48, then 64
    assert room is not None
    assert room.nearly_free is None or room.nearly_free > 32


def test_between_two_sizes_the_latency_is_taken_to_be_straight() -> None:
    room = axis_headroom("seq", 100, 10.0, [(200, 10.0), (300, 14.0)], 300, estimate=False)
    assert (room.nearly_free, room.cheap) == (212, 250)
    endless = axis_headroom("width", 1.0, 10.0, [(2.0, 10.1)], 2.0, estimate=True)
    assert (endless.nearly_free, endless.cheap) == (None, None)
    ended = axis_headroom("seq", 128, 10.0, [(256, 10.1)], 1024, estimate=False)  # the model goes no further
    assert (ended.nearly_free, ended.cheap) == (256, 256)


def test_advice_comes_first_and_each_kind_of_caveat_once() -> None:
    basis = {"tensorrt": "fused as by an engine", "compile": "of its graph", "eager": "measured"}
    given = []
    for name, how in basis.items():
        point = prediction(name, 5.0)
        own = (f"{name} was not measured on this GPU: {how}", f"{name} was not asked: guessed")
        provenance = replace(point.provenance, caveats=("fitted", *own * (name != "eager")))
        given.append(replace(point, setting=replace(point.setting, provenance=provenance)))
    found = explanation(*given)
    assert caveats_of(found) == [
        "caveat: fitted",
        "caveat of 2 runtimes (tensorrt, compile): not measured on this GPU; latpred predict --runtime NAME says more "
        "of each",
        "caveat of tensorrt, compile: not asked: guessed",
    ]
    assert repr(replace(found, advice="Stay with eager.")).splitlines()[2] == "Stay with eager."


def test_the_text_fits_a_terminal() -> None:
    found = latpred.explain(network(), 4, device=saved())
    lines = repr(found).splitlines()
    assert max(len(line) for line in lines) <= 80
    assert lines[0] == "example-net: batch 4, 128 tokens, fp32 on example, single"
    text = repr(found)
    for part in ("speed-up", "crossover", "cuda-graphs", "where the time goes", "may grow in eager", "Run it in"):
        assert part in text
    assert text.count("caveat: measured on another machine") == 1
    long = explanation(
        prediction("onnxruntime-cuda-graphs", 1234.5, 1.9),
        prediction("compile-reduce-overhead", 2345.6, 1.9),
        prediction("eager", 9345.6, 1.9),
        headrooms={"onnxruntime-cuda-graphs": headroom(), "eager": headroom(None, None)},
    )
    assert max(len(line) for line in repr(long).splitlines()) <= 80
    assert "…" not in repr(long)


def test_page_and_figure_say_how_it_was_asked() -> None:
    net, device = network(attention="eager", memory_format="channels_last"), saved()
    found = latpred.explain(net, device=device, protocol="pipelined")
    how = "fp32, channels_last, eager attention on example, pipelined"
    assert repr(found).splitlines()[0] == f"example-net: batch 1, 128 tokens, {how}"
    above = found.plot().axes[0].get_title()
    assert above == "example-net, batch 1, fp32 on example\nchannels_last, eager attention, pipelined"
    usual = latpred.explain(network(), device=device).plot()
    assert usual.axes[0].get_title() == "example-net, batch 1, fp32 on example"


def test_a_notebook_gets_tables_without_anything_unescaped() -> None:
    shown = latpred.explain(network(model="a<b>"), device=saved())._repr_html_()
    assert "a&lt;b&gt;" in shown
    assert "a<b>" not in shown
    assert shown.count("<table>") == shown.count("</table>") >= 5


def test_json_and_rows() -> None:
    found = latpred.explain(network(), 4, device=saved())
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["schema"] == "latpred.explanation/1"
    assert [row["runtime"] for row in document["runtimes"]] == ["cuda-graphs", "eager"]
    assert document["runtimes"][0]["speedup"]["times"] > 1
    assert document["outlooks"]["eager"]["rooms"]["batch"]["now"] == 4
    assert document["advice"] == found.advice
    frame = found.to_frame()
    assert list(frame["x_steps"]) == [1, 16]
    assert len(check(frame, PREDICTED)) == 2


def test_runtimes_that_do_not_run_autocast_are_excluded() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    names = ["cuda-graphs", "torchscript"]
    inputs = torch.zeros(1, 8)
    found = latpred.explain(model, 2, runtimes=names, inputs=inputs, device="a100", precision="amp-fp16")
    assert {choice.runtime for choice in found.choices} == {"eager", "cuda-graphs"}
    assert [one.runtime for one in found.excluded] == ["torchscript"]
