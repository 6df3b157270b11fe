"""Reports say what they should, in one file that asks for nothing else. How they look is tested in a browser."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from reportdata import half_unknown, network, saved, studied

import latpred
from latpred import report
from latpred.errors import UsageError
from latpred.explanation.advice import recommended
from latpred.render import format_ms

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """What a test asks of a page: text outside scripts, headings, addresses that it names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.headings: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag in {"h1", "h2", "h3"}:
            self.headings.append("")
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"script", "style"}:
            self.text += data
            if {"h1", "h2", "h3"} & set(self.open):
                self.headings[-1] += data


def test_it_says_everything_in_one_file(tmp_path: Path) -> None:
    path = report.write(studied(network()), tmp_path / "deep" / "report.html")
    found = Page(path.read_text())
    assert found.open == []
    assert [address for address in found.addresses if not address.startswith(("#", "data:"))] == []
    assert found.headings == [
        "Latency of example-net",
        "example-net",
        "Latency against batch size",
        "Runtimes side by side",
        "Where the time goes",
        "The two clocks",
        "The model",
        "Room to grow",
        "Caveats",
        "How far to trust this",
    ]
    for said in ("Run it in cuda-graphs", "formulas for everything", "4.2%: passed", "Example GPU", "torch 2.13.0"):
        assert said in found.text, said
    assert "Not fully covered" not in found.text
    assert found.text.count("framework") >= 2


def test_the_model_launches_what_the_table_of_runtimes_says() -> None:
    graph = latpred.trace(torch.nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 32, 32))
    one = report.gather(graph, (1,), runtimes=["eager"], device="rtx-8000")
    facts, table = dict(report.facts(one)), report.runtimes(one)
    launches = table.rows[0][table.heads.index("launches")]
    assert facts["launches in eager"] == launches == "2"  # which adds the bias by itself


def test_the_answer_and_the_charts_hold_the_predicted_numbers() -> None:
    (one,) = studied(network())
    latency = format_ms(recommended(one.explanation).prediction.latency_ms)
    assert f"to take {latency} in cuda-graphs on example" in report.answer(one)
    assert one.forward.prediction.runtime == "eager"
    drawn = re.findall(r'<img src="data:image/svg\+xml;base64,(.*?)" alt="(.*?)">', report.html([one]))
    charts = {about: base64.b64decode(svg).decode() for svg, about in drawn}
    curve, together, eager, runtimes, shares, clocks = charts.values()
    batch, low, high = one.curves[1].crossover
    assert f"crossover {batch} (90 %: {low} to {high})" in eager
    assert "cuda-graphs on example" in curve
    assert "eager on example" in eager
    for name in ("cuda-graphs", "eager"):
        assert all(name in chart for chart in (together, runtimes, shares))
    assert "time since the call (ms)" in clocks
    assert all(about.startswith(("Latency of", "Host and device", "Part of one forward")) for about in charts)


def test_a_model_half_unknown_is_said_at_its_top_and_its_name_cannot_break_out() -> None:
    text = report.html(studied(half_unknown("</script><img src=x onerror=alert(1)>$a_$")))
    assert "<img src=x" not in text
    found = Page(text)
    assert found.open == []
    assert found.text.index("Not fully covered.") < found.text.index("One forward pass")
    assert "No cost formula knows mylib::secret (6)." in found.text
    assert "cover 50% of the launches" in found.text
    assert "in the operations that are known" in found.text


def test_several_models_are_set_beside_each_other() -> None:
    found = Page(report.html(iter(studied(network(), half_unknown()))))
    assert found.headings[:3] == ["Latency of example-net, half-known", "2 models", "example-net"]
    assert found.text.index("half-known is not fully covered.") < found.text.index("One forward pass")
    assert {"#model-1", "#model-2"} <= set(found.addresses)


@pytest.mark.parametrize("batches", [(1,), tuple(range(1, 201))], ids=["one", "200"])
def test_one_batch_and_many(batches: tuple[int, ...]) -> None:
    one = report.gather(network(), batches, device=saved())
    assert len(report.points(one.curves).rows) == 2 * len(batches)
    assert len(report.html([one])) < 3e6


def test_a_report_of_nothing() -> None:
    with pytest.raises(UsageError, match="needs a model"):
        report.html([])
