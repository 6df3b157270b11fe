"""The verb that lists models by name: models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from latpred.cli.options import Output, output_options, speech_options
from latpred.cli.output import emit, notice
from latpred.errors import UnknownModelError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

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
    from latpred.tracing.names import listing

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
    from latpred.tracing.names import canonical

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
