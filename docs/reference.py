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
from unittest import mock

import click
from click.testing import CliRunner

import latpred
import latpred.calibration
from latpred import host
from latpred.accuracy.adaptation import Adaptation
from latpred.cli import main
from latpred.search.option_table import latency_table
from latpred.search.spaces import SearchSpace

DOCS = Path(__file__).parent
NOTE = "<!-- Written by docs/reference.py. -->\n\n"
SECTIONS = ("Parameters", "Returns", "Raises", "Attributes", "Examples", "Notes", "Yields")
WIDTH = 100
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
        "# Python\n\nEverything public of `latpred`; `latpred.calibration` measures. At the end, what `latpred.adapt` "
        "gives, and what the\nguide to a search imports from elsewhere.\n"
    ]
    for module in (latpred, latpred.calibration):
        for name in sorted(module.__all__, key=str.lower):
            if module is latpred or name not in latpred.__all__:
                parts.append(entry(module.__name__, name, getattr(module, name)))
    parts += [entry(value.__module__, value.__name__, value) for value in (Adaptation, latency_table, SearchSpace)]
    return "\n".join(parts)


def entry(module: str, name: str, value: object) -> str:
    """One name: its signature and its docstring; of a class also its public methods."""
    text = f"## {module}.{name}\n\n{signature(name, value)}{docstring(value)}\n"
    if inspect.isclass(value):
        own = [part for part in value.__mro__ if part is value or part.__name__.startswith("_")]
        for method, function in {name: member for part in own for name, member in vars(part).items()}.items():
            if method.startswith("_") or not getattr(function, "__doc__", None):
                continue
            if inspect.isfunction(function):
                text += f"\n### {name}.{method}\n\n{signature(method, function)}{docstring(function)}\n"
            elif isinstance(function, property):
                text += f"\n**{name}.{method}**: {' '.join((function.__doc__ or '').split())}\n"
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
