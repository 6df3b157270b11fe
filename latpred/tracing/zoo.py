"""The published architectures that go by name, read from `models/architectures.json`. No hub, no weights.

Each row names the transformers class, what it takes, and only the sizes that differ from the config class's own
defaults. "of libraries" has short names of models that torchvision and timm have: what the code of "The Framework Tax"
(2023) calls them.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import msgspec


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One published model.

    Attributes
    ----------
    model : str
        transformers class of the network; its config class follows from it.
    kind : str
        "seq", "image", "audio", or "custom" for what has several inputs.
    size : int
        Tokens, pixels or samples it is measured with unless asked otherwise.
    config : dict
        Arguments of the config class.
    aliases : tuple of str
        Other names.
    """

    model: str
    kind: str = msgspec.field(name="takes")
    size: int
    config: dict[str, Any] = {}
    aliases: tuple[str, ...] = ()


class _Zoo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    architectures: dict[str, Architecture]
    of_libraries: dict[str, str] = msgspec.field(name="of libraries")


_ZOO = msgspec.json.decode((files("latpred.models") / "architectures.json").read_bytes(), type=_Zoo)
ARCHITECTURES, SHORT = _ZOO.architectures, _ZOO.of_libraries
