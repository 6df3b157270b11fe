"""Table 3 of "The Framework Tax": five runtimes of BERT-base at batch 1 on an RTX 8000, half precision, 128 tokens.

python examples/framework_tax/table3.py

Nothing here is fitted to that table. PyTorch and TorchScript are those of the shipped profile, which was fitted to
other measurements of that GPU; the others are what latpred estimates where a runtime was not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import latpred

MODEL, PRECISION = "bert-base-uncased", "fp16"
PRINTED_MS = {
    "eager": 10.54,
    "torchscript": 6.14,
    "cuda-graphs": 2.82,
    "onnxruntime": 2.56,
    "onnxruntime-cuda-graphs": 2.11,
}


def predicted(model: str, device: str) -> dict[str, latpred.Prediction]:
    """What latpred answers for each runtime."""
    asked = {"device": device, "precision": PRECISION, "protocol": "pipelined"}
    return {runtime: latpred.predict(model, runtime=runtime, **asked) for runtime in PRINTED_MS}


def rows(found: Mapping[str, float]) -> list[tuple[str, float, float, float]]:
    """Runtime, predicted and printed milliseconds, and the error."""
    return [(name, found[name], ms, found[name] / ms - 1) for name, ms in PRINTED_MS.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the five errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="another model than the paper's")
    parser.add_argument("--device", default="rtx-8000", help="a profile's name or file, or a GPU's name")
    asked = parser.parse_args(arguments)
    found = predicted(asked.model, asked.device)
    print(f"{'runtime':24} {'predicted ms':>13} {'90 % interval':>16} {'paper ms':>9} {'error':>7}")
    for name, predicted_ms, printed_ms, error in rows({name: one.latency_ms for name, one in found.items()}):
        span = "{:.2f} to {:.2f}".format(*found[name].interval_ms)
        print(f"{name:24} {predicted_ms:13.2f} {span:>16} {printed_ms:9.2f} {error:+7.0%}")


if __name__ == "__main__":
    main()
