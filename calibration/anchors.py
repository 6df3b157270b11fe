"""Anchors: the few cells of a profile's own calibration that tell whether the profile still holds.

Chosen from the cells that the profile keeps, so that every kernel family, every class of dispatch and every kind of
call that they tell of is timed again. Nothing is timed here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

import numpy as np

from latpred.calibration import builders, networks
from latpred.calibration.cells import Cell
from latpred.calibration.kernelfit import row_of
from latpred.calibration.suite import network_spec
from latpred.errors import ProfileError
from latpred.features import NATIVE, native
from latpred.graph import ModelGraph
from latpred.ops.families import parent, root
from latpred.profile import DeviceProfile

EAGER = "eager"
KERNEL_ANCHORS = 8  # of each family and precision, where a kernel is a cell of its own
PLACED_ANCHORS = 12  # networks of each family, where kernels are timed in networks, which hold several of it
TINY_ANCHORS = 20  # networks that only dispatch
LOOKED_AT = {"kernel": 160, "network": 60}  # cells that are walked to see what they hold, of each precision
LONGEST_US = 40_000.0

_KEY = re.compile(r"(?P<kind>\w+)/(?P<runtime>[\w-]+)/(?P<precision>\w+)/(?P<name>\w+)/(?P<dims>[\w=,-]*)")


def chosen(profile: DeviceProfile) -> list[Cell]:
    """The cells to time again.

    Raises
    ------
    ProfileError
        When the profile keeps no cells that can be.
    """
    known = [(cell, sample.median_us) for sample in profile.samples if (cell := _cell(sample.cell)) is not None]
    eager = [(cell, us) for cell, us in known if cell.runtime == EAGER]
    mixed = random.Random(0).sample(eager, len(eager))
    quick = [cell for cell, us in mixed if us <= LONGEST_US]
    found = _networks(quick)
    if profile.device.asynchronous:
        found += [cell for cell in quick if cell.kind == "dispatch"]
        found += _covering(profile, [cell for cell in quick if cell.kind == "kernel"], KERNEL_ANCHORS)
    else:
        sized = [cell for cell in quick if cell.kind == "network" and not network_spec(cell).tiny]
        found += _covering(profile, [cell for cell in sized if not network_spec(cell).chain], PLACED_ANCHORS)
    if not found:
        raise ProfileError(
            f"profile {profile.name!r} keeps no cells that could be timed again ({profile.provenance}). "
            "Calibrate this machine, then check that profile: latpred calibrate"
        )
    return found


def fit_of(profile: DeviceProfile, family: str, row: tuple[float, ...], precision: str) -> str | None:
    """The fit that prices a kernel, by its key in the profile; None where no fit does."""
    fits = profile.kernels.get(precision, {})
    if NATIVE in fits and native(family, np.array([row]), profile.machine.threads)[0]:
        return NATIVE
    name: str | None = family
    while name is not None and name not in fits:
        name = parent(name)
    return name


def _cell(key: str) -> Cell | None:
    """The cell of a key; None for keys that are not of cells, as in profiles fitted to samples from elsewhere."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    pairs = (pair.partition("=") for pair in found["dims"].split(",") if pair)
    try:
        dims = {name: int(value) for name, _, value in pairs}
    except ValueError:
        return None
    return Cell(found["kind"], found["name"], dims, found["precision"], found["runtime"])


def _networks(cells: Iterable[Cell]) -> list[Cell]:
    """Chains of calls, and networks that only dispatch."""
    specs = [(cell, network_spec(cell)) for cell in cells if cell.kind == "network"]
    tiny = [cell for cell, spec in specs if spec.tiny and not spec.chain]
    return [*(cell for cell, spec in specs if spec.chain), *tiny[:TINY_ANCHORS]]


def _covering(profile: DeviceProfile, cells: Sequence[Cell], wanted: int) -> list[Cell]:
    """Cells in their order, each taken where it holds a kernel of a family that has too few of them so far."""
    counts: dict[tuple[str, str], int] = {}
    looked: dict[str, int] = {}
    found = []
    for cell in cells:
        seen = looked.get(cell.precision, 0)
        if cell.precision not in profile.kernels or seen >= LOOKED_AT[cell.kind]:
            continue
        looked[cell.precision] = seen + 1
        parts = {(cell.precision, part) for part in _parts(profile, cell)}
        if any(counts.get(part, 0) < wanted for part in parts):
            found.append(cell)
            for part in parts:
                counts[part] = counts.get(part, 0) + 1
    return found


def _parts(profile: DeviceProfile, cell: Cell) -> set[str]:
    """Fits that price what a cell launches; on a synchronous device their families, of which a network holds many."""
    graph, batch = builders.graph(cell) if cell.kind == "kernel" else _network(cell)
    ops = [op for op in graph.at(batch) if op.launches]
    fits = (fit_of(profile, op.family, row_of(op, batch), cell.precision) for op in ops)
    found = {fit for fit in fits if fit is not None}
    return found if cell.kind == "kernel" else {root(fit) for fit in found}


def _network(cell: Cell) -> tuple[ModelGraph, int]:
    spec = network_spec(cell)
    return networks.graph(spec, cell.precision), spec.batch
