"""One table of the options that several verbs share, and the grammar of --batch and --budget.

An option's name is that of the parameter of `latpred.predict` it is handed to, so that verbs pass options on together.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from latpred.cli.main import state
from latpred.errors import UsageError
from latpred.query import AMP, ATTENTIONS, EXECUTIONS, PROTOCOLS, checked_batches, parse_lengths

Command = Callable[..., Any]

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)  # to be read
WRITTEN = click.Path(dir_okay=False, path_type=Path)
MOST_BATCHES = 4096
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")  # that can be calibrated
_ITEM = re.compile(r"(?P<low>\d+)(?:-(?P<high>\d+)(?::(?P<step>\d+)(?P<times>x?))?)?")
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>s|m|h|)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class Output(NamedTuple):
    """The form in which a result is wanted, and the file it goes to (stdout without one)."""

    as_json: bool = False
    as_csv: bool = False
    path: Path | None = None

    @property
    def form(self) -> str:
        """The one of "json", "csv" and "text" that is wanted."""
        if self.as_json or self.as_csv:
            return "json" if self.as_json else "csv"
        suffix = self.path.suffix.lower() if self.path else ""
        return {".json": "json", ".csv": "csv"}.get(suffix, "text")

    def check(self) -> None:
        """Refuse, before anything takes time, what could not be written in the end."""
        from latpred.storage import demand_writable

        if self.as_json and self.as_csv:
            raise UsageError("--json and --csv exclude each other; give one.")
        other = self.path.suffix.lower() if self.path else ""
        if other in (".json", ".csv") and other != f".{self.form}":
            raise UsageError(f"--{self.form} and a file {other} exclude each other; leave --{self.form} out.")
        if other in (".html", ".png", ".svg", ".pdf"):
            how = "latpred report writes HTML" if other == ".html" else "--plot draws figures, where a verb has it"
            raise UsageError(f"-o writes text, .json or .csv, not {other}; {how}.")
        if self.path is not None:
            demand_writable(self.path)


def parse_batches(text: str, most: int = MOST_BATCHES) -> tuple[int, ...]:
    """Batch sizes from numbers and ranges joined by commas, in the order given, each once."""
    sizes: dict[int, None] = {}
    for item in text.split(","):
        for size in _sizes(item.strip()):
            sizes[size] = None
            if len(sizes) > most:
                raise ValueError(f"{text!r} names more batch sizes than {most}; give fewer.")
    return checked_batches(tuple(sizes))


def parse_seconds(text: str) -> float:
    """A time such as 90s, 5m or 1h, in seconds."""
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
    if not match["times"]:
        return range(low, high + 1, step)
    sizes = [low]
    while sizes[-1] * step <= high:
        sizes.append(sizes[-1] * step)
    return sizes


def _parsed_by(parse: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A click callback that parses what stands after an option and turns a ValueError into a usage error."""

    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from None

    return callback


def _figure_path(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """The path, if a figure can be drawn at all: minutes of measuring must not end in a missing package."""
    if path is not None:
        from latpred.plot import style
        from latpred.storage import demand_writable

        demand_writable(style.checked_path(path))
        with style.in_style():
            pass
    return path


def given(*names: str) -> list[str]:
    """Which of these parameters of the verb stand on its command line, as the user writes them."""
    context = click.get_current_context()
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]


def batch_option(default: str | None, shown: str | None = None) -> Callable[[Command], Command]:
    """`--batch`, with the grammar of `parse_batches`; without a default, what is `shown` says which sizes are taken."""
    grammar = "Numbers and ranges, by commas or again: 1-64 is every size, 1-64:8 every eighth, 1-128:2x doubles."
    return click.option(
        "--batch",
        "-b",
        "batches",
        metavar="SIZES",
        multiple=True,
        callback=_parsed_by(lambda texts: parse_batches(",".join(texts)) if texts else None),
        default=default and (default,),
        show_default=default is not None,
        help=grammar + (f"  [default: {shown}]" if shown else ""),
    )


def budget_option(about: str) -> Callable[[Command], Command]:
    """`--budget`, with the grammar of `parse_seconds`."""
    return click.option("--budget", "budget_s", metavar="TIME", callback=_parsed_by(parse_seconds), help=about)


def _precision(*formats: str, default: str | None = None) -> Callable[[Command], Command]:
    """`--precision`; without a default it is the model's own."""
    return click.option(
        "--precision",
        type=click.Choice(formats),
        default=default,
        show_default=default is not None,
        help="Number format"
        + ("; amp-: fp32 under torch.autocast." if set(AMP) & set(formats) else ".")
        + ("" if default else "  [default: the model's own]"),
    )


OPTIONS: dict[str, Callable[[Command], Command]] = {
    "batch": click.option(
        "--batch",
        "-b",
        metavar="SIZE",
        callback=_parsed_by(lambda text: parse_batches(text, most=1)[0]),
        default="1",
        show_default=True,
        help="One batch size; predict and curve take several.",
    ),
    "seq": click.option("--seq", type=click.IntRange(1), help="Tokens per sequence, or samples of audio."),
    "image": click.option("--image", type=click.IntRange(1), help="Pixels per side of a square image."),
    "precision": _precision(*PRECISIONS, "fp64", *AMP),
    "precision_to_generate": _precision(*PRECISIONS, "fp64"),
    "precision_to_measure": _precision(*PRECISIONS, "fp64", *AMP, default="fp32"),
    "precision_to_validate": _precision(*PRECISIONS, *AMP, default="fp32"),
    "device": click.option(
        "--device",
        "-d",
        help="cpu, cuda:0 or simulated, a profile's name or file, or a GPU's name.  [default: this machine's own]",
    ),
    "devices": click.option(
        "--device",
        "-d",
        "devices",
        multiple=True,
        help="As for `latpred predict`; may be given again.  [default: this machine's own]",
    ),
    "runtime": click.option("--runtime", default="eager", show_default=True, help="How the model is run."),
    "runtimes": click.option(
        "--runtime", "runtimes", multiple=True, help="Compare this with eager; may be given again.  [default: all]"
    ),
    "protocol": click.option(
        "--protocol",
        type=click.Choice(PROTOCOLS),
        default="single",
        show_default=True,
        help="single waits for each forward pass; pipelined issues them back to back.",
    ),
    "host": click.option(
        "--host",
        help="Another host: its dispatch over the profile's host's, as 1.3, a CPU's or measured host's name, or this.",
    ),
    "memory_format": click.option(
        "--channels-last",
        "memory_format",
        is_flag=True,
        callback=lambda _context, _parameter, given: "channels_last" if given else "contiguous",
        help="Images and convolutions in the channels_last format.",
    ),
    "attention": click.option(
        "--attention",
        type=click.Choice(ATTENTIONS),
        help="As products and softmax, or fused.  [default: the model's own]",
    ),
    "threads": click.option(
        "--threads", type=click.IntRange(1), help="Use a profile measured with so many threads per op."
    ),
    "threads_to_measure": click.option(
        "--threads", type=click.IntRange(1), help="Threads per op on the CPU.  [default: PyTorch's]"
    ),
    "threads_to_validate": click.option(
        "--threads", type=click.IntRange(1), help="Threads per op on the CPU.  [default: the profile's]"
    ),
    "cudnn_benchmark": click.option(
        "--cudnn-benchmark/--no-cudnn-benchmark",
        default=None,
        help="Use a profile measured with cudnn's autotuning on, or off.",
    ),
    "yes": click.option("--yes", "-y", is_flag=True, help="Calibrate without asking on a machine that has no profile."),
    "repeats": click.option(
        "--repeats", type=click.IntRange(1), default=4, show_default=True, help="Rounds through all cells."
    ),
    "budget_s": budget_option("Start nothing later than this, as 90s or 5m."),
    "mapping": click.option(
        "--mapping",
        type=FILE,
        help="JSON file of rules that bring the columns of tables to those of a measurement table.",
    ),
    "lengths": click.option(
        "--lengths",
        metavar="TOKENS",
        callback=_parsed_by(parse_lengths),
        help="Sequences of unequal lengths: 12,40,7, or mean=20.92,std=10.18,pad=128.",
    ),
    "execution": click.option(
        "--execution",
        type=click.Choice(EXECUTIONS),
        default="padded",
        show_default=True,
        help="What is done about unequal lengths: all at the padded length, nested tensors, or one packed row.",
    ),
    "strict": click.option(
        "--strict", is_flag=True, help="Refuse an op that no formula knows, instead of estimating it."
    ),
    "now": click.option(
        "--now", is_flag=True, help="Answer for the machine as it is: a second of timing tells how fast that is."
    ),
    "measured": click.option(
        "--measured", type=FILE, help="Draw the points of this measurement table over the curve; with --plot."
    ),
    "plot": click.option(
        "--plot", type=WRITTEN, callback=_figure_path, help="Draw a figure into this file too: .png, .svg or .pdf."
    ),
    "json": click.option("--json", "as_json", is_flag=True, help="Print JSON; its first key names the schema."),
    "csv": click.option("--csv", "as_csv", is_flag=True, help="Print CSV."),
    "output": click.option(
        "--output", "-o", "path", type=WRITTEN, help="Write there instead of to stdout; .json and .csv choose the form."
    ),
    "profile_output": click.option(
        "--output",
        "-o",
        "path",
        type=WRITTEN,
        help="Write the profile there, to a .json file, instead of among your own; the report goes to stdout.",
    ),
}
TABLES = click.argument("sources", metavar="TABLE...", nargs=-1, type=FILE)
INPUTS = ("seq", "image", "precision")
TARGET = ("device", "runtime", "protocol", "host")
SETUP = ("memory_format", "attention", "threads", "cudnn_benchmark")
CURVE = (*INPUTS, "lengths", "execution", *TARGET, *SETUP, "strict", "now", "yes", "plot", "measured")


def takes(*names: str) -> Callable[[Command], Command]:
    """Give a verb options of the table, in this order."""

    def decorate(function: Command) -> Command:
        for name in reversed(names):
            function = OPTIONS[name](function)
        return function

    return decorate


def output_options(function: Command) -> Command:
    """`--json --csv -o`, handed to the verb together as `output`, and what `speech_options` gives."""

    @wraps(function)
    def with_output(*args: Any, as_json: bool, as_csv: bool, path: Path | None, **given: Any) -> Any:
        output = Output(as_json, as_csv, None if path == Path("-") else path)
        output.check()
        return function(*args, output=output, **given)

    return takes("json", "csv", "output")(speech_options(with_output))


def profile_options(function: Command) -> Command:
    """The same for a verb that makes a profile: the report goes to stdout, the profile to the file that is `path`."""

    @wraps(function)
    def with_profile(*args: Any, as_json: bool, as_csv: bool, path: Path | None, **given: Any) -> Any:
        from latpred.storage import SUFFIX, demand_writable

        output = Output(as_json, as_csv)
        output.check()
        if path is not None:
            if path.suffix != SUFFIX:
                raise UsageError(f"-o {path} is where the profile goes; give it a name that ends in {SUFFIX}.")
            demand_writable(path)
        return function(*args, output=output, path=path, **given)

    return takes("json", "csv", "profile_output")(speech_options(with_profile))


def speech_options(function: Command) -> Command:
    """`--quiet --debug`, which change the invocation's `State`; and nothing on stdout but the verb's results."""

    @wraps(function)
    def spoken(*args: Any, **given: Any) -> Any:
        with redirect_stdout(sys.stderr):  # what a user's model prints is no part of a JSON document
            return function(*args, **given)

    def set_flag(_context: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value:
            setattr(state(), str(parameter.name), True)

    flag: dict[str, Any] = {"is_flag": True, "expose_value": False, "callback": set_flag}
    debug = click.option("--debug", help="Show the traceback of an error.", **flag)
    quiet = click.option("--quiet", "-q", help="Print results and errors only.", **flag)
    return quiet(debug(spoken))


def examples(*lines: str) -> str:
    """What stands at the end of a verb's --help."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


class Verb(click.Command):
    """A command that refuses an option of one value that is given twice, where click would silently take the last."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the command line apart."""
        _, _, order = ([], [], []) if ctx.resilient_parsing else self.make_parser(ctx).parse_args([*args])
        for option, times in Counter(order).items():
            if times > 1 and isinstance(option, click.Option) and not (option.multiple or option.is_flag):
                raise click.UsageError(f"{option.opts[0]} takes one value and is given {times} times; give one.", ctx)
        return super().parse_args(ctx, args)


def verb(*lines: str) -> Callable[[Command], click.Command]:
    """A verb with examples at the end of its --help."""
    return click.command(epilog=examples(*lines), cls=Verb)
