"""How long named hosts take to dispatch, over the reference host: from published latencies that name their CPU.

    python examples/published/host_factors.py TABLES                       # the factors, and how well ratings tell them
    python examples/published/host_factors.py TABLES -o latpred/models/hosts.json  # and write them down

TABLES is a folder with fastertransformer, torchscript_dispatch_split, nvidia_dle_pytorch, optimum_benchmark and
torchbench (.csv.gz). A row counts where the GPU, by its datasheet, has time to spare; its factor is what was measured
over the dispatch that latpred predicts for the reference host, with the PyTorch of that time. A block is what one
source measured in one runtime on one GPU, and its factor is the median of its rows. The host's factor is the mean over
its blocks; how far blocks of a host lie apart is what that leaves open. torchvision, timm and transformers build the
models.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd

from latpred.graph.graph import ModelGraph
from latpred.prediction.predictor import Predictor
from latpred.profile import datasheet, gpus, hosts
from latpred.query import Options
from latpred.runtimes.legacy_torch import TORCH_1_12

ROOM = 1.7  # the reference host takes that many times what the GPU needs, lest a fast host be hidden by the GPU
FEWEST = 2  # rows that a block must have
USUAL = 2  # blocks that the usual spread between blocks counts as
CLOCK_LOG_STD = 0.1  # what clocks leave open of two CPUs of one architecture
Row = pd.Series


class Measured(NamedTuple):
    """Rows of one table that are used: whose they are, which of them, and how each is asked for.

    model : a name or a module, and the options to trace it with. column : milliseconds.
    """

    source: str
    table: str
    wanted: Callable[[pd.DataFrame], pd.Series]
    model: Callable[[Row], tuple[Any, dict[str, Any]]]
    protocol: str
    column: str = "latency_ms"


def encoder(row: Row) -> tuple[Any, dict[str, Any]]:
    """BERT-base without embeddings and pooler, whose inputs are hidden states and a mask."""
    import torch

    tokens = int(row.seq_or_image)
    return _bert_encoder(), {"inputs": (torch.zeros(1, tokens, 768), torch.zeros(1, 1, tokens, tokens))}


@cache
def _bert_encoder() -> Any:
    import torch
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertEncoder

    with torch.device("meta"):
        return BertEncoder(BertConfig(attn_implementation="eager")).eval()


BERTS = {  # of DeepLearningExamples: layers, width, heads, width within
    "BERT-large": (24, 1024, 16, 4096),
    "BERT-dist6l": (6, 768, 12, 3072),
    "BERT-dist4l": (4, 312, 12, 1200),
}


@cache
def _bert(name: str) -> Any:
    import torch
    from transformers import BertConfig, BertForQuestionAnswering

    layers, width, heads, inner = BERTS[name]
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=inner,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        return BertForQuestionAnswering(config).eval()


VISION = {
    "Swin-T 224": ("timm:swin_tiny_patch4_window7_224", 224),
    "Swin-T 224 SwinV2": ("timm:swinv2_tiny_window8_256", 256),
    "ViT-B_16 384px": ("timm:vit_base_patch16_384", 384),
}
TORCHVISION = ("densenet121", "mnasnet1_0", "mobilenet_v2", "resnet18", "resnet50", "vgg16")
MEASURED = (
    Measured(
        "FasterTransformer",
        "fastertransformer",
        lambda table: table.model.str.startswith("BERT-base encoder"),
        encoder,
        "pipelined",
    ),
    Measured(
        "FasterTransformer",
        "fastertransformer",
        lambda table: table.model.isin(list(VISION)),
        lambda row: (VISION[row.model][0], {"image": VISION[row.model][1]}),
        "pipelined",
    ),
    Measured(
        "DeepLearningExamples (Triton)",
        "torchscript_dispatch_split",
        lambda table: table.model.isin(list(BERTS)),
        lambda row: (_bert(row.model), {"seq": int(row.seq)}),
        "pipelined",
        "host_dispatch_ms",
    ),
    Measured(
        "DeepLearningExamples",
        "nvidia_dle_pytorch",
        lambda table: (table.model == "resnet50v1.5") & (table.precision == "fp32"),
        lambda row: ("torchvision:resnet50", {"image": 224}),
        "single",
    ),
    Measured(
        "optimum-benchmark",
        "optimum_benchmark",
        lambda table: table.model.str.contains("bge-base") & (table.runtime == "eager"),
        lambda row: ("bert-base-uncased", {"seq": int(row.seq_or_image)}),
        "single",
    ),
    Measured(
        "TorchBench",
        "torchbench",
        # Its TorchScript is another one: models are frozen and their normalisations folded.
        lambda table: table.model.isin(TORCHVISION) & (table.batch == 1) & (table.runtime == "eager"),
        lambda row: (f"torchvision:{row.model}", {"image": 224}),
        "single",
    ),
)


def factors(folder: Path) -> pd.DataFrame:
    """A line for each row that the host of its measurement set the latency of."""
    lines = [line for each in MEASURED for line in _lines(folder, each)]
    return pd.DataFrame(lines, columns=["host", "source", "gpu", "runtime", "model", "batch", "factor"])


def _lines(folder: Path, measured: Measured) -> Iterator[tuple[Any, ...]]:
    table = pd.read_csv(folder / f"{measured.table}.csv.gz")
    named = table.host.fillna("").map(hosts.find).astype(bool)
    for row in table[measured.wanted(table) & named & table.batch.notna()].itertuples():
        runtime = "torchscript" if "TorchScript" in row.runtime else "eager"
        predictor = _predictor(row.gpu)
        model, asked = measured.model(row)
        graph = _traced(predictor, model, Options(runtime=runtime, precision=_precision(row.precision), **asked))
        found = predictor.predict(graph, int(row.batch), runtime=runtime, protocol=measured.protocol)
        took_ms = float(getattr(row, measured.column))
        if measured.column == "host_dispatch_ms" or found.overhead_ms > ROOM * found.compute_ms:
            factor = took_ms / found.overhead_ms
            yield hosts.find(row.host).name, measured.source, row.gpu, runtime, row.model, int(row.batch), factor


def _precision(said: str) -> str:
    return "fp32" if said == "tf32" else said  # PyTorch's own setting, under which a model in fp32 runs


@cache
def _predictor(gpu: str) -> Predictor:
    """A GPU's datasheet with the reference host and the software that the reference host had."""
    profile = datasheet.profile_of(gpus.spec(gpu))
    return Predictor(msgspec.structs.replace(profile, protocol={**profile.protocol, "era": TORCH_1_12}))


_GRAPHS: dict[tuple[Any, ...], ModelGraph] = {}


def _traced(predictor: Predictor, model: Any, options: Options) -> ModelGraph:
    shapes = tuple(tuple(tensor.shape) for tensor in options.inputs or ())
    key = (model, options.runtime, options.precision, options.seq, options.image, shapes)
    if key not in _GRAPHS:
        _GRAPHS[key] = predictor.trace(model, options)
    return _GRAPHS[key]


def by_rating(means: pd.Series, host: hosts.HostRow, slope: float = 1.0) -> float:
    """Log factor of a host by its rating: twice the rating is half the factor.

    Ratings flatter one maker's CPUs: how much is told by its measured hosts, and less the fewer there are.
    """
    at_one = pd.Series({name: log + slope * np.log(hosts.find(name).speed) for name, log in means.items()})
    own = at_one[[_maker(name) == _maker(host.name) for name in at_one.index]]
    trust = len(own) / (len(own) + 1)
    middle = at_one.mean() + (trust * (own.mean() - at_one.mean()) if len(own) else 0.0)
    return float(middle - slope * np.log(host.speed))


def _maker(name: str) -> str:
    return "AMD" if name.startswith(("EPYC", "Ryzen")) else "Intel"


def rating_error(blocks: pd.Series, slope: float = 1.0) -> float:
    """How far the blocks of each measured host are from what the ratings of the others say, as a standard deviation."""
    means = blocks.groupby("host").mean()
    squares = [
        np.mean((blocks[name] - by_rating(means.drop(name), hosts.find(name), slope)) ** 2) for name in means.index
    ]
    return float(np.sqrt(np.mean(squares)))


def spreads(blocks: pd.Series) -> pd.Series:
    """Standard deviation of the log of what a new block of each host takes over the mean of its blocks.

    With two or three blocks a host's own variance is uncertain: that of all hosts together counts as `USUAL` blocks.
    """
    by_host = blocks.groupby("host")
    squares = ((blocks - by_host.transform("mean")) ** 2).groupby("host").sum()
    degrees = by_host.size() - 1
    variance = (USUAL * squares.sum() / degrees.sum() + squares) / (USUAL + degrees)
    return np.sqrt(variance * (1.0 + 1.0 / by_host.size()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print blocks, hosts and the relation to ratings; write the table of hosts where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, help="folder of published tables")
    parser.add_argument("-o", "--output", type=Path, help="table of hosts to write the factors into")
    asked = parser.parse_args(arguments)
    os.environ["TIMM_FUSED_ATTN"] = "0"  # as timm was then
    rows = factors(asked.tables)
    blocks = rows.assign(log=np.log(rows.factor)).groupby(["host", "source", "gpu", "runtime"]).log
    middles = blocks.median()[blocks.size() >= FEWEST].dropna()
    print(pd.DataFrame({"factor": np.exp(middles), "rows": blocks.size()}).round(2).to_string())
    means, log_stds = middles.groupby("host").mean(), spreads(middles)
    print(pd.DataFrame({"factor": np.exp(means), "log_std": log_stds}).round(3).to_string())
    for slope in (0.0, 0.5, 1.0, 1.5):
        print(f"rating to the power of {-slope:g}: hosts left out are off by {rating_error(middles, slope):.2f}")
    if asked.output:
        sources = rows.groupby("host").source.agg(lambda names: ", ".join(dict.fromkeys(names)))
        _write(asked.output, means, log_stds, sources, rating_error(middles))


def _write(path: Path, means: pd.Series, log_stds: pd.Series, sources: pd.Series, rated: float) -> None:
    """Rewrite factors in place: measured, by the clock of a measured host of the same architecture, or by rating."""
    measured = {hosts.find(name).architecture: hosts.find(name) for name in means.index}
    lines = []
    for row in msgspec.json.decode(path.read_bytes()):
        host = hosts.find(row["name"])
        like = measured.get(host.architecture)
        row |= {"measured_in": sources.get(host.name, ""), "like": "", "basis": "measured"}
        if host.name in means:
            factor, log_std = np.exp(means[host.name]), log_stds[host.name]
        elif like is not None and like.boost_ghz and host.boost_ghz:
            factor = np.exp(means[like.name]) * like.boost_ghz / host.boost_ghz
            log_std = np.hypot(log_stds[like.name], CLOCK_LOG_STD)
            row |= {"like": like.name, "basis": "clock"}
        else:
            factor = np.exp(by_rating(means, host))
            log_std = rated if host.rating else np.hypot(rated, CLOCK_LOG_STD)
            row["basis"] = "rating" if host.rating else "clock"
        row |= {"factor": float(f"{factor:.3g}"), "log_std": float(f"{log_std:.3g}")}
        kept = {name: value for name, value in row.items() if value not in ("", [])}
        lines.append(" " + msgspec.json.format(msgspec.json.encode(kept), indent=0).decode())
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
