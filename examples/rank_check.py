"""Are random small networks ranked right on this CPU? Measures them, and holds predictions against that.

    latpred calibrate --runtimes eager,onnxruntime
    python examples/rank_check.py --out rank_check            # about 25 minutes; run again after an interruption
    python examples/rank_check.py --replay rank_check         # the same report, nothing measured

Encoders and residual networks are drawn at random and measured in eager and onnxruntime at batches 1 and 16, in ten
passes over all of them, so that no mood of the machine falls on one network alone. Predictions are held against the
median of the passes. How well medians of half the passes order those of the other half says what noise leaves to hope
for. A second table says what adapting the profile to ten networks brings on the others (`latpred.adapt`).
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from spaces import SPACES

import latpred
from latpred import tables
from latpred.accuracy import metrics
from latpred.accuracy.predicted import GraphKey, predict_table
from latpred.accuracy.recording import Recording, load
from latpred.calibration.timing.timer import Plan
from latpred.calibration.workloads.suites import Workload, module_workload, seeded
from latpred.graph.features import Floats
from latpred.graph.graph import ModelGraph
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.profile.document import DeviceProfile

RUNTIMES, BATCHES = ("eager", "onnxruntime"), (1, 16)
VISIT = Plan(least=3, most=40, precision=0.005, budget_s=0.05, warmup_s=0.02)
CHUNK = 24  # networks measured between two savings
CELL = ["model", "runtime", "batch"]
SPLITS = 50  # ways in which passes are split into halves


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure or replay, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=60, help="of each space")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--passes", type=int, default=10, help="measurements of each network, far apart")
    parser.add_argument("--shots", type=int, default=10, help="networks that a profile is adapted to")
    parser.add_argument("--draws", type=int, default=20, help="of those networks")
    parser.add_argument("--device", default="cpu", help="whose profile predicts")
    parser.add_argument("--out", default="rank_check", help="folder of what is measured")
    parser.add_argument("--replay", help="folder of what was measured before")
    asked = parser.parse_args(arguments)
    profile = store.find(asked.device)
    if asked.replay:
        recording = load(asked.replay)
    else:
        for runtime in RUNTIMES:
            Predictor(profile).check(runtime, "fp32")  # said before minutes are spent on measuring
        recording = measured(Path(asked.out), asked.candidates, asked.seed, asked.passes)
    cells, passes = compared(recording, profile)
    cells.to_parquet(Path(asked.replay or asked.out) / "cells.parquet")
    print_ranking(cells, passes)
    print_adaptation(cells, recording, profile, asked.shots, asked.draws)


# -- measuring ---------------------------------------------------------------------------------------------------------


def drawn(count: int, seed: int) -> dict[str, tuple[str, dict[str, int]]]:
    """By name, the space and the choices of random networks, all different; both spaces in turn."""
    found: dict[str, tuple[str, dict[str, int]]] = {}
    rng = random.Random(seed)
    for number in range(count):
        for space, module in SPACES.items():
            while True:
                choice = {name: rng.choice(values) for name, values in module.TINY.items()}
                if (space, choice) not in found.values():
                    break
            found[f"{space}-{number:03}"] = (space, choice)
    return found


def measured(folder: Path, count: int, seed: int, passes: int) -> Recording:
    """Measure what `folder` does not hold yet, and record it with the traces of the networks."""
    networks = drawn(count, seed)
    workloads = {name: workload(name, *which) for name, which in networks.items()}
    parts, kept = [], folder / "parts"
    kept.mkdir(parents=True, exist_ok=True)
    for number in range(passes):
        names = random.Random(number).sample(list(networks), len(networks))
        for start in range(0, len(names), CHUNK):
            saved = kept / f"{seed}-{len(names)}-{number}-{start}.csv"
            if not saved.exists():
                say(f"pass {number + 1} of {passes}: networks {start + 1} to {min(start + CHUNK, len(names))}")
                models = [workloads[name] for name in names[start : start + CHUNK]]
                tables.write(latpred.measure(models, BATCHES, runtime=RUNTIMES, repeats=1, plan=VISIT), saved)
            parts.append(tables.read(saved, tables.MEASURED))
    graphs: dict[GraphKey, ModelGraph] = {}
    for name, one in workloads.items():
        say(f"tracing {name}")
        for runtime in RUNTIMES:
            graphs[one.key("fp32", runtime)] = one.trace("fp32", runtime)
    about = f"{count} random networks of each of {', '.join(SPACES)}, seed {seed}"
    recording = Recording("rank_check", about, pd.concat(parts, ignore_index=True), graphs)
    recording.save(folder)
    return recording


def workload(name: str, space: str, choice: Mapping[str, int]) -> Workload:
    """A network, built now and kept, so that it is exported once for all that is done with it."""
    module = SPACES[space]
    return module_workload(name, seeded(partial(module.build, **choice), "cpu", "fp32"), **module.TINY_INPUT)


# -- judging -----------------------------------------------------------------------------------------------------------


def compared(recording: Recording, profile: DeviceProfile) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row for each network, runtime and batch, with what is measured, predicted and might rank; and all passes."""
    cells, passes = over_passes(recording.table[recording.table["status"] == tables.OK])
    cells["predicted_s"] = predict_table(cells, recording.graphs, profile)["latency_s"].to_numpy()
    eager = {key.model: graph for key, graph in recording.graphs.items() if key.runtime == "eager"}
    graphs = [eager[name] for name in cells["model"]]
    cells = cells.assign(
        space=[name.rpartition("-")[0] for name in cells["model"]],
        macs=[graph.macs(batch) for graph, batch in zip(graphs, cells["batch"], strict=True)],
        parameters=[graph.parameters for graph in graphs],
        modules=[sum(op.module_calls for op in graph.ops) for graph in graphs],
    )
    return cells, passes


def over_passes(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Medians over passes as a measurement table, with the standard error of each; and the passes in columns."""
    turns = table.assign(turn=table.groupby(CELL).cumcount())
    passes = turns.pivot(index=CELL, columns="turn", values="latency_s").dropna()
    count = passes.shape[1]
    low, median, high = (passes.quantile(share, axis=1) for share in (0.25, 0.5, 0.75))
    even, odd = (passes.iloc[:, start::2].median(axis=1) for start in (0, 1))
    cells = table.drop_duplicates(CELL).set_index(CELL).loc[passes.index]
    cells = cells.assign(
        latency_s=median,
        spread_s=(high - low) / 2 * 1.86 / math.sqrt(count),  # of a median, were the passes normal
        n=count,
        repeat_ratio=np.exp(np.abs(np.log(even / odd))),
    )
    return cells.reset_index(), passes


def print_ranking(cells: pd.DataFrame, passes: pd.DataFrame) -> None:
    """Kendall's tau over all pairs: of predictions, of what else might rank, between halves, and at best."""
    print(f"medians of {passes.shape[1]} passes")
    print("                                 Kendall tau of all pairs                               error        noise")
    print("space     runtime      batch  nets  latpred    macs  params modules  halves at best  median     p90  median")
    for (space, runtime, batch), part in cells.groupby(["space", "runtime", "batch"]):
        rankers = [part[name] for name in ("predicted_s", "macs", "parameters", "modules")]
        taus = [latpred.agreement(ranker, part["latency_s"]).kendall_b for ranker in rankers]
        halves = between_halves(passes.loc[pd.MultiIndex.from_frame(part[CELL])].to_numpy())
        error = metrics.errors(part["predicted_s"], part["latency_s"])
        shown = "".join(f"{tau:8.3f}" for tau in (*taus, halves, at_best(halves)))
        shown += "".join(f"{share:8.1%}" for share in (error.median, error.p90, noise(part)))
        print(f"{space:9} {runtime:12} {batch:5} {len(part):5} {shown}")


def between_halves(latencies: Floats) -> float:
    """Kendall's tau between medians over half the passes, in columns, and over the other half; mean over splits."""
    count, draw = latencies.shape[1], np.random.default_rng(0)
    taus = []
    for _ in range(SPLITS):
        order = draw.permutation(count)
        first, second = (np.median(latencies[:, own], axis=1) for own in (order[: count // 2], order[count // 2 :]))
        taus.append(latpred.agreement(first, second).kendall_b)
    return float(np.mean(taus))


def at_best(halves: float) -> float:
    """Tau of the true latencies with medians over all passes, as tau between halves tells it of normal logs.

    The halves' correlation gives that of twice as many passes (Spearman and Brown), whose root is that with the truth.

    >>> at_best(1.0), round(at_best(0.8), 2)
    (1.0, 0.89)
    """
    correlation = math.sin(math.pi / 2 * max(halves, 0.0))
    return 2 / math.pi * math.asin(math.sqrt(2 * correlation / (1 + correlation)))


def noise(part: pd.DataFrame) -> float:
    """How far medians over all passes are off, in the median: half of what those of even and odd ones are apart."""
    return float(np.median(np.expm1(np.log(part["repeat_ratio"]) / 2)))


def print_adaptation(cells: pd.DataFrame, recording: Recording, profile: DeviceProfile, shots: int, draws: int) -> None:
    """What adapting the profile to a few networks brings on the others, over many draws of the few."""
    print(f"median error after adapting to {shots} networks, on the others; {draws} draws")
    print("space     runtime      before  median   worst   draws that made it worse")
    for (space, runtime), part in cells.groupby(["space", "runtime"]):
        names = sorted(set(part["model"]))
        if len(names) <= shots:
            print(f"{space:9} {runtime:12} left out: there are {len(names)} networks")
            continue
        few = [random.Random(draw).sample(names, shots) for draw in range(draws)]
        before, after = np.array([adapted(part, recording, profile, drawn) for drawn in few]).T
        figures = f"{np.median(before):7.1%} {np.median(after):7.1%} {after.max():7.1%}"
        worse = np.sum(after > before + noise(part))
        print(f"{space:9} {runtime:12}{figures}   {worse} of {draws} by more than a median's noise ({noise(part):.1%})")


def adapted(
    part: pd.DataFrame, recording: Recording, profile: DeviceProfile, few: Sequence[str]
) -> tuple[float, float]:
    """Median error on all networks but a few, by the profile as it is, and adapted to those few."""
    mine = part["model"].isin(few)
    rest, known = part[~mine], part.loc[mine, [name for name in part if tables.MEASURED.column(name) is not None]]
    better = latpred.adapt(profile, known, graphs=recording.graphs).profile
    after_s = predict_table(rest, recording.graphs, better)["latency_s"]
    before, after = (metrics.errors(found, rest["latency_s"]).median for found in (rest["predicted_s"], after_s))
    return before, after


def say(what: str) -> None:
    """Progress, for people."""
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
