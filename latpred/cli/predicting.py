"""Verbs that predict: predict for a few batch sizes, curve for many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from latpred.cli.options import (
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
from latpred.cli.output import emit

if TYPE_CHECKING:
    from latpred.lengths import Given, Lengths
    from latpred.prediction import Curve


@dataclass(frozen=True, slots=True)
class Ragged:
    """Sequences of unequal lengths, and what is done about them."""

    lengths: Lengths | Given | None
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
    from latpred.lengths import parse_lengths

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
        @click.option("--yes", "-y", is_flag=True, help="Calibrate without asking on a machine that has no profile.")
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
    """Predict the latency of MODEL, with its interval, its regime and from which batch on compute rules.

    MODEL is a name (bert-base-uncased, torchvision:resnet50, timm:vit_tiny_patch16_224), a file and the function in it
    that builds the model (models.py:build), or an .onnx file (with --runtime onnxruntime).
    """
    show_curve(predicted(context, request), request.output)


@click.command(epilog="\b\nExample:\n  latpred curve resnet18 --batch 1-256:2x --csv -o resnet18.csv")
@prediction_options("1-128:2x")
def curve(context: click.Context, request: Request) -> None:
    """Predict the latency of MODEL over a range of batch sizes; see `latpred predict` for what MODEL may be."""
    show_curve(predicted(context, request), request.output)


def predicted(context: click.Context, request: Request) -> Curve:
    """Walk the model, make sure there is a profile, predict."""
    from latpred import api
    from latpred.cli.calibrating import ensure_profile
    from latpred.finding import located, predictor_of
    from latpred.runtimes import onnx_file
    from latpred.runtimes.walking import target_of, walk, walked_by
    from latpred.tracing import trace

    given, target, way = request.model_input, request.target, request.way
    if request.ragged.lengths is not None:
        return _of_lengths(context, request)
    options: dict[str, Any] = {"seq": given.seq, "image": given.image, "precision": given.precision}
    by_tools = walked_by(target.runtime) != "eager"
    # The walk comes first: a misspelt model must not cost a calibration.
    graph = None
    if onnx_file.is_file(request.model):
        onnx_file.check_file(request.model, target.runtime)
    else:
        graph = trace(request.model, memory_format=way.memory_format, strict=request.strict, **options)
    ensure_profile(context, target.device, way, yes=request.yes)
    if by_tools or graph is None:
        predictor = predictor_of(located(target.device, target.host, way.threads, way.cudnn_benchmark))
        predictor.check(target.runtime)
        kind = target_of(predictor.profile.device.kind)
        graph = walk(request.model, runtime=target.runtime, target=kind, memory_format=way.memory_format, **options)
    return api.predict(
        graph,
        request.batches,
        target.runtime,
        device=target.device,
        host=target.host,
        threads=way.threads,
        cudnn_benchmark=way.cudnn_benchmark,
        protocol=target.protocol,
    )


def _of_lengths(context: click.Context, request: Request) -> Curve:
    from latpred import api
    from latpred.cli.calibrating import ensure_profile
    from latpred.lengths import Given

    given, target, way, ragged = request.model_input, request.target, request.way, request.ragged
    ensure_profile(context, target.device, way, yes=request.yes)
    lengths: Any = ragged.lengths
    batches: Sequence[int] = request.batches
    # A list of lengths is a batch by itself: --batch has a default, which says nothing.
    if isinstance(lengths, Given) and context.get_parameter_source("batches") is ParameterSource.DEFAULT:
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
    )


def show_curve(curve: Curve, output: Output) -> None:
    """Print predictions; JSON is the same document for both verbs, with one point per batch."""
    from latpred.cli.rendering import print_curve

    emit(output, document=curve.to_dict, rows=curve.to_frame, text=lambda console: print_curve(curve, console))
