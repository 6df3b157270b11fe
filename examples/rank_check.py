"""Are random small networks ranked right on this CPU? Measures them, and holds predictions against that.

    latpred calibrate --runtimes eager,onnxruntime
    python examples/rank_check.py --out rank_check            # about twelve minutes; run again after an interruption
    python examples/rank_check.py --replay rank_check         # the same report, nothing measured

Encoders and residual networks are drawn at random and measured in eager and onnxruntime at batches 1 and 16, twice
over: how well the first time orders the second is the most that a predictor can hope for. A second table says what
adapting the profile to ten measured networks brings on the others (`latpred.adapt`).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from spaces import encoders, residual

import latpred
from latpred import metrics, profiles, tables
from latpred.calibration.subjects import Subject, module_subject, seeded
from latpred.calibration.timing import Plan
from latpred.graph import ModelGraph
from latpred.predicted import GraphKey, predict_table
from latpred.predictor import Predictor
from latpred.profile import DeviceProfile
from latpred.recording import Recording, load

SPACES = {"encoders": encoders, "residual": residual}
RUNTIMES, BATCHES = ("eager", "onnxruntime"), (1, 16)
PASSES, REPEATS = 2, 2
VISIT = Plan(least=3, most=40, precision=0.005, budget_s=0.08, warmup_s=0.04)
CHUNK = 12  # networks measured between two savings


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure or replay, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=60, help="of each space")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shots", type=int, default=10, help="networks that a profile is adapted to")
    parser.add_argument("--draws", type=int, default=20, help="of those networks")
    parser.add_argument("--device", default="cpu", help="whose profile predicts")
    parser.add_argument("--out", default="rank_check", help="folder of what is measured")
    parser.add_argument("--replay", help="folder of what was measured before")
    asked = parser.parse_args(arguments)
    profile = profiles.find(asked.device)
    if asked.replay:
        recording = load(asked.replay)
    else:
        for runtime in RUNTIMES:
            Predictor(profile).check(runtime, "fp32")  # said before minutes are spent on measuring
        recording = measured(Path(asked.out), asked.candidates, asked.seed)
    cells = compared(recording, profile)
    cells.to_parquet(Path(asked.replay or asked.out) / "cells.parquet")
    print_ranking(cells)
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


def measured(folder: Path, count: int, seed: int) -> Recording:
    """Measure what `folder` does not hold yet, and record it with the walks of the networks."""
    networks = drawn(count, seed)
    subjects = {name: subject(name, *which) for name, which in networks.items()}
    names = list(networks)
    chunks = [names[start : start + CHUNK] for start in range(0, len(names), CHUNK)]
    parts, kept = [], folder / "parts"
    kept.mkdir(parents=True, exist_ok=True)
    for number, chunk in ((number, chunk) for number in range(PASSES) for chunk in chunks):
        saved = kept / f"{seed}-{number}-{chunk[0]}-{len(chunk)}.csv"
        if not saved.exists():
            say(f"pass {number + 1} of {PASSES}: {chunk[0]} to {chunk[-1]}")
            models = [subjects[name] for name in chunk]
            tables.write(latpred.measure(models, BATCHES, runtime=RUNTIMES, repeats=REPEATS, plan=VISIT), saved)
        parts.append(tables.read(saved, tables.MEASURED))
    graphs: dict[GraphKey, ModelGraph] = {}
    for name, one in subjects.items():
        say(f"walking {name}")
        for runtime in RUNTIMES:
            graphs[one.key("fp32", runtime)] = one.walk("fp32", runtime)
    about = f"{count} random networks of each of {', '.join(SPACES)}, seed {seed}"
    recording = Recording("rank_check", about, pd.concat(parts, ignore_index=True), graphs)
    recording.save(folder)
    return recording


def subject(name: str, space: str, choice: Mapping[str, int]) -> Subject:
    """A network, built now and kept, so that it is exported once for all that is done with it."""
    module = SPACES[space]
    return module_subject(name, seeded(partial(module.build, **choice), "cpu", "fp32"), **module.TINY_INPUT)


# -- judging -----------------------------------------------------------------------------------------------------------


def compared(recording: Recording, profile: DeviceProfile) -> pd.DataFrame:
    """A row for each network, runtime and batch: what was measured, what is predicted, and what else might rank."""
    cell, table = ["model", "runtime", "batch"], recording.table[recording.table["status"] == tables.OK]
    once = table.assign(turn=table.groupby(cell).cumcount()).pivot(index=cell, columns="turn", values="latency_s")
    cells = tables.merge_repeats(table)
    cells["predicted_s"] = predict_table(cells, recording.graphs, profile)["latency_s"].to_numpy()
    cells = cells.merge(once.rename(columns={0: "first_s", 1: "second_s"}).dropna(), on=cell)
    walked = {key.model: graph for key, graph in recording.graphs.items() if key.runtime == "eager"}
    graphs = [walked[name] for name in cells["model"]]
    return cells.assign(
        space=[name.rpartition("-")[0] for name in cells["model"]],
        macs=[graph.macs(batch) for graph, batch in zip(graphs, cells["batch"], strict=True)],
        parameters=[graph.parameters for graph in graphs],
        modules=[sum(op.module_calls for op in graph.ops) for graph in graphs],
    )


def print_ranking(cells: pd.DataFrame) -> None:
    """Kendall's tau over all pairs, for predictions, for what else might rank, and for the measurement itself."""
    print("                                 Kendall tau of all pairs                      error        p90 between")
    print("space     runtime      batch  nets  latpred    macs  params modules  repeat  median     p90  repeats")
    for (space, runtime, batch), part in cells.groupby(["space", "runtime", "batch"]):
        rankers = [part[name] for name in ("predicted_s", "macs", "parameters", "modules")]
        taus = [latpred.agreement(ranker, part["latency_s"]).kendall_b for ranker in rankers]
        taus.append(latpred.agreement(part["first_s"], part["second_s"]).kendall_b)
        error = metrics.errors(part["predicted_s"], part["latency_s"])
        shares = (error.median, error.p90, metrics.noise(part["repeat_ratio"], "two passes").p90)
        shown = "".join(f"{tau:8.3f}" for tau in taus) + "".join(f"{share:8.1%}" for share in shares)
        print(f"{space:9} {runtime:12} {batch:5} {len(part):5} {shown}")


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
        noise = metrics.noise(part["repeat_ratio"], "two passes").median
        figures = f"{np.median(before):7.1%} {np.median(after):7.1%} {after.max():7.1%}"
        worse = np.sum(after > before + noise)
        print(f"{space:9} {runtime:12}{figures}   {worse} of {draws} by more than the repeat noise ({noise:.1%})")


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
