"""The report in a real browser: nothing fails, nothing is fetched, it fits any screen, all can read it.

Needs a Chromium on the machine; without one these tests are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reportdata import half_unknown, network, studied

from latpred import report

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on this machine")

WIDTHS = (400, 1600)
TABLES = "(tables) => tables.map((table) => [table.scrollWidth, table.closest('.wide').clientWidth])"
CHARTS = 4
PAPER_PX = 680  # of A4 between margins of 15 mm, at 96 to the inch


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LATPRED_HOME", str(tmp_path_factory.mktemp("home")))
        yield report.write(studied(network(), half_unknown()), tmp_path_factory.mktemp("report") / "report.html")


class Opened:
    """A page with all its charts drawn, and what it said and asked for meanwhile."""

    def __init__(self, browser: Any, path: Path, width: int) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.said: list[str] = []
        self.fetched: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.fetched.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_function(f"document.querySelectorAll('.chart svg[aria-hidden]').length == {2 * CHARTS}")


@pytest.mark.parametrize("width", WIDTHS)
def test_it_draws_and_fits_without_a_word(browser: Any, path: Path, width: int) -> None:
    opened = Opened(browser, path, width)
    page = opened.page
    assert opened.said == []
    assert [url for url in opened.fetched if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    sizes = page.evaluate(
        "[...document.querySelectorAll('.chart svg')].map((svg) => svg.getBoundingClientRect().width)"
    )
    assert all(0.6 * min(width, 450) < size <= width for size in sizes)
    marks = page.evaluate(
        "[...document.querySelectorAll('.chart svg')].map((svg) => svg.querySelectorAll('path').length)"
    )
    assert min(marks) > 5


@pytest.mark.parametrize(("width", "fits"), [(400, False), (600, False), (1000, True)])
def test_every_table_fits_or_scrolls_in_its_own_box(browser: Any, path: Path, width: int, fits: bool) -> None:
    page = Opened(browser, path, width).page
    page.eval_on_selector_all("details", "(all) => all.forEach((one) => { one.open = true; })")
    sizes = page.eval_on_selector_all("table", TABLES)
    assert len(sizes) > 8
    assert max(box for _, box in sizes) < width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    scrolls = page.eval_on_selector_all(".wide", "(all) => all.map((one) => getComputedStyle(one).overflowX)")
    assert set(scrolls) == {"auto"}
    if fits:
        assert [(table, box) for table, box in sizes if table > box] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_everybody_can_read_it(browser: Any, path: Path, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(Opened(browser, path, width).page).response["violations"]
    assert [(one["impact"], one["id"], one["nodes"][0]["html"]) for one in found] == []


def test_another_runtime_can_be_chosen(browser: Any, path: Path) -> None:
    page = Opened(browser, path, 1600).page
    chart = page.locator("#curve-1")
    before = chart.locator("svg").inner_html()
    chosen = page.get_by_label("Runtime shown").first
    assert chosen.input_value() == "cuda-graphs"
    chosen.select_option("eager")
    page.wait_for_function("(old) => document.querySelector('#curve-1 svg').innerHTML != old", arg=before)


def test_a_point_tells_its_numbers(browser: Any, path: Path) -> None:
    page = Opened(browser, path, 1600).page
    page.locator("#curve-1").scroll_into_view_if_needed()
    box = page.locator("#curve-1 svg .mark-symbol.role-mark path").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#vg-tooltip-element.visible", timeout=10_000)
    assert "latency (ms)" in page.locator("#vg-tooltip-element").inner_text()


def test_on_paper_all_tables_are_open(browser: Any, path: Path) -> None:
    page = Opened(browser, path, 1600).page
    count = "document.querySelectorAll('details[open]').length"
    page.evaluate(f"addEventListener('beforeprint', () => {{ window.openOnPaper = {count}; }})")
    assert page.evaluate(count) == 0
    assert page.pdf()[:4] == b"%PDF"
    assert page.evaluate("window.openOnPaper") == 4


def test_on_paper_no_chart_is_cut(browser: Any, path: Path) -> None:
    page = Opened(browser, path, 1600).page
    widths = "[...document.querySelectorAll('.chart svg')].map((svg) => svg.width.baseVal.value)"
    on_screen = page.evaluate(widths)
    assert max(on_screen) > PAPER_PX
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert max(page.evaluate(widths)) <= PAPER_PX
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.wait_for_function(f"Math.max(...{widths}) == {max(on_screen)}")
    assert page.locator("details[open]").count() == 0


def test_it_is_small(path: Path) -> None:
    assert path.stat().st_size < 3e6
