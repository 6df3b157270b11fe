"""Writes what of the documentation comes from the source: `python docs/reference.py`.

The page of the command line comes from every verb's `--help`, that of Python from signatures and docstrings. `--check`
writes nothing and says which are old. `--outputs` also runs the commands in docs/ and the README that measure nothing,
and shows what they print now.
"""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import click
from click.testing import CliRunner

import latpred
from latpred import calibration, errors, host, plot, report, runtimes
from latpred.accuracy.accuracy_report import Report
from latpred.accuracy.adaptation import Adaptation
from latpred.accuracy.drift import Check
from latpred.cli import main
from latpred.prediction.prediction import Provenance
from latpred.profile import store
from latpred.progress import ProgressEvent
from latpred.search.budget import Spent
from latpred.search.spaces import SearchSpace

DOCS = Path(__file__).parent
NOTE = "<!-- Written by docs/reference.py. -->\n\n"
SECTIONS = ("Parameters", "Returns", "Raises", "Attributes", "Examples", "Notes", "Yields")
WIDTH = 100
MODULES = {
    **{module: tuple(module.__all__) for module in (latpred, calibration, plot, report, runtimes)},
    store: ("find", "load", "listing", "save"),
}
RECORDS = (Adaptation, Check, ProgressEvent, Provenance, Report, Spent)
# What a shipped profile's prediction says of the machine that writes these pages, over as many lines as it takes.
ELSEWHERE = re.compile(r"(?m)^ *caveat: .*another machine.*\n?(?:  .*\n?)*")
MEASURES_NOTHING = re.compile(r"--device (?!cpu\b|cuda|simulated)|^latpred trace")


def pages() -> dict[str, str]:
    """Every page by its file name."""
    return {"cli.md": NOTE + command_line(), "api.md": NOTE + python()}


def command_line() -> str:
    """The page of the command line."""
    parts = ["# Command line\n", *(f"## {' '.join(path)}\n\n{help_of(path)}" for path in [("latpred",), *verbs()])]
    return "\n".join(parts)


def verbs(group: click.Group = main, path: tuple[str, ...] = ("latpred",)) -> Iterator[tuple[str, ...]]:
    """Every verb in the order of --help, those of groups included."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from verbs(command, (*path, name))


def help_of(path: tuple[str, ...]) -> str:
    """What a verb prints with --help."""
    shown = CliRunner().invoke(main, [*path[1:], "--help"], prog_name="latpred", terminal_width=WIDTH)
    return f"```text\n{shown.output.rstrip()}\n```\n"


def python() -> str:
    """The page of Python names."""
    parts = [
        "# Python\n\nEverything public of `latpred`; `latpred.calibration` measures. Then come figures, the HTML\n"
        "report, runtimes and files of profiles, at the end the published spaces, records that calls give, and the\n"
        "[errors](#errors).\n"
    ]
    for module, names in _by_module():
        parts += [entry(module.__name__, name, getattr(module, name)) for name in sorted(names, key=str.lower)]
    parts.append(entry(SearchSpace.__module__, SearchSpace.__name__, SearchSpace))
    parts += [f"## {record.__name__}\n\n{fields_of(record)}" for record in RECORDS]
    return importing("\n".join([*parts, error_table()]))


def _by_module() -> Iterator[tuple[ModuleType, list[str]]]:
    """Modules with the names that they alone have: `latpred` has those of `latpred.calibration` too."""
    for module, names in MODULES.items():
        yield (
            module,
            [name for name in names if module is latpred or getattr(latpred, name, None) is not getattr(module, name)],
        )


def importing(page: str) -> str:
    """A page whose examples import what they call, so that each runs where it is pasted."""
    return re.sub(r"(?s)```pycon\n(.*?)```", lambda found: f"```pycon\n{_imports(found[1])}{found[1]}```", page)


def _imports(example: str) -> str:
    bound = set(re.findall(r"\w+", " ".join(re.findall(r"(?m)^>>> (?:from \S+ )?import (.*)", example))))
    code = "\n".join(re.findall(r"(?m)^(?:>>>|\.\.\.) (?!from |import )(.*)", example))
    lines = [f"import {name}" for name in ("latpred", "torch") if name not in bound and f"{name}." in code]
    for module, names in _by_module():
        called = sorted(name for name in names if re.search(rf"(?<![.\w]){name}\(", code) and name not in bound)
        lines += [f"from {module.__name__} import {', '.join(called)}"] * bool(called)
        bound.update(called)
    return "".join(f">>> {line}\n" for line in lines)


def fields_of(record: type) -> str:
    """A record that calls give or tell: what it is, its fields and its properties."""
    text = f"{signature(record.__name__, record)}{docstring(record)}"
    for name, member in vars(record).items():
        if isinstance(member, property) and member.__doc__:
            text += f"\n**{record.__name__}.{name}**: {' '.join((member.__doc__ or '').split())}\n"
    return text


def error_table() -> str:
    """Every error by name: what it is one of, what the command line exits with, and what it means."""
    classes = {name: error for name, error in vars(errors).items() if inspect.isclass(error) and name[0] != "_"}
    found = [error for error in classes.values() if issubclass(error, errors.LatpredError)]
    rows = [
        f"| `{error.__name__}` | `{next(base.__name__ for base in error.__mro__[1:] if base.__name__[0] != '_')}` "
        f"| {error.exit_code} | {' '.join((error.__doc__ or '').split())} |\n"
        for error in found
    ]
    head = "| in `latpred.errors` | is a | exit code | what it means |\n|---|---|---|---|\n"
    said = "What latpred raises on purpose is a `LatpredError`; a `UsageError` is a `ValueError` too.\n\n"
    return f"## Errors\n\n{said}{head}{''.join(rows)}"


def entry(module: str, name: str, value: object) -> str:
    """One name: its signature and its docstring; of a class also its public methods, of a constant its value."""
    if not callable(value):
        return f"## {module}.{name}\n\n```text\n{name} = {value!r}\n```\n\n"
    text = f"## {module}.{name}\n\n{signature(name, value)}{docstring(value)}\n"
    if inspect.isclass(value):
        own = [part for part in value.__mro__ if part is value or part.__name__.startswith("_")]
        for method, function in {name: member for part in own for name, member in vars(part).items()}.items():
            if method.startswith("_"):
                continue
            if inspect.isfunction(function := getattr(function, "__func__", function)):
                text += f"\n### {name}.{method}\n\n{signature(method, function)}{docstring(function)}\n"
            elif isinstance(function, property):
                text += f"\n**{name}.{method}**: {' '.join((function.__doc__ or 'of that name').split())}\n"
    return text


class _Bare(str):
    """An annotation that is shown as it is written, without quotes."""

    __repr__ = str.__str__


def signature(name: str, value: object) -> str:
    """A call's signature in a block, one parameter a line where it is long."""
    try:
        found = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    parameters = [one.replace(annotation=_bare(one.annotation)) for one in found.parameters.values()]
    gives = inspect.Signature.empty if inspect.isclass(value) else _bare(found.return_annotation)
    returns = str(inspect.Signature(return_annotation=gives)).removeprefix("()")
    kinds = [one.kind for one in parameters]
    parts = [str(one) for one in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    shown = f"{name}({', '.join(parts)}){returns}"
    if len(shown) > WIDTH:
        inner = ",\n".join(f"    {part}" for part in parts)
        shown = f"{name}(\n{inner},\n){returns}"
    return f"```text\n{shown.replace('NoneType', 'None')}\n```\n\n"


def _bare(annotation: object) -> object:
    annotation = getattr(annotation, "__forward_arg__", annotation)
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def docstring(value: object) -> str:
    """A numpydoc docstring as Markdown: sections in bold, their entries as lists, examples as they are."""
    lines = inspect.cleandoc(getattr(value, "__doc__", None) or "").splitlines()
    shown: list[str] = []
    section = ""
    index = 0
    while index < len(lines):
        line, below = lines[index], lines[index + 1] if index + 1 < len(lines) else ""
        if line in SECTIONS and below and set(below) == {"-"}:
            section, index = line, index + 2
            shown += [f"**{section}**", ""]
            continue
        shown.append(_line(line, section))
        index += 1
    return _fenced("\n".join(shown)).rstrip() + "\n"


def _line(line: str, section: str) -> str:
    if section in ("Examples", "Notes", "") or not line:
        return line
    if line.startswith("    "):
        return f"  {line.strip()}"
    name, _, kind = line.partition(" : ")
    return f"- `{name}`: {kind}<br>" if kind else f"- `{name}`<br>"


def _fenced(text: str) -> str:
    """Examples in fences; what stands outside them is left alone."""
    return re.sub(r"(?m)((?:^>>> .*\n?)(?:^(?!\*\*|$).+\n?)*)", lambda f: f"```pycon\n{f[1].rstrip()}\n```\n", text)


def refreshed(page: str) -> str:
    """A page with the outputs of its console blocks as they are now, where nothing is measured for them."""
    return re.sub(r"(?ms)^```console\n(.*?)^```", lambda found: f"```console\n{_outputs(found[1])}```", page)


def _outputs(block: str) -> str:
    parts = re.split(r"(?m)^\$ ", block)[1:]
    return "".join(f"$ {part}" if not MEASURES_NOTHING.search(part) else f"$ {_output(part)}" for part in parts)


def _output(part: str) -> str:
    command = part.partition("\n")[0]
    with mock.patch.object(host, "machine_id", return_value="elsewhere"):  # no profile is of the reader's machine
        shown = CliRunner().invoke(main, shlex.split(command)[1:])
    if not shown.stdout:
        raise click.ClickException(f"{command}: {shown.stderr}")
    lines = [line.rstrip() for line in ELSEWHERE.sub("", shown.stdout).strip("\n").splitlines()]
    return "\n".join([command, *lines]) + "\n"


def run(arguments: list[str]) -> int:
    """Write the pages, or with --check only say which are not what they should be."""
    old = [name for name, text in pages().items() if not (DOCS / name).exists() or (DOCS / name).read_text() != text]
    if "--check" in arguments:
        print(f"old: {', '.join(old)}; write them anew with: python docs/reference.py" if old else "up to date")
        return bool(old)
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    for path in [DOCS.parent / "README.md", *DOCS.glob("*.md")] if "--outputs" in arguments else ():
        if path.name not in ("cli.md", "api.md"):
            path.write_text(refreshed(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
