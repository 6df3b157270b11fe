"""How exact is the kernel regression on matrix products that somebody else timed?

    python examples/gemm_table.py products.csv --budget 100,300

The table has a row for each product: system (a GPU that latpred has a datasheet of), m, n, k, latency_us, and where
there are several, source and dtype. latpred chooses which shapes to look at, and is tested on all others, and on pairs
of n and k that were kept from it. Without a table, a made-up GPU with tiles and 3 % of noise is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import pandas as pd

from latpred.calibration import evaluate_kernels
from latpred.profile.gpus import spec

SIZES_M = (1, 3, 8, 16, 17, 64, 65, 128, 192, 257, 512, 1024, 2048, 8192)
SIZES_NK = (64, 256, 512, 1024, 2048, 4096, 8192)


def made_up(noise: float = 0.03, seed: int = 0) -> pd.DataFrame:
    """Products on a T4 as a simple law has them: a floor, rounds of 128 by 128 tiles, and bytes."""
    sizes = pd.DataFrame([(m, n, k) for m in SIZES_M for n in SIZES_NK for k in SIZES_NK], columns=["m", "n", "k"])
    gpu = spec("t4")
    rounds = np.ceil(np.ceil(sizes.m / 128) * np.ceil(sizes.n / 128) / gpu.multiprocessors)
    compute = rounds * 128 * 128 * sizes.k * gpu.multiprocessors / (0.7 * gpu.peak_macs_per_us("fp16"))
    memory = 2.0 * (sizes.n * sizes.k + sizes.m * sizes.k + sizes.m * sizes.n) / gpu.bandwidth_bytes_per_us
    noisy = np.exp(noise * np.random.default_rng(seed).standard_normal(len(sizes)))
    return sizes.assign(system="t4", source="made up", latency_us=(3.0 + np.hypot(compute, memory)) * noisy)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each system, budget and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?")
    parser.add_argument("--budget", default="100,300")
    options = parser.parse_args(arguments)
    budgets = [int(number) for number in options.budget.split(",")]
    print(f"{'system':10} {'source':16} {'shapes':>6}  {'tested on':12} {'products':>8}  mean    median  within 10 %")
    for score in evaluate_kernels(options.table or made_up(), budgets):
        print(
            f"{score.system:10} {score.source:16} {score.budget:6d}  {score.tested:12} {score.products:8d}  "
            f"{score.mean:6.2%}  {score.median:6.2%}  {score.within_10:6.1%}"
        )


if __name__ == "__main__":
    main()
