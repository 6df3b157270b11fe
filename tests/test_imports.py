"""The house rules that a parser can check: imports run one way, nothing predicts with a clock, nothing loads code."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"latpred": ROOT / "latpred", "latpred.calibration": ROOT / "calibration", "latpred.models": ROOT / "models"}

MOST_FILE_LINES = 600
MOST_FUNCTION_LINES = 40

# A module may import only what stands in its own row or above it. The longest matching name decides a module's row;
# what matches none is held to the rules about cycles, calibration and the command line only.
ROWS = (
    ("latpred.errors", "latpred.units", "latpred.home", "latpred.host"),
    ("latpred.ops",),
    ("latpred.graph", "latpred.schedule"),
    ("latpred.tracing",),
    ("latpred.profile", "latpred.profile_codec", "latpred.profiles"),
    ("latpred.roofline", "latpred.runtimes"),
    ("latpred.prediction", "latpred.plot"),
    ("latpred.predictor", "latpred.many"),
    ("latpred.accuracy", "latpred.report", "latpred.api", "latpred.doctor", "latpred.adapting"),
    ("latpred.budget", "latpred.ranking"),
    ("latpred.calibration",),
    ("latpred.cli",),
)
SEPARATE = (("latpred.profile", "latpred.tracing"), ("latpred.prediction", "latpred.tracing"))
ALONE = ("latpred.errors", "latpred.units")

CLOCKS = {"time", "timeit", "torch.utils.benchmark", "torch.profiler", "cProfile"}
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
HEAVY = {"torch", "pandas", "sklearn", "scipy", "transformers", "matplotlib", "altair", "fvcore", "joblib"}


class Import(NamedTuple):
    """One import statement's target, and whether it happens when the module loads."""

    target: str
    line: int
    at_load: bool


def sources() -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


SOURCES = sources()
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in SOURCES.items()}


def imports_of(name: str) -> list[Import]:
    """Imports of a module, those for type checkers left out, targets as precise as names of modules allow."""
    return list(_imports(TREES[name], at_load=True))


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
                yield Import(full if full in SOURCES else str(child.module), child.lineno, at_load)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, at_load and not inside)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def row(module: str) -> int | None:
    """Index of the row a module stands in."""
    matches = [(len(name), index) for index, names in enumerate(ROWS) for name in names if within(module, name)]
    return max(matches)[1] if matches else None


@pytest.mark.parametrize("name", SOURCES)
def test_imports_run_one_way(name: str) -> None:
    mine = row(name)
    for target, line, at_load in imports_of(name):
        theirs = row(target)
        measuring = within(target, "latpred.calibration") and not at_load and not within(name, "latpred.cli")
        if mine is None or theirs is None or measuring:
            continue
        assert theirs <= mine, f"{SOURCES[name]}:{line}: {name} must not import {target}"


@pytest.mark.parametrize("name", [name for name in SOURCES if not within(name, "latpred.calibration")])
def test_calibration_is_imported_only_where_something_is_measured(name: str) -> None:
    early = [f"line {i.line}" for i in imports_of(name) if i.at_load and within(i.target, "latpred.calibration")]
    assert not early, f"{SOURCES[name]}: import latpred.calibration inside the function that measures ({early})"


@pytest.mark.parametrize("name", [name for name in SOURCES if not within(name, "latpred.cli")])
def test_only_the_entry_point_imports_the_command_line(name: str) -> None:
    assert not [i for i in imports_of(name) if within(i.target, "latpred.cli")], SOURCES[name]


@pytest.mark.parametrize(("name", "other"), SEPARATE)
def test_rooms_that_know_nothing_of_each_other(name: str, other: str) -> None:
    for module in SOURCES:
        if within(module, name) or within(module, other):
            foreign = other if within(module, name) else name
            assert not [i for i in imports_of(module) if within(i.target, foreign)], SOURCES[module]


@pytest.mark.parametrize("name", ALONE)
def test_the_ground_floor_imports_nothing_of_the_house(name: str) -> None:
    assert not [i for i in imports_of(name) if within(i.target, "latpred")]


def test_no_module_needs_itself_to_load() -> None:
    graph = {name: {i.target for i in imports_of(name) if i.at_load and i.target in SOURCES} for name in SOURCES}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"import cycle: {' → '.join([*above[above.index(name) :], name])}"
        if name not in done:
            for target in graph[name] - {name}:
                visit(target, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("name", [name for name in SOURCES if not within(name, "latpred.calibration")])
def test_what_predicts_never_starts_a_clock(name: str) -> None:
    timed = [i for i in imports_of(name) if i.target in CLOCKS]
    events = [n.lineno for n in ast.walk(TREES[name]) if isinstance(n, ast.Attribute) and n.attr == "elapsed_time"]
    assert not timed, f"{SOURCES[name]}: {timed}"
    assert not events, f"{SOURCES[name]}: lines {events}"


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_unpickles_or_evaluates(name: str) -> None:
    assert not [i for i in imports_of(name) if i.target.partition(".")[0] in UNPICKLERS], SOURCES[name]
    for node in ast.walk(TREES[name]):
        where = f"{SOURCES[name]}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load", "joblib.load", "np.load", "numpy.load"}, where
            for keyword in node.keywords:
                assert keyword.arg not in {"trust_remote_code", "allow_pickle"}, where


@pytest.mark.parametrize("name", SOURCES)
def test_files_and_functions_stay_small(name: str) -> None:
    path = SOURCES[name]
    length = len(path.read_text().splitlines())
    assert length <= MOST_FILE_LINES, f"{path} has {length} lines"
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = body_lines(node)
            assert size <= MOST_FUNCTION_LINES, f"{path}:{node.lineno}: {node.name} has {size} lines"


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body: what is under its signature and docstring."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    start = (first.end_lineno or 0) + 1 if documented else first.lineno
    return (function.end_lineno or 0) - start + 1


@pytest.mark.parametrize("name", [name for name in SOURCES if SOURCES[name].read_text().strip()])
def test_every_module_says_what_it_is(name: str) -> None:
    assert ast.get_docstring(TREES[name]), SOURCES[name]


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running some code."""
    script = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.splitlines()}


def test_importing_latpred_loads_nothing_heavy() -> None:
    assert not loaded_by("import latpred") & HEAVY


def test_help_loads_nothing_but_click() -> None:
    loaded = loaded_by("from latpred.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass")
    assert "click" in loaded
    assert not loaded & (HEAVY | {"numpy", "rich", "msgspec", "platformdirs"})


def test_the_wheel_holds_every_package() -> None:
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
    namespaces = {name.rpartition(".")[0] for name, path in SOURCES.items() if path.name != "__init__.py"}
    assert packages | namespaces == set(listed)
