"""Captured graphs: one host step hands the device all kernels of a forward pass.

What runtimes that replay such graphs share: the schedule of a replay, and what cannot be captured. How a graph is
captured for real is each runtime's own business.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from latpred.errors import RuntimeRefusalError
from latpred.graph import Op
from latpred.runtimes.eager import one_step_per_op
from latpred.schedule import Schedule

REPLAY = "replay"  # host class of the step that launches a captured graph
# What decides while it runs how large its result is: by name, without the namespace.
DATA_DEPENDENT = frozenset(
    {
        *("nonzero", "masked_select", "argwhere", "bincount", "histc", "combinations"),
        *("unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
        *("repeat_interleave.Tensor", "NonZero", "Unique", "Compress"),
    }
)


def one_replay(runtime: str, ops: Iterable[Op], first: Iterable[Op] = ()) -> Schedule:
    """The schedule that launches every kernel of some ops in one step."""
    ahead, captured = tuple(first), tuple(op for op in ops if op.launches and op.family)
    each = one_step_per_op(runtime, (*ahead, *captured))
    steps = len(ahead) + 1
    replay = len(ahead)
    return Schedule(
        runtime=runtime,
        ops=each.ops,
        host_class=(*each.host_class[:replay], REPLAY),
        module_calls=np.append(each.module_calls[:replay], 0),
        python_calls=np.append(each.python_calls[:replay], 0),
        sync=np.append(each.sync[:replay], 0),
        kernel_step=np.minimum(each.kernel_step, steps - 1),
        kernel_op=each.kernel_op,
        kernel_share=each.kernel_share,
        kernel_family=each.kernel_family,
    )


def refuse_uncapturable(runtime: str, model: str, ops: Iterable[Op], *, unsure: bool = False) -> None:
    """Refuse ops that no graph can hold."""
    for op in ops:
        where = f" in {op.module}" if op.module else ""
        short = op.name.rpartition("::")[2]
        if op.syncs:
            raise RuntimeRefusalError(
                f"{runtime} cannot capture {model}: {op.name}{where} makes the host wait for the device. "
                f"Ask for runtime='eager', or {_other_way(unsure)}."
            )
        if short in DATA_DEPENDENT or short.partition(".")[0] in DATA_DEPENDENT:
            raise RuntimeRefusalError(
                f"{runtime} cannot capture {model}: the size of what {op.name}{where} gives depends on the data. "
                "Ask for runtime='eager'."
            )


def _other_way(unsure: bool) -> str:
    if unsure:
        return "pass the model itself instead of its walk: some leave such checks out while they are captured"
    return "take that call out of the model's forward"
