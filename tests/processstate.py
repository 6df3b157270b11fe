"""What Python and the libraries keep for the whole process, as a prediction finds it and has to leave it."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, initialization


def settings() -> dict[str, Any]:
    """What Python and the libraries keep for the whole process."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.config as inductor

    backends: Any = torch.backends
    root = logging.getLogger()
    return {
        "torch.nn.init": dict(vars(torch.nn.init)),
        "layers' functions": [
            vars(kind).get("reset_parameters") for kind in vars(nn).values() if isinstance(kind, type)
        ],
        "transformers' initialisation": dict(vars(initialization)),
        "transformers' models": (PreTrainedModel.init_weights, PreTrainedModel.tie_weights),
        "modules' functions": (nn.Module.__call__, nn.Module._call_impl, nn.Module.__init__),
        "tensors' functions": {name: value for name, value in vars(torch.Tensor).items() if callable(value)},
        "torch's functions": {name: value for name, value in vars(torch).items() if callable(value)},
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "device of contexts": torch.utils._device.CURRENT_DEVICE,
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "determinism": (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "cudnn": (backends.cudnn.benchmark, backends.cudnn.deterministic, backends.cudnn.allow_tf32),
        "attention": (backends.cuda.flash_sdp_enabled(), backends.cuda.math_sdp_enabled()),
        "backend": torch.utils.backend_registration._privateuse1_backend_name,
        "CUDA's functions": {name: value for name, value in vars(torch.cuda).items() if callable(value)},
        "backend of convolutions": torch._C._select_conv_backend,
        "function modes": torch._C._len_torch_function_stack(),
        "global hooks": len(torch.nn.modules.module._global_forward_hooks),
        "torch's generator": torch.get_rng_state().tolist(),
        "Python's generator": random.getstate(),
        "numpy's generator": repr(np.random.get_state()),
        "Dynamo": {key: value for key, value in dynamo.get_config_copy().items() if not callable(value)},
        "Inductor": {key: value for key, value in inductor.get_config_copy().items() if not callable(value)},
        "functorch": {key: value for key, value in functorch.get_config_copy().items() if not callable(value)},
        "Inductor's functions": dict(vars(compile_fx)),
        "compiling": (torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag),
        "warnings": (list(warnings.filters), warnings.showwarning, warnings.showwarning.__module__),
        "logging": (root.level, list(root.handlers), logging.root.manager.disable),
        "profiling": (
            sys.getprofile(),
            sys.gettrace(),
        ),
        "collector": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks), gc.get_freeze_count()),
        "environment": {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "KMP"))},
    }


def different(before: dict[str, Any], after: dict[str, Any], *, but: tuple[str, ...] = ()) -> list[str]:
    """Names of what changed, and which entries of it where there are several."""
    found = []
    for name, value in before.items():
        now = after[name]
        if name in but or now == value:
            continue
        many = isinstance(value, dict) and isinstance(now, dict)
        keys = [key for key in {**value, **now} if value.get(key) != now.get(key)] if many else []
        found.append(f"{name} {keys or (value, now)}"[:300])
    return found
