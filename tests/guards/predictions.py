"""What every shipped recording and every shipped profile of a GPU predicts, as one CSV file of numbers in full."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import latpred
from latpred import tables
from latpred.accuracy import predicted, recording
from latpred.prediction.prediction import Curve
from latpred.profile import store
from latpred.units import MS_PER_S

KEPT = Path(__file__).with_name("predictions.csv")
RECORDINGS = {
    "epyc-shared-varied": "epyc-shared",
    "epyc-shared-everyday": "epyc-shared",
    "epyc-shared-compile": "epyc-shared",
    "epyc-shared-runtimes": "epyc-shared",
    "epyc-genoa-sealed": "epyc-genoa",
    "epyc-genoa-everyday": "epyc-genoa",
    "epyc-genoa-runtimes": "epyc-genoa",
    "epyc-genoa-compile": "epyc-genoa",
    "epyc-milan-sealed": "epyc-milan",
    "epyc-milan-runtimes": "epyc-milan",
    "epyc-milan-compile": "epyc-milan",
}
GPUS = ("rtx-8000", "rtx-2080ti", "rtx-3090", "rtx-a6000", "titan-x-pascal")
DATASHEET = "h100"  # a GPU that is predicted from what its maker says
MODELS = ("resnet-18", "distilbert-base-uncased", "mobilenet-v2")
BATCHES = (1, 8, 64, 512)
# The TorchScript of today traces a model by a run, in half precision on a CPU for long unless it is given little.
RUN_FOR_REAL = "rtx-3090", "fp16", "torchscript"
LITTLE = {"resnet-18": {"image": 32}, "distilbert-base-uncased": {"seq": 8}, "mobilenet-v2": {"image": 32}}

KEYS = ("source", "model", "input_size", "precision", "runtime", "protocol", "batch", "run")
NUMBERS = ("latency_s", "low_s", "high_s", "overhead_s", "compute_s")

Key = tuple[str, ...]
Numbers = tuple[float, ...]


def replayed(name: str) -> Iterator[tuple[Key, Numbers]]:
    """The cells of a shipped recording, predicted with its profile."""
    found = recording.load(name)
    cells = tables.merge_repeats(found.table)
    table = predicted.predict_table(cells, found.graphs, store.load(RECORDINGS[name]))
    for row in table.to_dict("records"):
        key = (name, *(str(row.get(column, "")) for column in KEYS[1:]))
        yield key, tuple(float(row[column]) for column in NUMBERS)


def on_gpu(device: str) -> Iterator[tuple[Key, Numbers]]:
    """Curves of a few models on a GPU, in every runtime and precision that its profile has."""
    for model in MODELS:
        for precision in ("fp32", "fp16"):
            for runtime in runtimes_of(device):
                size = LITTLE[model] if (device, precision, runtime) == RUN_FOR_REAL else {}
                for protocol in ("single", "pipelined"):
                    curve = latpred.predict(
                        model, BATCHES, runtime, device=device, precision=precision, protocol=protocol, **size
                    )
                    for position, batch in enumerate(BATCHES):
                        key = (device, model, "", precision, runtime, protocol, str(batch), "")
                        yield key, _numbers(curve, position)


def runtimes_of(device: str) -> tuple[str, ...]:
    """The runtimes that are predicted on a GPU without asking a runtime's own tools."""
    return ("eager",) if device == DATASHEET else ("eager", "torchscript")


def _numbers(curve: Curve, position: int) -> Numbers:
    one = curve[position]
    low, high = one.interval_ms
    return tuple(float(ms) / MS_PER_S for ms in (one.latency_ms, low, high, one.overhead_ms, one.compute_ms))


def present(source: str) -> dict[Key, Numbers]:
    """What is predicted today for a recording or a GPU."""
    return dict(replayed(source) if source in RECORDINGS else on_gpu(source))


SOURCES = (*RECORDINGS, *GPUS, DATASHEET)


def kept() -> dict[str, dict[Key, Numbers]]:
    """What is kept, by recording or GPU."""
    found: dict[str, dict[Key, Numbers]] = {source: {} for source in SOURCES}
    with KEPT.open(newline="") as file:
        rows = csv.reader(file)
        next(rows)
        for row in rows:
            found[row[0]][tuple(row[: len(KEYS)])] = tuple(map(float, row[len(KEYS) :]))
    return found


def keep() -> None:
    """Write today's predictions."""
    with KEPT.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow((*KEYS, *NUMBERS))
        for source in SOURCES:
            for key, numbers in present(source).items():
                rows.writerow((*key, *map(repr, numbers)))
