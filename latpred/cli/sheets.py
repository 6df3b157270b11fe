"""What `profiles list --datasheets`, `profiles list --hosts` and `calibrate --host-only` print."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from latpred.cli.output import emit, notice

if TYPE_CHECKING:
    from rich.console import Console

    from latpred.cli.options import Output
    from latpred.hostprofile import HostProfile
    from latpred.specs import Spec


def show_datasheets(output: Output) -> None:
    """Print the GPUs that `--device` knows from their datasheets."""
    from latpred.specs import SPECS

    rows = [_sheet_fields(spec) for spec in SPECS]
    emit(
        output,
        document=lambda: {"schema": "latpred.datasheets/1", "datasheets": rows},
        rows=lambda: _frame(rows),
        text=lambda console: _print(
            console, rows, ("name", "sms", "memory_gib", "gb_per_s", "fp32_tmacs", "fp16_tmacs", "year")
        ),
    )


def show_hosts(output: Output) -> None:
    """Print the hosts that `--host` knows."""
    from latpred import hostprofile

    rows = [_host_fields(host) for host in hostprofile.listing()]

    def text(console: Console) -> None:
        _print(console, rows, ("name", "cpu", "measured"))
        if not rows:
            console.print("no host was measured yet; measure this one with: latpred calibrate --host-only")

    emit(
        output,
        document=lambda: {"schema": "latpred.hosts/1", "hosts": rows},
        rows=lambda: _frame(rows),
        text=text,
    )


def measure_host(name: str | None, output: Output) -> None:
    """Measure this host's dispatch, keep it, and say what it costs."""
    from latpred import hostprofile
    from latpred.calibration.hostonly import calibrate_host

    found = calibrate_host(name) if name else calibrate_host()
    notice(f"saved {hostprofile.path(found.name)}")
    fields = _host_fields(found)
    costs = [{"class": key, "us": us} for key, us in sorted(found.dispatch.costs_us.items()) if "." not in key]

    def text(console: Console) -> None:
        console.print(f"{found.name}: {found.machine.cpu}, measured in {found.seconds:.0f} s")
        _print(console, [{**row, "class": row["class"] or "any"} for row in costs], ("class", "us"))
        console.print(f"use it with: latpred predict MODEL --device NAME --host {found.name}", soft_wrap=True)

    emit(
        output,
        document=lambda: {"schema": "latpred.host/1", **fields, "costs_us": dict(found.dispatch.costs_us)},
        rows=lambda: _frame(costs),
        text=text,
    )


def _sheet_fields(spec: Spec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "title": spec.title,
        "architecture": spec.architecture,
        "sms": spec.multiprocessors,
        "memory_gib": spec.memory_bytes / 2**30,
        "gb_per_s": spec.bandwidth_bytes_per_s / 1e9,
        "fp32_tmacs": spec.peak_macs_per_s("fp32") / 1e12,
        "fp16_tmacs": spec.peak_macs_per_s("fp16") / 1e12,
        "clock_mhz": spec.clock_hz / 1e6,
        "l2_mib": spec.l2_bytes / 2**20,
        "source": spec.source,
        "year": int(re.findall(r"20\d\d", spec.source)[-1]),
    }


def _host_fields(host: HostProfile) -> dict[str, Any]:
    return {
        "name": host.name,
        "cpu": host.machine.cpu,
        "measured": host.created[:10],
        "module_call_us": host.dispatch.module_call_us,
        "python_call_us": host.dispatch.python_call_us,
        "fixed_us": host.dispatch.fixed_us,
    }


def _print(console: Console, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    from rich.table import Table

    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right", overflow="fold")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.4g}" for value in map(row.get, columns)))
    console.print(table)


def _frame(rows: list[dict[str, Any]]) -> Any:
    import pandas as pd

    return pd.DataFrame(rows)
