"""The code blocks of a Markdown page, and what running them must show: for the tests of the README and of docs/."""

from __future__ import annotations

import doctest
import re
import shlex
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import click
from click.testing import CliRunner

from latpred import host
from latpred.cli import main

ROOT = Path(__file__).parents[1]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL

_BLOCK = re.compile(r"(?:<!-- (?P<mark>slow|parsed)[^>]*-->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```", re.M | re.S)
# What differs from machine to machine: numbers and their units, the regime they lead to, threads, a profile's age.
MEASURED = re.compile(r"\d[\d.,]*|\b(us|ms|s)\b|\b(framework|compute|memory)(?=\s+\d)|threads?|just now|\w+ ago")
VARYING = ("caveat", "compute-bound", "never framework-bound", "framework-bound")
# What a shipped profile's prediction may still differ in: its age, and the machine that it is not.
ELSEWHERE = re.compile(r"calibrated .*?\)|measurements .*?\)|just now|\d+ \w+ ago|, here .*?\)")
FOREIGN = re.compile(r"^ *caveat: .*another machine.*\n?(?:  .*\n?)*", re.M)  # wrapped over as many lines as it takes
ANYWHERE = re.compile(r"--device (?!cpu\b)|^latpred trace")  # commands that measure nothing
NUMBER = re.compile(r"[\d.]+")
TIMES = ("us", "ms", "s", "min")


class Block(NamedTuple):
    """One fenced block: its language, its text, and "slow" or "parsed" where a comment above it says so."""

    language: str
    text: str
    mark: str


class Shown(NamedTuple):
    """A command and the output that a page shows for it."""

    command: str
    output: str


def blocks(page: str) -> list[Block]:
    """Every fenced block of a page that names a language."""
    return [Block(found["language"], found["text"], found["mark"] or "") for found in _BLOCK.finditer(page)]


def shown_commands(page: str) -> Iterator[Shown]:
    """Commands of console blocks, with their output."""
    for block in blocks(page):
        if block.language == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                yield Shown(command, output.strip("\n"))


def bash_lines(page: str, mark: str = "") -> list[str]:
    """Lines of the bash blocks that carry a mark, or none."""
    marked = [block.text for block in blocks(page) if block.language == "bash" and block.mark == mark]
    return "".join(marked).splitlines()


def parse(command: str) -> None:
    """Let a verb's own parser read a command."""
    program, *words = shlex.split(command)
    assert program == "latpred", command
    found: click.Command = main
    while isinstance(found, click.Group):
        name = words.pop(0)
        inner = found.get_command(click.Context(found), name)
        assert inner is not None, command
        found = inner
    given = list(zip(["", *words], words, strict=False))
    there = [before == "--mapping" or (word.endswith(".csv") and before != "-o") for before, word in given]
    existing = ["/dev/null" if stands else word for stands, word in zip(there, words, strict=True)]
    # Below the program's own context, since a verb keeps the first form of --help that it is asked for.
    found.make_context("shown", existing, parent=click.Context(main, **main.context_settings))


def run(command: str, exits: tuple[int, ...] = (0,)) -> str:
    """What a command prints on stdout."""
    program, *arguments = shlex.split(command)
    assert program == "latpred", command
    # Pages are read elsewhere: on the very machine that the shipped profile is of, a prediction would say so.
    elsewhere = mock.patch.object(host, "machine_id", return_value="elsewhere")
    with elsewhere if "epyc-shared" in command else nullcontext():
        done = CliRunner().invoke(main, arguments)
    assert done.exit_code in exits, (command, done.stderr, done.exception)
    return done.stdout


def demand_shown(shown: Shown) -> None:
    """Make sure that a command prints what is shown; numbers only where nothing of this machine is in them."""
    # A gate that is missed is part of what a report says.
    printed = run(shown.command, exits=(0, 1) if "--replay" in shown.command else (0,))
    if ANYWHERE.search(shown.command):
        assert alike(printed, shown.output), printed
    else:
        assert shape(printed) == shape(shown.output)


def shape(text: str) -> list[list[str]]:
    """Words of each line, without what is measured."""
    lines = [line for line in text.strip("\n").splitlines() if not line.startswith(VARYING)]
    return [MEASURED.sub(" ", line).split() for line in lines]


def words(text: str) -> list[str]:
    """All words, without what differs from machine to machine though nothing was measured."""
    return [word for line in FOREIGN.sub("", text).splitlines() for word in ELSEWHERE.sub(" ", line).split()]


def alike(one: str, other: str) -> bool:
    """Whether two outputs say the same: counts exactly, times and what has decimals but for one in the last digit."""
    left, right = words(one), words(other)
    return len(left) == len(right) and all(map(_same, left, right, [*left[1:], ""]))


def _same(one: str, other: str, unit: str) -> bool:
    if one == other:
        return True
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    return all(_near(a, b, unit) for a, b in zip(NUMBER.findall(one), NUMBER.findall(other), strict=True))


def _near(one: str, other: str, unit: str) -> bool:
    decimals = min(len(number.partition(".")[2]) for number in (one, other))
    counted = not decimals and unit not in TIMES
    return one == other if counted else abs(float(one) - float(other)) <= 1.01 * 10**-decimals


def run_python(page: str, name: str) -> None:
    """Run the Python blocks of a page one after the other, in one namespace."""
    namespace: dict[str, object] = {"__name__": name}
    for number, block in enumerate(block for block in blocks(page) if block.language == "python"):
        where = f"{name}[{number}]"
        if ">>>" not in block.text:
            exec(compile(block.text, where, "exec"), namespace)
            continue
        test = doctest.DocTestParser().get_doctest(block.text, namespace, where, name, 0)
        assert doctest.DocTestRunner(optionflags=OPTIONS).run(test, clear_globs=False).failed == 0, where
        namespace.update(test.globs)
