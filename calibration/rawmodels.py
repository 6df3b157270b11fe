"""The whole models of a raw folder by the names it gives them: how to walk them, their relatives, who may be looked at.

Nothing is downloaded and no weights are made. The held-out models are published as a test of finished profiles, so
neither a fit nor a verdict that feeds a profile may see them.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

from latpred.errors import UnknownModelError
from latpred.graph import ModelGraph

HELD_OUT = (
    *("densenet161", "vgg16", "mobilebert", "funnel", "electra", "deberta", "swin_t", "regnet_y_8gf"),
    *("wav2vec2", "t5", "mobilenet_v3_large", "convnext_tiny"),
)


class Recipe(NamedTuple):
    """A model to walk.

    name : as `latpred.trace` takes it, or a class of transformers when `sizes` are given. relatives : architectures
    that teach about each other go by one word. seq : tokens, where not the usual number.
    """

    name: str
    relatives: str
    seq: int | None = None
    sizes: tuple[tuple[str, int], ...] = ()


def held_out(name: str) -> bool:
    """Whether a model, by this or another usual name, is kept from everything that makes a profile.

    >>> held_out("torchvision:vgg16"), held_out("t5-encoder"), held_out("vgg11")
    (True, True, False)
    """
    plain = re.split(r"[:/]", name.lower().replace("swin-tiny", "swin_t").replace("convnext-tiny", "convnext_tiny"))[-1]
    return plain.startswith(HELD_OUT)


def recipe(name: str) -> Recipe:
    """How to walk the model that a folder calls by a name; names it does not have of its own are taken as latpred's."""
    length = re.fullmatch(r"bert-base-s(\d+)", name)
    if length:
        return Recipe("bert-base", "bert", seq=int(length[1]))
    return RECIPES.get(name, Recipe(name, re.split(r"[-_:\d]", name.removeprefix("torchvision:"))[0]))


@cache
def graph(name: str, precision: str) -> ModelGraph:
    """The walk of a model.

    Raises
    ------
    UnknownModelError
        When the name means nothing.
    MissingPackageError
        When the package that has the model is not installed.
    TraceError
        When it cannot be walked.
    """
    from latpred.tracing import trace

    wanted = recipe(name)
    if wanted.sizes:
        return trace(_sized(wanted), seq=wanted.seq or 128, precision=precision)
    return trace(wanted.name, seq=wanted.seq, precision=precision)


def _sized(wanted: Recipe) -> Any:
    """A transformers model of given sizes, on the meta device."""
    import torch

    try:
        import transformers

        with torch.device("meta"):
            model = getattr(transformers, wanted.name)
            return model(model.config_class(**dict(wanted.sizes))).eval()
    except (ImportError, RuntimeError, AttributeError) as error:
        raise UnknownModelError(
            f"{wanted.name} cannot be built with the installed transformers ({error}). Reinstall it: "
            "pip install -U transformers"
        ) from error


def _bert(width: int, layers: int) -> Recipe:
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
    }
    return Recipe("BertModel", "bert", sizes=tuple(sizes.items()))


def _vision(name: str, relatives: str) -> Recipe:
    return Recipe(f"torchvision:{name}", relatives)


RECIPES: dict[str, Recipe] = {
    "bert-base": Recipe("bert-base", "bert"),
    "bert-large": Recipe("bert-large", "bert"),
    "bert-6l": _bert(768, 6),
    "bert-24l": _bert(768, 24),
    "bert-w384": _bert(384, 12),
    "bert-w1536": _bert(1536, 12),
    "roberta": Recipe("roberta", "bert"),
    "distilbert": Recipe("distilbert", "distilbert"),
    "albert": Recipe("albert", "albert"),
    "squeezebert": Recipe("squeezebert", "squeezebert"),
    "gpt2": Recipe("gpt2", "gpt2"),
    "fnet": Recipe("fnet", "fnet"),
    "nystromformer": Recipe("nystromformer", "nystromformer"),
    "wavlm": Recipe("wavlm", "wavlm"),
    "vit-b32": Recipe("timm:vit_base_patch32_224", "vit"),
    "vit_b_16": _vision("vit_b_16", "vit"),
    "resnet18": _vision("resnet18", "resnet"),
    "resnet50": _vision("resnet50", "resnet"),
    "resnet101": _vision("resnet101", "resnet"),
    "wide_resnet50_2": _vision("wide_resnet50_2", "resnet"),
    "resnext50": _vision("resnext50_32x4d", "resnet"),
    "mobilenet_v2": _vision("mobilenet_v2", "mobilenet"),
    "mnasnet": _vision("mnasnet1_0", "mobilenet"),
    "efficientnet_lite1": Recipe("timm:efficientnet_lite1", "efficientnet"),
    "shufflenet": _vision("shufflenet_v2_x1_0", "shufflenet"),
    "alexnet": _vision("alexnet", "alexnet"),
    "squeezenet": _vision("squeezenet1_0", "squeezenet"),
    "googlenet": _vision("googlenet", "googlenet"),
}
