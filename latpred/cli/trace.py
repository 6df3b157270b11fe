"""The verb that shows what a model does without predicting how long it takes: trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import click

from latpred.cli.options import (
    Model,
    Output,
    batch_option,
    channels_last_option,
    model_options,
    output_options,
    speech_options,
)
from latpred.cli.output import emit, notice
from latpred.errors import UnknownModelError, UsageError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from latpred.accuracy.crosscheck import Difference
    from latpred.graph.graph import ModelGraph

TARGETS = ("cpu", "cuda")


@click.command(
    epilog="\b\nExample:\n"
    "  latpred trace bert-base-uncased --seq 128 --check\n"
    "  latpred trace resnet18 --runtime onnxruntime --csv"
)
@click.argument("model")
@batch_option("1")
@model_options
@channels_last_option
@click.option("--runtime", default="eager", show_default=True, help="Whose steps to show.")
@click.option(
    "--target", type=click.Choice(TARGETS), help="Kind of device.  [default: cpu, where the runtime runs on it]"
)
@click.option("--check", is_flag=True, help="Count multiply-adds with torch's FlopCounterMode and fvcore too; runs it.")
@click.option("--strict", is_flag=True, help="Refuse a model with an op that no formula knows.")
@output_options
@speech_options
def trace(
    model: str,
    batches: tuple[int, ...],
    model_input: Model,
    channels_last: bool,
    runtime: str,
    target: str | None,
    check: bool,
    strict: bool,
    output: Output,
) -> None:
    """Walk MODEL without a device: operations, multiply-adds, bytes and launches of one forward pass.

    Another runtime than eager is asked with its own tools what it makes of the model.
    """
    from latpred import runtimes
    from latpred.runtimes.lowering import trace_for_runtime

    if check and runtime != "eager":
        raise UsageError("--check counts what eager does; leave out --runtime.")
    graph = trace_for_runtime(
        model,
        runtime=runtime,
        target=target or str(getattr(runtimes.get(runtime), "needs", "cpu")),
        seq=model_input.seq,
        image=model_input.image,
        precision=model_input.precision,
        memory_format="channels_last" if channels_last else "contiguous",
        strict=strict,
        batches=batches,
    )
    found = compared(model, model_input, graph, batches[0]) if check else ()

    def document() -> dict[str, Any]:
        import json

        return {
            "schema": "latpred.trace/1",
            "totals": [totals(graph, batch, runtime) for batch in batches],
            "check": [
                {"counter": one.counter, "ours": one.ours, "theirs": one.theirs, "reasons": list(one.reasons)}
                for one in found
            ],
            "graph": json.loads(graph.to_json()),
        }

    def text(console: Console) -> None:
        for batch in batches:
            _print_graph(console, graph, batch, runtime)
        for one in found:
            _print_difference(console, one, batches[0])

    emit(output, document=document, rows=lambda: _op_rows(graph, batches[0]), text=text)


def compared(model: str, model_input: Model, graph: ModelGraph, batch: int) -> tuple[Difference, ...]:
    """Count the same model with other counters, which have to run it on the CPU."""
    from latpred.accuracy.crosscheck import check
    from latpred.zoo import names

    built = names.build(
        model, seq=model_input.seq, image=model_input.image, device="cpu", precision=model_input.precision or "fp32"
    )
    return check(graph, built.model.eval(), built.inputs(batch, "cpu"), batch)


def _print_difference(console: Console, one: Difference, batch: int) -> None:
    counted = "nothing" if one.theirs is None else f"{one.theirs / 1e9:.3f} GMACs"
    verdict = "the same" if one.theirs == one.ours else f"latpred {one.ours / 1e9:.3f}"
    console.print(f"{one.counter} at batch {batch}: {counted}, {verdict}", markup=False, soft_wrap=True)
    for reason in one.reasons:
        console.print(f"  {reason}", markup=False, soft_wrap=True)


def totals(graph: ModelGraph, batch: int, runtime: str = "eager") -> dict[str, Any]:
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


def _print_graph(console: Console, graph: ModelGraph, batch: int, runtime: str) -> None:
    from rich.table import Table

    from latpred.units import format_bytes, format_count

    sizes = f"{graph.input_kind} {graph.input_size}, " if graph.input_size else ""
    where = "" if runtime == "eager" else f"{runtime} on {graph.target or 'cpu'}, "
    console.print(
        f"{graph.model}: {sizes}{graph.precision}, {where}batch {batch}", style="bold", markup=False, soft_wrap=True
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ops")
    for name in ("launches", "MACs", "bytes"):
        table.add_column(name, justify="right")
    for family, (launches, macs, moved) in _by_family(graph, batch).items():
        table.add_row(family, str(launches), format_count(macs) if macs else "-", format_bytes(moved))
    total = totals(graph, batch, runtime)
    table.add_row(
        "all", str(total["launches"]), format_count(total["macs"]), format_bytes(total["bytes"]), style="bold"
    )
    console.print(table)
    syncs = f", {total['synchronisations']} host synchronisations" if total["synchronisations"] else ""
    console.print(
        f"{total['macs'] / 1e9:.3f} GMACs, {format_count(graph.parameters)} parameters, "
        f"at least {format_bytes(total['peak_bytes'])} of memory{syncs}",
    )
    if runtime != "eager":
        _print_steps(console, graph, batch, total["steps"])
    if total["estimated_ops"]:
        known = f"{total['coverage_of_launches']:.0%} of launches and {total['coverage_of_bytes']:.0%} of bytes"
        unknown = ", ".join(f"{name} ({count})" for name, count in total["estimated_ops"].items())
        console.print(f"formulas cover {known}; estimated from bytes: {unknown}", markup=False, soft_wrap=True)


def _print_steps(console: Console, graph: ModelGraph, batch: int, steps: int) -> None:
    """What a runtime's steps are called, those it makes most of first, and what in them is an estimate."""
    counts = Counter(op.name for op in graph.at(batch))
    named = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
    console.print(f"{steps} host step{'' if steps == 1 else 's'}: {named}", markup=False, soft_wrap=True)
    for note in graph.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _by_family(graph: ModelGraph, batch: int) -> dict[str, tuple[int, int, int]]:
    from latpred.graph.graph import total_bytes
    from latpred.ops.families import root

    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for op in graph.at(batch):
        if op.launches:
            row = sums[root(op.family)]
            row[0] += op.launches
            row[1] += op.macs.at(batch)
            row[2] += total_bytes(op, batch)
    return {family: (a, b, c) for family, (a, b, c) in sorted(sums.items(), key=lambda item: -item[1][2])}


def _op_rows(graph: ModelGraph, batch: int) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(
        {
            "op": op.name,
            "module": op.module,
            "family": op.family,
            "host_class": op.host_class,
            "dtype": op.dtype,
            "batch": batch,
            "macs": op.macs.at(batch),
            "weight_bytes": op.weight_bytes.at(batch),
            "read_bytes": op.read_bytes.at(batch),
            "write_bytes": op.write_bytes.at(batch),
            "launches": op.launches,
            "syncs": op.syncs,
            "estimated": op.estimated,
        }
        for op in graph.at(batch)
    )


_UNITS = {"seq": "tokens", "image": "pixels", "audio": "samples", "custom": ""}


@click.command(epilog="\b\nExample:\n  latpred models\n  latpred models resnet --libraries")
@click.argument("text", required=False, default="")
@click.option("--libraries", is_flag=True, help="Also list what the installed torchvision and timm have.")
@output_options
@speech_options
def models(text: str, libraries: bool, output: Output) -> None:
    """List the models that go by name, or those with TEXT in a name. Any name works with _ for - and - for _.

    Names of torchvision and timm work without the library too, where nothing else has the name.
    """
    from latpred.zoo.names import listing

    found = [row for row in listing(libraries=libraries) if _matches(row, text)]
    if not found:
        raise UnknownModelError(f"no model has {text!r} in its name. List all with: latpred models --libraries")
    emit(
        output,
        document=lambda: {"schema": "latpred.models/1", "models": found},
        rows=lambda: _frame(found),
        text=lambda console: _print(found, console),
    )
    if not libraries and output.path is None and not (output.as_json or output.as_csv):
        notice("torchvision's and timm's names work too; list them with --libraries")


def _matches(row: dict[str, Any], text: str) -> bool:
    from latpred.zoo.names import canonical

    return any(canonical(text) in canonical(name) for name in (row["name"], *row["aliases"]))


def _frame(found: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame([row | {"aliases": " ".join(row["aliases"])} for row in found])


def _print(found: list[dict[str, Any]], console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", overflow="fold")
    table.add_column("takes", no_wrap=True)
    table.add_column("other names", overflow="fold")
    for row in found:
        takes = f"{row['size']} {_UNITS[row['takes']]}" if row["size"] else ""
        table.add_row(row["name"], takes, ", ".join(row["aliases"]))
    console.print(table)
