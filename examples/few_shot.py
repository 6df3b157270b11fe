"""What ten measured networks of a space buy: `latpred.adapt` beside one common factor and linear fits of counts.

    python examples/few_shot.py --seeds 50
    python examples/few_shot.py --measured measured.csv --profile epyc-shared

Networks are drawn from three published spaces. What they take is known: it is what the simulated device takes, or what
a profile fitted to measurements says, with the noise of a measurement on the ten. What is corrected is another GPU's
datasheet. The other networks' median error is shown, of the median seed, and in how many seeds `adapt` was no worse
than the better of the factor and the linear fit: to 0.1 % of a latency, to 0.05 % or a fiftieth of the error, and at
all. Linear fits have no negative coefficient: one counts the space's options, one launches of each family,
multiply-adds and bytes; the better of both is shown.

The second form takes what was measured: a table that `latpred measure` wrote of networks of one space, such as
nasbench201:17, and the profile of the machine. The others are judged by their measured latencies, with their noise.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import nnls

import latpred
from latpred.calibration.devices.simulated import SimulatedDevice
from latpred.graph.graph import ModelGraph
from latpred.prediction.predictor import Predictor
from latpred.profile import datasheet, gpus, load
from latpred.profile.document import DeviceProfile
from latpred.search import spaces
from latpred.zoo.spaces import space

SPACES = {of.name: of for of in (spaces.nasbench201, spaces.fbnet, spaces.once_for_all)}
TRUTHS = {"simulated": "rtx-2080ti", "titan-x-pascal": "rtx-3090"}  # and whose datasheet is corrected
BATCHES = (1, 32, 256)
NETWORKS, SHOTS, JUDGED = 120, 10, 50  # of each space; of these, measured and judged by each seed
ALIKE = ((0.001, 1.0), (0.0005, 1.02), (0.0, 1.0))  # what an error may be off by, and what it may be times another
NOISE = {1: 0.015, 32: 0.003, 256: 0.003}  # standard deviation of a measurement, as repeats of GPUs have it

Matrix = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each space, truth and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--spaces", nargs="+", choices=SPACES, default=[*SPACES])
    parser.add_argument("--measured", help="table of networks of one space, instead of known truths")
    parser.add_argument("--profile", help="what the measured machine is predicted by")
    asked = parser.parse_args(arguments)
    if bool(asked.measured) != bool(asked.profile):
        parser.error("--measured and --profile go together")
    heads = ("before", "factor", "linear", "adapt", "p90")
    print(
        f"{'space':14}{'truth':16}batch"
        + "".join(f"{head:>9}" for head in heads)
        + "  no worse by 0.1, by 0.05 or 2 %, at all"
    )
    if asked.measured:
        measured(pd.read_csv(asked.measured), asked.profile, asked.seeds)
        return
    for of in map(SPACES.__getitem__, asked.spaces):
        graphs, options = drawn(of, NETWORKS)
        for name, other in TRUTHS.items():
            takes, profile = truth_of(name), datasheet.profile_of(gpus.spec(other))
            for batch in BATCHES:
                latency_s = np.array([takes(graph, batch) for graph in graphs])
                cell(of.name, name, Cell(profile, graphs, options, batch, latency_s, NOISE[batch], True), asked.seeds)


def measured(table: pd.DataFrame, profile: str, seeds: int) -> None:
    """Print a line for each batch of a table of measured networks of one space."""
    for batch, rows in table[table.status == "ok"].groupby("batch"):
        named = [name.split(":") for name in rows.model]
        of = SPACES[named[0][0]]
        graphs, options = networks(of, [int(number) for _, number in named])
        latency_s = rows.latency_s.to_numpy()
        noise = (rows.spread_s / rows.latency_s).to_numpy()
        cell(of.name, profile, Cell(load(profile), graphs, options, batch, latency_s, noise, False), seeds)


def drawn(of: spaces.SearchSpace, count: int) -> tuple[list[ModelGraph], Matrix]:
    """Different networks of a space, and how often each has each option."""
    draw, numbers = random.Random(7), dict[int, None]()
    while len(numbers) < count:
        numbers[draw.randrange(of.size)] = None
    return networks(of, [*numbers])


def networks(of: spaces.SearchSpace, numbers: Sequence[int]) -> tuple[list[ModelGraph], Matrix]:
    """Networks of a space by their numbers, and how often each has each option."""
    chosen = [Counter(space(of.name).chosen(of.encoding(number)).values()) for number in numbers]
    names = sorted({name for one in chosen for name in one})
    return [of.graph(number) for number in numbers], np.array([[one[name] for name in names] for one in chosen], float)


def work(graphs: Sequence[ModelGraph], batch: int) -> Matrix:
    """Launches of each family, multiply-adds and bytes."""
    launches = [Counter(op.family.partition(".")[0] for op in graph.ops) for graph in graphs]
    families = sorted({name for one in launches for name in one})
    rows = [[one[name] for name in families] for one in launches]
    return np.column_stack([np.array(rows, float), [[graph.macs(batch), graph.bytes(batch)] for graph in graphs]])


def truth_of(name: str) -> Callable[[ModelGraph, int], float]:
    """What a network takes there, in seconds."""
    if name == "simulated":
        return SimulatedDevice().true_latency_s
    predictor = Predictor(load(name))
    return lambda graph, batch: predictor.predict(graph, batch).latency_ms / 1e3


class Cell(NamedTuple):
    """Networks at one batch: what predicts them, what they take, its noise, and whether to add that."""

    profile: DeviceProfile
    graphs: list[ModelGraph]
    options: Matrix
    batch: int
    latency_s: Matrix
    noise: float | Matrix
    add_noise: bool


def cell(space_name: str, truth: str, at: Cell, seeds: int) -> None:
    """Print one line."""
    graphs, batch, latency_s = at.graphs, at.batch, at.latency_s
    noise = np.broadcast_to(at.noise, latency_s.shape)
    counts, unchanged = work(graphs, batch), seconds(Predictor(at.profile), graphs, batch)
    errors: dict[str, list[float]] = {name: [] for name in ("before", "factor", "linear", "adapt")}
    for seed in range(seeds):
        draw = np.random.default_rng(seed)
        order = draw.permutation(len(graphs))
        shots, judged = order[:SHOTS], order[SHOTS : SHOTS + JUDGED]
        taken = latency_s[shots] * np.exp(at.add_noise * noise[shots] * draw.normal(size=SHOTS))
        rows = pd.DataFrame({"model": [graphs[n] for n in shots], "batch": batch, "latency_s": taken})
        adapted = latpred.adapt(at.profile, rows.assign(spread_s=noise[shots] * taken)).profile
        found = {
            "before": unchanged[judged],
            "factor": unchanged[judged] * np.exp(np.median(np.log(taken / unchanged[shots]))),
            "adapt": seconds(Predictor(adapted), [graphs[n] for n in judged], batch),
        }
        error = {name: float(np.median(np.abs(each / latency_s[judged] - 1.0))) for name, each in found.items()}
        linear = (np.abs(fitted(each, shots, judged, taken) / latency_s[judged] - 1.0) for each in (at.options, counts))
        error["linear"] = min(float(np.median(each)) for each in linear)
        for name, each in errors.items():
            each.append(error[name])
    best = np.minimum(errors["factor"], errors["linear"])
    shown = [*(np.median(errors[name]) for name in errors), np.quantile(errors["adapt"], 0.9)]
    no_worse = (np.sum(errors["adapt"] <= np.maximum(best + more, best * times)) for more, times in ALIKE)
    line = f"{space_name:14}{truth:16}{batch:5}" + "".join(f"{each:9.2%}" for each in shown)
    print(line + "".join(f"{each:5}" for each in no_worse), flush=True)


def seconds(predictor: Predictor, graphs: Sequence[ModelGraph], batch: int) -> Matrix:
    """Predicted latencies."""
    return np.array([predictor.predict(graph, batch).latency_ms / 1e3 for graph in graphs])


def fitted(features: Matrix, shots: Matrix, judged: Matrix, measured: Matrix) -> Matrix:
    """What a linear fit to the ten says of the others."""
    design = np.column_stack([np.ones(len(features)), features / np.maximum(features.max(axis=0), 1e-30)])
    return design[judged] @ nnls(design[shots] / measured[:, None], np.ones(len(measured)))[0]


if __name__ == "__main__":
    main()
