"""Functions that a model has compiled with torch.compile, run as they were written, in this thread."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

from latpred.ownthread import replaced


def uncompiled() -> AbstractContextManager[None]:
    """Within it, Dynamo leaves what this thread runs alone; a walk would make it trace its own tracing.

    `torch.compiler.set_stance("force_eager")` is the same for all threads.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:  # nothing was compiled in this process
        return nullcontext()
    return replaced(frames, "_callback_from_stance", lambda _: None)
