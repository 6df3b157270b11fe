"""Where results and remarks go: results to stdout or a file, in the form asked for; remarks to stderr.

Nothing here knows what a result means; each verb brings its own text, rows and document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from latpred.cli.main import State, results
from latpred.cli.options import Output, Verb
from latpred.errors import UsageError
from latpred.render.prediction_text import SPARKS
from latpred.render.prediction_text import sparkline as sparkline_of
from latpred.render.profile_text import age
from latpred.storage import result_file
from latpred.units import format_duration

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

    from latpred.prediction.crossover import BatchThreshold
    from latpred.prediction.prediction import Curve, Prediction, Setting
    from latpred.profile.gpus import Spec
    from latpred.profile.host_profile import HostProfile

Print = Callable[["Console"], None]
WIDTH = 80


def emit(
    output: Output,
    *,
    document: Callable[[], Mapping[str, Any]],
    rows: Callable[[], pd.DataFrame],
    text: Print,
) -> None:
    """Write a result in the form asked for."""
    form = _form(output)
    if form == "json":
        import json

        written = json.dumps(document(), indent=2, allow_nan=False) + "\n"
    elif form == "csv":
        written = rows().to_csv(index=False)
    elif output.path is None:
        with results() as stream:
            text(_console(stream))
        return
    else:
        written = _plain(text)
    _write(output.path, written)


def answer(text: object) -> None:
    """Print a result of one line."""
    with results() as stream:
        click.echo(text, file=stream)


def notice(message: str) -> None:
    """Say something on stderr, unless --quiet."""
    context = click.get_current_context(silent=True)
    state = context.find_object(State) if context else None
    if state is None or not state.quiet:
        click.echo(message, err=True)


def _form(output: Output) -> str:
    if output.as_json and output.as_csv:
        raise UsageError("--json and --csv exclude each other; give one.")
    if output.as_json or output.as_csv:
        return "json" if output.as_json else "csv"
    suffix = output.path.suffix.lower() if output.path else ""
    return {".json": "json", ".csv": "csv"}.get(suffix, "text")


def _write(path: Path | None, text: str) -> None:
    if path is None:
        with results() as stream:
            click.echo(text, file=stream, nl=False)
        return
    with result_file(path, "Name another file with -o.") as part:
        part.write_text(text)
    notice(f"wrote {path}")


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    class Results(Console):
        def on_broken_pipe(self) -> None:
            raise  # by itself, rich ends the program

    console = Results(file=stream, soft_wrap=False, highlight=False)
    console.width = max(console.width, WIDTH)  # a narrower terminal wraps lines, where rich would cut numbers short
    return console


def _plain(text: Print) -> str:
    import io

    from rich.console import Console

    stream = io.StringIO()
    text(Console(file=stream, width=WIDTH, highlight=False, force_terminal=False))
    return stream.getvalue()


COLUMNS = ("batch", "latency", "90 % interval", "overhead", "compute", "regime", "samples/s")


def print_curve(curve: Curve, console: Console, *, sparkline: bool = False) -> None:
    """Print what was asked, the table, the batch at which the regime changes, provenance and caveats."""
    console.print(_title(curve.setting), style="bold", markup=False, soft_wrap=True)
    if sparkline and len(curve) > 1 and console.encoding.startswith("utf"):
        console.print(_spark(curve), markup=False, soft_wrap=True)
    console.print(_table(curve))
    for line in _facts(curve):
        console.print(line, markup=False, soft_wrap=True)


def _spark(curve: Curve) -> str:
    """Latency and throughput as bars, each from zero to its largest value."""
    latency, rate = curve.latency_ms.tolist(), curve.throughput_per_s.tolist()
    wide = len(curve) > SPARKS // 2
    lines = [
        f"latency   {sparkline_of(latency)}  up to {format_duration(max(latency) / 1e3)}",
        f"samples/s {sparkline_of(rate)}  up to {_rate(max(rate))}",
    ]
    return "\n".join(lines) if wide else "  ".join(lines)


def _title(setting: Setting) -> str:
    size = {"seq": "tokens", "image": "pixels", "audio": "samples"}.get(setting.input_kind)
    inputs = f", {setting.input_size} {size}" if size and setting.input_size else ""
    return f"{setting.model}{inputs}, {setting.precision}, {setting.runtime} on {setting.device}, {setting.protocol}"


def _table(curve: Curve) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "regime" else "right", no_wrap=True)
    for point in curve:
        table.add_row(*_row(point))
    return table


def _row(point: Prediction) -> tuple[str, ...]:
    low, high = (format_duration(end / 1e3) for end in point.interval_ms)
    if low.split()[-1] == high.split()[-1]:
        low = low.split()[0]
    return (
        str(point.batch) + ("" if point.fits is not False else "*"),
        format_duration(point.latency_ms / 1e3),
        f"{low} to {high}",
        format_duration(point.overhead_ms / 1e3),
        format_duration(point.compute_ms / 1e3),
        point.regime.removesuffix("-bound"),
        _rate(point.throughput_per_s),
    )


def _rate(per_s: float) -> str:
    decimals = 0 if per_s >= 100 else 1 if per_s >= 10 else 2
    return f"{per_s:.{decimals}f}"


def _facts(curve: Curve) -> list[str]:
    setting, last = curve.setting, curve.points[-1]
    said = [_crossover(curve.crossover)]
    if any(point.fits is False for point in curve):
        said.append("* needs more memory than the device has")
    share = min(point.coverage.launches for point in curve)
    if last.coverage.estimated_ops:
        unknown = ", ".join(f"{name} ({count})" for name, count in last.coverage.estimated_ops.items())
        said.append(f"coverage: formulas for {share:.1%} of launches; estimated: {unknown}")
    else:
        said.append("coverage: formulas for all launches")
    said.append(f"profile: {_origin(setting)}")
    return said + [f"caveat: {caveat}" for caveat in setting.provenance.caveats]


def _crossover(found: BatchThreshold) -> str:
    if found.batch == 1:
        return "never framework-bound: compute- or memory-bound from batch 1"
    if found.batch is None:
        return "framework-bound at every batch up to 65,536"
    low, high = found.low or 1, found.high
    span = f"{low} to {high}" if high is not None else f"{low} or more"
    return (
        f"compute-bound from batch {found.batch} (90 %: {span})" if low != high else f"compute-bound from batch {low}"
    )


def _origin(setting: Setting) -> str:
    from latpred.profile.datasheet import PROVENANCE
    from latpred.profile.store import Owner, owner

    provenance = setting.provenance
    machine = provenance.machine
    if provenance.source.partition(",")[0] == PROVENANCE:
        return f"none: {machine.accelerator} from its datasheet; measure one with: latpred calibrate"
    where = "this machine" if owner(machine) is Owner.THIS else provenance.profile
    threads = f", {machine.threads} thread{'' if machine.threads == 1 else 's'}" if not machine.accelerator else ""
    source, comma, adapted = provenance.source.partition(", ")
    verb = "calibrated" if source == "measured" else source
    return f"{where} ({setting.device}{threads}, {verb} {age(provenance.created)}{comma}{adapted})"


def plot_option(verb: Verb) -> Verb:
    """`--plot`, handed to the verb as `plot`."""
    return click.option(
        "--plot",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_checked,
        help="Draw a figure into this file too: .png, .svg or .pdf.",
    )(verb)


def draw(path: Path | None, figure: Callable[[], Figure]) -> None:
    """Make a figure and write it, where one is wanted.

    Raises
    ------
    UsageError
        When the file cannot be written.
    """
    if path is None:
        return
    from latpred.plot import save

    notice(f"wrote {save(figure(), path)}")


def _checked(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """The path, if a figure can be drawn at all: minutes of measuring must not end in a missing package."""
    if path is not None:
        from latpred.plot import style
        from latpred.storage import demand_writable

        demand_writable(style.checked_path(path))
        with style.in_style():
            pass
    return path


def show_datasheets(output: Output) -> None:
    """Print the GPUs that `--device` knows from their datasheets."""
    from latpred.profile.gpus import SPECS

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
    from latpred.profile import host_profile

    rows = [_host_fields(host) for host in host_profile.listing()]

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
    from latpred.calibration.host_only import calibrate_host
    from latpred.profile import host_profile

    found = calibrate_host(name) if name else calibrate_host()
    notice(f"saved {host_profile.path(found.name)}")
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
