"""Tables of latencies made from known costs, for tests of fitting: small models, two GPUs, two runs each."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import torch
from torch import nn

from latpred.accuracy.predicted import GraphKey
from latpred.calibration.published.joint_fit import Problem, problem
from latpred.calibration.published.published_table import FRAMEWORK_TAX
from latpred.graph.graph import ModelGraph
from latpred.runtimes.legacy_torch import TORCH_1_12
from latpred.tracing import trace

GPUS = ("2080Ti", "RTX-8000")
BATCHES = (1, 4, 16, 64, 256)
HOSTS = {"fast": 0.8, "slow": 1.6}


def tower(width: int, depth: int, window: int, norm: bool) -> nn.Module:
    """Convolutions of one width, with or without normalisation."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, stride=2, bias=not norm)]
    for _ in range(depth):
        layers.append(nn.Conv2d(width, width, window, padding=window // 2, bias=not norm))
        layers += [nn.BatchNorm2d(width)] if norm else []
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100))


MODELS = {
    "plain": (64, 8, 3, False),
    "normed": (64, 10, 3, True),
    "wide": (256, 6, 3, True),
    "narrow": (96, 12, 1, True),
    "thin": (32, 20, 1, False),
    "deep": (128, 24, 3, True),
}


def key_of(name: str, precision: str) -> GraphKey:
    """What the trace of a model goes by."""
    return GraphKey(name, "image", 96, precision, era=TORCH_1_12)


@cache
def graphs() -> dict[GraphKey, ModelGraph]:
    """Traces of all models in both precisions."""
    return {
        key_of(name, precision): trace(tower(*sizes), torch.zeros(1, 3, 96, 96), precision=precision)
        for name, sizes in MODELS.items()
        for precision in ("fp32", "fp16")
    }


def frame() -> pd.DataFrame:
    """Every model on every GPU, run, precision and batch; latencies are yet to come."""
    rows = [
        {"gpu": gpu, "model": model, "batch": batch, "precision": precision, "run": f"{gpu} {precision} {run}"}
        for gpu in GPUS
        for run in HOSTS
        for precision in ("fp32", "fp16")
        for model in MODELS
        for batch in BATCHES
    ]
    said = {"protocol": "pipelined", "stack": FRAMEWORK_TAX["stack"], "input_kind": "image_px", "input_size": 96}
    return pd.DataFrame(rows).assign(**said, latency_s=0.01)


@cache
def truth() -> tuple[Problem, np.ndarray]:
    """A problem with the parameters its latencies are made from: the priors' means, and some far off."""
    made = problem(frame(), dict(graphs()))
    theta, names = made.parameters.means, made.parameters.names
    for name, index in names.items():
        if name[0] == "run" and len(name) == 2:
            theta[index] = np.log(HOSTS[name[1].split()[-1]])
    for name, off in {
        ("host", "conv"): 0.2,
        ("host half", "batch_norm"): 0.3,
        ("gpu", "rtx-8000", "compute"): 0.3,
    }.items():
        theta[names[name]] += off
    return made, theta


def table() -> pd.DataFrame:
    """A table with latencies that scatter by 2 % about what the known costs give."""
    made, theta = truth()
    noise = np.random.default_rng(0).normal(0.0, 0.02, len(made.rows))
    return frame().assign(latency_s=made.predict(theta) * np.exp(noise))


def scripted(factor: float) -> pd.DataFrame:
    """The same rows as of TorchScript, slower or faster by a factor."""
    eager = table()
    return eager.assign(runtime="torchscript", run=eager["run"] + " scripted", latency_s=eager["latency_s"] * factor)


def solved(*sources: pd.DataFrame) -> tuple[Problem, np.ndarray]:
    """The fit to tables, by default to `table`, and its parameters."""
    made = problem(pd.concat(sources or [table()], ignore_index=True), dict(graphs()))
    return made, made.solve()


def products(slower: float) -> pd.DataFrame:
    """Matrix products in half precision, timed one by one, that take so many times what the known costs give."""
    rows = [
        {"gpu": "RTX-8000", "model": f"{n} x {k}", "batch": m}
        for n in (1024, 4096)
        for k in (1024, 4096)
        for m in (8, 512, 8192)
    ]
    kernels = {"runtime": "kernel", "precision": "fp16", "run": "kernels", "input_kind": "product", "input_size": 0}
    both = pd.concat([table(), pd.DataFrame(rows).assign(**kernels, latency_s=1.0)], ignore_index=True)
    made = problem(both, dict(graphs()))
    both.loc[both["runtime"] == "kernel", "latency_s"] = made.predict(made.parameters.means)[-len(rows) :] * slower
    return both


def captured(slower: float) -> pd.DataFrame:
    """Batches so small that kernels hide behind the host, and the same in CUDA graphs, at known costs or slower."""
    small = table().query("batch == batch.min()")
    mine = small.assign(runtime="cuda-graphs", run=small["run"] + " captured", latency_s=1.0)
    both = pd.concat([small, mine], ignore_index=True)
    made = problem(both, dict(graphs()))
    both.loc[both["runtime"] == "cuda-graphs", "latency_s"] = made.predict(made.parameters.means)[-len(mine) :] * slower
    return both
