"""Inputs: which dimension is the batch, and what follows from a model when none are given."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field

import pytest
import torch
from smallmodels import Function
from torch import nn

import latpred
from latpred.tracing.inputs import real

PRODUCT = Function(torch.matmul)


def test_every_tensor_that_shares_the_first_dimension_is_a_batch() -> None:
    shared = latpred.trace(PRODUCT, (torch.zeros(2, 3, 4), torch.zeros(2, 4, 5)))
    alone = latpred.trace(PRODUCT, (torch.zeros(2, 3, 4), torch.zeros(4, 5)))
    assert [graph.macs(8) for graph in (shared, alone)] == [8 * 3 * 4 * 5] * 2
    assert [op.family for graph in (shared, alone) for op in graph.ops] == ["bmm", "gemm"]
    assert shared.input_bytes.at(8) == 8 * 4 * (12 + 20)
    assert alone.input_bytes.at(8) == 8 * 4 * 12 + 4 * 20


def test_a_function_of_the_batch_decides_itself() -> None:
    graph = latpred.trace(PRODUCT, lambda batch: (torch.zeros(3, batch, 4), torch.zeros(4, 5)))
    assert graph.macs(8) == 8 * 3 * 4 * 5


def test_keyword_arguments_and_values_are_kept() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, *, power: int, ids: torch.Tensor) -> torch.Tensor:
            assert ids.tolist() == [4, 7, 4][: len(ids)]
            return x**power

    example = {"x": torch.zeros(2, 3), "power": 2, "ids": torch.tensor([4, 7])}
    assert latpred.trace(Scaled(), example).launches(3) == 1


@pytest.mark.parametrize(
    ("build", "kind", "size"),
    [("distilbert", "seq", 128), ("resnet-18", "image", 224), ("wav2vec2-base", "audio", 32_000)],
)
def test_inputs_follow_from_a_config(build: str, kind: str, size: int) -> None:
    from latpred.zoo import names

    model = names.build(build).model
    graph = latpred.trace(model)
    assert (graph.input_kind, graph.input_size) == (kind, size)
    assert graph.ops == latpred.trace(build).ops


def test_inputs_follow_from_the_first_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    graph = latpred.trace(model, image=33)
    assert (graph.input_kind, graph.input_size) == ("image", 33)
    assert graph.input_bytes.at(2) == 2 * 33 * 33 * 4
    assert latpred.trace(model).input_size == 224


def test_images_that_are_no_squares() -> None:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    described = nn.Sequential(nn.Conv2d(1, 4, 3))
    described.default_cfg = {"input_size": (1, 32, 64)}  # type: ignore[assignment]
    for model, channels in ((ViTModel(ViTConfig(image_size=(32, 64), **sizes)), 3), (described, 1)):
        assert latpred.trace(model).input_bytes.at(2) == 2 * channels * 32 * 64 * 4
    assert latpred.trace(described, image=16).input_bytes.at(2) == 2 * 16 * 16 * 4
    assert latpred.trace(nn.DataParallel(described)).input_bytes.at(2) == 2 * 32 * 64 * 4


class Multiplying(nn.Module):
    """Multiplies two named arguments."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y


class Encoded(UserDict[str, torch.Tensor]):
    """A mapping whose entries are attributes too."""

    def __getattr__(self, name: str) -> torch.Tensor:
        return self.data[name]


def test_mappings_keep_their_class_within_inputs_and_name_arguments_as_inputs() -> None:
    class Reading(nn.Module):
        def forward(self, given: Encoded, more: torch.Tensor | None = None) -> torch.Tensor:
            return given.x * 2

    graph = latpred.trace(Reading(), (Encoded(x=torch.zeros(1, 4)),))
    assert graph.bytes(8) == 2 * 8 * 4 * 4
    named = latpred.trace(Multiplying(), Encoded(x=torch.zeros(1, 3, 4), y=torch.zeros(1, 4, 5)))
    assert named.macs(8) == 8 * 3 * 4 * 5


@dataclass
class Sample:
    """A tensor with what was made of it."""

    x: torch.Tensor
    made: list[torch.Tensor] = field(default_factory=list)


class Keeping(nn.Module):
    """Takes a sample, and keeps what it gives there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, sample: Sample) -> torch.Tensor:
        sample.made.append(self.layer(sample.x))
        return sample.made[-1]


def test_tensors_that_objects_hold_are_inputs_too() -> None:
    for inputs in ((Sample(torch.zeros(1, 4)),), lambda batch: Sample(torch.zeros(batch, 4))):
        graph = latpred.trace(Keeping(), inputs)
        assert (graph.input_bytes.at(8), graph.notes) == (8 * 4 * 4, ())


def test_real_inputs_are_copies() -> None:
    given = torch.zeros(2, 4)
    (made,) = real(given, torch.float32)
    made += 1
    assert not given.any()
