"""What a misspelt verb is answered, and how what goes wrong becomes one sentence and an exit code."""

from __future__ import annotations

import difflib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

import click

from latpred.errors import BusyWarning, LatpredError, UsageError
from latpred.progress import sigterm_as_ctrl_c

INTERRUPTED = 130
_ELSEWHERE = "send stdout elsewhere: > FILE"  # which every verb allows, whatever its -o is


@dataclass
class State:
    """What one invocation carries from the group to its verb, and back to the error handler."""

    debug: bool = False  # show tracebacks
    quiet: bool = False  # say nothing on stderr but errors
    go_on: str = ""  # what to do to go on where an interrupt stopped the verb; "" where nothing is kept
    # Where results go, None where stdout is closed; while a verb runs, what anybody else prints goes to stderr.
    results: TextIO | None = field(default_factory=lambda: sys.stdout)


def state() -> State:
    """That of the invocation under way; a fresh one outside of any."""
    context = click.get_current_context(silent=True)
    return State() if context is None else context.ensure_object(State)


class _ReaderGoneError(Exception):
    """Nobody reads the results any more, as `head` when it has enough."""


class _UnwritableError(LatpredError):
    """What must be written, as results to stdout, cannot be."""

    exit_code = 3


def demand_stdout() -> TextIO:
    """The stream for results; an error where it is closed."""
    stream = state().results
    if stream is None:
        raise _UnwritableError(f"cannot write the result: stdout is closed; {_ELSEWHERE}.")
    return stream


@contextmanager
def results() -> Iterator[TextIO]:
    """Give the stream for results; say so when nobody reads it, or it cannot be written, as on a full disk."""
    stream = demand_stdout()
    try:
        yield stream
        stream.flush()
    except OSError as error:
        with suppress(OSError, ValueError):  # what the stream still holds must vanish, or Python writes it at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise _ReaderGoneError from None
        raise _UnwritableError(f"cannot write the result: {error.strerror or error}; {_ELSEWHERE}.") from error


class SuggestingGroup(click.Group):
    """A group that names the nearest verb when it does not know the one given."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb that the arguments start with."""
        name, known = args[0], self.list_commands(ctx)
        if name in known or name.startswith("-"):
            return super().resolve_command(ctx, args)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}."
        raise click.UsageError(f"No such command {name!r}. {hint}", ctx)


class VerbGroup(SuggestingGroup):
    """The top group, which answers for errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, in the order of --help."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs, each with the first line of its own help, however narrow the terminal is."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, str(verb.help).partition("\n")[0]) for name, verb in self.commands.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; say what went wrong in a sentence on stderr, and exit with its code."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
        ctx.ensure_object(State)
        try:
            with sigterm_as_ctrl_c(), warnings.catch_warnings():
                warnings.showwarning = partial(_warn, ctx, warnings.showwarning)
                return super().invoke(ctx)
        except LatpredError as error:
            _say(ctx, str(error))
            ctx.exit(error.exit_code)
        except _ReaderGoneError:
            ctx.exit(0)
        except SystemExit as end:
            _say(ctx, f"the model's own code ended the program with sys.exit({end.code!r}); take that out.")
            ctx.exit(UsageError.exit_code)
        except (KeyboardInterrupt, click.Abort) as stop:
            kept = f"what was measured is kept, {ctx.obj.go_on}" if ctx.obj.go_on else str(stop)
            _say(ctx, f"interrupted; {kept}." if kept else "interrupted.")
            ctx.exit(INTERRUPTED)
        except (OSError, MemoryError, ModuleNotFoundError, UnicodeEncodeError) as error:
            said = _of_system(error)
            if not said:
                raise
            _say(ctx, said)
            ctx.exit(_UnwritableError.exit_code)


def _of_system(error: Exception) -> str:
    """What is wrong with the system, where an error says so that anything may raise; "" of all others."""
    if isinstance(error, MemoryError):
        return "the memory that this process may take is used up; allow it more (ulimit -v, or a container's limit)."
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; install latpred with all that it needs: python -m pip install latpred"
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        return "a name holds bytes that are no text in this locale; rename the file, or set PYTHONUTF8=1."
    if "temporary directory" in str(error):  # of Python's tempfile, which PyTorch asks at import
        return "there is no folder for temporary files that can be written; name one with TMPDIR=DIR."
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")  # which PyTorch's compiler makes where it is imported
    if isinstance(error, OSError) and error.filename and cache.startswith(str(error.filename)):
        return f"cannot make {cache}: {error.strerror}; name another folder with TORCHINDUCTOR_CACHE_DIR=DIR."
    return ""


def _warn(ctx: click.Context, show: Callable[..., None], message: Warning | str, *where: Any) -> None:
    """A warning of latpred's own is a sentence on stderr as well; others are shown as Python does."""
    if not isinstance(message, BusyWarning):
        show(message, *where)
    elif not ctx.obj.quiet:
        click.echo(message, err=True)


def _say(ctx: click.Context, sentence: str) -> None:
    """An error on stderr, below its traceback where that was asked for."""
    if ctx.obj.debug:
        click.echo(traceback.format_exc(), err=True)
    click.echo(f"latpred: {sentence}", err=True)
