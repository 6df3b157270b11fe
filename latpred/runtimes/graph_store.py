"""Keeps the graphs that took seconds to make: what runtimes' own tools gave, and eager traces of models by name.

Two models of one structure have one key in a runtime whatever they are called: the key is a digest of the eager trace,
the runtime, the kind of device, and the versions and the code that matter. A trace by name, which is found without
PyTorch, has a key of all the software that it depends on. In memory for this process, on disk in the user's cache,
both bounded; a cache that cannot be written is done without, several processes may share one, and what another version
wrote is made again. joblib.Memory keeps pickles instead, which run whatever code was put into them, and grows until
somebody trims it; graphs are small JSON documents.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import platform
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from latpred import storage
from latpred.errors import TraceError
from latpred.graph.graph import ModelGraph
from latpred.ops import BUILT_IN, generation
from latpred.runtimes.legacy_torch import traced_for
from latpred.storage import Recent

MOST_IN_MEMORY = 256
MOST_ON_DISK_BYTES = 256 << 20
VERSION = 6
UP_TO = 64  # traces by name serve batches up to this one, or up to the largest that was asked for
LIBRARIES = ("torch", "transformers", "torchvision", "timm")  # where models come from
_TRACING = (
    *("tracing/*.py", "ops/*.py", "graph/*.py", "sandbox/*.py", "zoo/**/*.py", "runtimes/legacy_torch.py"),
    "models/architectures.json",
)

_memory: Recent[ModelGraph] = Recent(MOST_IN_MEMORY)


def structure(graph: ModelGraph) -> str:
    """Digest of everything in a trace but what it is called and which software made it."""
    bare = msgspec.structs.replace(graph, model="", stack={})
    return hashlib.sha256(msgspec.json.encode(bare)).hexdigest()


def kept(
    graph: ModelGraph, runtime: str, target: str, options: str, make: Callable[[], ModelGraph], code: str | None = ""
) -> ModelGraph:
    """What `make` gives for a model whose eager trace is `graph`, under its name.

    It is made once for each structure, runtime, target, options and code. What it raises is not kept, nor what it gives
    of a model that no code tells from others.
    """
    if code is None:
        return make()
    key = _key((structure(graph), runtime, target, f"{options}; {code}", graph.stack.get("torch", "")))

    def read_or_make() -> ModelGraph:
        path = _file(runtime, key)
        stored = _read(path)
        if stored is None:
            stored = make()
            _write(path, stored)
        return stored

    result = _memory.get(key, read_or_make)
    return result if result.model == graph.model else msgspec.structs.replace(result, model=graph.model)


def trace_by_name(
    name: str,
    era: str = "",
    batches: Sequence[int] = (),
    *,
    before: Callable[[], None] | None = None,
    **options: Any,
) -> ModelGraph:
    """What `latpred.trace` gives of a model by name, with the software of an era; PyTorch makes it at most once.

    For processes in which nobody patches PyTorch or the models' libraries. `options` are those of `latpred.trace`;
    `before` is called where the model has to be traced.
    """
    path = file_by_name(name, era, batches, **options)
    stored = None if path is None else _read(path)
    if stored is not None:
        return stored
    if before is not None:
        before()
    from latpred.tracing import trace

    with traced_for(era):
        if path is not None:
            with contextlib.suppress(TraceError):
                graph = trace(name, batches=(_most(batches),), **options)
                if not (graph.exact or graph.only):
                    _write(path, graph)
                    return graph
        return trace(name, batches=batches, **options)


def file_by_name(name: str, era: str = "", batches: Sequence[int] = (), **options: Any) -> Path | None:
    """Where the eager trace of a model by name is kept, under everything that it depends on.

    None where that cannot be told: a user's file, or a library that is worked on, may be another tomorrow, and formulas
    that somebody registered are not known by a version.
    """
    software = None if ".py:" in name or generation() != BUILT_IN else _software()
    if software is None:
        return None
    asked = {"era": era, "batches": _most(batches), **options}
    torch = sys.modules.get("torch")
    dtype = str(torch.get_default_dtype()) if torch else "torch.float32"
    timm = sys.modules.get("timm.layers.config")  # which fuses attention as it was told last
    fused = str(getattr(timm, "_USE_FUSED_ATTN", os.environ.get("TIMM_FUSED_ATTN", "1")))
    return _file("eager", _key((name, json.dumps(asked, sort_keys=True), dtype, fused, *software)))


def _most(batches: Sequence[int]) -> int:
    """A graph that is a line up to there serves all batches below as well."""
    return max((UP_TO, *batches))


@cache
def _software() -> tuple[str, ...] | None:
    """The interpreter, every package that is installed, what timm is told, and a digest of latpred's part in a trace.

    None where a library that models come from is installed to be worked on.
    """
    told = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("TIMM_")]
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError, ValueError):  # as of a damaged file
            came_from = metadata.distribution(name).read_text("direct_url.json") or "{}"
            if json.loads(came_from).get("dir_info", {}).get("editable"):
                return None
            told.append(came_from)  # two commits of a repository may have one version
    return (platform.python_version(), platform.machine(), *_packages(), *told, digest_of(*_TRACING))


@cache
def digest_of(*patterns: str) -> str:
    """A digest of latpred's own files, by patterns of their paths within it."""
    root = Path(__file__).parents[1]
    sources = [file for pattern in patterns for file in sorted(root.glob(pattern))]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _packages() -> list[str]:
    """Names and versions of all packages, of which installers call a folder; to read what is in there takes longer."""
    names: set[str] = set()
    for place in sys.path:
        with contextlib.suppress(OSError):  # no folder, or one that may not be read
            names.update(os.listdir(place or os.curdir))
    return sorted(name for name in names if name.endswith((".dist-info", ".egg-info")))


def forget() -> None:
    """Drop what this process holds in memory; the files stay."""
    global _memory
    _memory = Recent(MOST_IN_MEMORY)


def folder() -> Path:
    """Where the files are, one folder for each runtime."""
    return storage.cache_dir() / "graphs"


def _key(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join((str(VERSION), *parts)).encode()).hexdigest()[:32]


def _file(runtime: str, key: str) -> Path:
    return folder() / runtime / f"{key}.json.gz"


def _read(path: Path) -> ModelGraph | None:
    try:
        graph = ModelGraph.from_json(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error):  # not there, damaged, or written by another version
        return None
    with contextlib.suppress(OSError):  # a folder that can only be read serves as well
        os.utime(path)  # what was used last is deleted last
    return graph


def _write(path: Path, graph: ModelGraph) -> None:
    body = gzip.compress(graph.to_json().encode(), compresslevel=4, mtime=0)
    with contextlib.suppress(OSError):
        storage.write(path, body)
        _trim()


def _trim() -> None:
    """Delete what was used longest ago until the folder is within its bound."""
    kept_files = [(file.stat(), file) for file in folder().rglob("*.json.gz")]
    excess = sum(stat.st_size for stat, _ in kept_files) - MOST_ON_DISK_BYTES
    for stat, file in sorted(kept_files, key=lambda pair: pair[0].st_mtime):
        if excess <= 0:
            return
        file.unlink(missing_ok=True)
        excess -= stat.st_size
