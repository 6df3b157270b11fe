"""Counts what a reader of this repository has to hold in mind: lines, files, names, import circles, files on a road.

Run `python tools/counts.py` to print the counts. `tests/test_counts.py` lets them only fall; `--keep` writes today's.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "tests" / "guards" / "counts.json"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

# What is predicted to see which files take part: a model by its name, then the graph that was traced of it.
ROAD_MODEL, ROAD_DEVICE = "bert-base-uncased", "epyc-shared"


class Import(NamedTuple):
    """One import statement's target, and whether it happens when the module loads."""

    target: str
    line: int
    at_load: bool


@cache
def sources() -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    paths = {path: path.relative_to(ROOT).with_suffix("").parts for path in sorted((ROOT / "latpred").rglob("*.py"))}
    return {".".join(part for part in parts if part != "__init__"): path for path, parts in paths.items()}


@cache
def trees() -> dict[str, ast.Module]:
    """Every module's syntax tree by its dotted name."""
    return {name: ast.parse(path.read_text(), str(path)) for name, path in sources().items()}


@cache
def imports_of(name: str) -> tuple[Import, ...]:
    """Imports of a module, those for type checkers left out, targets as precise as names of modules allow."""
    return tuple(_imports(trees()[name], at_load=True))


def _imports(node: ast.AST, at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_load)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute here"
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                yield Import(full if full in sources() else str(child.module), child.lineno, at_load)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, at_load and not inside)


def import_graph() -> dict[str, set[str]]:
    """Modules that each module imports, when it loads or later."""
    return {name: {i.target for i in imports_of(name) if i.target in sources()} - {name} for name in sources()}


def circles(graph: Mapping[str, Iterable[str]]) -> list[frozenset[str]]:
    """Groups of modules that import each other, directly or through others."""
    names = np.array(list(graph))
    imports = np.array([[target in graph[name] for target in graph] for name in graph], dtype=int)
    _, group = connected_components(imports, connection="strong")
    return [frozenset(names[group == number].tolist()) for number in np.flatnonzero(np.bincount(group) > 1)]


def per_folder() -> Counter[str]:
    """Source files of each folder."""
    return Counter(str(path.parent.relative_to(ROOT)) for path in sources().values())


def repeated_base_names() -> dict[str, int]:
    """File names, packages' own left out, that more than one module has."""
    names = Counter(path.stem for path in sources().values() if path.stem != "__init__")
    return {name: count for name, count in sorted(names.items()) if count > 1}


def static_counts() -> dict[str, int]:
    """The counts that need nothing but the sources."""
    folders = per_folder()
    repeated = repeated_base_names()
    rings = circles(import_graph())
    defined = [node.name for tree in trees().values() for node in tree.body if isinstance(node, DEFINITIONS)]
    return {
        "source lines": sum(len(path.read_text().splitlines()) for path in sources().values()),
        "source files": len(sources()),
        "test lines": sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")),
        "files in the flat room": folders["latpred"],
        "files in the fullest other folder": max(count for folder, count in folders.items() if folder != "latpred"),
        "functions and classes that look public": sum(not name.startswith("_") for name in defined),
        "import circles": len(rings),
        "modules in import circles": sum(len(ring) for ring in rings),
        "base names that are not unique": len(repeated),
    }


_ROAD = f"""
import json, sys, threading
root = sys.argv[1]
entered = set()
def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_flags & 1 and code.co_filename.startswith(root):
        entered.add((code.co_filename, code.co_qualname))
def road(call):
    entered.clear()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len({{file for file, _ in entered}}), len(entered)
import latpred
from latpred import host
host.cpu_name = lambda: "of no profile"  # else more is asked on the machine that ROAD_DEVICE was measured on
cold = road(lambda: latpred.predict({ROAD_MODEL!r}, device={ROAD_DEVICE!r}))
graph = latpred.trace({ROAD_MODEL!r})
latpred.predict(graph, device={ROAD_DEVICE!r})
again = latpred.trace({ROAD_MODEL!r})
warm = road(lambda: latpred.predict(again, device={ROAD_DEVICE!r}))
print(json.dumps([*cold, *warm]))
"""


def road_counts() -> dict[str, int]:
    """Files and functions that two predictions enter: the first one of a name, and a later one of a traced graph."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "LATPRED_HOME": home, "LATPRED_CALIBRATE": "never", "PYTHONPATH": ""}
        command = [sys.executable, "-c", _ROAD, f"{ROOT / 'latpred'}{os.sep}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    files, functions, files_warm, functions_warm = json.loads(done.stdout.splitlines()[-1])
    return {
        "files that a cold predict enters": files,
        "functions that a cold predict enters": functions,
        "files that predicting a traced graph enters": files_warm,
        "functions that predicting a traced graph enters": functions_warm,
    }


def counts() -> dict[str, int]:
    """All counts by what they count."""
    import latpred

    return {**static_counts(), "exported names": len(latpred.__all__), **road_counts()}


def main() -> None:
    """Print the counts beside those kept, or keep today's."""
    parser = argparse.ArgumentParser(description="Count lines, files, names, import circles and files on a road.")
    parser.add_argument("--keep", action="store_true", help="write the counts that the tests allow to be no more")
    parser.add_argument("--details", action="store_true", help="list folders, circles and repeated base names too")
    arguments = parser.parse_args()
    today = counts()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name, count in today.items():
        print(f"{count:7}  {name}" + (f" (at most {kept[name]})" if kept.get(name, count) != count else ""))
    if arguments.details:
        for folder, count in per_folder().most_common():
            print(f"{count:7}  files in {folder}")
        for ring in circles(import_graph()):
            print(f"circle: {', '.join(sorted(ring))}")
        print(f"repeated base names: {', '.join(repeated_base_names())}")
    if arguments.keep:
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        KEPT.write_text(json.dumps(today, indent=2) + "\n")


if __name__ == "__main__":
    main()
