"""Options that several verbs share, and the grammar of --batch and --budget."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any

import click

from latpred.cli.main import State, only_results

Verb = Callable[..., Any]

MOST_BATCHES = 4096
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")  # that can be calibrated
MODEL_PRECISIONS = (*PRECISIONS, "fp64")  # that a model may be in
PROTOCOLS = ("single", "pipelined")
_ITEM = re.compile(r"(?P<low>\d+)(?:-(?P<high>\d+)(?::(?P<step>\d+)(?P<times>x?))?)?")
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>s|m|h|)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Model:
    """Which forward pass: the model's inputs and number format."""

    seq: int | None
    image: int | None
    precision: str | None


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how it would run."""

    device: str | None
    runtime: str
    protocol: str
    host: str | None


@dataclass(frozen=True, slots=True)
class Way:
    """How tensors lie in memory, and in which way the device was set up when it was measured."""

    channels_last: bool
    threads: int | None
    cudnn_benchmark: bool | None

    @property
    def memory_format(self) -> str:
        """As `latpred.trace` names it."""
        return "channels_last" if self.channels_last else "contiguous"

    @property
    def asked(self) -> bool:
        """Whether a profile measured in a certain way is asked for."""
        return self.threads is not None or self.cudnn_benchmark is not None


@dataclass(frozen=True, slots=True)
class Output:
    """The form in which a result is wanted, and the file it goes to (stdout without one)."""

    as_json: bool
    as_csv: bool
    path: Path | None


def parse_batches(text: str) -> tuple[int, ...]:
    """Batch sizes from numbers and ranges joined by commas, in the order given, each once.

    Raises
    ------
    ValueError
        When the text is not in the grammar, or names batch 0 or too many sizes.

    Examples
    --------
    >>> parse_batches("1,8,32")
    (1, 8, 32)
    >>> parse_batches("1-4,8-32:8,64-256:2x")
    (1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 256)
    """
    sizes: dict[int, None] = {}
    for item in text.split(","):
        for size in _sizes(item.strip()):
            sizes[size] = None
            if len(sizes) > MOST_BATCHES:
                raise ValueError(f"{text!r} names more than {MOST_BATCHES} batch sizes; use a step, as in 1-4096:2x.")
    return tuple(sizes)


def parse_seconds(text: str) -> float:
    """A time such as 90s, 5m or 1h, in seconds.

    Raises
    ------
    ValueError
        When the text is no time, or no time at all.

    Examples
    --------
    >>> parse_seconds("5m")
    300.0
    """
    match = _DURATION.fullmatch(text)
    seconds = float(match["number"]) * _SECONDS[match["unit"]] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"{text!r} is not a time to spend; write 90s, 5m or 1h.")
    return seconds


def _sizes(item: str) -> Iterable[int]:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ValueError(f"{item!r} is not a batch size; give whole numbers of 1 or more, as in 1,8,32 or 1-128:2x.")
    low = int(match["low"])
    high, step = int(match["high"] or low), int(match["step"] or 1)
    if low < 1:
        raise ValueError(f"{item!r} asks for batch {low}; the smallest batch is 1.")
    if high < low:
        raise ValueError(f"{item!r} ends before it starts; write {high}-{low}.")
    if step < (2 if match["times"] else 1):
        raise ValueError(f"{item!r} never moves on; write a step, as in {low}-{high}:8 or {low}-{high}:2x.")
    return _powers(low, high, step) if match["times"] else range(low, high + 1, step)


def _powers(low: int, high: int, factor: int) -> Iterator[int]:
    while low <= high:
        yield low
        low *= factor


def parsed_by(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A click callback that parses an option's text and turns a ValueError into a usage error."""

    def callback(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from None

    return callback


def batch_option(default: str) -> Callable[[Verb], Verb]:
    """`--batch`, with the grammar of `parse_batches`."""
    return click.option(
        "--batch",
        "-b",
        "batches",
        metavar="SIZES",
        callback=parsed_by(parse_batches),
        default=default,
        show_default=True,
        help="Numbers and ranges joined by commas: 1-64 is every size, 1-64:8 every eighth, 1-128:2x doubles.",
    )


def model_options(verb: Verb) -> Verb:
    """`--seq --image --precision`, handed to the verb as `model_input`."""
    return bundle(
        verb,
        "model_input",
        Model,
        click.option("--seq", type=click.IntRange(1), help="Tokens per sequence, or samples of audio."),
        click.option("--image", type=click.IntRange(1), help="Pixels per side of the image."),
        click.option(
            "--precision",
            type=click.Choice(MODEL_PRECISIONS),
            help="Number format.  [default: the model's own]",
        ),
    )


def target_options(verb: Verb) -> Verb:
    """`--device --runtime --protocol --host`, handed to the verb as `target`."""
    return bundle(
        verb,
        "target",
        Target,
        click.option(
            "--device",
            "-d",
            help="cpu, cuda:0 or simulated, a profile's name or file, or a GPU's name.  [default: this machine's own]",
        ),
        click.option("--runtime", default="eager", show_default=True, help="How the model is run."),
        click.option(
            "--protocol",
            type=click.Choice(PROTOCOLS),
            default="single",
            show_default=True,
            help="single waits for each forward pass; pipelined issues them back to back.",
        ),
        click.option(
            "--host",
            help="Another host: its dispatch over the profile's host's, as 1.3, or a measured one's name, or this.",
        ),
    )


def channels_last_option(verb: Verb) -> Verb:
    """`--channels-last`."""
    return click.option("--channels-last", is_flag=True, help="Images and convolutions in the channels_last format.")(
        verb
    )


def threads_option(verb: Verb) -> Verb:
    """`--threads`, for the verbs that measure."""
    return click.option("--threads", type=click.IntRange(1), help="Threads per op on the CPU.  [default: PyTorch's]")(
        verb
    )


def way_options(verb: Verb) -> Verb:
    """`--channels-last --threads --cudnn-benchmark`, handed to the verb as `way`."""
    return bundle(
        verb,
        "way",
        Way,
        channels_last_option,
        click.option("--threads", type=click.IntRange(1), help="Use a profile measured with so many threads per op."),
        click.option(
            "--cudnn-benchmark/--no-cudnn-benchmark",
            default=None,
            help="Use a profile measured with cudnn's autotuning on, or off.",
        ),
    )


def output_options(verb: Verb) -> Verb:
    """`--json --csv -o`, handed to the verb as `output`."""
    return bundle(
        verb,
        "output",
        Output,
        click.option("--json", "as_json", is_flag=True, help="Print JSON; its first key names the schema."),
        click.option("--csv", "as_csv", is_flag=True, help="Print CSV."),
        click.option(
            "--output",
            "-o",
            "path",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Write there instead of to stdout; .json and .csv choose the form.",
        ),
    )


def speech_options(verb: Verb) -> Verb:
    """`--quiet --debug`, which change the invocation's `State`; and nothing on stdout but the verb's results."""

    @wraps(verb)
    def spoken(*args: Any, **given: Any) -> Any:
        with only_results():
            return verb(*args, **given)

    def set_quiet(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
        context.ensure_object(State).quiet |= value

    def set_debug(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
        context.ensure_object(State).debug |= value

    debug = click.option(
        "--debug", is_flag=True, expose_value=False, callback=set_debug, help="Show the traceback of an error."
    )
    quiet = click.option(
        "--quiet", "-q", is_flag=True, expose_value=False, callback=set_quiet, help="Print results and errors only."
    )
    return quiet(debug(spoken))


def bundle(verb: Verb, name: str, record: type, *options: Callable[[Verb], Verb]) -> Verb:
    """Give a verb several options as one argument, so that its signature stays readable."""

    @wraps(verb)
    def bundled(*args: Any, **given: Any) -> Any:
        values = {field.name: given.pop(field.name) for field in fields(record)}
        return verb(*args, **{name: record(**values)}, **given)

    wrapped: Verb = bundled
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped
