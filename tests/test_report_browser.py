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
OPEN_ALL = "(all) => all.forEach((one) => { one.open = true; })"
SIZES = "(all) => all.map((one) => [one.naturalWidth, one.getBoundingClientRect().width])"
CHARTS = 6  # of each model


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


def opened(browser: Any, path: Path, width: int) -> Any:
    """A page with all its charts drawn."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(path.as_uri())
    return page


@pytest.mark.parametrize("width", WIDTHS)
def test_it_draws_and_fits_without_a_word(browser: Any, path: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    fetched: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(path.as_uri())
    assert path.stat().st_size < 1e6
    page.eval_on_selector_all("details", OPEN_ALL)
    sizes = page.eval_on_selector_all("img", SIZES)
    assert len(sizes) == 2 * CHARTS
    assert all(drawn > 100 and 0.6 * min(width, 450) < shown <= width for drawn, shown in sizes)
    assert said == []
    assert [url for url in fetched if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("width", "fits"), [(400, False), (600, False), (1000, True)])
def test_every_table_fits_or_scrolls_in_its_own_box(browser: Any, path: Path, width: int, fits: bool) -> None:
    page = opened(browser, path, width)
    page.eval_on_selector_all("details", OPEN_ALL)
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
    found = axe.run(opened(browser, path, width)).response["violations"]
    assert [(one["impact"], one["id"], one["nodes"][0]["html"]) for one in found] == []


def test_on_paper_all_tables_and_figures_are_open(browser: Any, path: Path) -> None:
    page = opened(browser, path, 1600)
    count = "document.querySelectorAll('details[open]').length"
    page.evaluate(f"addEventListener('beforeprint', () => {{ window.openOnPaper = {count}; }})")
    assert page.evaluate(count) == 0
    assert page.pdf()[:4] == b"%PDF"
    assert page.evaluate("window.openOnPaper") == 6
    assert page.evaluate(count) == 0
