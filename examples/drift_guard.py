"""What `latpred check` sees and what it lets pass: prints, never asserts. `python examples/drift_guard.py`.

A simulated device is calibrated once. Then it is timed again as the check does it, for each seed of its noise, and the
same times are held against the profile as it is, and with one thing in it altered: each kernel family of each
precision, each kind of op that the host dispatches, module and Python calls. A few minutes for all 20 seeds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec

from latpred import storage
from latpred.accuracy.drift import MOVED, Part
from latpred.calibration import calibrate
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec
from latpred.calibration.measurement import drift_test
from latpred.calibration.measurement.drift_test import timed_again
from latpred.calibration.session import Row
from latpred.ops.families import root
from latpred.profile.document import DeviceProfile

FACTOR = 1.15
CELLS = 500
LONGEST_S = 600.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Check with every seed and print a line each, then what they come to."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[storage.VARIABLE] = folder
        profile = calibrate(SimulatedDevice(SimulatedSpec(seed=1000)), cells=options.cells)
    quiet, caught = 0, {name: 0 for name, _ in altered(profile, options.factor)}
    for seed in range(options.seeds):
        rounds = timed_again(profile, SimulatedDevice(SimulatedSpec(seed=seed)), LONGEST_S)
        alarms = moved(profile, rounds)
        quiet += not alarms
        seen = [name for name, other in altered(profile, options.factor) if caught_in(name, moved(other, rounds))]
        for name in seen:
            caught[name] += 1
        said = "quiet" if not alarms else f"alarm: {', '.join(part.name for part in alarms)}"
        print(f"seed {seed}: unaltered {said}; altered by {options.factor:g}: {len(seen)} of {len(caught)} caught")
    print(f"quiet in {quiet} of {options.seeds} unaltered")
    always = [name for name, count in caught.items() if count == options.seeds]
    print(f"caught in {options.seeds} of {options.seeds} seeds: {len(always)} of {len(caught)} parts")
    for name in sorted(caught.keys() - set(always)):
        print(f"  {name}: {caught[name]} of {options.seeds}")


def moved(profile: DeviceProfile, rounds: Sequence[Sequence[Row]]) -> list[Part]:
    """Parts that a check of these times calls moved."""
    parts = drift_test.compared(profile, rounds)
    return [part for part in parts if part.verdict == MOVED]


def caught_in(name: str, parts: Sequence[Part]) -> bool:
    """Whether what was altered is among what moved."""
    return any(name in (part.name, root(part.name), f"{part.name.partition(' ')[0]} {part.group}") for part in parts)


def altered(profile: DeviceProfile, factor: float) -> Iterator[tuple[str, DeviceProfile]]:
    """The profile with one part after the other dearer by a factor."""
    for precision, fits in profile.kernels.items():
        for key, fit in fits.items():
            changed = {**fits, key: msgspec.structs.replace(fit, scale=fit.scale * factor)}
            kernels = {**profile.kernels, precision: changed}
            yield f"{precision} {key}", msgspec.structs.replace(profile, kernels=kernels)
    dispatch = profile.runtimes["eager"]
    for kind in sorted({root(name) for name in dispatch.costs_us if name not in ("", "python")}):
        costs = {name: us * factor if root(name) == kind else us for name, us in dispatch.costs_us.items()}
        yield kind, _dispatching(profile, costs_us=costs)
    yield "module calls", _dispatching(profile, module_call_us=dispatch.module_call_us * factor)
    yield "Python calls", _dispatching(profile, python_call_us=dispatch.python_call_us * factor)
    yield "attribute reads", _dispatching(profile, attribute_read_us=dispatch.attribute_read_us * factor)


def _dispatching(profile: DeviceProfile, **changes: object) -> DeviceProfile:
    dispatch = msgspec.structs.replace(profile.runtimes["eager"], **changes)
    return msgspec.structs.replace(profile, runtimes={**profile.runtimes, "eager": dispatch})


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="how many checks, each under noise of its own")
    parser.add_argument("--cells", type=int, default=CELLS, help="cells that the calibration measures")
    parser.add_argument("--factor", type=float, default=FACTOR, help="by how much a part is altered")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
