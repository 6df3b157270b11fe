"""What a person reads, as one record: a page of tables, facts and sentences.

The same page becomes text, what rich prints on a terminal, and HTML for a notebook. Computes nothing.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from latpred.units import format_duration

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table as Grid
    from rich.text import Text

WIDTH = 80
SPARKS = 60  # bars of a sparkline at most
_LONG_HEAD = 13  # characters of "90 % interval", up to which no head is broken in two lines
_BARS = "▁▂▃▄▅▆▇█"

Row = tuple[str, ...]


def listed(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@dataclass(frozen=True, slots=True)
class Table:
    """Cells under heads; a table without rows is not shown."""

    heads: Sequence[str]
    rows: Sequence[Row]
    left: Sequence[str] | None = None  # heads of columns of texts, which start left; None for the first
    folded: Sequence[str] = ()  # heads of the columns whose long cells go on in the next line
    title: str = ""  # a line above
    note: str = ""  # a sentence below
    total: bool = False  # whether the last row sums up the others

    def grid(self, width: int) -> Grid:
        """The table for rich, its columns closer to each other where it is wider than the page."""
        from rich.table import Table as Grid
        from rich.text import Text

        heads = [self._head(column) for column in range(len(self.heads))]
        columns = ["\n".join([head, *(row[at] for row in self.rows)]) for at, head in enumerate(heads)]
        widths = [max(map(len, cells.split("\n"))) for cells in columns]
        needed = sum(widths) + 2 * (len(columns) - 1)
        padding = (0, 2 if needed <= width else 1, 0, 0)
        # Rich cuts short what is wider than the page even so, unless a column may go on in the next line.
        folding = self.folded or [self.heads[widths.index(max(widths))]] * (sum(widths) + len(columns) - 1 > width)
        most_lines = max(head.count("\n") for head in heads)
        grid = Grid(box=None, pad_edge=False, padding=padding, header_style="bold")
        left = self.heads[:1] if self.left is None else self.left
        for name, head in zip(self.heads, heads, strict=True):
            above = "\n" * (most_lines - head.count("\n"))
            folded = name in folding
            grid.add_column(
                Text(above + head),
                justify="left" if name in left else "right",
                no_wrap=not folded,
                overflow="fold" if folded else "ellipsis",
            )
        for number, row in enumerate(self.rows, 1):
            grid.add_row(*map(Text, row), style="bold" if self.total and number == len(self.rows) else None)
        return grid

    def _head(self, column: int) -> str:
        """A head in two lines where it has two words and is wider than what stands under it, long names in more."""
        head = self.heads[column]
        most = max((_LONG_HEAD, *(len(row[column]) for row in self.rows)))
        if not column or len(head) <= most:
            return head
        wrapped = (textwrap.wrap(line, most, break_long_words=False) for line in head.split(" ", 1))
        return "\n".join(part for parts in wrapped for part in parts)

    def html(self) -> str:
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        head = "".join(f"<th>{escape(head)}</th>" for head in self.heads)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


class Facts(NamedTuple):
    """Names with what is to be said of each, aligned under each other."""

    rows: Sequence[tuple[str, str]]

    def lines(self) -> list[str]:
        width = max((len(name) for name, _ in self.rows), default=0) + 1
        return [f"{name:<{width}} {text}" for name, text in self.rows]

    def html(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(n)}</th><td>{escape(t)}</td></tr>" for n, t in self.rows
        )
        return f"<table>{rows}</table>"


@dataclass(frozen=True, slots=True)
class Page:
    """A title and what stands under it, in the order in which it is read."""

    title: str  # empty where the first part says what it is about
    parts: Sequence[Table | Facts | str]  # a string is a sentence, or several lines that are kept apart
    # Whether sentences are wrapped at the width of the page and tables stand between empty lines. Without it, a
    # sentence is a line however long, which a terminal wraps itself and other programs can search.
    prose: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width, before = options.max_width, None
        if self.title:
            yield _line(self.title, "bold")
        for part in self.parts:
            if isinstance(part, Table) and not part.rows:
                continue
            if self.prose and (before is None or isinstance(part, Table) or isinstance(before, Table)):
                yield ""
            if isinstance(part, Table):
                if part.title:
                    yield _line(part.title, "bold")
                yield part.grid(width)
            for line in self._lines(part.note if isinstance(part, Table) else part, width):
                yield _line(line)
            before = part

    def _lines(self, part: Facts | str, width: int) -> list[str]:
        lines = part.lines() if isinstance(part, Facts) else part.splitlines()
        if not self.prose:
            return lines
        wrapped = (textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False) for line in lines)
        return [line for several in wrapped for line in several or [""]]

    def text(self, width: int = WIDTH) -> str:
        """The page as plain text of so many columns."""
        from rich.console import Console

        stream = io.StringIO()
        console = Console(file=stream, width=width, color_system=None, legacy_windows=False, force_jupyter=False)
        console.print(self, crop=False)
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())

    def html(self) -> str:
        shown = [part for part in self.parts if (part.rows if isinstance(part, Table) else part)]
        parts = [_paragraph(part) if isinstance(part, str) else part.html() for part in shown]
        return f"<div><strong>{escape(self.title)}</strong>{''.join(parts)}</div>"


def _paragraph(text: str) -> str:
    """A sentence in HTML, or several lines that are kept apart."""
    return f"<p>{'<br/>'.join(map(escape, text.splitlines()))}</p>"


def _line(text: str, style: str = "") -> Text:
    """A line as long as it is: what does not fit is for the terminal to wrap."""
    from rich.text import Text

    return Text(text, style, no_wrap=True, overflow="ignore")


def sparkline(values: Sequence[float]) -> str:
    """Bars from zero to the largest value; long series are thinned.

    >>> sparkline([1, 2, 4, 8])
    '▁▂▄█'
    """
    step = -(-len(values) // SPARKS)
    most = max(values)
    return "".join(_BARS[max(0, -(-int(v / most * 80) // 10) - 1)] if most else _BARS[0] for v in values[::step])


def format_ms(milliseconds: float) -> str:
    """A duration with its unit.

    >>> format_ms(0.25)
    '250 us'
    """
    return format_duration(milliseconds / 1e3)


def format_interval(interval_ms: tuple[float, float]) -> str:
    """Both ends of an interval, the unit said once where both have it.

    >>> format_interval((1.5, 2.0)), format_interval((0.5, 2.0))
    ('1.50 to 2.00 ms', '500 us to 2.00 ms')
    """
    low, high = map(format_ms, interval_ms)
    number, unit = low.split()
    return f"{number if unit == high.split()[1] else low} to {high}"


def format_threshold(threshold: tuple[int | None, int | None, int | None]) -> str:
    """A batch size with the ends of its interval, the upper of which may be beyond all that was looked at.

    >>> format_threshold((6, 4, 9)), format_threshold((6, 4, None)), format_threshold((6, 6, 6))
    ('6 (90 %: 4 to 9)', '6 (90 %: 4 or more)', '6')
    """
    batch, low, high = threshold
    if low == high:
        return str(batch)
    return f"{batch} (90 %: {low} or more)" if high is None else f"{batch} (90 %: {low} to {high})"
