"""Sequences of unequal lengths in nn.TransformerEncoder, padded against nested: predicted beside measured.

    python examples/unequal_lengths.py                       # this machine's CPU, small encoder
    python examples/unequal_lengths.py --device simulated --width 768 --layers 12 --batches 1,8,128 --predict-only

Lengths are those of "The Framework Tax": mean 20.92 tokens, standard deviation 10.18, padded to 128.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

import torch
from torch import nn

import latpred
from latpred import Lengths
from latpred.calibration.measurement.whole_models import measure
from latpred.calibration.workloads.suites import module_workload
from latpred.tracing.unequal_lengths import padded_inputs, without_nested

LENGTHS = Lengths(mean=20.92, std=10.18, padded_to=128)
HEAD_DIM = 64


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, measure and print a line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--predict-only", action="store_true")
    asked = parser.parse_args(arguments)
    batches = [int(batch) for batch in asked.batches.split(",")]
    model = encoder(asked.width, asked.layers)
    predicted = {
        way: latpred.predict(model, batches, lengths=LENGTHS, execution=way, device=asked.device).latency_ms
        for way in ("padded", "nested")
    }
    show("predicted", batches, predicted)
    if asked.predict_only:
        return
    measured = {
        "padded": taken(without_nested(model), batches, asked.device, asked.repeats),
        "nested": taken(model, batches, asked.device, asked.repeats),
    }
    show("measured", batches, measured)
    for way, found in measured.items():
        errors = ", ".join(f"{p / m - 1:+.1%}" for p, m in zip(predicted[way], found, strict=True))
        print(f"error of {way}: {errors}")


def encoder(width: int, layers: int) -> nn.TransformerEncoder:
    """An encoder that torch runs nested when it gets a mask of padding."""
    layer = nn.TransformerEncoderLayer(width, width // HEAD_DIM, 4 * width, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, layers).eval()


def taken(model: nn.TransformerEncoder, batches: list[int], device: str, repeats: int) -> list[float]:
    """Measured milliseconds at each batch."""

    def inputs(batch: int) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = padded_inputs(model, LENGTHS.of(batch), LENGTHS.padded_to)(batch)
        return made

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        table = measure(module_workload("encoder", model, inputs), batches, device=device, repeats=repeats)
    return [seconds * 1e3 for seconds in table["latency_s"]]


def show(title: str, batches: list[int], found: dict[str, Sequence[float]]) -> None:
    """One line for each batch: both ways, and by how much nested execution is faster."""
    print(f"{title:<12}batch  padded ms  nested ms     cut")
    for batch, padded, nested in zip(batches, found["padded"], found["nested"], strict=True):
        print(f"{'':<12}{batch:>5}  {padded:>9.2f}  {nested:>9.2f}  {1 - nested / padded:>6.1%}")


if __name__ == "__main__":
    main()
