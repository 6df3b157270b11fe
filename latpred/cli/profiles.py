"""Verbs that look after latpred's own files and its environment: profiles, cache, doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from latpred.cli.main import SuggestingGroup
from latpred.cli.options import Output, output_options, speech_options
from latpred.cli.output import answer, emit

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from latpred.profile.store import Entry


@click.group(cls=SuggestingGroup, epilog="\b\nExample:\n  latpred profiles list")
def profiles() -> None:
    """List, show and locate device profiles."""


@profiles.command(
    name="list", epilog="\b\nExample:\n  latpred profiles list --json\n  latpred profiles list --datasheets"
)
@click.option("--datasheets", is_flag=True, help="List the GPUs that are known from their datasheets instead.")
@click.option("--hosts", is_flag=True, help="List the hosts whose dispatch was measured alone instead.")
@output_options
@speech_options
def list_profiles(datasheets: bool, hosts: bool, output: Output) -> None:
    """List the profiles calibrated here and those shipped."""
    from latpred.profile.store import directory, listing

    if datasheets or hosts:
        from latpred.cli.output import show_datasheets, show_hosts

        (show_datasheets if datasheets else show_hosts)(output)
        return
    entries = listing()

    def text(console: Console) -> None:
        if entries:
            console.print(_entries_table(entries))
        if all(entry.source == "shipped" for entry in entries):
            console.print(
                f"no profile of this machine in {directory()}; make one with: latpred calibrate", soft_wrap=True
            )

    emit(
        output,
        document=lambda: {"schema": "latpred.profiles/1", "profiles": [_entry_fields(entry) for entry in entries]},
        rows=lambda: _frame([_entry_fields(entry) for entry in entries]),
        text=text,
    )


@profiles.command(epilog="\b\nExample:\n  latpred profiles show cpu")
@click.argument("name")
@output_options
@speech_options
def show(name: str, output: Output) -> None:
    """Show what a profile holds: machine, device, runtimes, kernels and how well they were fitted."""
    from latpred.profile.codec import to_document
    from latpred.profile.store import load
    from latpred.render import profile_text

    profile = load(name)
    emit(
        output,
        document=lambda: {"schema": "latpred.profile/1", "profile": to_document(profile)},
        rows=lambda: _frame(profile_text.kernel_rows(profile)),
        text=lambda console: profile_text.describe(profile, console),
    )


@profiles.command(name="path", epilog='\b\nExample:\n  cp "$(latpred profiles path cpu)" /tmp/')
@click.argument("name", required=False)
@speech_options
def path_of(name: str | None) -> None:
    """Print the file of a profile, or without a NAME the directory of all."""
    from latpred.profile.store import directory, locate

    answer(locate(name) if name else directory())


@click.group(cls=SuggestingGroup, epilog="\b\nExample:\n  latpred cache show")
def cache() -> None:
    """Show or clear what latpred keeps only to save time."""


@cache.command(name="show", epilog="\b\nExample:\n  latpred cache show")
@output_options
@speech_options
def show_cache(output: Output) -> None:
    """Print where the cache is and what it takes."""
    from latpred.storage import usage
    from latpred.units import format_bytes

    found = usage()
    fields = {"path": str(found.path), "files": found.files, "bytes": found.bytes}
    emit(
        output,
        document=lambda: {"schema": "latpred.cache/1", **fields},
        rows=lambda: _frame([fields]),
        text=lambda console: console.print(
            f"{found.path}: {found.files} files, {format_bytes(found.bytes)}", soft_wrap=True
        ),
    )


@cache.command(epilog="\b\nExample:\n  latpred cache clear")
@speech_options
def clear() -> None:
    """Delete the cache; profiles and calibrations under way are kept."""
    from latpred.storage import clear as clear_cache
    from latpred.units import format_bytes

    removed = clear_cache()
    answer(f"removed {removed.files} files, {format_bytes(removed.bytes)}, from {removed.path}")


@click.command(epilog="\b\nExample:\n  latpred doctor")
@output_options
@speech_options
@click.pass_context
def doctor(context: click.Context, output: Output) -> None:
    """Say what stands between this machine and a prediction, and what to do about it."""
    from latpred.doctor import examine

    findings = examine()
    rows = [{"topic": f.topic, "verdict": f.verdict, "detail": f.detail, "advice": f.advice} for f in findings]
    emit(
        output,
        document=lambda: {"schema": "latpred.doctor/1", "findings": rows},
        rows=lambda: _frame(rows),
        text=lambda console: _print_findings(console, rows),
    )
    if any(finding.verdict == "fail" for finding in findings):
        context.exit(3)


def _entry_fields(entry: Entry) -> dict[str, Any]:
    profile = entry.profile
    return {
        "name": entry.name,
        "source": entry.source,
        "device": profile.device.name if profile else "",
        "cpu": profile.machine.cpu if profile else "",
        "threads": profile.machine.threads if profile else None,
        "created": profile.created if profile else "",
        "provenance": profile.provenance if profile else "",
        "passed": profile.acceptance.passed if profile else None,
        "path": str(entry.path),
        "problem": entry.problem,
    }


def _entries_table(entries: list[Entry]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "source", "device", "host", "calibrated", "state"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        fields = _entry_fields(entry)
        state = entry.problem or ("ok" if fields["passed"] else "did not pass its gate")
        table.add_row(entry.name, entry.source, fields["device"], fields["cpu"], fields["created"][:10], state)
    return table


def _print_findings(console: Console, rows: list[dict[str, str]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        advice = f"\n→ {row['advice']}" if row["advice"] else ""
        table.add_row(row["verdict"], row["topic"], row["detail"] + advice)
    console.print(table, markup=False)


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows)
