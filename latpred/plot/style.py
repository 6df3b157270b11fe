"""How all figures look: sizes for a column of a paper, colours that colour-blind readers tell apart, shapes for grey.

Colours are those of Okabe and Ito. No line, bar or region is told from another by colour alone: lines differ in dashes,
bars in hatches, regions in names. Nothing here knows what is drawn.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from latpred.errors import MissingPackageError, UsageError
from latpred.storage import result_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLUMN_IN, PAGE_IN = 3.3, 6.9  # width of one column of a paper, and of both
FORMATS = (".png", ".svg", ".pdf")

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#777777"

REGIONS = {"framework-bound": "#FDF3DF", "compute-bound": "#EAF3FB", "memory-bound": "#E6F4EE"}
REGION_HATCH = "#F0DDB4"
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (9, 2)), (0, (3, 1, 1, 1, 1, 1)))
LINES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, BLACK, SKY)
MARKERS = "osD^vPX"
FILLS = (BLUE, ORANGE, GREEN, SKY, VERMILION, YELLOW, PURPLE, GREY)
# Lines alone: a pattern of dots or circles takes 140 to 260 KB of an SVG, in each figure.
HATCHES = ("", "////", "----", "xxxx", "\\\\\\\\", "++", "||||", "////----")

_RC: Any = {
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 6.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.2,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "savefig.dpi": 300,
    "svg.fonttype": "none",  # text stays text: to be searched and read aloud
    "pdf.fonttype": 42,
    "svg.hashsalt": "latpred",  # the same figure gives the same file
    "text.parse_math": False,  # names of models may hold dollar signs
}
# A date would make two files of one figure differ.
_METADATA: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


class Look(NamedTuple):
    colour: str
    hatch: str


@contextmanager
def in_style() -> Iterator[None]:
    """Draw in this style, or say what to install where matplotlib is missing; a decorator as well."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingPackageError("Figures need matplotlib. Install it with: pip install 'latpred[plot]'") from error
    with mpl.rc_context(_RC):
        yield


def axes(ax: Axes | None, height_in: float = 2.8) -> Axes:
    """The axes given, or those of a new figure as wide as a column."""
    if ax is not None:
        return ax
    from matplotlib import pyplot

    _, new = pyplot.subplots(figsize=(COLUMN_IN, height_in), layout="constrained")
    return new


@in_style()
def blank(height_in: float = 2.8, width_in: float = COLUMN_IN) -> Axes:
    """Axes of a new figure that no window or notebook knows of: to be drawn into and saved."""
    made: Axes = figure(width_in, height_in).subplots()
    return made


def figure_of(ax: Axes) -> Figure:
    """The figure that axes are part of."""
    found = ax.get_figure(root=True)
    assert found is not None
    return found


@in_style()
def figure(width_in: float = COLUMN_IN, height_in: float = 2.4) -> Figure:
    """A new figure that no window or notebook knows of."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


def legend_below(ax: Axes, gap: float = 0.38, columns: int = 2, handles: Sequence[Any] | None = None) -> None:
    """A legend under the axis label, `gap` inches below the axes."""
    from matplotlib.transforms import ScaledTranslation

    below = ax.transAxes + ScaledTranslation(0.0, -gap, ax.figure.dpi_scale_trans)
    ax.legend(
        handles=ax.get_legend_handles_labels()[0] if handles is None else handles,
        loc="upper center", bbox_to_anchor=(0.5, 0.0), bbox_transform=below, ncols=columns, columnspacing=1.0,
        borderaxespad=0.0,
    )  # fmt: skip


def plain_ticks(axis: Axis, limits: tuple[float, float]) -> None:
    """Numbers instead of powers of ten on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    few = limits[1] / limits[0] < 100
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if few else (1,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def looks(names: Sequence[str]) -> dict[str, Look]:
    """A colour and a hatch for each of at most eight names."""
    return dict(zip(names, map(Look, FILLS, HATCHES), strict=False))


def checked_path(path: str | os.PathLike[str]) -> Path:
    wanted = Path(path)
    if wanted.suffix.lower() not in FORMATS:
        raise UsageError(f"{wanted} does not say what kind of figure it is; end it in {', '.join(FORMATS)}.")
    return wanted


def save(made: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as PNG, SVG or PDF, as the file's ending says."""
    wanted = checked_path(path)
    ending = wanted.suffix.lower()  # which a link's target need not have
    with result_file(wanted) as part, in_style():
        made.savefig(part, format=ending.removeprefix("."), metadata=_METADATA.get(ending, {}))
    return wanted


def svg(made: Figure) -> bytes:
    text = io.BytesIO()
    with in_style():
        made.savefig(text, format="svg", metadata=_METADATA[".svg"])
    return text.getvalue()
