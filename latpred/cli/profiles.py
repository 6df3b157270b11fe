"""Verbs that look after latpred's own files and its environment: profiles, cache, doctor."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from latpred.cli.options import Output, Verb, examples, output_options, speech_options, verb
from latpred.cli.output import answer, emit, emit_rows
from latpred.errors import UsageError
from latpred.render import Page, Table
from latpred.units import format_bytes

if TYPE_CHECKING:
    from latpred.profile.document import DeviceProfile
    from latpred.profile.gpus import Spec
    from latpred.profile.host_profile import HostProfile
    from latpred.profile.hosts import HostRow
    from latpred.profile.store import Entry


@click.group(epilog=examples("latpred profiles list"))
def profiles() -> None:
    """List, show, locate, rename and delete device profiles."""


@profiles.command(
    cls=Verb, name="list", epilog=examples("latpred profiles list --json", "latpred profiles list --hosts")
)
@click.option("--datasheets", is_flag=True, help="List the GPUs that are known from their datasheets instead.")
@click.option("--hosts", is_flag=True, help="List the hosts that --host knows by name instead: yours, and CPUs.")
@output_options
def list_profiles(datasheets: bool, hosts: bool, output: Output) -> None:
    """List the profiles calibrated here and those shipped."""
    if datasheets and hosts:
        raise UsageError("--datasheets and --hosts exclude each other; give one.")
    if datasheets:
        from latpred.profile.gpus import SPECS

        columns = ("name", "sms", "memory_gib", "gb_per_s", "fp32_tmacs", "fp16_tmacs", "year")
        rows = [_datasheet_fields(spec) for spec in SPECS]
        emit_rows(output, "latpred.datasheets/1", "datasheets", rows, Page("", [table_of(rows, columns)]))
    elif hosts:
        from latpred.profile import host_profile
        from latpred.profile.hosts import HOSTS

        # Hosts that this user measured, then those that others' figures tell of.
        rows = [*map(host_fields, host_profile.listing()), *map(_known_host_fields, HOSTS)]
        heads: tuple[str, ...] = ("name", "factor", "90 % interval", "basis", "source")
        table = Table(heads, [_host_row(row) for row in rows], left=("name", "basis", "source"), folded=heads)
        emit_rows(output, "latpred.hosts/1", "hosts", rows, Page("", [table]))
    else:
        from latpred.profile.store import directory, listing

        rows = [_entry_fields(entry) for entry in listing()]
        heads = ("name", "source", "device", "host", "calibrated", "state")
        table = Table(heads, [_entry_row(row) for row in rows], left=heads, folded=heads)
        nothing = f"no profile of this machine in {directory()}; make one with: latpred calibrate"
        own = any(row["source"] != "shipped" for row in rows)
        page = Page("", [table] if own else [table, nothing])
        emit_rows(output, "latpred.profiles/1", "profiles", rows, page)


def _host_row(fields: dict[str, Any]) -> tuple[str, ...]:
    if "factor" not in fields:
        return fields["name"], "", "", "measured", f"by you on {fields['measured']}: {fields['cpu']}"
    low, high = fields["interval"]
    return fields["name"], f"{fields['factor']:.2f}", f"{low:.2f} to {high:.2f}", fields["basis"], fields["source"]


def _known_host_fields(host: HostRow) -> dict[str, Any]:
    from latpred.prediction.clocks import Z90

    names = ("name", "architecture", "year", "factor", "log_std", "basis", "source", "boost_ghz", "rating", "aliases")
    ratio = math.exp(Z90 * host.log_std)
    interval = [host.factor / ratio, host.factor * ratio]
    return {**{name: getattr(host, name) for name in names}, "interval": interval}


def table_of(rows: Sequence[dict[str, Any]], columns: tuple[str, ...]) -> Table:
    """Some columns of rows, numbers with four digits."""
    cells = [tuple(row[name] if isinstance(row[name], str) else f"{row[name]:.4g}" for name in columns) for row in rows]
    texts = [name for name in columns if rows and isinstance(rows[0][name], str)]
    return Table(columns, cells, left=texts, folded=texts)


def _datasheet_fields(spec: Spec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "title": spec.title,
        "architecture": spec.architecture,
        "sms": spec.multiprocessors,
        "memory_gib": spec.memory_bytes / 2**30,
        "gb_per_s": spec.gb_per_s,
        "fp32_tmacs": spec.peak_macs_per_us("fp32") / 1e6,
        "fp16_tmacs": spec.peak_macs_per_us("fp16") / 1e6,
        "clock_mhz": spec.boost_mhz,
        "l2_mib": spec.l2_kib / 1024,
        "source": spec.source,
        "year": int(re.findall(r"20\d\d", spec.source)[-1]),
    }


def host_fields(host: HostProfile) -> dict[str, Any]:
    """What a list of hosts says of one."""
    return {
        "name": host.name,
        "cpu": host.machine.cpu,
        "measured": host.created[:10],
        "module_call_us": host.dispatch.module_call_us,
        "python_call_us": host.dispatch.python_call_us,
        "fixed_us": host.dispatch.fixed_us,
    }


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


def _entry_row(fields: dict[str, Any]) -> tuple[str, ...]:
    state = fields["problem"] or ("ok" if fields["passed"] else "did not pass its gate")
    return (*(fields[name] for name in ("name", "source", "device", "cpu")), fields["created"][:10], state)


@profiles.command(cls=Verb, epilog=examples("latpred profiles show cpu"))
@click.argument("name")
@output_options
def show(name: str, output: Output) -> None:
    """Show what a profile holds: machine, device, runtimes, kernels and how well they were fitted."""
    from latpred.profile.store import load

    show_profile(load(_meant(name)), output)


def _meant(name: str) -> str | Path:
    """The file of what `find` takes for a device of this machine, as cpu-1-thread for cpu; else the name itself."""
    from latpred.profile.store import find, is_live, listing

    entries = listing()
    if not is_live(name) or name in [entry.name for entry in entries]:
        return name
    own = find(name)
    return next(entry.path for entry in entries if entry.profile == own)


def show_profile(profile: DeviceProfile, output: Output) -> None:
    """Print a profile."""
    from latpred.profile.document import SHOWN, to_document
    from latpred.profile.profile_page import kernel_rows, profile_page

    emit(
        output,
        document=lambda: {"schema": SHOWN, "profile": to_document(profile)},
        rows=lambda: kernel_rows(profile),
        page=lambda: profile_page(profile),
    )


@profiles.command(cls=Verb, name="path", epilog=examples('cp "$(latpred profiles path cpu)" /tmp/'))
@click.argument("name", required=False)
@speech_options
def path_of(name: str | None) -> None:
    """Print the file of a profile, or without a NAME the directory of all."""
    from latpred.profile.store import directory, locate

    answer(locate(_meant(name)) if name else directory())


@profiles.command(cls=Verb, epilog=examples("latpred profiles rename cpu epyc-in-the-basement"))
@click.argument("name")
@click.argument("new_name")
@speech_options
def rename(name: str, new_name: str) -> None:
    """Give a profile that was made here another name."""
    from latpred.profile import store

    answer(store.rename(name, new_name))


@profiles.command(cls=Verb, epilog=examples("latpred profiles delete cpu"))
@click.argument("name")
@speech_options
def delete(name: str) -> None:
    """Delete a profile that was made here."""
    from latpred.profile import store

    answer(f"deleted {store.delete(name)}")


@click.group(epilog=examples("latpred cache show"))
def cache() -> None:
    """Show or clear what latpred keeps only to save time."""


@cache.command(cls=Verb, name="show", epilog=examples("latpred cache show"))
@output_options
def show_cache(output: Output) -> None:
    """Print where the cache is and what it takes."""
    from latpred.storage import usage

    used = usage()
    fields = {"path": str(used.path), "files": used.files, "bytes": used.bytes}
    emit(
        output,
        document=lambda: {"schema": "latpred.cache/1", **fields},
        rows=lambda: [fields],
        page=lambda: Page("", [f"{used.path}: {used.files} files, {format_bytes(used.bytes)}"]),
    )


@cache.command(cls=Verb, epilog=examples("latpred cache clear"))
@speech_options
def clear() -> None:
    """Delete the cache; profiles and calibrations under way are kept."""
    from latpred.storage import clear as clear_cache

    removed = clear_cache()
    answer(f"removed {removed.files} files, {format_bytes(removed.bytes)}, from {removed.path}")


@verb("latpred doctor")
@output_options
def doctor(output: Output) -> None:
    """Say what keeps this machine from a prediction, and what to do."""
    from latpred.cli.doctor import examine

    findings = examine()
    rows = [asdict(finding) for finding in findings]
    cells = [(f.verdict, f.topic, f.detail + (f"\n→ {f.advice}" if f.advice else "")) for f in findings]
    heads = ("verdict", "topic", "found")
    page = Page("", [Table(heads, cells, left=heads, folded=("found",))])
    emit_rows(output, "latpred.cli.doctor/1", "findings", rows, page)
    if any(finding.verdict == "fail" for finding in findings):
        click.get_current_context().exit(3)
