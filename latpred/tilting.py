"""Tilts: by what power of their size kernels take longer, or less long, than the fits of a profile say.

An adaptation finds them (`latpred.corrections`); pricing multiplies by them. Beyond the sizes that were measured a
tilt stays what it is at the last of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from latpred.features import Floats
from latpred.graph import Op
from latpred.profile import Tilt

TIME = "time"
OF = (TIME, "window", "channels")
"""Sizes that a tilt may be of: the kernel's own time in microseconds, and two of convolutions: the taps of the window,
and the geometric mean of the channels it reads and writes."""


def sizes(op: Op) -> dict[str, float]:
    """Sizes of an op's kernels that its dimensions tell at any batch; none for most."""
    if "kernel_h" not in op.dims:
        return {}
    height, width, entering, leaving = (op.dims[name].constant for name in ("kernel_h", "kernel_w", "c_in", "c_out"))
    found = {"window": float(height * width), "channels": math.sqrt(entering * leaving)}
    return {name: size for name, size in found.items() if size > 0}


def fixed_factor(tilts: Iterable[Tilt], op: Op) -> float:
    """What all kernels of an op are multiplied by, whatever their time."""
    own = sizes(op)
    return math.prod(float(tilted(tilt, np.array(own[tilt.of]))) for tilt in tilts if tilt.of in own)


def tilted(tilt: Tilt, size: Floats) -> Floats:
    """What kernels of such sizes are multiplied by.

    >>> tilted(Tilt("time", exponent=0.5, centre=4.0, low=1.0, high=16.0), np.array([1.0, 4.0, 16.0, 100.0])).tolist()
    [0.5, 1.0, 2.0, 2.0]
    """
    factor: Floats = (np.clip(size, tilt.low, tilt.high) / tilt.centre) ** tilt.exponent
    return factor
