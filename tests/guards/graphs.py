"""The graph of every small architecture in every runtime that can be traced without a GPU, as canonical JSON."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import smallmodels

from latpred.graph.graph import ModelGraph
from latpred.runtimes import lowering

KEPT = Path(__file__).with_name("graphs.json.gz")
# Nystromformer refuses half precision.
ARCHITECTURES = tuple(name for name in smallmodels.ARCHITECTURES if name != "nystromformer")
# TorchScript takes long for most of these; what it keeps alive of WavLM differs by some bytes from trace to trace.
UNSCRIPTED = ("efficientnet", "longformer", "mobilenet-v2", "mobilevit", "segformer", "swin", "wavlm")
SCRIPTED = tuple(name for name in ARCHITECTURES if name not in UNSCRIPTED)
EXPORTED = ("bert", "resnet", "lstm")


class Road(NamedTuple):
    """A runtime on a kind of device.

    quick : the architectures that every test run traces for it; tools that take seconds for each see a few only.
    """

    runtime: str
    target: str
    precision: str = "fp32"
    quick: tuple[str, ...] = ARCHITECTURES

    def __str__(self) -> str:
        return f"{self.runtime} on {self.target} in {self.precision}"


# Eager comes first: in a process that has exported or compiled a model, fewer Python calls are made by some others.
ROADS = (
    Road("eager", "cpu"),
    Road("eager", "cuda", "fp16"),
    Road("cuda-graphs", "cuda"),
    Road("torchscript", "cpu", "fp32", SCRIPTED),
    Road("torchscript", "cuda", "fp16", EXPORTED),
    Road("onnxruntime", "cpu", "fp32", EXPORTED),
    Road("onnxruntime", "cuda", "fp16", EXPORTED),
    Road("compile", "cpu", "fp32", ("resnet",)),
    Road("compile", "cuda", "fp16", ("distilbert",)),
)


class Digest(NamedTuple):
    """What a graph amounts to at batch 2, and the SHA-256 of its canonical JSON."""

    ops: int
    launches: int
    macs: int
    bytes: int
    sha256: str


def canonical(graph: ModelGraph) -> bytes:
    """A graph's JSON with sorted keys, without versions of packages and options that were not asked for."""
    plain = msgspec.json.encode(msgspec.structs.replace(graph, stack={}), order="sorted")
    return plain.replace(b'"attention":"",', b"").replace(b'"reread_after":null,', b"")


def digest(graph: ModelGraph) -> Digest:
    """A graph as it is kept."""
    batch = 2 if not graph.only else graph.only[0]
    sha256 = hashlib.sha256(canonical(graph)).hexdigest()
    return Digest(len(graph.at(batch)), graph.launches(batch), graph.macs(batch), graph.bytes(batch), sha256)


def traced(road: Road, architectures: Iterable[str]) -> Iterator[tuple[str, ModelGraph]]:
    """The graphs of a road, by architecture."""
    for name in architectures:
        model, inputs = smallmodels.build_small(name, "meta"), partial(smallmodels.inputs_of, name)
        yield (
            name,
            lowering.trace_for_runtime(
                model, inputs, runtime=road.runtime, target=road.target, precision=road.precision
            ),
        )


def digests(*, quick: bool) -> dict[str, dict[str, Digest]]:
    """Today's graphs, of every architecture or of those of each test run; call it in a process of its own."""
    return {
        str(road): {name: digest(graph) for name, graph in traced(road, road.quick if quick else ARCHITECTURES)}
        for road in ROADS
    }


def kept() -> dict[str, dict[str, Digest]]:
    """What is kept, by road and architecture."""
    return decoded(gzip.decompress(KEPT.read_bytes()))


def decoded(text: str | bytes) -> dict[str, dict[str, Digest]]:
    """Digests from JSON."""
    found = json.loads(text)
    return {road: {name: Digest(*values) for name, values in graphs.items()} for road, graphs in found.items()}


def changed(found: dict[str, dict[str, Digest]]) -> list[str]:
    """Graphs that are not those that are kept, in words."""
    before = kept()
    return [
        f"{name} in {road}: {before[road].get(name)} is now {one}"
        for road, graphs in found.items()
        for name, one in graphs.items()
        if before[road].get(name) != one
    ]


def keep() -> None:
    """Write the graphs of every architecture; the runtimes' tools take ten minutes for them."""
    KEPT.write_bytes(gzip.compress(json.dumps(digests(quick=False), indent=1).encode(), mtime=0))
