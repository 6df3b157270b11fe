"""How much faster than eager another runtime is, predicted beside published, and which runtime is the fastest.

python examples/published/runtime_ratios.py kernl.csv.gz transformer_deploy.csv.gz [--models NAME ...]

A table has a row for each published latency, with the columns source, gpu, runtime, precision, model, batch,
seq_or_image, protocol, stack and latency_ms. Rows of one source, GPU, model and input size make a group. One row tells
the host of a source and GPU: eager's at batch 1; nothing else is fitted here.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import latpred
from latpred.errors import LatpredError
from latpred.profile import gpus
from latpred.zoo import names

EAGER = "eager"
# Runtimes by what tables call them or note beside them; the first that is found counts.
RUNTIMES = {
    "nvfuser": None,
    "aitemplate": None,
    "deepspeed": None,
    "kernl": None,
    "onnxruntime tensorrt": None,
    "tensorrtexecutionprovider": "tensorrt",
    "inductor (prototype": "compile-reduce-overhead",
    "reduce-overhead": "compile-reduce-overhead",
    "compile": "compile",
    "cuda-graphs": "cuda-graphs",
    "auto_optimization": "onnxruntime-optimized",
    "transformer optimizer": "onnxruntime-optimized",
    # kernl's script calls the optimizer with only_onnxruntime, which leaves out all that it fuses itself.
    "transformer-optimized": "onnxruntime",
    "onnxruntime": "onnxruntime",
    "tensorrt": "tensorrt",
    "eager": EAGER,
}
MODELS = {
    "bert-base-uncased": "bert-base-uncased",
    "kamalkraj/bert-base-cased-ner-conll2003": "bert-base-cased",
    "dslim/bert-base-NER": "bert-base-cased",
    "BAAI/bge-base-en-v1.5": "bert-base-uncased",
    "sentence-transformers/msmarco-distilbert-cos-v5": "distilbert-base-uncased",
    "cardiffnlp/twitter-roberta-base-sentiment": "roberta-base",
    "roberta-large-mnli": "roberta-large",
    "gpt2": f"{__file__}:gpt2",
    "philschmid/MiniLM-L6-H384-uncased-sst2": f"{__file__}:minilm",
}
SPOILT = ("SUSPECT", "identical in source", "CHECK")  # in the notes of rows that their source has wrong
INPUTS, INTEGER_BYTES, FLOAT_BYTES = 3, 8, 4  # of BERT: tokens, their kinds and a mask
LARGE = 64  # rows of different batch sizes are compared by the sample from here on
TARGETS = (0.10, 0.15, 0.20)


class Row(NamedTuple):
    """A published latency, with latpred's names. group, host : what it is compared with, and who shares its host.

    autocast : whether PyTorch ran it under `torch.autocast`, in which other runtimes' rows of half precision are not.
    bound : whether inputs and outputs stay on the GPU; optimum's models without IO binding take them over the host.
    """

    group: tuple[str, ...]
    host: tuple[str, ...]
    gpu: str
    runtime: str
    precision: str
    model: str
    batch: int
    size: int
    ms: float
    autocast: bool
    bound: bool = True


class UnderAutocast(torch.nn.Module):
    """A model of transformers that enters autocast: with halves as weights, or with casts of them that it keeps."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, *args: object, **kwargs: object) -> object:
        with torch.autocast("cuda", torch.float16):
            return self.model(*args, **kwargs)


def minilm() -> object:
    """MiniLM of six layers, 384 wide."""
    import transformers

    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    return transformers.BertModel(transformers.BertConfig(**sizes))


def gpt2() -> object:
    """GPT-2 with the head that text generation needs."""
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))


def read(path: str) -> Iterator[Row]:
    """The rows of a table that can be predicted."""
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            made = _row(path, row)
            if made is not None:
                yield made


def timm_model(name: str, source: str) -> str:
    """A network of timm as the benchmark of a source's PyTorch built it."""
    file = "timm_reparameterized" if "-pt29" in source else "timm_fast_norm" if re.search("-pt(113|2)", source) else ""
    return f"{Path(__file__).parent / file}.py:{name}" if file else f"timm:{name}"


def _row(path: str, row: dict[str, str]) -> Row | None:
    called = f"{row['runtime']} {row['notes']}".lower()
    runtime = next((name for said, name in RUNTIMES.items() if said in called), None)
    timm = "timm.create_model" in row["model_build_hint"]
    model = timm_model(row["model"], row["source"]) if timm else MODELS.get(row["model"], "")
    gpu = row["gpu"].partition(" (")[0]
    size = re.match(r"\d+$", row["seq_or_image"])
    if not (runtime and model and size and gpus.find(gpu)) or any(said in row["notes"] for said in SPOILT):
        return None
    if not row["batch"] or "decode" in row["notes"]:
        return None
    source = row["source"].partition(" ")[0].partition("@")[0]
    software = (row["stack"], row["protocol"].rpartition(",")[2]) if timm else ()
    place = (path, source, gpu)
    precision = "fp16" if "fp16" in row["precision"] else "fp32"
    batch, image = int(float(row["batch"])), row["seq_or_image"]
    return Row(
        (*place, *software, row["model"], image),
        (path, row["source"], gpu, *software),  # each page of a source was written on another machine
        gpus.spec(gpu).name,
        runtime,
        precision,
        model,
        batch,
        int(image),
        float(row["latency_ms"]),
        "autocast" in row["precision"],
        "io_binding=False" not in row["notes"],
    )


@cache
def predicted_ms(row: Row, host: float) -> float:
    """What latpred answers for a row on a host of a factor."""
    at = {"device": row.gpu, "host": round(host, 4)}
    if "timm" in Path(row.model).name:  # which casts its weights in each call
        precision = "amp-fp16" if row.autocast else row.precision
        return latpred.predict(row.model, row.batch, row.runtime, image=row.size, precision=precision, **at).latency_ms
    # transformers of that time had attention in parts.
    model = under_autocast(row.model, row.size) if row.autocast else row.model
    bound_ms = latpred.predict(
        model, row.batch, row.runtime, seq=row.size, precision=row.precision, attention="eager", **at
    ).latency_ms
    return bound_ms if row.bound else bound_ms + round_trip_ms(row)


def round_trip_ms(row: Row) -> float:
    """What optimum's models without IO binding take longer.

    They bring each input to the host, from where ONNX Runtime takes it back to the GPU, and the results, which are
    fp32 in its optimizer's half precision too, to the host and back.
    """
    device = latpred.profile.find(row.gpu).device
    width = names.build(row.model, seq=row.size).model.config.hidden_size
    token_bytes = INPUTS * INTEGER_BYTES + width * FLOAT_BYTES
    copies_us = 2 * row.batch * row.size * token_bytes / device.copy_bytes_per_us
    return (copies_us + 2 * (INPUTS + 1) * device.sync_us) / 1e3


@cache
def under_autocast(name: str, seq: int) -> UnderAutocast:
    """A model by name, in autocast."""
    return UnderAutocast(names.build(name, seq=seq).model)


def host_factor(rows: Iterable[Row]) -> float:
    """The host whose eager batch-1 latency of the shortest input is the published one; 1 where there is none."""
    alone = [row for row in rows if row.runtime == EAGER and row.batch == 1]
    if not alone:
        return 1.0
    row = min(alone, key=lambda row: (row.precision, row.size))
    factor = 1.0
    for _ in range(4):
        factor = float(np.clip(factor * row.ms / predicted_ms(row, factor), 0.05, 20.0))
    return factor


def pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Each row of another runtime, and eager's it is compared with: of one batch, or both large."""
    for row in rows:
        if row.runtime == EAGER:
            continue
        eager = [one for one in rows if one.runtime == EAGER and (one.batch == row.batch or _large(one, row))]
        same = sorted(eager, key=lambda one: (one.precision != row.precision, one.batch != row.batch))
        if same:
            yield row, same[0]


def _large(one: Row, other: Row) -> bool:
    return min(one.batch, other.batch) >= LARGE


def compared(rows: Sequence[Row]) -> Iterator[tuple[Row, float, float]]:
    """Each row with its latency over eager's, predicted and published; what cannot be predicted is named."""
    groups, hosts = defaultdict(list), defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
        hosts[row.host].append(row)
    factors = {name: host_factor(some) for name, some in hosts.items()}
    for name, factor in factors.items():
        print("host", *name[1:], f"{factor:.2f}")
    for group in groups.values():
        for row, eager in pairs(group):
            factor = factors[row.host]
            try:
                times = [predicted_ms(one, factor) / one.batch for one in (row, eager)]
            except LatpredError as error:
                print(f"left out: {row.model} in {row.runtime}: {error}")
                continue
            yield row, times[0] / times[1], (row.ms / row.batch) / (eager.ms / eager.batch)


def fastest(found: Sequence[tuple[Row, float, float]]) -> tuple[int, int]:
    """How often the fastest of three or more runtimes, eager among them, is right, and of how many groups."""
    cells: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(lambda: [(1.0, 1.0)])
    for row, predicted, published in found:
        cells[*row.group, row.batch, row.precision].append((predicted, published))
    named = [ratios for ratios in cells.values() if len(ratios) >= 3]
    right = sum(min(range(len(r)), key=lambda i: r[i][0]) == min(range(len(r)), key=lambda i: r[i][1]) for r in named)
    return right, len(named)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print every ratio, then each runtime's errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", help="files of published latencies, csv.gz")
    parser.add_argument("--models", nargs="*", help="only these models, as the tables call them")
    asked = parser.parse_args(arguments)
    rows = [row for path in asked.tables for row in read(path)]
    if asked.models:
        rows = [row for row in rows if row.group[-2] in asked.models]
    found = []
    for row, predicted, published in compared(rows):
        found.append((row, predicted, published))
        what = f"{row.gpu:12} {row.group[-2][:36]:36} {row.size:4} {row.batch:5} {row.precision} {row.runtime:24}"
        print(f"{what} {predicted:6.3f} {published:6.3f} {predicted / published - 1:+6.0%}", flush=True)
    for runtime in dict.fromkeys(row.runtime for row, *_ in found):
        ratios = np.array([(mine, theirs) for row, mine, theirs in found if row.runtime == runtime])
        error = np.abs(ratios[:, 0] / ratios[:, 1] - 1)
        log = np.sqrt(np.mean(np.log(ratios[:, 0] / ratios[:, 1]) ** 2))
        shares = "  ".join(f"within {limit:.0%}: {np.mean(error <= limit):.0%}" for limit in TARGETS)
        print(f"{runtime:24} {len(error):4} rows, median error {np.median(error):.1%}, rms log {log:.2f}  {shares}")
    right, groups = fastest(found)
    if groups:
        print(f"fastest of three or more right in {right} of {groups}")


if __name__ == "__main__":
    main()
