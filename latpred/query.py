"""What is asked: `Options` of a model, `DeviceQuery` of a device, batch sizes, and lengths of sequences.

The same records serve every call and every verb. Nothing here knows of models, profiles or tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, TypeVar

from latpred.errors import UsageError

if TYPE_CHECKING:
    import torch

    from latpred.graph.graph import ModelGraph

    Model = torch.nn.Module | str | os.PathLike[str] | ModelGraph
    Device = torch.device | str | os.PathLike[str]

PROTOCOLS = ("single", "pipelined")
PLACES = ("device", "host")
THIS = "this"  # host: the one that asks
EXECUTIONS = ("padded", "nested", "packed")
HALVES = ("fp16", "bf16")
AMP = {"amp-fp16": "fp16", "amp-bf16": "bf16"}  # torch.autocast over weights in fp32, and to what it casts
ATTENTIONS = ("eager", "sdpa")
SPACES = ("nasbench201", "fbnet", "once_for_all")  # published, whose networks go by name
MOST_BATCH = 2**20
ERA: ContextVar[str] = ContextVar("era", default="")  # that models are traced for; "" is what is installed
_PAIR = re.compile(r"(?P<name>[a-z]+)=(?P<value>\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked of a model, on whatever device; `latpred.predict` says what each field means."""

    inputs: Any = None
    seq: int | None = None
    image: int | None = None
    precision: str | None = None
    memory_format: str | None = None
    attention: str | None = None
    lengths: Lengths | GivenLengths | None = None
    execution: str = "padded"
    runtime: str = "eager"
    protocol: str = "single"
    inputs_on: str = "device"

    def __post_init__(self) -> None:
        """Refuse what is no choice, and lengths beside other inputs."""
        _check_choice("protocol", self.protocol, PROTOCOLS)
        _check_choice("inputs_on", self.inputs_on, PLACES)
        if not isinstance(self.precision, str | None):
            raise UsageError(
                f"precision={self.precision!r} is no name of a precision; give one, as in precision='fp16'."
            )
        check_attention(self.attention)
        if self.lengths is None:
            if self.execution != "padded":
                raise UsageError(
                    f"execution={self.execution!r} says what is done about unequal lengths; "
                    "give lengths= (--lengths) too."
                )
            return
        extra = [name for name in ("inputs", "seq", "image", "attention") if getattr(self, name) is not None]
        if extra:
            raise UsageError(f"lengths= says what the inputs are; leave out {', '.join(extra)}.")
        if self.memory_format not in (None, "contiguous"):
            raise UsageError(
                "lengths are of sequences, which have no channels; leave out memory_format (--channels-last)."
            )
        _check_choice("execution", self.execution, EXECUTIONS)

    @property
    def tracing(self) -> dict[str, Any]:
        """Arguments of `latpred.trace`."""
        return {
            "inputs": self.inputs,
            "seq": self.seq,
            "image": self.image,
            "precision": self.precision,
            "memory_format": self.memory_format or "contiguous",
            "attention": self.attention,
        }

    def checked(self, graph: ModelGraph) -> ModelGraph:
        """The graph; an error where it is asked to be what it was not traced as."""
        extra = [name for name in ("inputs", "seq", "image") if getattr(self, name) is not None]
        if extra:
            raise UsageError(
                f"A traced graph has its inputs already; leave out {', '.join(extra)}, or trace again with them."
            )
        if self.precision not in (None, graph.precision):
            raise UsageError(f"This graph was traced in {graph.precision}; trace it again to predict {self.precision}.")
        if self.memory_format not in (None, graph.memory_format):
            raise UsageError(
                f"This graph was traced in the {graph.memory_format} format; trace it again for {self.memory_format}."
            )
        return graph


@dataclass(frozen=True, slots=True)
class DeviceQuery:
    """Which device, on which host, and how it runs there; `latpred.predict` says what each field means."""

    device: Device | None = None
    host: float | str | os.PathLike[str] | None = None
    threads: int | None = None
    cudnn_benchmark: bool | None = None
    now: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, and make the device a string, or a path where one was given."""
        host, device = self.host, self.device
        if host is not None and (isinstance(host, bool) or not isinstance(host, Real | str | os.PathLike)):
            raise UsageError(
                f"host={host!r} is not a host; give a factor such as 1.3, the name of a host, or 'this' for this "
                "machine."
            )
        if isinstance(host, Real):
            object.__setattr__(self, "host", float(host))
        object.__setattr__(self, "threads", checked_threads(self.threads))
        if self.now and host not in (None, THIS):
            raise UsageError(
                f"host={host!r} is another host, whose present speed cannot be timed here; leave out now=True (--now) "
                "or host (--host)."
            )
        if device is None:
            return
        if not (isinstance(device, str | os.PathLike) or type(device).__module__ == "torch"):
            raise UsageError(
                f"device= takes a name or a path, not a {type(device).__name__}; give cpu, cuda:0, the name of a "
                "profile or a path to one. A loaded profile predicts with predictor = latpred.Predictor(profile), "
                "predictor.predict(predictor.trace(model)); a search takes device=predictor."
            )
        name: str | Path = Path(device) if isinstance(device, os.PathLike) else str(device)
        if name == "cpu:0":  # as PyTorch calls it, too
            name = "cpu"
        object.__setattr__(self, "device", name)


def checked_threads(threads: Any) -> int | None:
    """A number of threads as Python's own; None where nothing is asked of them."""
    return None if threads is None else whole_number("threads", threads, "number of threads")


def whole_number(name: str, value: Any, unit: str) -> int:
    """A count as Python's own number, which a file can hold; refuse what is no whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise UsageError(f"{name}={value!r} is not a {unit}; give a whole number of at least 1")
    return int(value)


def check_budget(budget_s: Any) -> None:
    """Refuse a budget that is no number of seconds; None is none."""
    if budget_s is not None and (isinstance(budget_s, bool) or not isinstance(budget_s, Real) or budget_s != budget_s):
        raise UsageError(f"budget_s={budget_s!r} is not a number of seconds; give one, as in budget_s=60.")


Record = TypeVar("Record", Options, DeviceQuery)


def record_of(kind: type[Record], asked: Mapping[str, Any]) -> Record:
    """What of many named arguments is an `Options` or a `DeviceQuery`.

    >>> record_of(DeviceQuery, {"device": "cpu", "seq": 128})
    DeviceQuery(device='cpu', host=None, threads=None, cudnn_benchmark=None, now=False)
    """
    return kind(**{field.name: asked[field.name] for field in fields(kind) if field.name in asked})


def check_attention(attention: str | None) -> None:
    if attention is not None:
        _check_choice("attention", attention, ATTENTIONS)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}={value!r} is not known; choose from: {', '.join(choices)}.")


def is_one(batch: Any) -> bool:
    """Whether a batch stands for itself, and not for several: a number, or what is none and checked as one."""
    return isinstance(batch, str) or not hasattr(batch, "__len__")


def checked_batches(batch: Any) -> tuple[int, ...]:
    """One batch size or several, each once, all whole numbers from 1 to `MOST_BATCH`."""
    batches = [batch] if is_one(batch) else batch
    if not len(batches):
        raise UsageError(f"{batches!r} names no batch size; give whole numbers of 1 or more, as in [1, 8, 32].")
    for batch in batches:
        if getattr(batch, "ndim", 0):
            raise UsageError("A tensor is no batch size; give 1 or more, as in batch=8, and inputs as inputs=x.")
        if isinstance(batch, bool) or not isinstance(batch, Integral):  # numpy's bool is none
            raise UsageError(f"Batch {batch!r} is not a whole number; give 1 or more, as in batch=8.")
        if int(batch) < 1:
            raise UsageError(f"Batch {batch} is not possible; the smallest batch is 1.")
        if int(batch) > MOST_BATCH:
            raise UsageError(
                f"Batch {batch} is beyond anything a device holds; the largest that is predicted is {MOST_BATCH}."
            )
    return tuple(dict.fromkeys(int(batch) for batch in batches))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths with a normal distribution, rounded, at least 1 and at most `padded_to`.

    Attributes
    ----------
    mean, std : float
        Tokens.
    padded_to : int
        Tokens that every sequence has with its padding.

    Examples
    --------
    >>> Lengths(mean=20.92, std=10.18, padded_to=128).of(5)
    (8, 16, 21, 26, 34)
    """

    mean: float
    std: float
    padded_to: int

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not value == value:
                raise UsageError(f"{name}={value!r} is not a number of tokens; give one, as in mean=20.92.")
            object.__setattr__(self, name, float(value))
        object.__setattr__(self, "padded_to", whole_number("padded_to", self.padded_to, "number of tokens"))
        if not 1 <= self.mean <= self.padded_to:
            raise UsageError(
                f"A mean of {self.mean:g} tokens is not possible: lengths run from 1 to padded_to={self.padded_to}; "
                "give one of those."
            )
        if self.std < 0 or self.std**2 > (self.mean - 1) * (self.padded_to - self.mean):
            raise UsageError(
                f"Lengths from 1 to {self.padded_to} with a mean of {self.mean:g} cannot have a standard deviation of "
                f"{self.std:g}; give one from 0 to {((self.mean - 1) * (self.padded_to - self.mean)) ** 0.5:.4g}."
            )

    def of(self, batch: int) -> tuple[int, ...]:
        """The lengths of a typical batch, ascending.

        They lie at evenly spaced quantiles and are not drawn at random: the same question has the same answer.
        """
        if not self.std:
            return (round(self.mean),) * batch
        normal = NormalDist(self.mean, self.std)
        quantiles = (normal.inv_cdf((index + 0.5) / batch) for index in range(batch))
        return tuple(min(max(round(value), 1), self.padded_to) for value in quantiles)


@dataclass(frozen=True, slots=True)
class GivenLengths:
    """Lengths given one by one, padded to the longest."""

    values: tuple[int, ...]

    @property
    def padded_to(self) -> int:
        return max(self.values)

    def of(self, batch: int) -> tuple[int, ...]:
        """They themselves, which are a batch of one size only."""
        count = len(self.values)
        if batch != count:
            raise UsageError(
                f"{count} length{'' if count == 1 else 's'} are a batch of {count}, not of {batch}; leave batch out, "
                "or give Lengths(mean=..., std=..., padded_to=...)."
            )
        return self.values


def checked_lengths(lengths: Any) -> Lengths | GivenLengths:
    """Lengths in one of their two forms.

    >>> checked_lengths([12, 40, 7]).padded_to
    40
    """
    if isinstance(lengths, Lengths | GivenLengths):
        return lengths
    if is_one(lengths):
        raise UsageError(
            f"{lengths!r} are not lengths; give whole numbers, as in lengths=[12, 40, 7], or a Lengths(...)."
        )
    if not len(lengths):
        raise UsageError("The list of lengths is empty; give one for each sequence of the batch, as in [12, 40, 7].")
    return GivenLengths(tuple(whole_number("length", value, "number of tokens") for value in lengths))


def parse_lengths(text: str) -> Lengths | GivenLengths:
    """Lengths from the command line's grammar; a ValueError where the text is not in it.

    >>> parse_lengths("12,40,7").of(3)
    (12, 40, 7)
    >>> parse_lengths("mean=20.92,std=10.18,pad=128")
    Lengths(mean=20.92, std=10.18, padded_to=128)
    """
    items = [item.strip() for item in text.split(",")]
    if all(re.fullmatch(r"-?\d+", item) for item in items):
        return checked_lengths([int(item) for item in items])
    values = {match["name"]: match["value"] for item in items if (match := _PAIR.fullmatch(item))}
    if set(values) != {"mean", "std", "pad"} or len(items) != 3 or "." in values["pad"]:
        raise ValueError(f"{text!r} are not lengths; write 12,40,7 or mean=20.92,std=10.18,pad=128.")
    return Lengths(float(values["mean"]), float(values["std"]), int(values["pad"]))
