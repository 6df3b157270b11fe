"""`--plot FILE`: what it takes is checked before anything is predicted or measured, and drawn when all is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from latpred.cli.options import Verb
from latpred.cli.output import notice

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_option(verb: Verb) -> Verb:
    """`--plot`, handed to the verb as `plot`."""
    return click.option(
        "--plot",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_checked,
        help="Draw a figure into this file too: .png, .svg or .pdf.",
    )(verb)


def draw(path: Path | None, figure: Callable[[], Figure]) -> None:
    """Make a figure and write it, where one is wanted.

    Raises
    ------
    UsageError
        When the file cannot be written.
    """
    if path is None:
        return
    from latpred.plot import save

    notice(f"wrote {save(figure(), path)}")


def _checked(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """The path, if a figure can be drawn at all: minutes of measuring must not end in a missing package."""
    if path is not None:
        from latpred.plot import style
        from latpred.storage import demand_writable

        demand_writable(style.checked_path(path))
        with style.in_style():
            pass
    return path
