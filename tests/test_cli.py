"""The command line itself: finding verbs, reading options, streams, files, exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from clidata import run
from torch import nn

import latpred
from latpred.cli import calibrate, main, output
from latpred.cli.options import parse_batches, parse_seconds
from latpred.errors import CalibrationError, LatpredError, UsageError
from latpred.progress import ProgressEvent, bar, each_tenth


def test_help_lists_every_verb_and_a_command_to_start_with() -> None:
    shown = run("--help")
    assert shown.exit_code == 0
    listed = re.findall(r"^  (\w+)  +(\w.*)$", shown.stdout.partition("Commands:")[2], re.MULTILINE)
    assert [name for name, _ in listed] == list(main.commands)
    assert "latpred predict bert-base-uncased --batch 1,8,32" in shown.stdout


def test_version() -> None:
    assert run("--version").stdout == f"latpred {latpred.__version__}\n"


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_batches, "8,1,8,32", (8, 1, 32)),
        (parse_batches, "1-4,8-32:8,64-256:2x", (1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 256)),
        (parse_batches, "4-4", (4,)),
        (parse_batches, "3-100:3x", (3, 9, 27, 81)),
        (parse_batches, " 1 , 2-3 ", (1, 2, 3)),
        (parse_seconds, "90", 90),
        (parse_seconds, "1.5h", 5400),
        (parse_seconds, "0.5 m", 30),
    ],
)
def test_the_grammar_of_batches_and_times(parse: Callable[[str], object], text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize("error", [UsageError("a was wrong. Do b."), CalibrationError("c failed. Do d.")])
def test_an_error_is_one_sentence_on_stderr_and_its_exit_code(
    error: LatpredError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("latpred.storage.usage", fail)
    shown = run("cache", "show")
    assert (shown.exit_code, shown.stdout, shown.stderr) == (error.exit_code, "", f"latpred: {error}\n")
    for arguments in (("--debug", "cache", "show"), ("cache", "show", "--debug")):
        shown = run(*arguments)
        assert shown.exit_code == error.exit_code
        assert "Traceback (most recent call last)" in shown.stderr
        assert shown.stderr.endswith(f"latpred: {error}\n")
