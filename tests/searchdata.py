"""Candidates of a search and a predictor with known numbers, for tests of searches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from factories import device, dispatch, profile
from torch import nn
from transformers import BertConfig

from latpred.prediction.predictor import Predictor
from latpred.profile.document import KernelFit

INPUTS = (torch.zeros(2, 64),)
SMALL = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50)


def predictor(fixed_us: float = 20.0, fits: Iterable[KernelFit] = ()) -> Predictor:
    info = device(name="cpu", kind="cpu", asynchronous=False, launch_us=0.0, gap_us=0.0, sync_us=0.0)
    return Predictor(profile(info, fits, {"eager": dispatch(fixed_us=fixed_us), "torchscript": dispatch()}))


def builder(width: int, depth: int = 2) -> Callable[[], nn.Module]:
    """A function that workers can be sent although they cannot import this file."""

    def build() -> nn.Module:
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64)]
        return nn.Sequential(*layers * depth)

    return build


class Stubborn:
    """A candidate that cannot be sent anywhere."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self) -> nn.Module:
        return builder(32)()


def candidates(count: int = 12) -> list[Callable[[], nn.Module]]:
    return [builder(8 * (number % 9 + 1), number % 3 + 1) for number in range(count)]


ASKED: dict[str, Any] = {"batch": [1, 8], "inputs": INPUTS, "device": predictor()}
