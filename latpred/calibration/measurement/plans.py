"""What to measure on a GPU, in the order of its worth: the study of "The Framework Tax", and models kept out of fits.

"check" is a minute or two in which everything is tried once. A plan is a list of stages, a stage a list of settings
(one model at one batch size in one runtime and precision): whoever runs out of time part-way has what matters most.
Nothing is built here; `recorder` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import nn

from latpred.calibration.cells import Cell
from latpred.calibration.workloads import suites
from latpred.calibration.workloads.suites import Inputs, Workload, seeded, token_inputs, workloads_of
from latpred.errors import MissingPackageError, UsageError

CORE = (
    "bert-base-uncased",
    "distilbert-base-uncased",
    "squeezebert-uncased",
    "albert-base-v2",
    "roberta-base",
    "gpt2",
    "resnet-18",
    "resnet-50",
    "mobilenet-v2",
    "timm:efficientnet_lite0",
    "vit-base-32",
    "wavlm-base",
)
MORE = ("fnet-base", "resnet-101", "resnet-152", "bert-large-uncased")
REPEATED = 4  # models that are measured again, for the repeat noise
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHAPES = (*((width, 12) for width in (128, 256, 512, 1024, 1536)), *((768, layers) for layers in (2, 4, 8, 16, 24)))
CAPTURED = ("eager", "cuda-graphs")
FIRST = (*CAPTURED, "torchscript")
COMPILED = ("compile", "compile-reduce-overhead", "onnxruntime", "onnxruntime-cuda-graphs")
PRECISIONS = ("fp16", "fp32", "bf16", "tf32")
TRIED = ("distilbert-base-uncased", "resnet-18")
COUNTED = 0  # number of a setting that is not timed: a profiler counts what it launches
_VOCABULARY, _LENGTH = 30522, 128


@dataclass(frozen=True, slots=True)
class Setting:
    """One model at one batch size in one runtime and precision.

    number : 1; 2 where it is measured again to learn the repeat noise; 0 where a profiler counts its launches instead.
    """

    workload: Workload
    batch: int
    precision: str
    runtime: str
    number: int = 1

    @property
    def counted(self) -> bool:
        """Whether a profiler counts its launches and nothing is timed."""
        return self.number == COUNTED

    @property
    def cell(self) -> Cell:
        """What a journal knows it by."""
        dims = {"size": self.workload.input_size, "batch": self.batch, "number": self.number}
        return Cell(f"model.{self.workload.input_kind}", self.workload.name, dims, self.precision, self.runtime)


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings by stage, the most valuable first, no setting twice; `notes` say what could not be planned here."""

    name: str
    stages: dict[str, tuple[Setting, ...]]
    notes: tuple[str, ...] = ()


def plan(name: str) -> Plan:
    """A plan by name.

    >>> plan("gpu")
    Traceback (most recent call last):
    latpred.errors.UsageError: There is no plan to measure 'gpu' by. Use one of paper, heldout, check.
    """
    makers: dict[str, Callable[[], Plan]] = {"paper": _paper, "heldout": _heldout, "check": _check}
    if name not in makers:
        raise UsageError(f"There is no plan to measure {name!r} by. Use one of {', '.join(makers)}.")
    return makers[name]()


def _paper() -> Plan:
    core, notes = _named(CORE)
    more, _ = _named(MORE)
    lengths = [workload for length in LENGTHS for workload in workloads_of("bert-base-uncased", seq=length)]
    shapes = [_bert(width, layers) for width, layers in SHAPES]
    fp16 = ("fp16",)
    stages = (
        ("core", _grid(core, (1, 4, 16, 64), fp16, FIRST)),
        ("again", _grid(core[:REPEATED], (1, 16), fp16, FIRST, number=2)),
        ("launches", _launches(core)),
        ("shapes", _grid(shapes, (1, 16), fp16, CAPTURED)),
        ("lengths", _grid(lengths, (1,), fp16, FIRST)),
        ("compiled", _grid(core, (1, 16), fp16, COMPILED)),
        ("batches", _grid(core, BATCHES, fp16, FIRST)),
        ("more-models", _grid(more, BATCHES, fp16, FIRST)),
        ("fp32", _grid(core, BATCHES, ("fp32",), FIRST)),
        ("more-compiled", chain(_grid(lengths, (1,), fp16, COMPILED), _grid(core, (4, 64), fp16, COMPILED))),
        ("other-precisions", _grid(core, (1, 4, 16, 64), ("bf16", "tf32"), CAPTURED)),
        ("the-rest", _grid([*core, *more], BATCHES, PRECISIONS, (*FIRST, *COMPILED))),
    )
    return Plan("paper", _each_once(stages), notes)


def _heldout() -> Plan:
    models, notes = _named(suites.get("heldout").names)
    stages = (
        ("core", _grid(models, (1, 4, 16, 64), ("fp16",), FIRST)),
        ("again", _grid(models[:REPEATED], (1, 16), ("fp16",), FIRST, number=2)),
        ("launches", _launches(models)),
        ("compiled", _grid(models, (1, 16), ("fp16",), COMPILED)),
        ("batches", _grid(models, BATCHES, ("fp16",), FIRST)),
        ("fp32", _grid(models, BATCHES, ("fp32",), FIRST)),
        ("the-rest", _grid(models, BATCHES, PRECISIONS, (*FIRST, *COMPILED))),
    )
    return Plan("heldout", _each_once(stages), notes)


def _check() -> Plan:
    """Two models once in every runtime: does all of it work here?"""
    models, notes = _named(TRIED)
    settings = _grid(models, (1,), ("fp16",), (*FIRST, *COMPILED))
    return Plan("check", _each_once([("every-runtime", settings), ("launches", _launches(models))]), notes)


def _named(names: Sequence[str]) -> tuple[list[Workload], tuple[str, ...]]:
    """Workloads of those names that can be built here, and a sentence about each of the others."""
    workloads: list[Workload] = []
    notes = []
    for name in names:
        try:
            workloads += workloads_of(name)
        except MissingPackageError as error:
            notes.append(str(error))
    return workloads, tuple(notes)


def _bert(width: int, layers: int) -> Workload:
    """BERT of another width or depth, heads of 64."""
    sizes = {"num_hidden_layers": layers, "num_attention_heads": width // 64, "intermediate_size": 4 * width}

    def build(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        make = suites.published("BertModel", {"hidden_size": width, **sizes})
        return seeded(make, device, precision), token_inputs(_LENGTH, _VOCABULARY)

    return Workload(f"bert-w{width}-l{layers}", "seq", _LENGTH, build, "bert")


def _grid(
    workloads: Sequence[Workload],
    batches: Sequence[int],
    precisions: Sequence[str],
    runtimes: Sequence[str],
    *,
    number: int = 1,
) -> Iterator[Setting]:
    """All combinations, model by model, so that each is built once."""
    for precision in precisions:
        for workload in workloads:
            for runtime in runtimes:
                for batch in batches:
                    yield Setting(workload, batch, precision, runtime, number)


def _launches(workloads: Sequence[Workload]) -> Iterator[Setting]:
    """What a profiler counts: batch 1, as dispatched and as captured."""
    return _grid(workloads, (1,), ("fp16",), CAPTURED, number=COUNTED)


def _each_once(stages: Iterable[tuple[str, Iterator[Setting]]]) -> dict[str, tuple[Setting, ...]]:
    seen: set[str] = set()
    kept = {}
    for name, settings in stages:
        fresh = [setting for setting in settings if setting.cell.key not in seen]
        seen.update(setting.cell.key for setting in fresh)
        kept[name] = tuple(fresh)
    return kept
