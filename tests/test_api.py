"""latpred.predict and latpred.max_batch, from a module and a profile's name to a number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import factories
import msgspec
import pytest
import torch
from factories import graph, linear
from profiledata import machine, profile

import latpred
from latpred.calibration.timing import reference_speed
from latpred.errors import NoProfileError, ProfileError, UsageError
from latpred.profile import store
from latpred.query import MOST_BATCH


def test_from_a_module_to_a_number() -> None:
    store.save(profile("cpu-here"))
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    found = latpred.predict(network, 4, inputs=(torch.randn(2, 64),))
    assert isinstance(found, latpred.Prediction)
    assert (found.batch, found.provenance.profile, found.provenance.caveats) == (4, "cpu-here", ())
    graph = latpred.trace(network, (torch.randn(2, 64),))
    assert latpred.predict(graph, 4).latency_ms == found.latency_ms


def test_a_new_calibration_is_noticed(tmp_path: Path) -> None:
    net = graph(linear())
    with pytest.raises(NoProfileError, match="latpred calibrate"):
        latpred.predict(net)
    own = profile()
    slower = msgspec.structs.replace(own.runtimes["eager"], fixed_us=5000.0)
    for path in (None, tmp_path / "mine.json"):
        store.save(own, path)
        first = latpred.predict(net, device=path)
        store.save(msgspec.structs.replace(own, runtimes={"eager": slower}), path)
        assert latpred.predict(net, device=path).latency_ms == pytest.approx(first.latency_ms + 4.995)


def test_a_device_is_a_name_a_path_or_torchs_own(tmp_path: Path) -> None:
    there = store.save(profile("cpu-here"), tmp_path / "elsewhere" / "copy.json")
    store.save(profile("cpu-here"))
    net = graph(linear())
    expected = latpred.predict(net).latency_ms
    for name in ("cpu", "cpu-here", torch.device("cpu"), there, str(there)):
        assert latpred.predict(net, device=name).latency_ms == expected
    with pytest.raises(ProfileError, match="no profile is called 'a100000'"):
        latpred.predict(net, device="a100000")
    with pytest.raises(UsageError, match="smallest batch is 1"):  # which is said before anything is traced
        latpred.predict("no-such-model", [4, 0])


@pytest.mark.parametrize("asked", [{"threads": 4}, {"cudnn_benchmark": True}, {"host": "a toaster"}])
@pytest.mark.parametrize("ask", [latpred.predict, latpred.explain, partial(latpred.max_batch, latency_ms=1.0)])
def test_all_that_is_asked_of_a_device_is_handed_on(ask: Callable[..., object], asked: dict[str, object]) -> None:
    with pytest.raises(ProfileError):
        ask(graph(linear()), device="rtx-8000", **asked)


def test_the_largest_batch_that_is_tried_is_said_to_be_no_more_than_that() -> None:
    given = profile("endless")
    store.save(msgspec.structs.replace(given, device=msgspec.structs.replace(given.device, memory_bytes=0)))
    with pytest.warns(UserWarning, match=r"^1,048,576 is the largest batch that is tried: larger ones may keep 1e\+09"):
        assert latpred.max_batch(graph(linear()), 1e9, device="endless") == MOST_BATCH


def test_another_machine_or_stack_is_a_caveat() -> None:
    store.save(profile("foreign", machine=factories.machine()))
    (caveat,) = latpred.predict(graph(linear()), device="foreign").provenance.caveats
    assert "Example 9000" in caveat
    store.save(profile(machine=machine(stack={"torch": "1.0", "numpy": "0.1"})))
    (caveat,) = latpred.predict(graph(linear()), device="cpu").provenance.caveats
    assert caveat.startswith("measured with torch 1.0, here it is ")


@pytest.mark.parametrize("slowed", [0.5, 0.72])
def test_a_machine_that_was_mostly_slow_is_a_caveat_but_not_for_now(
    slowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = {"machine": factories.machine_here(stack={}), "speed": {"dispatch": 100.0}}
    store.save(profile(**mine, slowed=slowed))
    said = latpred.predict(graph(linear()), device="cpu").provenance.caveats
    assert [caveat.partition(":")[0] for caveat in said] == (
        ["the machine was slow around 72% of the cells of its calibration"] if slowed > 0.5 else []
    )
    monkeypatch.setattr(reference_speed, "speed_now", lambda *given, host_only: {"dispatch": 130.0})
    (now,) = latpred.predict(graph(linear()), device="cpu", now=True).provenance.caveats
    assert now.startswith("adjusted to the present speed of the machine")


def test_a_graph_has_its_inputs_and_precision_already() -> None:
    store.save(profile("cpu-here"))
    for ask in (latpred.predict, latpred.explain):
        with pytest.raises(UsageError, match="leave out seq"):
            ask(graph(linear()), seq=64)
        with pytest.raises(UsageError, match="traced in fp32"):
            ask(graph(linear()), precision="fp16")
        with pytest.raises(UsageError, match="contiguous format"):
            ask(graph(linear()), memory_format="channels_last")
    assert latpred.predict(graph(linear()), precision="fp32").precision == "fp32"


def test_what_is_no_public_name() -> None:
    assert set(latpred.__all__) <= set(dir(latpred))
    with pytest.raises(AttributeError, match="no attribute 'forecast'"):
        _ = latpred.forecast
