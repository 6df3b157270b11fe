"""Measuring text generation: what the table holds, and what it says beside a prediction. No wall clock."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from clidata import document, models_file, run
from gauges import FAST
from profiledata import machine, profile
from tracing.test_text_generation import gpt2

import latpred
from latpred import tables
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec
from latpred.calibration.measurement import timed_generation
from latpred.calibration.measurement.timed_generation import beside, generation_workloads, measure_generation
from latpred.calibration.measurement.whole_models import StoppedError
from latpred.cli.predict import live_device
from latpred.errors import UsageError
from latpred.profile import store
from latpred.profile.document import OPENED, DeviceInfo
from latpred.progress import ProgressEvent
from latpred.tracing.text_generation import trace_generation


def test_the_table_has_all_of_it_and_the_first_token() -> None:
    table = measure_generation(gpt2(), 6, 4, [1, 2], repeats=1, plan=FAST)
    assert tables.check(table, tables.MEASURED)["status"].tolist() == ["ok"] * 4
    assert sorted(zip(table["input_kind"], table["batch"], strict=True)) == [
        ("prompt+1", 1),
        ("prompt+1", 2),
        ("prompt+4", 1),
        ("prompt+4", 2),
    ]
    assert (table["input_size"] == 6).all()
    keys = [key for key in tables.KEYS if key != "machine"]
    store.save(profile())
    predicted = latpred.predict_generation(gpt2(), 6, 4, [1, 2]).to_frame()
    assert len(predicted.merge(table, on=keys)) == 4


def test_sequences_that_end_early_are_no_measurement() -> None:
    model = gpt2()
    with torch.inference_mode():
        torch.nn.init.zeros_(model.lm_head.weight)  # type: ignore[arg-type, union-attr]  # the first token scores highest
    model.generation_config.eos_token_id = 0  # type: ignore[union-attr]
    model.generation_config.pad_token_id = 0  # type: ignore[union-attr]
    module, inputs = generation_workloads(model, 6, [4])[0].make("cpu", "fp32")
    with torch.inference_mode(), pytest.raises(UsageError, match="ended every sequence after 7 tokens, not 10"):
        module(**inputs(2, "cpu"))


def test_on_the_simulated_device_the_trace_generates() -> None:
    device = SimulatedDevice(SimulatedSpec(noise=0.0, spikes=0.0))
    table = measure_generation(gpt2(), 6, 4, [1, 2], device=device, repeats=1, plan=FAST)
    measured_s = table.set_index(["input_kind", "batch"])["latency_s"]
    graph = trace_generation(gpt2(), 6, 4)
    assert graph.whole.syncs(2) == sum(stage.graph.syncs(2) for stage in (graph.prefill, *graph.steps)) + 3
    for batch in (1, 2):
        # The device is idle whenever an iteration begins, so that each takes what it takes by itself.
        each_s = [device.true_latency_s(stage.graph, batch) for stage in (graph.prefill, *graph.steps)]
        assert measured_s["prompt+1", batch] == pytest.approx(each_s[0], rel=0.01)
        assert measured_s["prompt+4", batch] == pytest.approx(sum(each_s), rel=0.02)


def test_a_profile_is_measured_on_the_device_that_it_is_of() -> None:
    info = DeviceInfo(name="nvidia-h100-80gb-hbm3", kind="cuda", asynchronous=True, memory_bytes=80 << 30)
    store.save(profile("nvidia-h100", device=info))
    assert live_device("nvidia-h100") == "cuda:0"
    assert [live_device(name) for name in ("cuda:1", "simulated")] == ["cuda:1", "simulated"]
    assert live_device(None) == "cuda:0"
    store.save(profile("cuda:1", device=info, protocol={OPENED: "cuda:1"}))
    assert live_device(None) == live_device("cuda:1") == "cuda:1"


def test_predicted_beside_measured() -> None:
    store.save(profile())
    curve = latpred.predict_generation(gpt2(), 6, 4, [2])
    table = measure_generation(gpt2(), 6, 4, [2], repeats=1, plan=FAST)
    rows = beside(curve, table).set_index("what")
    assert list(rows.index) == ["first token", "next token", "4 tokens"]
    measured = table.set_index("input_kind")["latency_s"]
    assert rows.loc["next token", "measured_s"] == pytest.approx((measured["prompt+4"] - measured["prompt+1"]) / 3)
    assert rows.loc["4 tokens", "error"] == pytest.approx(curve[0].latency_ms / 1e3 / measured["prompt+4"] - 1)


@pytest.mark.parametrize("visits", [1, 3])
def test_ctrl_c_leaves_what_was_measured(visits: int) -> None:
    seen: list[ProgressEvent] = []

    def stop(step: ProgressEvent) -> None:
        seen.append(step)
        if len(seen) > visits:
            raise KeyboardInterrupt

    with pytest.raises(StoppedError) as stopped:
        measure_generation(gpt2(), 6, 4, [1, 2], device=SimulatedDevice(), repeats=1, plan=FAST, progress=stop)
    table = tables.check(stopped.value.table, tables.MEASURED)
    assert len(table) == 4
    assert (table["status"] == "ok").sum() == visits


def test_the_verb_prints_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latpred.calibration.measurement.whole_models.VISIT", FAST)
    store.save(profile())
    asked = ["generate", f"{models_file(tmp_path)}:gpt2", "--prompt", "4", "--new-tokens", "2", "--measure"]
    done = run(*asked)
    assert done.exit_code == 0, done.output
    assert "next token" in done.stdout
    assert [row["what"] for row in document(*asked)["measured"]] == ["first token", "next token", "2 tokens"]


def test_the_verb_measures_with_the_threads_of_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def measure(*_: object, **options: object) -> None:
        asked.extend((options["device"], options["threads"]))
        raise UsageError("enough")

    monkeypatch.setattr(timed_generation, "measure_generation", measure)
    store.save(profile("cpu-3-threads", machine=machine(threads=3)))
    model = f"{models_file(tmp_path)}:gpt2"
    run("generate", model, "--device", "cpu-3-threads", "--new-tokens", "2", "--prompt", "4", "--measure")
    assert asked == ["cpu", 3]


def test_the_first_token_counts_where_the_rest_could_not_be_measured() -> None:
    store.save(profile())
    table = measure_generation(gpt2(), 6, 2, [1], repeats=1, plan=FAST)
    table.loc[table["input_kind"] == "prompt+2", ["status", "latency_s"]] = "out of memory", math.nan
    rows = beside(latpred.predict_generation(gpt2(), 6, 2, [1]), table)
    assert rows["status"].tolist() == ["ok", "out of memory", "out of memory"]
    assert rows["measured_s"].notna().tolist() == rows["error"].notna().tolist() == [True, False, False]
