"""The page of a report: a jinja2 template filled with sentences, tables and charts, and one copy of Vega-Lite."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from latpred.errors import MissingPackageError, UsageError
from latpred.render.explanation_text import AXES, changes, growth, shares
from latpred.storage import result_file

if TYPE_CHECKING:
    from latpred.report.gathering import Studied

# What the bundle gives to the page.
_EXPORT = "window.latpredEmbed = vegaEmbed;"
_NEEDED = {"altair": "altair", "vl_convert": "vl-convert-python", "jinja2": "jinja2"}


class Chart(NamedTuple):
    """A figure: its anchor, what it shows, and its Vega-Lite document as JSON that is safe inside a script element."""

    anchor: str
    about: str
    document: str


def html(parts: Sequence[Studied]) -> str:
    """The page about some models.

    Raises
    ------
    MissingPackageError
        When a package that draws it is not installed.
    UsageError
        When there is no model.
    """
    if not parts:
        raise UsageError("A report needs a model; give one or more.")
    demand_packages()
    from jinja2 import Environment, StrictUndefined

    from latpred.report import words

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["glued"] = words.glued
    source = resources.files("latpred.report").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=f"Latency of {', '.join(studied.name for studied in parts)}",
        device=parts[0].explanation.fastest.prediction.device,
        overview=words.overview(list(parts)),
        parts=[_part(number, studied) for number, studied in enumerate(parts, 1)],
        trust=words.trust(parts[0].profile, parts[0].curves[0].setting),
        checks=words.checks(parts[0].profile),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=version("latpred"),
        bundle=_bundle(),
    )


def write(parts: Sequence[Studied], path: str | os.PathLike[str]) -> Path:
    """Write the page into a file.

    Raises
    ------
    MissingPackageError, UsageError
        As for `html`; also when the file cannot be written.
    """
    text, wanted = html(parts), Path(path)
    with result_file(wanted) as part:
        part.write_text(text, encoding="utf-8")
    return wanted


def demand_packages() -> None:
    """Make sure that everything a report needs is installed.

    Raises
    ------
    MissingPackageError
        When something is not.
    """
    missing = [name for module, name in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise MissingPackageError(
            f"Reports need {', '.join(missing)}. Install what is missing with: pip install 'latpred[report]'"
        )


def _part(number: int, studied: Studied) -> dict[str, Any]:
    """What the template knows of one model."""
    from latpred.report import words

    found = studied.explanation
    return {
        "anchor": f"model-{number}",
        "name": studied.name,
        "answer": words.answer(studied),
        "advice": found.advice,
        "gap": words.gap(studied),
        "charts": _charts(number, studied),
        "runtimes": words.runtimes(studied),
        "points": words.points(studied.curves),
        "shares": shares(found),
        "growth": [(growth(name, headroom), changes(headroom)) for name, headroom in found.headrooms.items()],
        "facts": words.facts(studied),
        "caveats": words.caveats(studied),
        "axes": sorted({AXES.get(room.axis, room.axis) for one in found.headrooms.values() for room in one.rooms}),
    }


def _charts(number: int, studied: Studied) -> dict[str, Chart]:
    from latpred.report import charts

    found = studied.explanation
    points = [choice.prediction for choice in found.choices]
    forward = studied.forward.prediction
    idle = studied.forward.gaps.total_us / 1e3 / forward.latency_ms if forward.latency_ms else 0.0
    made = {
        "curve": (
            f"Latency of {studied.name} against batch size on logarithmic axes, with its 90 % interval, the host's "
            "overhead, the device's compute, the regimes and the crossover",
            charts.curve(studied.curves),
        ),
        "runtimes": (f"Latency of each runtime at batch {found.batch} with its 90 % interval", charts.runtimes(points)),
        "shares": ("Host and device time of each runtime by class of operations", charts.shares(points)),
        "clocks": (
            f"Part of one forward pass in {forward.runtime}: what the host dispatches and what the device runs; "
            f"between kernels the device idles for {idle:.0%} of the whole pass",
            charts.two_clocks(studied.forward),
        ),
    }
    return {name: Chart(f"{name}-{number}", about, _json(document)) for name, (about, document) in made.items()}


def _json(document: dict[str, Any]) -> str:
    """JSON in which no text can end the script element around it."""
    return json.dumps(document, allow_nan=False).replace("<", "\\u003c")


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script that needs no network."""
    import vl_convert

    found: str = vl_convert.javascript_bundle(_EXPORT)
    return found.replace("</script", "<\\/script")
