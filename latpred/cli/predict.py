"""Verbs that predict from a profile and run nothing: predict, curve, rank, explain, timeline, report and generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from latpred.cli.calibrate import ensure_profile
from latpred.cli.options import (
    CURVE,
    INPUTS,
    SETUP,
    WRITTEN,
    Output,
    batch_option,
    given,
    output_options,
    speech_options,
    takes,
    verb,
)
from latpred.cli.output import draw, emit, notice, progress, records
from latpred.errors import LatpredError, NoProfileError, UnknownModelError, UsageError
from latpred.query import DeviceQuery, GivenLengths, Options, record_of
from latpred.render import Page, Table, format_interval, format_ms, listed
from latpred.units import format_duration

if TYPE_CHECKING:
    import pandas as pd

    from latpred.explanation.generation import GenerationCurve
    from latpred.graph.graph import ModelGraph
    from latpred.prediction.prediction import Curve
    from latpred.prediction.timeline import ForwardPass

_NAMED = 4  # models that a caveat is of


@verb(
    "latpred predict bert-base-uncased --batch 1,8,32",
    "latpred predict models.py:build --image 192 --batch 1-64:2x --json",
)
@click.argument("model")
@batch_option("1")
@takes(*CURVE)
@output_options
def predict(**asked: Any) -> None:
    """Predict the latency of MODEL, with its interval and crossover.

    MODEL is a name (bert-base-uncased, torchvision:resnet50, timm:vit_tiny_patch16_224), a file and the function in it
    that builds the model (models.py:build), or an .onnx file (with --runtime onnxruntime).
    """
    _show_curve(sparklines=False, **asked)


@verb(
    "latpred curve resnet18 --batch 1-256:2x --csv -o resnet18.csv",
    "latpred curve bert-base-uncased --device rtx-8000 --plot bert.png",
)
@click.argument("model")
@batch_option("1-128:2x")
@takes(*CURVE)
@output_options
def curve(**asked: Any) -> None:
    """Predict the latency of MODEL over a range of batch sizes.

    MODEL is what `latpred predict` takes.
    """
    _show_curve(sparklines=True, **asked)


def _show_curve(*, sparklines: bool, plot: Path | None, measured: Path | None, output: Output, **asked: Any) -> None:
    """Print and draw predictions; CSV also has the work of it, from which `latpred compare` makes its baselines."""
    from latpred.prediction.prediction_page import curve_page

    if measured is not None and plot is None:
        raise UsageError("--measured is drawn into a figure; add --plot curve.png.")
    curve, ran = _predicted(**asked)

    def rows() -> pd.DataFrame:
        table = curve.to_frame()
        if ran is not None:
            for name in ("macs", "bytes", "launches"):
                table[name] = [getattr(ran(point.batch), name)(point.batch) for point in curve]
        return table

    page = partial(curve_page, curve, sparklines=sparklines)
    emit(output, document=curve.to_dict, rows=rows, page=page)
    if plot is not None:
        from latpred.plot import blank, figure_of

        draw(plot, lambda: figure_of(curve.plot(blank(), measured=measured)))


def _predicted(
    model: str, batches: Sequence[int], *, strict: bool, yes: bool, **asked: Any
) -> tuple[Curve, Callable[[int], ModelGraph] | None]:
    """Trace the model, make sure there is a profile, predict; with what ran at a batch, unless lengths were given."""
    from latpred.api import curve_of, predictor_of

    # These refuse what cannot be answered, before anything is calibrated for it.
    query, options = record_of(DeviceQuery, asked), record_of(Options, asked)
    lengths, runtime = options.lengths, options.runtime
    if lengths is None:
        graph = _graph_of(model, query, options, batches, strict=strict, yes=yes)
        predictor = predictor_of(query, runtime)
        curve = curve_of(predictor, graph, batches, Options(runtime=runtime, protocol=options.protocol))
        return curve, lambda batch: predictor.lowered(graph.exact.get(batch, graph), runtime)
    if strict:
        raise UsageError("--strict looks at models whose inputs are alike; leave it out, or --lengths.")
    _demand_names([model])
    ensure_profile(query, (runtime,), yes=yes)
    # A list of lengths is a batch by itself: --batch has a default, which says nothing.
    if isinstance(lengths, GivenLengths) and not given("batches"):
        batches = (len(lengths.values),)
    return curve_of(predictor_of(query, runtime), model, batches, options), None


def _graph_of(
    model: str, query: DeviceQuery, options: Options, batches: Sequence[int], *, strict: bool = False, yes: bool
) -> ModelGraph:
    """What the runtime runs for a model; where there is no profile yet, the model must be one before it is made."""
    from latpred.api import predictor_of, profile_of
    from latpred.runtimes.graph_store import trace_by_name
    from latpred.runtimes.lowering import is_onnx_file, traced_by

    runtime, plain = options.runtime, replace(query, now=False)
    try:
        profile_of(plain)
    except NoProfileError:
        _demand_model(model, options, batches)
    ensure_profile(query, (runtime,), yes=yes)
    predictor, graph = predictor_of(plain, runtime), None
    if traced_by(runtime, predictor.era) != "eager":
        _say_asked(model, runtime)
    elif not is_onnx_file(model):
        graph = trace_by_name(model, predictor.era, batches, **options.tracing)
    if graph is None or graph.target not in ("", predictor.target):
        graph = predictor.trace(model, options, batches)
    if strict:
        from latpred.tracing.op_record import demand_known

        demand_known(graph)
    return graph


def _demand_model(model: str, options: Options, batches: Sequence[int] = ()) -> None:
    """Trace a model, or look at an ONNX file, so that one which cannot be predicted costs no calibration."""
    from latpred.runtimes.graph_store import trace_by_name
    from latpred.runtimes.lowering import is_onnx_file

    if is_onnx_file(model):
        from latpred.runtimes.onnx import onnx_file

        onnx_file.check_file(model, options.runtime)
    else:
        trace_by_name(model, batches=batches, **options.tracing)


def _say_asked(model: str, runtime: str) -> None:
    """Say that a runtime's own tools are asked, which may take a while."""
    notice(f"asking {runtime} what it makes of {model}")


@verb(
    "latpred rank resnet18 resnet50 mobilenet_v2 --device rtx-8000 --device a100 --batch 1,64",
    "latpred rank nasbench201:9 nasbench201:123 --device rtx-8000 --csv",
)
@click.argument("models", nargs=-1, required=True)
@batch_option("1")
@takes(*INPUTS, "devices", "host", "runtime", "protocol", "attention", "yes")
@output_options
def rank(
    models: tuple[str, ...], batches: tuple[int, ...], devices: tuple[str, ...], yes: bool, output: Output, **asked: Any
) -> None:
    """Order MODELS by predicted latency, on one device or several.

    A MODEL is what `latpred predict` takes, or a network of a published space: nasbench201:17, fbnet:C, once_for_all:0.
    """
    from latpred.search.ranking import rank as ranked

    _demand_names(models)
    for device in devices or (None,):
        if device is not None and "," in device and not Path(device).exists():
            raise UsageError(f"{device!r} is no device; give each by itself, as in --device rtx-8000 --device a100.")
        ensure_profile(DeviceQuery(device, asked["host"]), (asked["runtime"],), yes=yes)
    table = ranked(models, batch=batches, device=list(devices) or None, **asked)
    emit(
        output,
        document=lambda: {"schema": "latpred.ranking/1", "rows": records(table)},
        rows=lambda: table.assign(caveats=table["caveats"].str.join("; ")),
        page=lambda: _ranking_page(table, asked["protocol"]),
    )
    if table["error"].notna().all():
        click.get_current_context().exit(UsageError.exit_code)


def _demand_names(models: Sequence[str]) -> None:
    """Refuse a misspelt model before anything is calibrated; what else is wrong with one stands in the ranking."""
    from latpred.runtimes.lowering import is_onnx_file
    from latpred.zoo import names

    for model in models:
        try:
            if not is_onnx_file(model):
                names.build(model)
        except UnknownModelError:
            raise
        except LatpredError:
            continue


def _ranking_page(table: pd.DataFrame, protocol: str) -> Page:
    parts: list[Table | str] = []
    for (device, batch, runtime), cells in table.groupby(["device", "batch", "runtime"], sort=False):
        known = cells[cells["error"].isna()]
        rows = [
            (
                *(str(row["rank"]), row["name"], format_ms(row["latency_ms"])),
                *(format_interval((row["low_ms"], row["high_ms"])), row["regime"], f"{row['launches']:.0f}"),
            )
            for row in known.to_dict("records")
        ]
        heads = ("rank", "model", "latency", "90 % interval", "regime", "launches")
        title = f"{', '.join(known['precision'].unique())}, {runtime} on {device}, {protocol}, batch {batch}"
        parts.append(Table(heads, rows, left=("model", "regime"), folded=("model",), title=title))
    failed = table[table["error"].notna()].drop_duplicates(["device", "candidate"])
    for (_, name, error), cells in failed.groupby(["candidate", "name", "error"], sort=False):
        parts.append(f"{name} on {', '.join(cells['device'])}: {error}")
    return Page("", [*parts, *_ranking_caveats(table[table["error"].isna()])])


def _ranking_caveats(cells: pd.DataFrame) -> Iterator[str]:
    """What may not hold, each once for each device, with the models that it is about where it is not about all."""
    ranked = cells.groupby("device")["candidate"].nunique()
    told = cells.explode("caveats").dropna(subset="caveats")
    for (device, caveat), rows in told.groupby(["device", "caveats"], sort=False):
        names = listed(rows["name"].unique().tolist(), _NAMED)
        of = f" of {names}" if rows["candidate"].nunique() < ranked[str(device)] else ""
        yield f"caveat{of}{f' on {device}' if len(ranked) > 1 else ''}: {caveat}"


@verb(
    "latpred explain bert-base-uncased --batch 1",
    "latpred explain resnet18 --batch 8 --runtime onnxruntime --json",
    "latpred explain resnet18 --plot runtimes.png",
)
@click.argument("model")
@takes("batch", *INPUTS, "device", "host", "runtimes", "protocol", *SETUP, "yes", "plot")
@output_options
def explain(
    model: str, batch: int, runtimes: tuple[str, ...], yes: bool, plot: Path | None, output: Output, **asked: Any
) -> None:
    """Compare runtimes for MODEL, and say what to change.

    It shows what each runtime takes, where the time goes, and how far the model can grow. MODEL is what `latpred
    predict` takes. A runtime that brings its own tools takes seconds the first time it meets a model.
    """
    from latpred.explanation.explain import explain as compare_runtimes
    from latpred.explanation.explanation import explanation_page

    _prepare([model], runtimes, yes, asked)
    explanation = compare_runtimes(
        model, batch, runtimes=runtimes or None, progress=partial(_say_asked, model), **asked
    )
    emit(output, document=explanation.to_dict, rows=explanation.to_frame, page=lambda: explanation_page(explanation))
    draw(plot, explanation.plot)


def _prepare(models: Sequence[str], runtimes: Sequence[str], yes: bool, asked: dict[str, Any]) -> None:
    """Refuse what cannot be answered, then make sure that there is a profile."""
    options = replace(record_of(Options, asked), runtime="onnxruntime")  # in which an .onnx file is compared
    for model in models:
        _demand_model(model, options)
    ensure_profile(record_of(DeviceQuery, asked), runtimes, yes=yes)


@verb(
    "latpred timeline bert-base-uncased --device rtx-8000 -o trace.json",
    "latpred timeline resnet18 --batch 8 --plot clocks.png",
)
@click.argument("model")
@takes("batch", *INPUTS, "device", "runtime", "host", *SETUP, "yes", "plot")
@output_options
def timeline(model: str, batch: int, yes: bool, plot: Path | None, output: Output, **asked: Any) -> None:
    """Follow host and device through one forward pass of MODEL.

    It shows every dispatch, every kernel, and the gaps between. -o trace.json writes a trace that
    https://ui.perfetto.dev and chrome://tracing open; --plot draws it.
    """
    from latpred.api import predictor_of
    from latpred.prediction.timeline import forward_pass

    query, options = record_of(DeviceQuery, asked), record_of(Options, asked)
    graph = _graph_of(model, query, options, (batch,), yes=yes)
    forward = forward_pass(predictor_of(query), graph, batch, runtime=options.runtime)
    emit(output, document=forward.to_dict, rows=forward.to_frame, page=lambda: _forward_page(forward))
    if plot is not None:
        from latpred.plot import two_clocks

        draw(plot, lambda: two_clocks(forward))


def _forward_page(forward: ForwardPass) -> Page:
    from latpred.prediction.prediction_page import basis_lines
    from latpred.prediction.timeline import DEVICE, HOST, WAIT

    point, gaps = forward.prediction, forward.gaps
    rows = []
    for clock in (HOST, DEVICE):
        spans = sum(span.kind != WAIT for span in forward.row(clock))
        busy_ms = forward.busy_us(clock) / 1e3
        share = busy_ms / point.latency_ms if point.latency_ms else 0.0
        rows.append((clock, str(spans), format_ms(busy_ms), f"{share:.1%}"))
    about = f"{point.model}, batch {point.batch}, {point.precision}, {point.runtime} on {point.device}"
    total, longest = (format_ms(us / 1e3) for us in gaps)
    idle = f"between kernels the device idles for {total}, at most {longest} at a time"
    table = Table(("clock", "spans", "busy", "of latency"), rows)
    rests_on = basis_lines(point.provenance, point.device)
    return Page(f"{about}: {format_ms(point.latency_ms)}", [table, idle, *rests_on])


@verb(
    "latpred report bert-base-uncased -o bert.html",
    "latpred report resnet18 mobilenet_v2 --device rtx-8000 -o two.html",
)
@click.argument("models", nargs=-1, required=True)
@click.option(
    "--output", "-o", "path", type=WRITTEN, default=Path("report.html"), show_default=True, help="The file to write."
)
@batch_option("1-256:2x")
@takes(*INPUTS, "device", "host", "runtimes", "protocol", *SETUP, "yes")
@speech_options
def report(
    models: tuple[str, ...], path: Path, batches: tuple[int, ...], runtimes: tuple[str, ...], yes: bool, **asked: Any
) -> None:
    """Write one HTML file about MODELS, to share.

    It holds the answer, figures, runtimes, what is free, what to change, and how far to trust it. The file needs no
    network. Runtimes are compared at the smallest of the batch sizes.
    """
    from latpred.report import demand_packages, gather, write
    from latpred.storage import demand_writable

    demand_packages()
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"a report is HTML, and {path} does not end in .html.")
    demand_writable(path)
    _prepare(models, runtimes, yes, asked)
    parts = []
    for number, model in enumerate(models, 1):
        notice(f"predicting {model} ({number} of {len(models)})")
        parts.append(gather(model, batches, runtimes=runtimes or None, progress=partial(_say_asked, model), **asked))
    notice(f"wrote {write(parts, path)}")


@verb(
    "latpred generate gpt2 --prompt 128 --new-tokens 16 --batch 1-128:2x",
    "latpred generate llama-3.2-1b --prompt 512 --new-tokens 64 --device rtx-8000",
)
@click.argument("model")
@click.option("--prompt", type=click.IntRange(1), default=128, show_default=True, help="Tokens of each prompt.")
@click.option(
    "--new-tokens", type=click.IntRange(1), default=16, show_default=True, help="Tokens to generate for each."
)
@batch_option("1")
@takes("precision_to_generate", "attention", "device", "host", "threads")
@click.option("--runtime", default="eager", show_default=True, help="What runs the forward passes of the decode steps.")
@click.option("--measure", is_flag=True, help="Run it on this machine as well, and print measured beside predicted.")
@takes("yes")
@output_options
def generate(model: str, runtime: str, measure: bool, yes: bool, output: Output, **asked: Any) -> None:
    """Predict how long MODEL takes to generate text.

    It gives the time of the first token, of each further one, and of all. MODEL is the name of a decoder (gpt2,
    llama-3.2-1b), or a file and the function in it that builds a decoder of transformers (models.py:build).
    """
    from latpred.explanation.generation import generation_page, predict_generation
    from latpred.tracing.text_generation import decoder, demand_room

    # Neither a misspelt model nor too long a prompt must cost a calibration.
    demand_room(*decoder(model), asked["prompt"], asked["new_tokens"])
    for name in ("attention", "host", "threads"):
        if measure and asked[name] is not None:
            raise UsageError(f"--measure runs the model as it is on this machine; leave it out, or --{name}.")
    ensure_profile(record_of(DeviceQuery, asked), (runtime,), yes=yes)
    curve = predict_generation(model, batch=asked.pop("batches"), runtime=runtime, **asked)
    if measure:
        _measure_generation(curve, model, asked["device"], output)
        return
    emit(output, document=curve.to_dict, rows=curve.to_frame, page=lambda: generation_page(curve))


def live_device(device: str | None) -> str:
    """What to measure on: the device that was named, else the one whose profile was."""
    from latpred.profile import store

    if device is not None and store.is_live(device):
        return device
    return store.live_name(store.find(device))


def _measure_generation(curve: GenerationCurve, model: str, device: str | None, output: Output) -> None:
    """Run what was predicted, on the device and with the threads of its profile, and show both."""
    from latpred.calibration.devices import open_device
    from latpred.calibration.measurement.timed_generation import beside, measure_generation
    from latpred.profile import gpus, store

    first, profile = curve[0], store.find(device)
    if first.runtime != "eager":
        raise UsageError(
            f"Text generation is measured in eager, not in {first.runtime}; leave out --measure or --runtime."
        )
    live = open_device(live_device(device))
    here, predicted = live.info().name, profile.device.name
    if here != gpus.one_name_each([here, predicted])[predicted]:
        raise UsageError(
            f"{live.name} here is {here}, and the prediction is for {predicted}; leave out --measure, or make a "
            f"profile of the one here: latpred calibrate --device {live.name}"
        )
    with progress("measuring") as show:
        table = measure_generation(
            model,
            first.prompt,
            first.new_tokens,
            [point.batch for point in curve],
            device=live.name,
            precision=first.precision,
            threads=profile.machine.threads if profile.device.kind == "cpu" else None,
            progress=show,
        )
    joined = beside(curve, table)
    emit(
        output,
        document=lambda: {**curve.to_dict(), "measured": records(joined)},
        rows=lambda: joined,
        page=lambda: _measured_page(curve, joined),
    )


def _measured_page(curve: GenerationCurve, joined: pd.DataFrame) -> Page:
    from latpred.explanation.generation import generation_page

    rows = []
    for row in joined.to_dict("records"):
        timed = row["status"] == "ok"
        result = (format_duration(row["measured_s"]), f"{row['error']:+.1%}") if timed else (row["status"], "-")
        rows.append((str(row["batch"]), row["what"], format_duration(row["predicted_s"]), *result))
    page = generation_page(curve)
    table = Table(("batch", "what", "predicted", "measured", "error"), rows, left=("what",))
    return Page(page.title, [*page.parts, table])
