"""What dispatch takes longer when its code has left the caches.

A call of PyTorch runs tens of kilobytes of code. In a small model every call finds it in a near cache; in a large one
the weights and activations that pass between two calls of the same kind push it out, and the same call takes several
times as long. On a CPU, where host and device share their caches, this is most of what short kernels seem to cost in
large networks. With D bytes touched since the last call of a kind

    dispatch = cost(class) + cold_cost(class) * D / (D + cold_bytes)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from latpred.features import Floats
from latpred.ops.families import nearest
from latpred.profile import DispatchFit
from latpred.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ColdDispatch:
    """Dispatch of a schedule's steps from cold caches.

    most_us : ndarray, shape (n,), what each step takes longer at most. reuse_bytes : ndarray, shape (n, 2), constant
    and per-sample bytes touched since the last step of its class. half_bytes : bytes that bring half of it.
    """

    most_us: Floats
    reuse_bytes: Floats
    half_bytes: float

    @classmethod
    def of(cls, schedule: Schedule, fit: DispatchFit, slower: float = 1.0) -> ColdDispatch | None:
        """For a runtime's costs, all of them `slower` so many times; None where they are not known."""
        if not fit.cold_costs_us:
            return None
        most_us = {name: slower * nearest(fit.cold_costs_us, name) for name in set(schedule.host_class)}
        return cls(np.array([most_us[name] for name in schedule.host_class]), reuse_bytes(schedule), fit.cold_bytes)

    def at(self, batches: Floats) -> Floats:
        """Microseconds that each step takes longer at each batch, shape (n, batches)."""
        touched = self.reuse_bytes[:, :1] + self.reuse_bytes[:, 1:] * batches
        longer: Floats = self.most_us[:, None] * (touched / (touched + self.half_bytes))
        return longer


def reuse_bytes(schedule: Schedule) -> Floats:
    """Bytes that a forward pass, one of many, touches between two steps of a class: constant and per sample."""
    moved = np.array([_bytes(op.weight_bytes, op.read_bytes, op.write_bytes) for op in schedule.ops]).reshape(-1, 2)
    steps = np.zeros((len(schedule.host_class), 2))
    np.add.at(steps, schedule.kernel_step, moved[schedule.kernel_op] * schedule.kernel_share[:, None])
    before = np.cumsum(steps, axis=0) - steps
    numbers = {name: number for number, name in enumerate(dict.fromkeys(schedule.host_class))}
    code = np.array([numbers[name] for name in schedule.host_class], dtype=np.int64)
    order = np.argsort(code, kind="stable")  # steps of a class next to each other, in order
    first = np.diff(code[order], prepend=-1) != 0
    previous = np.roll(order, 1)
    previous[first] = order[np.roll(first, -1)]  # the last one, in the pass before
    distance = before[order] - before[previous]
    distance[first] += steps.sum(axis=0)
    touched = np.empty_like(distance)
    touched[order] = distance
    return touched


def _bytes(*lines: tuple[int, int]) -> tuple[int, int]:
    return sum(line[0] for line in lines), sum(line[1] for line in lines)
