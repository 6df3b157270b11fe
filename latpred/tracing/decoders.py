"""Models that generate text: from a decoder's name to the class with a language-modelling head, and what is refused.

Nothing here walks anything; see `latpred.tracing.generation`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from latpred.errors import UsageError
from latpred.tracing import names
from latpred.tracing.zoo import ARCHITECTURES

# transformers' classes of decoders, and those with a language-modelling head.
_HEADED = {
    "GPT2Model": "GPT2LMHeadModel",
    "LlamaModel": "LlamaForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "MixtralModel": "MixtralForCausalLM",
}


def decoder(model: torch.nn.Module | str, device: str = "meta", precision: str = "fp32") -> tuple[str, torch.nn.Module]:
    """A model's name and the module that has its `generate()`.

    Parameters
    ----------
    model : torch.nn.Module or str
        A module is returned as it is, a name is built.
    device, precision : str
        For a name: where its weights are, and of which dtype.

    Raises
    ------
    UsageError
        When the model generates no text.
    UnknownModelError
        When no model goes by the name.

    Examples
    --------
    >>> decoder("gpt2")[1].__class__.__name__
    'GPT2LMHeadModel'
    """
    name = model if isinstance(model, str) else type(model).__name__
    module = _by_name(model, device, precision) if isinstance(model, str) else model
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"a {name} generates no text; give a transformers model with a generate(), or a decoder's name"
        )
    if not hasattr(module, "prepare_inputs_for_generation") or not _can_generate(module):
        raise UsageError(
            f"{name} generates no text: it has no language-modelling head with a generate(). Give one of transformers' "
            f"causal language models (GPT2LMHeadModel, LlamaForCausalLM), or one of: {', '.join(_names())}"
        )
    config: Any = getattr(module, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"{name} is an encoder with a decoder, whose generation is not predicted; give a decoder alone, one of: "
            f"{', '.join(_names())}"
        )
    if getattr(config, "is_decoder", True) is False:
        raise UsageError(
            f"{name} is an encoder: it keeps no cache, and its head generates nothing as it is configured. Set "
            f"is_decoder=True in its config, or give one of: {', '.join(_names())}"
        )
    return name, module


def longest(module: torch.nn.Module) -> int | None:
    """The most tokens a model takes, where its config tells.

    >>> longest(decoder("gpt2")[1])
    1024
    """
    value = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return value if isinstance(value, int) and value > 0 else None


def demand_room(name: str, module: torch.nn.Module, prompt: int, new_tokens: int) -> None:
    """Refuse numbers of tokens that are none, or that the model cannot take."""
    for what, value in (("prompt", prompt), ("new_tokens", new_tokens)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{what}={value!r} is not a number of tokens; give a whole number of at least 1")
    most = longest(module)
    if most is not None and prompt + new_tokens > most:
        raise UsageError(
            f"{prompt} prompt tokens and {new_tokens} new ones are {prompt + new_tokens}, but {name} takes at most "
            f"{most}; ask for a shorter prompt or fewer new tokens"
        )


def _can_generate(module: Any) -> bool:
    can = getattr(module, "can_generate", None)
    return bool(can()) if callable(can) else False


def _names() -> list[str]:
    """Names of the decoders that can be built."""
    return [name for name, row in ARCHITECTURES.items() if row.model in _HEADED]


def _by_name(name: str, device: str, precision: str) -> torch.nn.Module:
    row = ARCHITECTURES.get(names.full_name(name) or "")
    if row is None or row.model not in _HEADED:
        return names.build(name, device=device, precision=precision).model  # or the error that says what there is
    return names.build_row(msgspec.structs.replace(row, model=_HEADED[row.model]), device, precision)
