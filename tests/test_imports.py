"""The house rules that a parser can check: imports run one way, nothing predicts with a clock, nothing loads code."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from counts import circles, import_graph, imports_of, sources, trees

MOST_FILE_LINES = 600
MOST_FUNCTION_LINES = 40

# A module may import only what stands in its own row or above it; every module has one.
ROWS = (
    "errors units host progress query storage tables",
    "render plot",
    "ops",
    "graph",
    "sandbox zoo tracing",
    "profile",
    "runtimes",
    "prediction api",
    "fit",
    "accuracy explanation search",
    "report",
    "calibration",
    "cli __main__",
)
ROW = {f"latpred.{name}": number for number, names in enumerate(ROWS) for name in names.split()}
RECORDS = ("latpred.profile.document", "latpred.prediction.prediction")
ALONE = ("latpred.errors", "latpred.units")

CLOCKS = {"time", "timeit", "torch.utils.benchmark", "torch.profiler", "cProfile"}
BINARY = {"'rb'", "'wb'", "'ab'"}
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
HEAVY = {"torch", "pandas", "sklearn", "scipy", "transformers", "matplotlib", "fvcore", "joblib"}


SOURCES = sources()
TREES = trees()


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def row(module: str) -> int | None:
    """Index of the row a module stands in."""
    return ROW.get(".".join(module.split(".")[:2]))


FRONTS = ("latpred", "latpred.models")  # packages whose own files import nothing
TIMELESS = [name for name in SOURCES if not within(name, "latpred.calibration")]


def test_every_module_has_a_row() -> None:
    assert [name for name in SOURCES if row(name) is None and name not in FRONTS] == []


NEVER = {**dict.fromkeys((*FRONTS, *ALONE), "latpred"), **dict.fromkeys(RECORDS, "latpred.tracing")}


@pytest.mark.parametrize(("name", "package"), NEVER.items())
def test_what_a_module_never_imports(name: str, package: str) -> None:
    assert not [i for i in imports_of(name) if within(i.target, package)]


@pytest.mark.parametrize("name", SOURCES)
def test_imports_run_one_way(name: str) -> None:
    mine, wrong = row(name), []
    for found in imports_of(name):
        theirs = row(found.target)
        # What measures is imported inside the function that measures.
        measuring = within(found.target, "latpred.calibration") and not found.at_load
        if mine is not None and theirs is not None and theirs > mine and not measuring:
            wrong.append(f"{SOURCES[name]}:{found.line}: must not import {found.target}")
    assert wrong == []


def test_no_imports_go_in_a_circle() -> None:
    assert [sorted(circle) for circle in circles(import_graph())] == []


@pytest.mark.parametrize("name", TIMELESS)
def test_calibration_is_imported_only_where_something_is_measured(name: str) -> None:
    early = [f"line {i.line}" for i in imports_of(name) if i.at_load and within(i.target, "latpred.calibration")]
    assert not early, f"{SOURCES[name]}: import latpred.calibration inside the function that measures ({early})"


@pytest.mark.parametrize("name", TIMELESS)
def test_what_predicts_never_starts_a_clock(name: str) -> None:
    progress = name == "latpred.progress"  # which times nothing but the run itself
    timed = [i for i in imports_of(name) if i.target in CLOCKS and not progress]
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
def test_text_files_name_their_encoding(name: str) -> None:
    for node in ast.walk(TREES[name]):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        called = ast.unparse(node.func)
        given = [ast.unparse(argument) for argument in node.args]
        opens = called == "open" or (called.endswith(".open") and called != "os.open")
        text = called.endswith(".read_text") and not given  # a file of a package is read by its name
        text = text or called.endswith(".write_text") or (opens and not BINARY & {*given})
        assert not text, f"{SOURCES[name]}:{node.lineno}: give encoding=, else the locale's is taken"


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


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import latpred; dir(latpred); latpred.cost('a::b')", HEAVY | {"numpy"}),
        ("from latpred import host; host.processor_time()", HEAVY | {"numpy"}),
        ("import latpred.prediction.predictor", HEAVY),
        ("from latpred.calibration.devices import machine; machine.identity(threads=1)", {"torch"}),
    ],
)
def test_what_needs_nothing_heavy_loads_none(code: str, heavy: set[str]) -> None:
    assert not loaded_by(code) & heavy


def test_help_loads_nothing_but_click() -> None:
    loaded = loaded_by("from latpred.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass")
    assert "click" in loaded
    assert not loaded & (HEAVY | {"numpy", "rich", "msgspec", "platformdirs"})


def test_every_folder_with_modules_is_a_package_that_the_wheel_holds() -> None:
    assert {path.parent / "__init__.py" for path in SOURCES.values()} <= set(SOURCES.values())
