"""A page looks alike as text, on a terminal and in a notebook: aligned, whole, escaped."""

from __future__ import annotations

from latpred.render import Facts, Page, Table

TABLE = Table(
    ("runtime", "speed-up over eager", "regime"),
    [("eager", "-", "compute"), ("cuda-graphs", "1.10x", "framework")],
    left=("runtime", "regime"),
    title="Runtimes:",
    note="a note",
)


def test_numbers_stand_right_texts_left_and_long_heads_break() -> None:
    assert Page("Title", [TABLE, "a sentence"]).text().splitlines() == [
        "Title",
        "Runtimes:",
        "               speed-up",
        "runtime      over eager  regime",
        "eager                 -  compute",
        "cuda-graphs       1.10x  framework",
        "a note",
        "a sentence",
    ]


def test_a_wide_table_draws_its_columns_together_before_it_cuts_a_cell() -> None:
    cells = ("x" * 20, "y" * 20, "z" * 37)
    shown = Page("", [Table(("a", "b", "c"), [cells])]).text(80).splitlines()
    assert shown[1] == " ".join(cells)
    folded = Page("", [Table(("a", "b"), [("left", "word " * 20)], left=("a", "b"), folded=("b",))]).text(60)
    assert folded.count("word") == 20
    assert max(map(len, folded.splitlines())) <= 60


def test_what_is_wider_than_the_page_goes_on_in_the_next_line() -> None:
    rows = [("onnxruntime-optimized", "1.16x (0.55 to 2.42), about equal", "2.75 ms"), ("eager", "-", "3.19 ms")]
    table = Table(("runtime", "speed-up over eager", "latency"), rows)
    for width in (80, 50):
        lines = Page("", [table]).text(width).splitlines()
        assert max(map(len, lines)) <= width
        words = " ".join(lines).split()
        assert [words.count(word) for word in ("onnxruntime-optimized", "equal", "ms")] == [1, 1, 2]


def test_a_head_with_a_long_name_breaks_at_its_hyphens_before_it_is_cut() -> None:
    heads = ("ops", "onnxruntime-cuda-graphs host", "onnxruntime-cuda-graphs device", "eager host")
    shown = Page("", [Table(heads, [("gemm", "1.00 ms", "2.00 ms", "3.00 ms")])]).text(50).splitlines()
    heads = [["onnxruntime-"] * 2, ["cuda-graphs"] * 2, ["ops", "host", "device", "eager", "host"]]
    assert [line.split() for line in shown[:3]] == heads


def test_sentences_are_wrapped_in_prose_alone() -> None:
    sentence = "caveat: " + "word " * 30
    assert len(Page("", [sentence]).text().splitlines()) == 1
    shown = Page("Title", [TABLE, sentence, Table(("a",), [])], prose=True).text(40).splitlines()
    assert shown[:3] == ["Title", "", "Runtimes:"]
    assert shown[shown.index("a note") + 1] == ""
    assert max(map(len, shown)) <= 40
    assert shown[-1].startswith("  word")


def test_markup_is_shown_and_never_obeyed() -> None:
    page = Page("[bold]<b>", [Facts([("name", "[red]<i>"), ("longer name", "x")]), Table(("<h>",), [("[blue]<c>",)])])
    text, html = page.text(), page.html()
    for markup in ("[bold]<b>", "name         [red]<i>", "<h>", "[blue]<c>"):
        assert markup in text
    for tag in ("<b>", "<i>", "<h>", "<c>"):
        assert tag not in html
    assert "[red]&lt;i&gt;" in html


def test_lines_that_are_kept_apart_stay_so_in_a_notebook_and_a_table_without_rows_is_left_out() -> None:
    html = Page("", ["one <1>\ntwo", Table(("head",), [])]).html()
    assert "<p>one &lt;1&gt;<br/>two</p>" in html
    assert "head" not in html
