"""Networks built from published encodings have the parameters and multiply-adds that were published of them."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from factories import kernel_fits
from searchdata import predictor
from torch import nn

import latpred
from latpred.errors import UsageError
from latpred.graph.graph import ModelGraph
from latpred.ops import Work, cost
from latpred.search import spaces
from latpred.search.option_table import additive
from latpred.search.spaces import fbnet, nasbench201, once_for_all
from latpred.zoo.spaces import fbnet as fbnets
from latpred.zoo.spaces import nasbench201 as cells
from latpred.zoo.spaces import space

CPU = predictor(fits=kernel_fits("gemm", "conv", "elementwise", "batch_norm", "pooling", "reduction", "copy"))

FIRST = "|avg_pool_3x3~0|+|nor_conv_1x1~0|skip_connect~1|+|nor_conv_1x1~0|skip_connect~1|skip_connect~2|"
SECOND = "|nor_conv_3x3~0|+|nor_conv_3x3~0|avg_pool_3x3~1|+|skip_connect~0|nor_conv_3x3~1|skip_connect~2|"
OTHER = "|skip_connect~0|+|none~0|nor_conv_3x3~1|+|avg_pool_3x3~0|nor_conv_3x3~1|nor_conv_3x3~2|"

# Specialised networks of https://github.com/open-mmlab/mmrazor (configs/nas/mmcls/onceforall): pixels, then millions of
# parameters and of operations as its README has them.
NOTE8_22MS = {
    "ks": (3, 3, 3, 3, 5, 5, 3, 3, 7, 3, 3, 3, 5, 3, 3, 3, 3, 7, 3, 3),
    "e": (3, 3, 3, 3, 3, 3, 3, 3, 4, 3, 3, 3, 3, 4, 3, 3, 6, 6, 3, 6),
    "d": (2, 2, 2, 2, 2),
}
NOTE8_31MS = {
    "ks": (5, 3, 3, 3, 5, 5, 3, 3, 3, 3, 5, 3, 3, 5, 7, 3, 3, 3, 5, 5),
    "e": (3, 3, 3, 3, 4, 3, 3, 3, 4, 4, 4, 4, 4, 3, 4, 3, 6, 3, 3, 3),
    "d": (2, 2, 3, 3, 4),
}


def traced(build: Any, *encoding: Any, image: int, **more: Any) -> ModelGraph:
    with torch.device("meta"):
        model = build(*encoding, **more)
    return latpred.trace(model, image=image)


# As NATS-Bench's api.get_cost_info prints them: https://github.com/D-X-Y/NATS-Bench/issues/18, /24 and /36.
@pytest.mark.parametrize(
    ("encoding", "classes", "image", "parameters", "operations"),
    [
        (FIRST, 10, 32, None, 15.64737),
        (FIRST, 100, 32, None, 15.65322),
        (FIRST, 120, 16, None, 3.91948),
        (SECOND, 10, 32, 0.802426, 113.95137),
        (OTHER, 10, 32, 0.802426, 113.95137),
    ],
)
def test_nasbench201(encoding: str, classes: int, image: int, parameters: float | None, operations: float) -> None:
    graph = traced(nasbench201.build, encoding, classes=classes, image=image)
    # The published count has the additions of the classifier's bias, one for each class.
    assert round((graph.macs() + classes) / 1e6, 5) == operations
    if parameters is not None:
        assert graph.parameters / 1e6 == parameters


def test_nasbench201_has_15625_cells_that_are_read_back() -> None:
    found = list(cells.encodings())
    assert len(found) == len(set(found)) == 15_625
    assert {FIRST, SECOND, OTHER} <= set(found)
    assert cells.decoded(SECOND) == (
        *("nor_conv_3x3", "nor_conv_3x3", "avg_pool_3x3"),
        *("skip_connect", "nor_conv_3x3", "skip_connect"),
    )


def test_each_operation_stands_on_its_own_edge() -> None:
    """Operation i multiplies by a number of its own, so the sum tells which node each one took."""
    factors = (2.0, 3.0, 5.0, 7.0, 11.0, 13.0)
    operations = [nn.Conv2d(1, 1, 1, bias=False) for _ in factors]
    for operation, factor in zip(operations, factors, strict=True):
        nn.init.constant_(operation.weight, factor)
    nodes = [1.0]
    for to in (1, 2, 3):
        nodes.append(sum(f * nodes[a] for f, (a, b) in zip(factors, cells.EDGES, strict=True) if b == to))
    x = torch.ones(1, 1, 2, 2)
    assert cells.Cell(operations)(x).unique().tolist() == nodes[-1:]
    assert cells.operation("none", 1)(x).unique().tolist() == [0.0]
    assert cells.operation("skip_connect", 1)(x) is x


def test_fbnet_c_is_the_one_that_timm_has() -> None:
    timm = pytest.importorskip("timm")
    ours = traced(fbnet.build, "C", image=224)
    theirs = latpred.trace(timm.create_model("fbnetc_100"))
    assert (ours.parameters, ours.macs()) == (theirs.parameters, theirs.macs())


# Table 3 of the paper. It says not of each network how wide its last convolution is, as the authors' code does.
@pytest.mark.parametrize(
    ("name", "operations", "parameters"), [("A", 249e6, 4.3e6), ("B", 295e6, 4.5e6), ("C", 375e6, 5.5e6)]
)
def test_fbnet(name: str, operations: float, parameters: float) -> None:
    graph = traced(fbnet.build, name, image=224)
    assert graph.macs() == pytest.approx(operations, rel=0.045)
    assert graph.parameters == pytest.approx(parameters, rel=0.075)
    assert fbnet.graph(name).parameters == graph.parameters
    assert (name == "A") == (graph.parameters == 4_264_792)


@pytest.mark.parametrize(
    ("encoding", "image", "parameters", "operations"), [(NOTE8_22MS, 140, 4.3, 70.9), (NOTE8_31MS, 152, 4.6, 105.4)]
)
def test_once_for_all(encoding: dict[str, Any], image: int, parameters: float, operations: float) -> None:
    graph = traced(once_for_all.build, encoding, image=image)
    assert round(graph.parameters / 1e6, 1) == parameters
    # The published count has two operations for each element that is normalised, one for each that a ReLU or a pooling
    # reads.
    with torch.device("meta"):
        model = once_for_all.build(encoding)
    extra = 2 * elements(model, nn.BatchNorm2d, image) + elements(model, (nn.ReLU, nn.AdaptiveAvgPool2d), image)
    assert round((graph.macs() + extra) / 1e6, 1) == operations


def elements(model: nn.Module, kinds: Any, image: int) -> int:
    """Elements that the layers of some kinds read."""
    counts: list[int] = []
    hooks = [
        layer.register_forward_hook(lambda _layer, args, _out: counts.append(args[0].numel()))
        for layer in model.modules()
        if isinstance(layer, kinds)
    ]
    model(torch.zeros(1, 3, image, image, device="meta"))
    for hook in hooks:
        hook.remove()
    return sum(counts)


def test_a_network_that_was_built_takes_the_images_of_its_encoding() -> None:
    small = {"ks": 3, "e": 3, "d": 2, "r": 128}
    for of, encoding in ((nasbench201, FIRST), (once_for_all, small)):
        assert latpred.trace(of.build(encoding)).macs() == of.graph(encoding).macs()
    larger = latpred.trace(once_for_all.build(small), image=160)
    assert larger.macs() == once_for_all.graph(small, image=160).macs()


def test_the_largest_once_for_all_network() -> None:
    largest = traced(once_for_all.build, {"ks": 7, "e": 6, "d": 4}, image=224)
    assert largest.parameters // 10**5 == 76  # 7.6 M in the same README


@pytest.mark.parametrize(
    ("of", "architecture", "said"),
    [
        ("nasbench201", "|nor_conv_3x3~0|+|none~0|", "is no NAS-Bench-201 cell; one looks like"),
        ("nasbench201", FIRST.replace("avg_pool_3x3", "max_pool_3x3"), "has no operation 'max_pool_3x3'"),
        ("nasbench201", FIRST.replace("nor_conv_1x1~0|skip_connect~1|+", "nor_conv_1x1~1|none~0|+"), "is no NAS-B"),
        ("nasbench201", 15_625, "nasbench201 has no network 15625; its numbers are 0 to 15624"),
        ("fbnet", ["ir_k3_e1"] * 21, "has 22 blocks, not 21"),
        ("fbnet", ["ir_k3_e1"] * 21 + ["ir_k7_e6"], "has no block 'ir_k7_e6'"),
        ("once_for_all", {"ks": (3,) * 19, "e": 3, "d": 2}, "ks has 19 numbers"),
        ("once_for_all", {"ks": 3, "e": 5, "d": 2}, "e holds 5"),
        ("once_for_all", {"ks": 3, "e": 3}, "is no once-for-all network; give a mapping such as"),
        ("once_for_all", {"ks": 3, "e": 3, "d": 2, "wid": 1.2}, "wid=1.2 is not read; leave it out"),
    ],
)
def test_a_bad_encoding_says_what_is_wrong(of: str, architecture: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        space(of).build(architecture)


def test_numbers_of_cells_are_those_of_the_published_tables() -> None:
    # As AutoDL-Projects asserts them where it numbers the cells (exps/NAS-Bench-201/main.py).
    assert nasbench201.encoding(0) == FIRST
    assert nasbench201.encoding(9) == "|avg_pool_3x3~0|+|none~0|none~1|+|skip_connect~0|none~1|nor_conv_3x3~2|"
    last = "|avg_pool_3x3~0|+|avg_pool_3x3~0|nor_conv_1x1~1|+|none~0|avg_pool_3x3~1|nor_conv_3x3~2|"
    assert nasbench201.encoding(np.int64(123)) == last


@pytest.mark.parametrize("of", [fbnet, once_for_all], ids=["fbnet", "once_for_all"])
def test_each_number_is_another_network(of: spaces.SearchSpace) -> None:
    draw = random.Random(0)
    numbers = [0, 1, of.size - 1, *(draw.randrange(of.size) for _ in range(200))]
    chosen = {tuple(space(of.name).chosen(of.encoding(number)).values()) for number in numbers}
    assert len(chosen) == len(set(numbers))


def test_the_sizes_of_spaces_are_the_published_ones() -> None:
    assert nasbench201.size == 15_625
    assert fbnet.size == 9**22
    assert once_for_all.size == ((3 * 3) ** 2 + (3 * 3) ** 3 + (3 * 3) ** 4) ** 5  # "roughly 2 x 10^19"
    deepest = space("once_for_all").chosen(once_for_all.encoding(once_for_all.size - 1))
    assert set(deepest.values()) == {"kernel 7, expansion 6"}


def test_names_of_networks_are_candidates_like_their_graphs() -> None:
    names = ["nasbench201:9", f"nasbench201:{FIRST}", "fbnet:C", "fbnet:0", 'once_for_all:{"ks": 3, "e": 3, "d": 2}']
    graphs = [
        *(nasbench201.graph(architecture, image=16) for architecture in (9, FIRST)),
        *(fbnet.graph(architecture, image=16) for architecture in ("C", 0)),
        once_for_all.graph({"ks": 3, "e": 3, "d": 2}, image=16),
    ]
    table = latpred.predict_many(names, image=16, device=CPU, errors="raise")
    assert table["name"].tolist() == names
    by_graph = latpred.predict_many(graphs, device=CPU)
    assert table.drop(columns="name").equals(by_graph.drop(columns="name"))
    for name, graph in zip(names, graphs, strict=True):
        assert unnamed(latpred.trace(name, image=16)) == msgspec.structs.replace(unnamed(graph), model=name)


def test_the_image_is_the_space_s_or_in_the_encoding() -> None:
    assert nasbench201.graph(FIRST) == nasbench201.graph(FIRST, image=32)
    encoding = {"ks": 3, "e": 3, "d": 2, "r": [128]}
    smaller = once_for_all.graph(encoding)
    assert smaller == once_for_all.graph(encoding, image=128)
    assert smaller.macs() < once_for_all.graph({**encoding, "r": 160}).macs()


def test_a_model_without_choices_has_no_latency_table() -> None:
    with pytest.raises(UsageError, match="a Linear is no supernet; give latpred"):
        latpred.latency_table(nn.Linear(1, 1), device=CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nasbench201:", "names no network"),
        ("nasbench201:15625", "has no network"),
        ("fbnet:D", "has 22 blocks, not 1; give so many names, or one of A, B, C"),
    ],
)
def test_a_name_of_no_network_says_what_is_wrong(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        latpred.trace(name)
    assert said in latpred.predict_many([name], device=CPU)["error"][0]


DRAW = random.Random(0)


@pytest.mark.parametrize(
    ("of", "architectures", "options"),
    [
        (nasbench201, DRAW.sample(cells.encodings(), 30), {"image": 32, "cells": 1}),
        (fbnet, ("A", [DRAW.choice(fbnets.BLOCKS) for _ in range(fbnets.PLACES)]), {"image": 64}),
        (once_for_all, ({"ks": 7, "e": 6, "d": 4},), {"image": 64}),
    ],
    ids=["nasbench201", "fbnet", "once_for_all"],
)
def test_graphs_are_those_of_the_networks(of: Any, architectures: Any, options: dict[str, int]) -> None:
    graphs = [of.graph(architecture, **options) for architecture in architectures]
    assert graphs == [traced(of.build, architecture, **options) for architecture in architectures]
    table = latpred.predict_many(graphs, batch=[1, 64], device=CPU)
    assert len({*table["latency_ms"]}) > len(graphs)


@pytest.mark.usefixtures("own_formulas")
def test_a_formula_that_is_registered_later_counts() -> None:
    asked = {"image": 24, "cells": 1}
    before = nasbench201.graph(9, **asked).macs()
    cost("aten::conv2d")(lambda *_, out, **__: Work("elementwise", {"numel": 1, "operands": 1}, macs=1))
    after = nasbench201.graph(9, **asked)
    assert after == traced(nasbench201.build, 9, **asked)
    assert after.macs() < before


def test_graphs_of_once_for_all_networks_differ_in_paths_alone() -> None:
    for encoding in (NOTE8_22MS, NOTE8_31MS):
        whole, parts = traced(once_for_all.build, encoding, image=64), once_for_all.graph(encoding, image=64)
        assert unnamed(parts) == unnamed(whole)


def unnamed(graph: ModelGraph) -> ModelGraph:
    """A graph whose ops do not say in which module they are."""
    replace = msgspec.structs.replace
    return replace(graph, ops=tuple(replace(op, module="") for op in graph.ops))


@pytest.mark.parametrize("batch", [1, 64])
def test_a_latency_table_adds_up_to_predictions(batch: int) -> None:
    supernet = nasbench201.supernet(image=16, cells=1)
    table = latpred.latency_table(supernet, device=CPU, batch=batch)
    assert table["error"].max() < 1e-6
    added = table.set_index(["label", "option"])["latency_ms"]
    assert (added.groupby(level="label").min()[1:] == 0).all()
    assert not added.between(0, 1e-9, inclusive="neither").any()  # what costs the same as the cheapest adds 0, too
    for number in (0, 9, 123):
        chosen = space("nasbench201").chosen(nasbench201.encoding(number))
        predicted = latpred.predict_many([supernet.graph(chosen)], batch=batch, device=CPU)["latency_ms"].item()
        assert added["", ""] + sum(added[label, option] for label, option in chosen.items()) == pytest.approx(predicted)


def test_sums_are_judged_by_architectures_that_had_no_part_in_the_fit() -> None:
    """The last two of ten draws are not fitted, but one of them was drawn before."""
    chosen, takes_ms = [(0, 0), (1, 0), (0, 1)] * 3, [3.0, 5.0, 4.0] * 3
    assert additive([*chosen, (1, 1)], (2, 2), np.array([*takes_ms, 3.0]))[1] == pytest.approx(1.0)  # 6 in place of 3
    _, error = additive([(0, 0), (0, 1), (1, 0), (1, 1)] * 3, (2, 2), np.array([1.0, 1.0, 1.0, 2.0] * 3))
    assert error == pytest.approx(0.25, abs=0.1)  # all were fitted, which does not make the sums right


def test_a_latency_table_says_how_far_off_its_sums_are() -> None:
    supernet, where = nasbench201.supernet(image=32), {"device": ["rtx-8000", "titan-x-pascal"], "batch": [1, 64, 128]}
    table = latpred.latency_table(supernet, **where)
    assert len(table) == 6 * (1 + 6 * len(cells.OPERATIONS))
    errors = table.groupby(["device", "batch"])["error"].first()
    assert errors["rtx-8000", 1] < 1e-9  # the host alone sets the pace
    assert 1e-3 < errors.max() < 0.1
    assert table.equals(latpred.latency_table(supernet, **where))
