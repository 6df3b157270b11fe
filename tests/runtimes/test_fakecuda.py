"""The GPU that exists for Inductor only: what it answered is not kept for a real one."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.runtime.hints import DeviceProperties

from latpred.runtimes.inductor import fake_cuda


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # Inductor's imports
def test_inductor_keeps_no_answer_of_a_device_that_does_not_exist() -> None:
    with fake_cuda.present():
        assert DeviceProperties.create(torch.device("cuda", 0)).multi_processor_count == 132
    assert DeviceProperties.create.cache_info().currsize == 0
