"""How what goes wrong becomes one sentence and an exit code."""

from __future__ import annotations

import io
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

import click

from latpred.errors import DISK_FULL, BusyWarning, LatpredError
from latpred.progress import sigterm_as_ctrl_c

INTERRUPTED = 130


@dataclass
class State:
    """What one invocation carries from the group to its verb, and back to the error handler."""

    debug: bool = False  # show tracebacks
    quiet: bool = False  # say nothing on stderr but errors
    go_on: str = ""  # what to do to go on where an interrupt stopped the verb; "" where nothing is kept
    # Where results go; while a verb runs, what anybody else prints goes to stderr.
    results: TextIO = field(default_factory=lambda: sys.stdout)


def state() -> State:
    """That of the invocation under way; a fresh one outside of any."""
    context = click.get_current_context(silent=True)
    return State() if context is None else context.ensure_object(State)


class VerbGroup(click.Group):
    """The top group, which answers for errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, in the order of --help."""
        return list(self.commands)

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
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            _say(ctx, f"no room is left on the disk: {error}. Free some, and run the same command again.")
            ctx.exit(3)
        except (KeyboardInterrupt, click.Abort) as stop:
            kept = f"what was measured is kept, {ctx.obj.go_on}" if ctx.obj.go_on else str(stop)
            _say(ctx, f"interrupted; {kept}." if kept else "interrupted.")
            ctx.exit(INTERRUPTED)


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
