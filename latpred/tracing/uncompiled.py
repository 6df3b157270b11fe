"""Functions that a model has compiled with torch.compile, run as they were written, in this thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from latpred.ownthread import replaced


@contextmanager
def uncompiled() -> Iterator[set[str]]:
    """Within it, Dynamo leaves what this thread runs alone; a walk would make it trace the walk.

    Gives a set that is empty as long as nothing was called that is compiled. The same for all threads would be
    `torch.compiler.set_stance("force_eager")`.
    """
    met: set[str] = set()
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:  # nothing was compiled in this process
        yield met
        return

    def eager(callback: object) -> object:
        if callback in (None, False):  # of a function that is never to be compiled
            return callback
        met.add("compiled")
        return None

    with replaced(frames, "_callback_from_stance", eager):
        yield met
