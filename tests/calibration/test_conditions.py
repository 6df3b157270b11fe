"""What a process has set while it measures, and that it is put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from latpred.calibration import conditions

MATMUL, CONV = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Each test leaves the process as it found it."""
    allowed = MATMUL.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cudnn.benchmark = False
    MATMUL.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed


def test_measurements_run_in_inference_mode_without_autocast_and_autotuning() -> None:
    torch.backends.cudnn.benchmark = True
    with torch.autocast("cpu"), conditions.stated():
        assert torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.backends.cudnn.benchmark
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert torch.backends.cudnn.benchmark
    assert not torch.is_inference_mode_enabled()


def test_autocast_comes_back_inside_the_callers_own() -> None:
    with torch.autocast("cpu"):
        with conditions.stated():
            pass
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("before", [True, False])
def test_tf32_is_forgotten_afterwards(before: bool) -> None:
    MATMUL.allow_tf32 = torch.backends.cudnn.allow_tf32 = before
    with conditions.stated():
        MATMUL.allow_tf32 = torch.backends.cudnn.allow_tf32 = not before
    assert MATMUL.allow_tf32 is before
    assert torch.backends.cudnn.allow_tf32 is before


def test_tf32_set_through_the_newer_interface_comes_back() -> None:
    CONV.fp32_precision = "ieee"  # the older interface now refuses to be read: convolutions and RNNs differ
    MATMUL.fp32_precision = "tf32"
    with conditions.stated():
        MATMUL.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    assert MATMUL.fp32_precision == "tf32"
    assert CONV.fp32_precision == "ieee"


def test_everything_comes_back_after_an_error() -> None:
    torch.backends.cudnn.benchmark = True
    with pytest.raises(KeyboardInterrupt), conditions.stated():
        raise KeyboardInterrupt
    assert torch.backends.cudnn.benchmark
    assert not torch.is_inference_mode_enabled()


def test_subnormal_numbers_are_flushed_inside_only() -> None:
    def kept() -> bool:
        return bool((torch.full((8,), 1e-39) * 0.5).any())

    assert kept()
    with conditions.stated():
        assert not kept()
    assert kept()
