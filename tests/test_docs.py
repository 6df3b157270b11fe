"""The documentation does what it says: every block runs, the outputs shown are real, the reference is the source's."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import docblocks
import pytest
from docblocks import ROOT, Shown
from profiledata import profile

from latpred.profile import store

DOCS = ROOT / "docs"
GENERATED = ("cli.md", "api.md")
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md")) if path.name not in GENERATED}
WITH_README = {"README.md": (ROOT / "README.md").read_text(), **PAGES}
LANGUAGES = {"python", "bash", "console", "toml", "text"}

SHELL = [
    pytest.param(name, mark, marks=[pytest.mark.slow] if mark == "slow" else [])
    for name, page in PAGES.items()
    for mark in ("", "parsed", "slow")
    if docblocks.bash_lines(page, mark)
]
CONSOLE = [(name, shown) for name, page in WITH_README.items() for shown in docblocks.shown_commands(page)]


@pytest.mark.parametrize(("name", "shown"), CONSOLE, ids=lambda value: getattr(value, "command", value))
def test_a_command_prints_what_is_shown(name: str, shown: Shown) -> None:
    store.save(profile())
    docblocks.demand_shown(shown)


@pytest.mark.parametrize(("name", "mark"), SHELL)
def test_shell_lines_run(name: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if mark != "slow":  # which calibrates first
        store.save(profile())
    for line in docblocks.bash_lines(PAGES[name], mark):
        if mark == "parsed":
            docblocks.parse(line)
        else:
            docblocks.run(line, exits=(0, 1) if mark == "slow" else (0,))  # on a busy machine a gate may fail


@pytest.mark.usefixtures("own_formulas")
@pytest.mark.parametrize("name", WITH_README)
def test_python_holds(name: str) -> None:
    store.save(profile())
    docblocks.run_python(WITH_README[name], name)


@pytest.mark.parametrize("name", WITH_README)
def test_blocks_are_of_kinds_that_are_run(name: str) -> None:
    blocks = docblocks.blocks(WITH_README[name])
    assert {block.language for block in blocks} <= LANGUAGES
    assert WITH_README[name].count("```") == 2 * len(blocks), "a block without a language"


def test_the_reference_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(DOCS / "reference.py"))["run"](["--check"]) == 0, capsys.readouterr().out


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- .*: (\S+\.md)$", navigation, flags=re.MULTILINE)
    assert sorted(listed) == sorted([*PAGES, *GENERATED])
    for name, page in PAGES.items():
        for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#]+)(#([\w-]+))?\)", page):
            assert (DOCS / target).exists(), f"{name} links to {target}"
            if anchor and target.endswith(".md"):
                heads = re.findall(r"^#+ (.*)$", (DOCS / target).read_text(), flags=re.MULTILINE)
                assert anchor in [re.sub(r"[^\w\s-]", "", head.lower()).strip().replace(" ", "-") for head in heads]


def named_in(module: Path) -> set[str]:
    """What a module defines: functions, classes with their methods, and constants."""
    names: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_every_file_and_name_of_the_architecture_exists() -> None:
    named = re.findall(r"`((?:latpred|calibration|models|tests)[\w/.]*)(?::([\w.]+))?`", PAGES["architecture.md"])
    assert len(named) > 50
    paths = [ROOT / path for path, _ in named if not path.startswith("latpred.")]
    assert [path for path in paths if not path.exists() and not path.with_suffix(".py").exists()] == []
    assert [f"{path}:{name}" for path, name in named if name and name not in named_in(ROOT / path)] == []


def test_the_architecture_says_what_lives_in_every_package() -> None:
    from counts import sources

    packages = {str(path.parent.relative_to(ROOT)) for path in sources().values()}
    listed = set(re.findall(r"`([\w/]+)`", PAGES["architecture.md"].partition("## The road")[0]))
    # what lies deeper is told with the package above it
    assert {name for name in packages if name.count("/") < 2 and name != "latpred"} - listed == set()


def test_what_is_to_be_cited_is_this_version() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation


def test_every_model_that_goes_by_name_is_listed() -> None:
    from latpred.zoo.names import listing

    listed = set(re.findall(r"`([^`]+)`", PAGES["names-and-codes.md"].partition("## Files of models")[0]))
    others = {"latpred models", "latpred models resnet --libraries", "_", "-", "file.py:function", ".onnx"}
    assert listed - others == {row["name"] for row in listing()}


def test_every_variable_is_listed() -> None:
    from latpred import api, storage

    page = PAGES["names-and-codes.md"]
    assert f"`{storage.VARIABLE}`" in page
    assert f"`{api.VARIABLE}`" in page
    assert all(f"`{choice}`" in page for choice in api.CHOICES)
