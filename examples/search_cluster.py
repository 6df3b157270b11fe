"""Predict a search's candidates in one process, in two, on a dask cluster and with ray: the same table each time.

    python examples/search_cluster.py --candidates 2000

A run that names a file (--resume table.parquet) may be stopped and started again: finished candidates are read back.

The candidates are random transformer encoders, given as objects that build one when they are called.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import joblib
import pandas as pd
import torch
from torch import nn

import latpred

TOKENS, WIDTH = 64, 128
WARM_UP = 16  # candidates before anything is timed: workers start, and layers are seen for the first time
ENGINES = ("loky", "dask", "ray")


@dataclass(frozen=True)
class Encoder:
    """One architecture of the space."""

    layers: int
    heads: int
    hidden: int

    def __call__(self) -> nn.Module:
        """The model; called on the meta device, so that no weights are made."""
        layer = nn.TransformerEncoderLayer(WIDTH, self.heads, self.hidden, batch_first=True)
        return nn.TransformerEncoder(layer, self.layers, enable_nested_tensor=False).eval()


def architectures(count: int, seed: int) -> Iterator[Encoder]:
    """Random architectures, made as they are asked for."""
    draw = random.Random(seed)
    for _ in range(count):
        yield Encoder(draw.randint(1, 8), draw.choice((2, 4, 8)), 32 * draw.randint(2, 16))


@contextmanager
def engine(name: str, workers: int) -> Iterator[None]:
    """The backend of this name, with workers started here."""
    if name == "dask":
        from distributed import Client

        with (
            Client(n_workers=workers, threads_per_worker=1, dashboard_address=None),
            joblib.parallel_config(backend="dask"),
        ):
            yield
    elif name == "ray":
        import ray
        from ray.util.joblib import register_ray

        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
        register_ray()
        try:
            with joblib.parallel_config(backend="ray", n_jobs=workers):
                yield
        finally:
            ray.shutdown()
    else:
        with joblib.parallel_config(backend=name, n_jobs=workers):
            yield


def timed(count: int, seed: int, options: dict[str, Any]) -> tuple[pd.DataFrame, float]:
    """The table, and candidates a second once everything is warm."""
    inputs = torch.zeros(1, TOKENS, WIDTH)
    latpred.predict_many(architectures(WARM_UP, seed=-1), inputs=inputs, device=options["device"])
    start = time.perf_counter()
    table = latpred.predict_many(architectures(count, seed), inputs=inputs, **options)
    return table, count / (time.perf_counter() - start)


def main(arguments: list[str] | None = None) -> None:
    """Run the engines and print a line for each."""
    parser = argparse.ArgumentParser(description="One table from several engines.")
    parser.add_argument("--candidates", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engines", default=",".join(ENGINES), help="some of: loky,dask,ray")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--resume", help="Parquet file of finished candidates, for the first engine")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options: dict[str, Any] = {"device": given.device, "batch": [1, 8]}
    serial, rate = timed(given.candidates, given.seed, options)
    print(f"{'serial':<8} {rate:7.1f} candidates a second")
    known = {"resume": given.resume} if given.resume else {}
    for name in given.engines.split(","):
        with engine(name, given.workers):
            table, rate = timed(given.candidates, given.seed, {**options, **known})
        known = {}
        same = "the same table" if table.equals(serial) else "ANOTHER TABLE"
        print(f"{name:<8} {rate:7.1f} candidates a second, {same}")


if __name__ == "__main__":
    main()
