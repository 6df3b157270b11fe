"""torch.compile kept apart from what the user compiles, as far as the installed torch can tell the two apart.

Dynamo keeps its results on code objects, which all models of a class share. Newer versions of torch have regions for
them (`isolate_recompiles`); in older ones all results of a function share its cache, told apart by their backend.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

REGIONS = "isolate_recompiles" in inspect.signature(torch.compile).parameters


def compiled(model: torch.nn.Module, most: int, **options: Any) -> Any:
    """`torch.compile` with static shapes, for at most so many compilations of one function.

    Older versions have no limit of a model's own, so there the process's own is raised where it is lower.
    """
    if REGIONS:
        options |= {"isolate_recompiles": True, "recompile_limit": most}
    else:
        import torch._dynamo.config as dynamo

        dynamo.recompile_limit = max(dynamo.recompile_limit, most)
    return torch.compile(model, dynamic=False, **options)


@contextlib.contextmanager
def removed_afterwards() -> Iterator[Callable[..., Any]]:
    """A form of `compiled` whose results, and what it sets, are gone when the context ends."""
    import torch._dynamo.config as dynamo
    import torch._dynamo.eval_frame as frames

    backends, limit = set(frames.cached_backends), dynamo.recompile_limit
    before = set() if REGIONS else {code for code in _codes() if _entries(code)}
    made: list[Any] = []

    def compile_with(model: torch.nn.Module, most: int, **options: Any) -> Any:
        made.append(compiled(model, most, **options))
        return made[-1]

    try:
        yield compile_with
    finally:
        dynamo.recompile_limit = limit
        for code in _codes():
            if _all_from(made, code) if REGIONS else _entries(code) and code not in before:
                frames.reset_code(code)  # type: ignore[attr-defined]
        for backend in set(frames.cached_backends) - backends:
            del frames.cached_backends[backend]


def _codes() -> list[Any]:
    """Code objects that Dynamo has looked at and that still live."""
    from torch._dynamo.convert_frame import input_codes

    return [code for code in (reference() for reference in input_codes.seen) if code is not None]


def _entries(code: Any) -> int:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(code))


def _all_from(made: list[Any], code: Any) -> bool:
    """Whether all results that are kept on a code object, and at least one, are from these compiled models."""
    import torch._dynamo.eval_frame as frames

    regions = [one.dynamo_ctx._isolate_recompiles_id for one in made]
    own = sum(len(frames._get_cache_entries_for_region(code, region)) for region in regions)
    return bool(own) and own == frames._get_total_cache_entry_count(code)
