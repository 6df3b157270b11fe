"""How verbs are found, and how what goes wrong becomes one sentence and an exit code."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any, TextIO

import click

from latpred.errors import LatpredError, UsageError

SUMMARIES = {
    "predict": "Predict the latency of MODEL, with its interval, its regime and its crossover batch.",
    "curve": "Predict the latency of MODEL over a range of batch sizes; see `latpred predict` for what MODEL may be.",
    "explain": (
        "Compare runtimes for MODEL: what each takes, where the time goes, how far it can grow, what to change."
    ),
    "timeline": (
        "Follow host and device through one forward pass of MODEL: every dispatch, every kernel, and the gaps between."
    ),
    "report": (
        "Write one HTML file about MODELS: answer, figures, runtimes, what is free, what to change, "
        "how far to trust it."
    ),
    "generate": "Predict how long MODEL takes to generate text: its first token, each further one, and all of them.",
    "trace": "Walk MODEL without a device: operations, multiply-adds, bytes and launches of one forward pass.",
    "calibrate": (
        "Measure what ops and kernels cost on this machine, and keep it as a profile. Once per machine and device."
    ),
    "check": (
        "Say in half a minute whether a PROFILE of this machine still holds, after a new driver, torch or library."
    ),
    "adapt": "Correct a profile with a few measured models, and say what that bought.",
    "fit": "Fit a profile from a calibration's journal, or from a TABLE of published latencies, and keep it.",
    "measure": "Run models on this machine and time them, in rounds, with the repeat noise of the same run.",
    "compare": "Compare a predicted with a measured table: errors, order, crossover and knee, intervals, baselines.",
    "validate": "Measure whole models that no fit has seen, and compare the profile's predictions with them.",
    "evaluate": "Predict every cell of a measurement table made elsewhere, and say how far off that is.",
    "models": "List the models that go by name, or those with TEXT in a name. Any name works with _ for - and - for _.",
    "profiles": "List, show and locate device profiles.",
    "cache": "Show or clear what latpred keeps only to save time.",
    "doctor": "Say what stands between this machine and a prediction, and what to do about it.",
}


INTERRUPTED = 130


@dataclass
class State:
    """What one invocation carries from the group to its verb, and back to the error handler.

    Attributes
    ----------
    debug : bool
        Show tracebacks.
    quiet : bool
        Say nothing on stderr but errors.
    resumable : bool
        The verb keeps what it measures, so that the same command goes on where it was stopped.
    results : TextIO or None
        Where results go while a verb runs; what anybody else prints goes to stderr.
    """

    debug: bool = False
    quiet: bool = False
    resumable: bool = False
    results: TextIO | None = None


class ReaderGoneError(Exception):
    """Nobody reads the results any more, as `head` when it has enough."""


class UnwritableError(LatpredError):
    """The results cannot be written to stdout."""

    exit_code = 3


@contextmanager
def only_results() -> Iterator[None]:
    """Within it, stdout is for results alone: what a user's model prints is no part of a JSON document."""
    state = click.get_current_context().ensure_object(State)
    state.results = sys.stdout
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def results() -> Iterator[TextIO]:
    """Give the stream for results.

    Raises
    ------
    ReaderGoneError
        When nobody reads it.
    UnwritableError
        When it cannot be written, as on a full disk.
    """
    context = click.get_current_context(silent=True)
    state = context.find_object(State) if context else None
    stream = (state.results if state else None) or sys.stdout
    try:
        yield stream
        stream.flush()
    except OSError as error:
        _drop(stream)
        if isinstance(error, BrokenPipeError):
            raise ReaderGoneError from None
        raise UnwritableError(f"cannot write the result: {error.strerror or error}; name a file with -o.") from error


def _drop(stream: TextIO) -> None:
    """Let what the stream still holds vanish, which Python would try to write once more when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class SuggestingGroup(click.Group):
    """A group that names the nearest verb when it does not know the one given."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb that the arguments start with."""
        name, known = args[0], self.list_commands(ctx)
        if name in known or name.startswith("-"):
            return super().resolve_command(ctx, args)
        import difflib

        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}."
        raise click.UsageError(f"No such command {name!r}. {hint}", ctx)


class VerbGroup(SuggestingGroup):
    """The top group: it imports the module of a verb when the verb is asked for, and answers for errors."""

    def __init__(self, *args: Any, verbs: dict[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, in the order of --help."""
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb."""
        if cmd_name not in self._verbs:
            return None
        module = importlib.import_module(f"latpred.cli.{self._verbs[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        limit = formatter.width - 6 - max(map(len, self._verbs))
        known = [click.Command(name, help=SUMMARIES[name]) for name in self._verbs]
        with formatter.section("Commands"):
            formatter.write_dl([(str(verb.name), verb.get_short_help_str(limit)) for verb in known])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; say what went wrong in a sentence on stderr, and exit with its code."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
        try:
            return super().invoke(ctx)
        except LatpredError as error:
            _say(ctx, str(error))
            ctx.exit(error.exit_code)
        except ReaderGoneError:
            ctx.exit(0)
        except SystemExit as end:
            _say(ctx, f"the model's own code ended the program with sys.exit({end.code!r}); take that out.")
            ctx.exit(UsageError.exit_code)
        except (KeyboardInterrupt, click.Abort) as stop:
            kept = "what was measured is kept, run the same command to go on" if ctx.obj.resumable else str(stop)
            _say(ctx, f"interrupted; {kept}." if kept else "interrupted.")
            ctx.exit(INTERRUPTED)


def _say(ctx: click.Context, sentence: str) -> None:
    """An error on stderr, below its traceback where that was asked for."""
    if ctx.obj.debug:
        import traceback

        click.echo(traceback.format_exc(), err=True)
    click.echo(f"latpred: {sentence}", err=True)
