"""What to measure on a GPU, in the order of its worth: the study of "The Framework Tax", and models kept out of fits.

"check" is a minute or two in which everything is tried once. A plan is a list of stages, a stage a list of settings
(one model at one batch size in one runtime and precision): whoever runs out of time part-way has what matters most.
Nothing is built here; `recorder` measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

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
    """One model at one batch size in one runtime and precision."""

    workload: Workload
    batch: int
    precision: str
    runtime: str
    number: int = 1  # 2 where it is measured again to learn the repeat noise; `COUNTED` where nothing is timed

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


Settings = Iterator[Setting]


def plan(name: str) -> Plan:
    """A plan by name."""
    plans = {
        "paper": (_paper, CORE),
        "heldout": (_heldout, suites.get("heldout").names),
        "check": (_check, TRIED),
    }
    if name not in plans:
        raise UsageError(f"There is no plan to measure {name!r} by. Use one of {', '.join(plans)}.")
    stages_of, names = plans[name]
    models, notes = _named(names)
    seen: set[str] = set()
    stages = {}
    for stage, settings in stages_of(models).items():
        stages[stage] = tuple(setting for setting in settings if setting.cell.key not in seen)
        seen.update(setting.cell.key for setting in stages[stage])
    return Plan(name, stages, notes)


def _paper(core: Sequence[Workload]) -> dict[str, Settings]:
    more, _ = _named(MORE)
    lengths = [workload for length in LENGTHS for workload in workloads_of("bert-base-uncased", seq=length)]
    shapes = [_bert(width, layers) for width, layers in SHAPES]
    return {
        **_first_stages(core),
        "shapes": _grid(shapes, (1, 16), runtimes=CAPTURED),
        "lengths": _grid(lengths, (1,)),
        "compiled": _grid(core, (1, 16), runtimes=COMPILED),
        "batches": _grid(core, BATCHES),
        "more-models": _grid(more, BATCHES),
        "fp32": _grid(core, BATCHES, ("fp32",)),
        "more-compiled": chain(_grid(lengths, (1,), runtimes=COMPILED), _grid(core, (4, 64), runtimes=COMPILED)),
        "other-precisions": _grid(core, (1, 4, 16, 64), ("bf16", "tf32"), CAPTURED),
        "the-rest": _grid([*core, *more], BATCHES, PRECISIONS, (*FIRST, *COMPILED)),
    }


def _heldout(models: Sequence[Workload]) -> dict[str, Settings]:
    return {
        **_first_stages(models),
        "compiled": _grid(models, (1, 16), runtimes=COMPILED),
        "batches": _grid(models, BATCHES),
        "fp32": _grid(models, BATCHES, ("fp32",)),
        "the-rest": _grid(models, BATCHES, PRECISIONS, (*FIRST, *COMPILED)),
    }


def _check(models: Sequence[Workload]) -> dict[str, Settings]:
    """Two models once in every runtime: does all of it work here?"""
    return {"every-runtime": _grid(models, (1,), runtimes=(*FIRST, *COMPILED)), "launches": _launches(models)}


def _first_stages(models: Sequence[Workload]) -> dict[str, Settings]:
    return {
        "core": _grid(models, (1, 4, 16, 64)),
        "again": _grid(models[:REPEATED], (1, 16), number=2),
        "launches": _launches(models),
    }


def _launches(models: Sequence[Workload]) -> Settings:
    """What a profiler counts: batch 1, as dispatched and as captured."""
    return _grid(models, (1,), runtimes=CAPTURED, number=COUNTED)


def _grid(
    workloads: Sequence[Workload],
    batches: Sequence[int],
    precisions: Sequence[str] = ("fp16",),
    runtimes: Sequence[str] = FIRST,
    number: int = 1,
) -> Settings:
    """All combinations, model by model, so that each is built once."""
    for precision, workload, runtime, batch in product(precisions, workloads, runtimes, batches):
        yield Setting(workload, batch, precision, runtime, number)


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
