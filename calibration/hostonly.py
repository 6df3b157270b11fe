"""`calibrate --host-only`: what dispatch costs on this host, in seconds, without a kernel that takes any time.

Tiny networks and chains of calls are timed in place on the CPU, as in a full calibration's first minute. Which factor
that makes between two hosts is `latpred.hostswap`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from latpred import hostprofile
from latpred.calibration import conditions, fitting, networks, suite, visits
from latpred.calibration.cells import Cell
from latpred.calibration.device import Device, open_device
from latpred.calibration.dispatchfit import call_costs, fit_in_place
from latpred.calibration.session import Row
from latpred.calibration.synchronous import Synchronous
from latpred.errors import CalibrationError
from latpred.hostprofile import HOST_SCHEMA, HostProfile
from latpred.profile import DispatchFit

TINY = 2 * len(networks.KINDS)
FEWEST = 4


def calibrate_host(
    name: str = "this-host",
    *,
    device: Device | None = None,
    tiny: int = TINY,
    progress: Callable[[int, int, str], None] | None = None,
) -> HostProfile:
    """Measure what dispatch costs on this host, and save it.

    Parameters
    ----------
    name : str
        Of the host profile, as `--host` takes it.
    device : Device, optional
        An open synchronous device; default: the CPU.
    tiny : int
        Tiny networks to time; each takes about 0.2 s.
    progress : callable, optional
        Told how many cells are done, of how many, and which is next.

    Raises
    ------
    HostError
        When the name is not a file name, or the directory cannot be written.
    CalibrationError
        When too little could be measured.

    Examples
    --------
    >>> calibrate_host("laptop").dispatch.module_call_us  # doctest: +SKIP
    """
    hostprofile.path(name)  # a bad name must not cost a measurement
    live = device or open_device("cpu")
    start = time.monotonic()
    with conditions.stated():
        cells = list(_cells(tiny))
        campaign = Synchronous(live, ("fp32",))
        rows = [_row(campaign, cell, index, len(cells), progress) for index, cell in enumerate(cells)]
    profile = HostProfile(
        name=name,
        kind="host",
        schema=HOST_SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=live.machine(),
        dispatch=_fitted(rows, live),
        seconds=round(time.monotonic() - start, 1),
    )
    hostprofile.save(profile)
    return profile


def _cells(tiny: int) -> Iterator[Cell]:
    for spec in (*suite.chain_networks(), *suite.tiny_networks(tiny)):
        yield suite.network_cell(spec)


def _row(
    campaign: Synchronous, cell: Cell, index: int, total: int, progress: Callable[[int, int, str], None] | None
) -> Row:
    if progress is not None:
        progress(index, total, cell.key)
    start = time.monotonic()
    sampled = campaign.measure(cell)
    return Row(cell, dict(sampled.timings), time.monotonic() - start, calls_us=sampled.calls_us)


def _fitted(rows: list[Row], live: Device) -> DispatchFit:
    rows = visits.at_one_speed(rows)
    runs = [(fitting.run_of(row, live.info()), suite.network_spec(row.cell)) for row in rows]
    chains = [run for run, spec in runs if spec.chain]
    tiny = [run for run, spec in runs if spec.tiny and not spec.chain]
    if len(tiny) < FEWEST or not chains:
        raise CalibrationError(
            f"{len(tiny)} tiny networks and {len(chains)} chains of calls were timed, too few to know a host by. "
            f"Time at least {FEWEST}: latpred calibrate --host-only"
        )
    return fit_in_place(tiny, call_costs(chains))
