"""Names of the models of torchvision and timm, read in their source: to import both takes seconds.

What is not among them may still be a model that somebody registers while a program runs.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_REGISTERED = re.compile(r'^@register_model(?:\((?:name="(\w+)")?\))?$.*?^def (\w+)\(', re.MULTILINE | re.DOTALL)


@cache
def registered(library: str) -> tuple[str, ...]:
    """Names of a library's models, without the library, in the order of the alphabet; none where it is not there.

    >>> registered("no_such_library")
    ()
    """
    try:
        spec = find_spec(library)
    except ValueError:  # it is there, but not as files
        return ()
    folders = [] if spec is None else [Path(folder) / "models" for folder in spec.submodule_search_locations or ()]
    texts = [path.read_text(errors="replace") for folder in folders for path in sorted(folder.rglob("*.py"))]
    return tuple(sorted({name or function for text in texts for name, function in _REGISTERED.findall(text)}))
