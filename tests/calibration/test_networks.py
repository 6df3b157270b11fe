"""Generated networks: every kind builds, is traced and runs, and its trace is the stream of calls of its run."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from gauges import ScriptedGauge

from latpred.calibration import schedules
from latpred.calibration.timing import in_network
from latpred.calibration.workloads import blocks, networks
from latpred.calibration.workloads.networks import KINDS, MEDLEY, WAVE, NetworkSpec
from latpred.graph.graph import Op
from latpred.tracing.inputs import cast, dtype_of

TINY = [networks.draw(seed, tiny=True) for seed in range(3 * len(KINDS))]
# A second head of width 8 and images and sequences of other sizes, still small.
SIZED = [
    NetworkSpec(kind, seed=100 + number, width=48, size=64 if number in (2, 3, 4, 5, 6) else 12, batch=2)
    for number, kind in enumerate((*KINDS, WAVE))
]
MEDLEYS = [networks.draw_small(MEDLEY, seed) for seed in range(len(blocks.MEDLEY) // blocks.MEDLEY_LAYERS + 1)]


def named(spec: NetworkSpec) -> str:
    return f"{spec.kind}-{spec.seed}"


def made(spec: NetworkSpec, precision: str, batch: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    model = networks.build(spec).to(dtype_of(precision))
    return model, cast(networks.inputs(spec, batch), dtype_of(precision))


def called(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, list[str]]:
    """What a network gives, and the names of the ops that Python issues for it, as `in_network` sees them."""
    with torch.inference_mode(), in_network.TimedCalls() as timed:
        out = model(*inputs)
    return out, timed.names


def gist(ops: Sequence[Op]) -> list[tuple[str, str, int]]:
    return [(op.name, op.host_class, op.launches) for op in ops]


@pytest.mark.parametrize("spec", [*TINY, *SIZED, *MEDLEYS], ids=named)
@pytest.mark.parametrize(("precision", "batch"), [("fp32", 1), ("fp32", 3), ("bf16", 3)])
def test_every_network_runs_and_its_trace_is_the_stream_of_calls(spec: NetworkSpec, precision: str, batch: int) -> None:
    model, inputs = made(spec, precision, batch)
    out, names = called(model, inputs)
    assert (out.shape[0], out.dtype) == (batch, dtype_of(precision))
    ops = networks.graph(spec, precision).at(batch)
    assert not any(op.estimated for op in ops)
    singles = [group[0].name if len(group) == 1 else "" for group in in_network.calls(ops)]
    assert singles == [name if one else "" for name, one in zip(names, singles, strict=True)]


@pytest.mark.parametrize("spec", TINY[: len(KINDS)], ids=named)
def test_a_spec_always_means_the_same_network(spec: NetworkSpec) -> None:
    first = networks.graph(spec)
    networks._graph.cache_clear()
    torch.manual_seed(spec.seed + 1)
    second = networks.graph(spec)
    assert gist(first.ops) == gist(second.ops)
    assert first.parameters == second.parameters
    assert first.macs(3) == second.macs(3)


def test_timing_in_place_times_each_group_of_calls() -> None:
    evictions: list[int] = []
    model, inputs = made(TINY[0], "fp32", 1)
    with torch.inference_mode():
        timing, calls_us = in_network.time_ops(
            model, inputs, repeats=4, budget_s=60.0, gauge=ScriptedGauge(), between=lambda: evictions.append(1)
        )
    assert len(calls_us) == len(in_network.calls(networks.graph(TINY[0]).at(1)))
    assert min(calls_us) > 0
    assert timing.n == 4
    assert len(evictions) == 8  # ahead of the pass that nobody watches and of the one with a clock


def test_holdouts_are_one_in_six_of_every_kind_and_never_tiny() -> None:
    drawn = [networks.draw(seed) for seed in range(6 * len(KINDS))]
    holdouts = [spec for spec in drawn if spec.holdout]
    # seeds 55 to 65: the sixth round over the eleven kinds
    assert [spec.seed for spec in holdouts] == list(range(55, 66))
    assert {spec.kind for spec in holdouts} == set(KINDS)
    assert not any(spec.tiny for spec in holdouts)
    assert not any(spec.holdout for spec in (networks.draw(seed, tiny=True) for seed in range(60)))


def test_a_cold_network_does_not_fit_a_cache_that_it_was_pushed_out_of() -> None:
    warm = networks.draw(0, tiny=True)
    cold = msgspec.structs.replace(warm, cold=True)
    grown = networks.graph(cold).parameter_bytes - networks.graph(warm).parameter_bytes
    assert grown == 64 * 1024 * 1024
    assert gist(networks.graph(cold).ops) == gist(networks.graph(warm).ops)


@pytest.mark.parametrize("spec", schedules.chain_networks(), ids=lambda spec: f"{spec.kind}-{spec.size}")
def test_chains_only_call(spec: NetworkSpec) -> None:
    graph = networks.graph(spec)
    assert spec.chain
    assert in_network.calls(graph.at(1)) == []
    modules, functions, reads = graph.at(1)[0].calls
    if spec.kind == "modules":
        assert modules == spec.size + 1  # the links, and the sequence that holds them
    else:
        assert (modules, functions, reads) == (1, spec.size, spec.size * (spec.kind == "attributes"))
    x = networks.inputs(spec, 3)[0]
    assert torch.equal(networks.build(spec)(x), x)
