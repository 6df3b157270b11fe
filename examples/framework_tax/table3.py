"""Table 3 of "The Framework Tax": five runtimes of BERT-base at batch 1 on an RTX 8000, half precision, 128 tokens.

python examples/framework_tax/table3.py

Nothing here is fitted to that table. PyTorch and TorchScript are those of the shipped profile, which was fitted to
other measurements of that GPU. A captured graph costs the host one launch, and the device the kernels that it held.
ONNX Runtime's dispatch is PyTorch's of the profile times the ratio of the two on a CPU where both were measured; its
kernels are those of its own graph, priced like PyTorch's.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

import latpred
from latpred import Predictor, profiles
from latpred.datasheet import LAUNCH_US
from latpred.eras import attention_of, walked_for
from latpred.graph import ModelGraph
from latpred.profile import DeviceProfile, DispatchFit
from latpred.runtimes import get, walking
from latpred.tracing.names import attention

MODEL, PRECISION = "bert-base-uncased", "fp16"
PRINTED_MS = {
    "eager": 10.54,
    "torchscript": 6.14,
    "cuda-graphs": 2.82,
    "onnxruntime": 2.56,
    "onnxruntime-cuda-graphs": 2.11,
}
DONE = {"protocol": "pipelined"}


def dispatch(total_us: float = 0.0) -> DispatchFit:
    """Host costs of a runtime whose calls take so long altogether."""
    return DispatchFit({"": 0.0}, module_call_us=0.0, python_call_us=0.0, fixed_us=total_us)


def predicted(model: str, device: str, cpu: str) -> dict[str, float]:
    """Milliseconds of each runtime."""
    profile = profiles.load(device)
    era = profile.protocol.get("era", "")
    with walked_for(era):
        eager_graph = latpred.trace(model, precision=PRECISION)
    predictor = Predictor(profile)
    found = {name: predictor.predict(eager_graph, runtime=name, **DONE).latency_ms for name in ("eager", "torchscript")}
    kernels = predictor.lowered(eager_graph, "eager")
    with attention(attention_of(era)):
        exported = walking.walk(model, runtime="onnxruntime", target="cuda", precision=PRECISION)
    eager_us = predictor.predict(eager_graph, **DONE).overhead_ms * 1e3
    own = {
        "cuda-graphs": (kernels, LAUNCH_US),
        "onnxruntime": (exported, eager_us * ratio(model, cpu)),
        "onnxruntime-cuda-graphs": (exported, LAUNCH_US),
    }
    return found | {name: of_its_own(profile, name, *given) for name, given in own.items()}


def ratio(model: str, cpu: str) -> float:
    """Dispatch of ONNX Runtime over that of PyTorch, where both were measured; the device plays no part in it."""
    predictor, graph = Predictor(profiles.load(cpu)), latpred.trace(model)
    host = {name: predictor.predict(graph, runtime=name).overhead_ms for name in ("eager", "onnxruntime")}
    return host["onnxruntime"] / host["eager"]


def of_its_own(profile: DeviceProfile, runtime: str, graph: ModelGraph, host_us: float) -> float:
    """Milliseconds of a runtime that the profile does not know, from its graph and what the host spends."""
    lent = msgspec.structs.replace(profile, runtimes={runtime: dispatch(host_us)}, protocol={})
    if graph.runtime == "eager":
        graph = get(runtime).estimate(graph, "cuda")
    return Predictor(lent).predict(graph, runtime=runtime, **DONE).latency_ms


def rows(found: Mapping[str, float]) -> list[tuple[Any, ...]]:
    """Runtime, predicted and printed milliseconds, and the error."""
    return [(name, found[name], ms, found[name] / ms - 1) for name, ms in PRINTED_MS.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the five errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="another model than the paper's")
    parser.add_argument("--device", default="rtx-8000", help="name or file of a profile with eager and torchscript")
    parser.add_argument("--cpu", default="epyc-shared", help="profile of a CPU with eager and onnxruntime")
    asked = parser.parse_args(arguments)
    print(f"{'runtime':24} {'predicted ms':>13} {'paper ms':>9} {'error':>7}")
    for name, predicted_ms, printed_ms, error in rows(predicted(asked.model, asked.device, asked.cpu)):
        print(f"{name:24} {predicted_ms:13.2f} {printed_ms:9.2f} {error:+7.0%}")


if __name__ == "__main__":
    main()
