"""For tests of the command line: how a verb is called, and a file with models that work and models that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import factories
from click.testing import CliRunner, Result

from latpred.cli import main
from latpred.profile import host_profile
from latpred.profile.host_profile import HOST_SCHEMA, HostProfile

MODELS = """
import torch
from torch import nn


def small():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def picture():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


class WithConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(5, 2)


class Mismatched(WithConvolution):
    def forward(self, x):
        return self.head(self.conv(x).flatten(1))


@torch.library.custom_op("latpred_cli_test::mystery", mutates_args=())
def mystery(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@mystery.register_fake
def _(x):
    return torch.empty_like(x)


class Strange(WithConvolution):
    def forward(self, x):
        return mystery(self.conv(x))


class Uneven(WithConvolution):
    def forward(self, x):
        return [self.conv(x) for _ in range(len(x) ** 2)][-1]


def broken():
    raise ValueError("no such layer")


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, bos_token_id=1, eos_token_id=None))
"""


def models_file(folder: Path) -> str:
    """Write the models into a file."""
    path = folder / "models.py"
    path.write_text(MODELS)
    return str(path)


def run(*arguments: str | Path) -> Result:
    """Call `latpred` with some arguments."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def document(*arguments: str | Path) -> dict[str, Any]:
    """What `latpred` gives as JSON."""
    shown = run(*arguments, "--json", "--quiet")
    assert shown.exit_code == 0, shown.stderr
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


def saved_host(name: str = "this-host") -> HostProfile:
    """A host profile that was measured here, kept under a name."""
    measured = (factories.machine(), factories.dispatch(), 4.0)
    host = HostProfile(name, "host", HOST_SCHEMA, "2026-01-02T03:04:05+00:00", *measured)
    host_profile.save(host)
    return host
