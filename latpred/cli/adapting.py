"""The verb that corrects a profile with a few measured models: adapt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from latpred.cli.options import Output, output_options, speech_options
from latpred.cli.output import emit, notice
from latpred.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


@click.command(
    epilog="\b\nExample:\n"
    "  latpred measure torchvision:resnet18 torchvision:resnet34 --batch 1,8 -o measured.csv\n"
    "  latpred adapt measured.csv --device cpu -o adapted.json\n"
    "  latpred predict torchvision:resnet50 --device adapted.json"
)
@click.argument("table", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--device", "-d", help="Device, or a profile's name or file.  [default: this machine's own profile]")
@click.option("--name", help="Of the new profile.  [default: the old one's with -adapted]")
@output_options
@speech_options
def adapt(table: Path, device: str | None, name: str | None, output: Output) -> None:
    """Correct a profile with a few measured models, and say what that bought.

    The corrected profile goes to the file that -o names, else among the user's own. The report goes to stdout.
    """
    from latpred import profiles
    from latpred.adapting import adapt as correct

    if output.path is not None and output.path.suffix != profiles.SUFFIX:
        raise UsageError(f"-o {output.path} is where the profile goes; give it a name that ends in {profiles.SUFFIX}.")
    found = correct(profiles.find(device), table, name=name, progress=notice)
    notice(f"saved {profiles.save(found.profile, output.path)}")

    def text(console: Console) -> None:
        console.print(found.text(), markup=False, highlight=False, soft_wrap=True)

    report = Output(as_json=output.as_json, as_csv=output.as_csv, path=None)
    emit(report, document=found.to_dict, rows=found.to_frame, text=text)
