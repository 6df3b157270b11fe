"""How verbs are found, and how what goes wrong becomes one sentence and an exit code."""

from __future__ import annotations

import importlib
import io
import sys
from dataclasses import dataclass
from typing import Any

import click

from latpred.cli.summaries import SUMMARIES
from latpred.errors import LatpredError

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
    """

    debug: bool = False
    quiet: bool = False
    resumable: bool = False


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
        except (KeyboardInterrupt, click.Abort):
            kept = "; what was measured is kept, run the same command to go on" if ctx.obj.resumable else ""
            _say(ctx, f"interrupted{kept}.")
            ctx.exit(INTERRUPTED)


def _say(ctx: click.Context, sentence: str) -> None:
    """An error on stderr, below its traceback where that was asked for."""
    if ctx.obj.debug:
        import traceback

        click.echo(traceback.format_exc(), err=True)
    click.echo(f"latpred: {sentence}", err=True)
