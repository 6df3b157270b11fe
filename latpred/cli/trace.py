"""Verbs that need no profile: trace shows what a model does, models which go by name."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from latpred.cli.options import INPUTS, Output, batch_option, output_options, takes, verb
from latpred.cli.output import emit, notice
from latpred.errors import UnknownModelError, UsageError
from latpred.query import AMP, Options, record_of
from latpred.render import Page, Table
from latpred.units import format_bytes, format_count

if TYPE_CHECKING:
    import pandas as pd

    from latpred.accuracy.crosscheck import Difference
    from latpred.graph.graph import ModelGraph


@verb("latpred trace bert-base-uncased --seq 128 --check", "latpred trace resnet18 --runtime onnxruntime --csv")
@click.argument("model")
@batch_option("1")
@takes(*INPUTS, "memory_format", "attention")
@click.option("--runtime", default="eager", show_default=True, help="Whose steps to show.")
@click.option(
    "--target",
    type=click.Choice(("cpu", "cuda")),
    help="Kind of device.  [default: cpu, where the runtime runs on it; cuda under autocast]",
)
@click.option("--check", is_flag=True, help="Count multiply-adds with torch's FlopCounterMode and fvcore too; runs it.")
@click.option("--strict", is_flag=True, help="Refuse a model with an op that no formula knows.")
@output_options
def trace(
    model: str, batches: tuple[int, ...], runtime: str, target: str | None, check: bool, output: Output, **asked: Any
) -> None:
    """Count operations, multiply-adds, bytes and launches of MODEL.

    One forward pass is traced, without a device and without a profile. Another runtime than eager is asked with its own
    tools what it makes of the model.
    """
    from latpred import runtimes
    from latpred.runtimes.lowering import trace_for_runtime

    if check and runtime != "eager":
        raise UsageError("--check counts what eager does; leave out --runtime.")
    if check and asked["precision"] in AMP:
        raise UsageError("--check counts multiply-adds, of which autocast changes none; leave out --precision.")
    usual = "cuda" if asked["precision"] in AMP else "cpu"
    target = target or str(getattr(runtimes.get(runtime), "needs", usual))
    graph = trace_for_runtime(model, runtime=runtime, target=target, batches=batches, **asked)
    differences = _other_counts(model, graph, batches[0], record_of(Options, asked)) if check else ()

    def document() -> dict[str, Any]:
        return {
            "schema": "latpred.trace/1",
            "totals": [_totals(graph, batch, runtime) for batch in batches],
            "check": [asdict(one) for one in differences],
            "graph": json.loads(graph.to_json()),
        }

    def page() -> Page:
        parts = [part for batch in batches for part in _graph_parts(graph, batch, runtime)]
        parts += [f"note: {note}" for note in graph.notes]
        return Page("", [*parts, *(line for one in differences for line in _difference_lines(one, batches[0]))])

    emit(output, document=document, rows=lambda: graph.to_frame(batches), page=page)


def _other_counts(model: str, graph: ModelGraph, batch: int, asked: Options) -> tuple[Difference, ...]:
    """Count the same model with other counters, which have to run it on the CPU."""
    from latpred.accuracy.crosscheck import check
    from latpred.tracing.meta_module import attend
    from latpred.zoo import names

    with names.attention(asked.attention):
        built = names.build(model, seq=asked.seq, image=asked.image, device="cpu", precision=asked.precision)
    attend(built.model, asked.attention)
    return check(graph, built.model, built.inputs(batch, "cpu"), batch)


def _difference_lines(one: Difference, batch: int) -> list[str]:
    counted = "nothing" if one.theirs is None else f"{one.theirs / 1e9:.3f} GMACs"
    verdict = "the same" if one.theirs == one.ours else f"latpred {one.ours / 1e9:.3f}"
    return [f"{one.counter} at batch {batch}: {counted}, {verdict}", *(f"  {reason}" for reason in one.reasons)]


def _totals(graph: ModelGraph, batch: int, runtime: str) -> dict[str, Any]:
    """What one forward pass at one batch size amounts to."""
    from latpred import runtimes

    coverage = graph.coverage(batch)
    return {
        "batch": batch,
        "macs": graph.macs(batch),
        "bytes": graph.bytes(batch),
        "launches": graph.launches(batch),
        "steps": len(runtimes.get(runtime).lower(graph, batch).host_class),
        "synchronisations": graph.syncs(batch),
        "peak_bytes": graph.peak_bytes(batch),
        "coverage_of_launches": coverage.launches,
        "coverage_of_bytes": coverage.bytes,
        "estimated_ops": coverage.estimated_ops,
    }


def _graph_parts(graph: ModelGraph, batch: int, runtime: str) -> list[Table | str]:
    """What one forward pass does by family of ops, and what it amounts to."""
    sizes = f"{graph.input_kind} {graph.input_size}, " if graph.input_size else ""
    where = "" if runtime == "eager" else f"{runtime} on {graph.target or 'cpu'}, "
    total = _totals(graph, batch, runtime)
    rows = [
        (family, str(launches), format_count(macs) if macs else "-", format_bytes(moved))
        for family, launches, macs, moved in _by_family(graph, batch).itertuples()
    ]
    rows.append(("all", str(total["launches"]), format_count(total["macs"]), format_bytes(total["bytes"])))
    syncs = f", {total['synchronisations']} host synchronisations" if total["synchronisations"] else ""
    title = f"{graph.model}: {sizes}{graph.precision}, {where}batch {batch}"
    parts: list[Table | str] = [
        Table(("ops", "launches", "MACs", "bytes"), rows, title=title, total=True),
        f"{total['macs'] / 1e9:.3f} GMACs, {format_count(graph.parameters)} parameters, "
        f"at least {format_bytes(total['peak_bytes'])} of memory{syncs}",
    ]
    if runtime != "eager":
        # What a runtime's steps are called, those it makes most of first, and what in them is an estimate.
        counts = Counter(op.name for op in graph.at(batch))
        named = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
        parts.append(f"{total['steps']} host step{'' if total['steps'] == 1 else 's'}: {named}")
    if total["estimated_ops"]:
        known = f"{total['coverage_of_launches']:.0%} of launches and {total['coverage_of_bytes']:.0%} of bytes"
        unknown = ", ".join(f"{name} ({count})" for name, count in total["estimated_ops"].items())
        parts.append(f"formulas cover {known}; estimated from bytes: {unknown}")
    return parts


def _by_family(graph: ModelGraph, batch: int) -> pd.DataFrame:
    """Launches, multiply-adds and bytes of each family of ops that launch something, the most bytes first."""
    from latpred.ops.families import root

    table = graph.to_frame(batch)
    table["bytes"] = table[["weight_bytes", "read_bytes", "write_bytes"]].sum(axis=1)
    launching = table[table["launches"] > 0]
    sums = launching.groupby(launching["family"].map(root), sort=False)[["launches", "macs", "bytes"]].sum()
    return sums.sort_values("bytes", ascending=False, kind="stable")


@verb("latpred models", "latpred models resnet --libraries")
@click.argument("text", required=False, default="")
@click.option("--libraries", is_flag=True, help="Also list what the installed torchvision and timm have.")
@output_options
def models(text: str, libraries: bool, output: Output) -> None:
    """List the models that go by name.

    With TEXT, those that have it in a name. Any name works with _ for - and - for _. Names of torchvision and timm work
    without the library too, where nothing else has the name.
    """
    from latpred.zoo.names import canonical, listing, of_library

    missing = [library for library in ("torchvision", "timm") if libraries and not of_library(library)]
    if missing:
        notice(f"no names of {' and '.join(missing)}, which cannot be imported here; latpred doctor says why")
    matching = [
        row
        for row in listing(libraries=libraries)
        if any(canonical(text) in canonical(name) for name in (row["name"], *row["aliases"]))
    ]
    if not matching:
        raise UnknownModelError(f"no model has {text!r} in its name. List all with: latpred models --libraries")
    emit(
        output,
        document=lambda: {"schema": "latpred.models/1", "models": matching},
        rows=lambda: [row | {"aliases": " ".join(row["aliases"])} for row in matching],
        page=lambda: _models_page(matching),
    )
    if not libraries and output == Output():
        notice("torchvision's and timm's names work too; list them with --libraries")


def _models_page(rows: list[dict[str, Any]]) -> Page:
    units = {"seq": "tokens", "image": "pixels", "audio": "samples", "custom": ""}
    cells = [
        (row["name"], f"{row['size']} {units[row['takes']]}" if row["size"] else "", ", ".join(row["aliases"]))
        for row in rows
    ]
    heads = ("name", "takes", "other names")
    return Page("", [Table(heads, cells, left=heads, folded=("name", "other names"))])
