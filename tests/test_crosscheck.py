"""Our counts beside torch's FlopCounterMode and fvcore, and the reasons given for the differences."""

from __future__ import annotations

import pytest
import torch
from smallmodels import SMALL, Function, build_small, inputs_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import latpred
from latpred.accuracy.crosscheck import check

# The rest fail under the counter, or hold a recurrence or an expert product that it counts by another rule.
FLOP_COUNTER_RUNS = sorted(set(SMALL) - {"deberta", "deberta-v2", "mixtral"})


@pytest.mark.parametrize("name", FLOP_COUNTER_RUNS)
def test_products_equal_half_the_flops_of_torch_s_counter(name: str) -> None:
    model = build_small(name, "cpu").requires_grad_(False)
    graph = latpred.trace(model, lambda batch: inputs_of(name, batch))
    if getattr(model, "_supports_sdpa", False):
        model.set_attn_implementation("eager")  # the counter drops the CPU's fused attention
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs_of(name, 2))
    assert graph.macs(2) == counter.get_total_flops() // 2


def test_dropped_attention_is_named() -> None:
    class Attend(nn.Linear):
        """A projection and fused attention over it."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = super().forward(x).view(x.shape[0], -1, 2, 8).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(heads, heads, heads)

    model, example = Attend(16, 16).eval(), torch.zeros(1, 10, 16)
    torch_s, fvcore_s = check(latpred.trace(model, example), model, example)
    attention = 2 * 2 * 10 * 10 * 8
    assert torch_s.theirs in (10 * 16 * 16, torch_s.ours)  # it counts a CPU's attention from PyTorch 2.15 on
    for difference in (torch_s, fvcore_s) if torch_s.reasons else (fvcore_s,):
        assert difference.ours == 10 * 16 * 16 + attention
        assert difference.theirs == 10 * 16 * 16
        (reason,) = difference.reasons
        assert reason.startswith(f"attention: ours {attention:,}, theirs 0")
        assert "silently leaves out fused attention" in reason


CONVOLUTIONAL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))


@pytest.mark.parametrize(("model", "macs"), [(CONVOLUTIONAL, 2 * (4 * 36 * 27 + 4 * 36 * 2)), (nn.ReLU(), 0)])
def test_agreement_needs_no_reason(model: nn.Module, macs: int) -> None:
    example = torch.zeros(2, 3, 8, 8)
    for difference in check(latpred.trace(model.eval(), example), model, example, batch=2):
        assert (difference.ours, difference.theirs, difference.reasons) == (macs, macs, ())


def test_normalisation_and_worded_padding_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.BatchNorm2d(4)).eval()
    example = torch.zeros(1, 3, 8, 8)
    _, fvcore_s = check(latpred.trace(model, example), model, example)
    convolution, other = fvcore_s.reasons
    assert "does not know convolutions with padding given as a word" in convolution
    assert "counts normalisation and pooling" in other


def test_a_counter_that_fails_says_why() -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            raise RuntimeError("not today")
        return x + 1

    model, example = Function(refuse).eval(), torch.zeros(1, 4)
    torch_s, _ = check(latpred.trace(model, example), model, example)
    assert torch_s.theirs is None
    assert torch_s.reasons == ("it fails with RuntimeError: not today",)
