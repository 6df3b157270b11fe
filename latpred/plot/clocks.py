"""The two clocks of one forward pass: a row of what the host dispatches and a row of what the device runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from latpred.plot import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from latpred.forward import ForwardPass, Span

ROWS = {"host": 1.0, "device": 0.0}
KINDS = 7  # classes with a colour of their own
CLOSE = 36  # kernels in the part that is looked at closely
_HEIGHT = 0.62
_WAIT = "synchronise"
_OTHER, _WAITING = "white", "#dddddd"


@style.drawn
def timeline(found: ForwardPass, ax: Axes | None = None, *, start_ms: float = 0.0, end_ms: float | None = None) -> Axes:
    """Spans of host and device between two times; what is white in the device's row is idle.

    Raises
    ------
    MissingPackageError
        When matplotlib is not installed.
    """
    ax = style.axes(ax, 1.5)
    end_ms = found.prediction.latency_ms if end_ms is None else end_ms
    shown = [span for span in found.spans if span.end_us > start_ms * 1e3 and span.start_us < end_ms * 1e3]
    look = style.looks(kinds(found))
    for kind, style_of in look.items():
        for row, height in ROWS.items():
            spans = [(s.start_us / 1e3, (s.end_us - s.start_us) / 1e3) for s in shown if (s.row, s.kind) == (row, kind)]
            ax.broken_barh(
                spans, (height - _HEIGHT / 2, _HEIGHT), facecolor=style_of.colour, edgecolor=style.BLACK,
                linewidth=0.25 if len(shown) < 200 else 0.0, hatch=style_of.hatch if len(shown) < 200 else "",
            )  # fmt: skip
    _rest(ax, shown, look)
    ax.set_yticks(list(ROWS.values()), list(ROWS))
    ax.set(xlim=(start_ms, end_ms), ylim=(-0.55, 1.55), xlabel="time since the call (ms)")
    ax.tick_params(axis="y", length=0)
    return ax


@style.drawn
def two_clocks(found: ForwardPass, into: Figure | None = None) -> Figure:
    """The whole forward pass, and below it a part from its middle with an arrow from each step to its kernel.

    Raises
    ------
    MissingPackageError
        When matplotlib is not installed.
    """
    into = into or style.figure(style.COLUMN_IN, 2.9)
    above, below = into.subplots(2, 1)
    point = found.prediction
    timeline(found, above)
    busy = f"host {point.overhead_ms:.3g} ms, device {point.compute_ms:.3g} ms of {point.latency_ms:.3g} ms"
    above.set_title(f"{point.model}, batch {point.batch}, {point.precision}, {point.runtime} on {point.device}\n{busy}")
    above.set_xlabel("")
    start, end = middle(found)
    above.axvspan(start, end, facecolor="none", edgecolor=style.BLACK, linewidth=0.9, zorder=5)
    timeline(found, below, start_ms=start, end_ms=end)
    _arrows(below, found, start, end)
    into.legend(handles=_patches(found), loc="outside lower center", ncols=4, columnspacing=1.0, handlelength=1.6)
    return into


def kinds(found: ForwardPass) -> list[str]:
    """Classes of ops that take most time, the first of them with the plainest look."""
    total: dict[str, float] = {}
    for span in found.spans:
        if span.kind != _WAIT:
            total[span.kind] = total.get(span.kind, 0.0) + span.end_us - span.start_us
    return sorted(total, key=lambda kind: -total[kind])[:KINDS]


def middle(found: ForwardPass) -> tuple[float, float]:
    """Milliseconds of a part in the middle that holds a few dozen kernels, all of a short one."""
    kernels = found.row("device")
    if len(kernels) <= CLOSE:
        return 0.0, found.prediction.latency_ms
    first = (len(kernels) - CLOSE) // 2
    launch = {span.step: span.start_us for span in found.row("host") if span.kind != _WAIT}
    return launch[kernels[first].step] / 1e3, kernels[first + CLOSE - 1].end_us / 1e3


def _rest(ax: Axes, shown: list[Span], look: dict[str, style.Look]) -> None:
    """Classes without a colour, and waiting."""
    for colour, spans in (
        (_OTHER, [span for span in shown if span.kind not in look and span.kind != _WAIT]),
        (_WAITING, [span for span in shown if span.kind == _WAIT]),
    ):
        for row, height in ROWS.items():
            ax.broken_barh(
                [(s.start_us / 1e3, (s.end_us - s.start_us) / 1e3) for s in spans if s.row == row],
                (height - _HEIGHT / 2, _HEIGHT), facecolor=colour, edgecolor=style.GREY, linewidth=0.4,
            )  # fmt: skip


def _patches(found: ForwardPass) -> list[Patch]:
    """For the legend: every class that occurs, whether in the close-up or not."""
    from matplotlib.patches import Patch

    line: dict[str, Any] = {"edgecolor": style.BLACK, "linewidth": 0.4}
    look = style.looks(kinds(found))
    made = [Patch(facecolor=one.colour, hatch=one.hatch, label=kind, **line) for kind, one in look.items()]
    present = {span.kind for span in found.spans}
    made += [Patch(facecolor=_OTHER, label="other", **line)] * bool(present - {*look, _WAIT})
    return made + [Patch(facecolor=_WAITING, label="waiting", **line)] * (_WAIT in present)


def _arrows(ax: Axes, found: ForwardPass, start_ms: float, end_ms: float) -> None:
    ends = {span.step: span.end_us for span in found.row("host") if span.kind != _WAIT}
    kernels = [k for k in found.row("device") if start_ms <= k.start_us / 1e3 <= end_ms]
    x = np.array([[ends[k.step] / 1e3, k.start_us / 1e3] for k in kernels]).reshape(-1, 2)
    bottom, top = ROWS["host"] - _HEIGHT / 2, ROWS["device"] + _HEIGHT / 2
    ax.plot(x.T, np.tile([[bottom], [top]], len(x)), color=style.GREY, linewidth=0.5)
