"""Verbs that predict: predict for a few batch sizes, curve for many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from latpred.cli.options import (
    MODEL_PRECISIONS,
    Model,
    Output,
    Target,
    Verb,
    Way,
    batch_option,
    bundle,
    model_options,
    output_options,
    parsed_by,
    speech_options,
    target_options,
    way_options,
)
from latpred.cli.output import draw, emit, notice, plot_option
from latpred.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import Console

    from latpred.explanation.generation import GenerationCurve
    from latpred.graph.graph import ModelGraph
    from latpred.prediction.prediction import Curve
    from latpred.query import GivenLengths, Lengths


@dataclass(frozen=True, slots=True)
class Ragged:
    """Sequences of unequal lengths, and what is done about them."""

    lengths: Lengths | GivenLengths | None
    execution: str


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked to be predicted."""

    model: str
    batches: tuple[int, ...]
    model_input: Model
    ragged: Ragged
    target: Target
    way: Way
    strict: bool
    yes: bool
    now: bool
    plot: Path | None
    measured: Path | None
    output: Output


def ragged_options(verb: Verb) -> Verb:
    """`--lengths --execution`, handed to the verb as `ragged`."""
    return bundle(
        verb,
        "ragged",
        Ragged,
        click.option(
            "--lengths",
            metavar="TOKENS",
            callback=parsed_by(_lengths),
            help="Sequences of unequal lengths: 12,40,7, or mean=20.92,std=10.18,pad=128.",
        ),
        click.option(
            "--execution",
            type=click.Choice(("padded", "nested", "packed")),
            default="padded",
            show_default=True,
            help="What is done about unequal lengths: all at the padded length, nested tensors, or one packed row.",
        ),
    )


def _lengths(text: str) -> Any:
    from latpred.query import parse_lengths

    return parse_lengths(text)


def prediction_options(default_batch: str) -> Callable[[Verb], Verb]:
    """Everything a predicting verb takes, handed to it as one `Request`."""

    def decorate(verb: Verb) -> Verb:
        @click.argument("model")
        @batch_option(default_batch)
        @model_options
        @ragged_options
        @target_options
        @way_options
        @click.option("--strict", is_flag=True, help="Refuse an op that no formula knows, instead of estimating it.")
        @click.option(
            "--now", is_flag=True, help="Answer for the machine as it is: a second of timing tells how fast that is."
        )
        @click.option("--yes", "-y", is_flag=True, help="Calibrate without asking on a machine that has no profile.")
        @plot_option
        @click.option(
            "--measured",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Draw the points of this measurement table over the curve; with --plot.",
        )
        @output_options
        @speech_options
        @click.pass_context
        def command(context: click.Context, /, **given: Any) -> None:
            verb(context, Request(**given))

        command.__doc__ = verb.__doc__
        return command

    return decorate


@click.command(
    epilog="\b\nExample:\n"
    "  latpred predict bert-base-uncased --batch 1,8,32\n"
    "  latpred predict models.py:build --image 192 --batch 1-64:2x --json"
)
@prediction_options("1")
def predict(context: click.Context, request: Request) -> None:
    """Predict the latency of MODEL, with its interval, its regime and its crossover batch.

    MODEL is a name (bert-base-uncased, torchvision:resnet50, timm:vit_tiny_patch16_224), a file and the function in it
    that builds the model (models.py:build), or an .onnx file (with --runtime onnxruntime).
    """
    show_curve(*predicted(context, request), request)


@click.command(
    epilog="\b\nExample:\n"
    "  latpred curve resnet18 --batch 1-256:2x --csv -o resnet18.csv\n"
    "  latpred curve bert-base-uncased --device rtx-8000 --plot bert.png"
)
@prediction_options("1-128:2x")
def curve(context: click.Context, request: Request) -> None:
    """Predict the latency of MODEL over a range of batch sizes; see `latpred predict` for what MODEL may be."""
    show_curve(*predicted(context, request), request, sparkline=True)


def predicted(context: click.Context, request: Request) -> tuple[Curve, ModelGraph | None]:
    """Walk the model, make sure there is a profile, predict; with the graph, where one serves all batches."""
    from latpred import api
    from latpred.cli.calibrate import ensure_profile

    target, way = request.target, request.way
    if request.measured is not None and request.plot is None:
        raise UsageError("--measured is drawn into a figure; add --plot curve.png.")
    if request.ragged.lengths is None and request.ragged.execution != "padded":
        raise UsageError("--execution says what is done about unequal lengths; add --lengths 12,40,7 or leave it out.")
    if request.ragged.lengths is not None:
        return _of_lengths(context, request), None
    graph = walked(
        request.model,
        request.model_input,
        target,
        way,
        request.batches,
        ensure=lambda: ensure_profile(context, target.device, way, runtimes=(target.runtime,), yes=request.yes),
        strict=request.strict,
    )
    curve = api.predict(
        graph,
        request.batches,
        target.runtime,
        device=target.device,
        host=target.host,
        threads=way.threads,
        cudnn_benchmark=way.cudnn_benchmark,
        protocol=target.protocol,
        now=request.now,
    )
    return curve, graph


def walked(
    model: str,
    given: Model,
    target: Target,
    way: Way,
    batches: Sequence[int] = (),
    *,
    ensure: Callable[[], None],
    strict: bool = False,
) -> ModelGraph:
    """What the runtime runs for a model. `ensure` sees to a profile once the model is known to be one."""
    from latpred.prediction.find import predictor_of
    from latpred.query import DeviceQuery
    from latpred.runtimes.legacy_torch import traced_for
    from latpred.runtimes.lowering import target_of, trace_for_runtime, traced_by
    from latpred.runtimes.onnx import onnx_file
    from latpred.tracing import trace

    options: dict[str, Any] = {"seq": given.seq, "image": given.image, "precision": given.precision}
    options |= {"memory_format": way.memory_format, "batches": batches}
    by_tools = traced_by(target.runtime) != "eager"
    # The walk comes first: a misspelt model must not cost a calibration.
    graph = None
    if onnx_file.is_file(model):
        onnx_file.check_file(model, target.runtime)
    else:
        graph = trace(model, strict=strict, **options)
    ensure()
    predictor = predictor_of(DeviceQuery(target.device, target.host, way.threads, way.cudnn_benchmark), target.runtime)
    era = predictor.profile.protocol.get("era", "")
    if graph is not None and not by_tools and not era:
        return graph
    if by_tools:
        notice(f"asking {target.runtime} what it makes of {model}")
    kind = target_of(predictor.profile.device.kind)
    with traced_for(era):  # of older software, as `latpred.predict` does it
        return trace_for_runtime(model, runtime=target.runtime, target=kind, **options)


def _of_lengths(context: click.Context, request: Request) -> Curve:
    from latpred import api
    from latpred.cli.calibrate import ensure_profile
    from latpred.query import GivenLengths

    given, target, way, ragged = request.model_input, request.target, request.way, request.ragged
    ensure_profile(context, target.device, way, runtimes=(target.runtime,), yes=request.yes)
    lengths: Any = ragged.lengths
    batches: Sequence[int] = request.batches
    # A list of lengths is a batch by itself: --batch has a default, which says nothing.
    if isinstance(lengths, GivenLengths) and context.get_parameter_source("batches") is ParameterSource.DEFAULT:
        batches = (len(lengths.values),)
    return api.predict(
        request.model,
        batches,
        target.runtime,
        seq=given.seq,
        image=given.image,
        lengths=lengths,
        execution=ragged.execution,
        device=target.device,
        host=target.host,
        precision=given.precision,
        threads=way.threads,
        cudnn_benchmark=way.cudnn_benchmark,
        protocol=target.protocol,
        now=request.now,
    )


def show_curve(curve: Curve, graph: ModelGraph | None, request: Request, *, sparkline: bool = False) -> None:
    """Print and draw predictions; JSON is the same document for both verbs, with one point per batch.

    CSV also has the work of the graph, from which `latpred compare` makes its baselines.
    """
    from latpred.cli.output import print_curve

    def rows() -> pd.DataFrame:
        table = curve.to_frame()
        for name in ("macs", "bytes", "launches") if graph is not None else ():
            table[name] = [getattr(graph, name)(point.batch) for point in curve]
        return table

    def text(console: Console) -> None:
        print_curve(curve, console, sparkline=sparkline)

    emit(request.output, document=curve.to_dict, rows=rows, text=text)
    draw(request.plot, lambda: _figure(curve, request.measured))


def _figure(curve: Curve, measured: Path | None) -> Figure:
    from latpred import plot

    ax = plot.blank()
    plot.curve(curve, ax, measured=measured)
    return plot.figure_of(ax)


@click.command(
    epilog="\b\nExample:\n"
    "  latpred generate gpt2 --prompt 128 --new-tokens 16 --batch 1-128:2x\n"
    "  latpred generate llama-3.2-1b --prompt 512 --new-tokens 64 --device rtx-8000"
)
@click.argument("model")
@click.option("--prompt", type=click.IntRange(1), default=128, show_default=True, help="Tokens of each prompt.")
@click.option(
    "--new-tokens", type=click.IntRange(1), default=16, show_default=True, help="Tokens to generate for each."
)
@batch_option("1")
@click.option("--precision", type=click.Choice(MODEL_PRECISIONS), help="Number format.  [default: the model's own]")
@click.option(
    "--device",
    "-d",
    help="cpu, cuda:0, simulated, or a profile's name or file.  [default: this machine's own profile]",
)
@click.option("--runtime", default="eager", show_default=True, help="What runs the forward passes of the decode steps.")
@click.option("--measure", is_flag=True, help="Run it on this machine as well, and print measured beside predicted.")
@click.option("--yes", "-y", is_flag=True, help="Calibrate without asking on a machine that has no profile.")
@output_options
@speech_options
@click.pass_context
def generate(
    context: click.Context,
    model: str,
    prompt: int,
    new_tokens: int,
    batches: tuple[int, ...],
    precision: str | None,
    device: str | None,
    runtime: str,
    measure: bool,
    yes: bool,
    output: Output,
) -> None:
    """Predict how long MODEL takes to generate text: its first token, each further one, and all of them.

    MODEL is the name of a decoder (gpt2, llama-3.2-1b), or a file and the function in it that builds a transformers
    model with a generate() (models.py:build).
    """
    from latpred import runtimes as known
    from latpred.cli.calibrate import ensure_profile
    from latpred.explanation.generation import predict_generation
    from latpred.tracing.text_generation import decoder

    known.get(runtime)
    decoder(model)  # a misspelt model must not cost a calibration
    ensure_profile(context, device, runtimes=(runtime,), yes=yes)
    curve = predict_generation(model, prompt, new_tokens, batches, runtime, device=device, precision=precision)
    if measure:
        _measured(curve, model, live_device(device), output)
        return
    emit(output, document=curve.to_dict, rows=curve.to_frame, text=lambda console: print_generation(curve, console))


def live_device(device: str | None) -> str:
    """What to measure on: the device that was named, else the one whose profile was."""
    from latpred.profile import store

    if device is not None and device.partition(":")[0] in store.LIVE_KINDS:
        return device
    return store.find(device).device.kind


def _measured(curve: GenerationCurve, model: str, device: str, output: Output) -> None:
    """Run what was predicted, and show both."""
    from latpred.calibration.measurement.timed_generation import beside, measure_generation
    from latpred.cli.progress_bar import progress

    first = curve[0]
    if first.runtime != "eager":
        raise UsageError(
            f"Text generation is measured in eager, not in {first.runtime}; leave out --measure or --runtime."
        )
    with progress("measuring") as show:
        table = measure_generation(
            model,
            first.prompt,
            first.new_tokens,
            [point.batch for point in curve],
            device=device,
            precision=first.precision,
            progress=show,
        )
    joined = beside(curve, table)
    emit(
        output,
        document=lambda: {**curve.to_dict(), "measured": joined.to_dict("records")},
        rows=lambda: joined,
        text=lambda console: _print_both(curve, joined, console),
    )


def _print_both(curve: GenerationCurve, joined: pd.DataFrame, console: Console) -> None:
    from rich.table import Table

    from latpred.units import format_duration

    print_generation(curve, console)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("batch", "what", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=True)
    for row in joined.to_dict("records"):
        cells = (str(row["batch"]), row["what"], format_duration(row["predicted_s"]))
        if row["status"] == "ok":
            table.add_row(*cells, format_duration(row["measured_s"]), f"{row['error']:+.1%}")
        else:
            table.add_row(*cells, row["status"], "-")
    console.print(table)


def print_generation(curve: GenerationCurve, console: Console) -> None:
    """Print what was asked, the table, provenance and caveats."""
    from rich.table import Table

    from latpred.explanation.generation import HEAD, row, title

    console.print(title(curve[0]), style="bold", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in HEAD:
        table.add_column(name, justify="left" if name == "regime" else "right", no_wrap=True)
    for point in curve:
        table.add_row(*row(point))
    console.print(table, soft_wrap=True)
    if any(point.fits is False for point in curve):
        console.print("* needs more memory than the device has")
    provenance = curve[0].provenance
    console.print(f"profile: {provenance.profile}, {provenance.source}", markup=False, soft_wrap=True)
    for caveat in provenance.caveats:
        console.print(f"caveat: {caveat}", markup=False, soft_wrap=True)
