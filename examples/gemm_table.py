"""How exact is the kernel regression on matrix products that somebody else timed?

    python examples/gemm_table.py products.csv --budget 100,300

The table has a row for each product: system (a GPU that latpred has a datasheet of), m, n, k, latency_us, and where
there are several, source and dtype. Shapes to learn from are chosen by their sizes alone; the regression is tested on
all others, and on pairs of n and k that were kept from it. Without a table, a made-up GPU with tiles and 3 % of noise
is used. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from sklearn.cluster import MiniBatchKMeans

from latpred.fit.roofline import fit_kernel
from latpred.graph.features import Floats, read
from latpred.prediction.kernel_times import evaluate
from latpred.profile.gpus import spec
from latpred.tables import load

SIZES_M = (1, 3, 8, 16, 17, 64, 65, 128, 192, 257, 512, 1024, 2048, 8192)
SIZES_NK = (64, 256, 512, 1024, 2048, 4096, 8192)
HYPER_POINTS = 240  # that tell the length scales
UNSEEN = 0.2  # share of the pairs of n and k that are kept from the choice
ELEMENT_BYTES = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}


def made_up() -> pd.DataFrame:
    """Products on a T4 as a simple law has them: a floor, rounds of 128 by 128 tiles, and bytes."""
    sizes = pd.DataFrame([(m, n, k) for m in SIZES_M for n in SIZES_NK for k in SIZES_NK], columns=["m", "n", "k"])
    gpu = spec("t4")
    rounds = np.ceil(np.ceil(sizes.m / 128) * np.ceil(sizes.n / 128) / gpu.multiprocessors)
    compute = rounds * 128 * 128 * sizes.k * gpu.multiprocessors / (0.7 * gpu.peak_macs_per_us("fp16"))
    memory = 2.0 * (sizes.n * sizes.k + sizes.m * sizes.k + sizes.m * sizes.n) / gpu.bandwidth_bytes_per_us
    noisy = np.exp(0.03 * np.random.default_rng(0).standard_normal(len(sizes)))
    return sizes.assign(system="t4", source="made up", latency_us=(3.0 + np.hypot(compute, memory)) * noisy)


def rows_of(products: pd.DataFrame) -> Floats:
    """Work and dimensions of each product."""
    m, n, k = products[["m", "n", "k"]].to_numpy(float).T
    size = products["dtype"].map(ELEMENT_BYTES).to_numpy(float)
    return np.column_stack((m * n * k, size * n * k, size * m * k, size * m * n, m, n, k))


def chosen(rows: Floats, budget: int) -> list[int]:
    """Shapes that stand for all: the one nearest the middle of each of as many groups."""
    logs = read("gemm", rows).logs
    groups = MiniBatchKMeans(budget, random_state=0, n_init=1, batch_size=4096, max_iter=30).fit(logs)
    nearest: list[int] = []
    for middle in groups.cluster_centers_:
        distance = ((logs - middle) ** 2).sum(axis=1)
        distance[nearest] = np.inf
        nearest.append(int(distance.argmin()))
    return nearest


def tests_of(products: pd.DataFrame, budget: int) -> Iterator[tuple[str, Floats]]:
    """What was tested, and the relative errors there."""
    rows, times = rows_of(products), products["latency_us"].to_numpy(float)
    pairs = products[["n", "k"]].drop_duplicates().sort_values(["n", "k"]).sample(frac=UNSEEN, random_state=0)
    hidden = pd.MultiIndex.from_frame(products[["n", "k"]]).isin(pd.MultiIndex.from_frame(pairs))
    multiprocessors = spec(products["system"].iloc[0]).multiprocessors
    for tested, offered in (("the rest", np.ones(len(rows), bool)), ("unseen n, k", ~hidden)):
        seen = np.flatnonzero(offered)[chosen(rows[offered], budget)]
        sizes = {"multiprocessors": multiprocessors, "max_points": budget, "hyper_points": min(budget, HYPER_POINTS)}
        fit = fit_kernel("gemm", rows[seen], times[seen], **sizes)
        scored = hidden if tested != "the rest" else np.isin(np.arange(len(rows)), seen, invert=True)
        yield tested, np.abs(evaluate(fit, rows[scored]) / times[scored] - 1.0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each system, budget and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?")
    parser.add_argument("--budget", default="100,300")
    options = parser.parse_args(arguments)
    table = made_up() if options.table is None else load(options.table)
    for name, default in (("source", ""), ("dtype", "bfloat16")):
        table = table if name in table else table.assign(**{name: default})
    table = table.astype(dict.fromkeys(("m", "n", "k", "latency_us"), float))
    names = ["system", "source", "dtype"]
    # Of a product that came twice, one timing may be fitted to: the other would test nothing.
    once = table.groupby([*names, "m", "n", "k"], sort=False, dropna=False, as_index=False)[["latency_us"]].median()
    print(f"{'system':10} {'source':25} {'shapes':>6}  {'tested on':12} {'products':>8}  mean    median  within 10 %")
    for (system, source, dtype), products in once.groupby(names, sort=False, dropna=False):
        for budget in map(int, options.budget.split(",")):
            for tested, errors in tests_of(products, budget):
                print(
                    f"{system:10} {f'{source} {dtype}':25} {budget:6d}  {tested:12} {len(errors):8d}  "
                    f"{errors.mean():6.2%}  {np.median(errors):6.2%}  {(errors <= 0.1).mean():6.1%}"
                )


if __name__ == "__main__":
    main()
