"""`calibrate --host-only`: what dispatch costs on this host, in seconds, without a kernel that takes any time.

Tiny networks and chains of calls are timed on the CPU, as in a full calibration's first minute. Which factor that
makes between two hosts is `latpred.prediction.host_swap`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from latpred.calibration import schedules
from latpred.calibration.devices import Device, conditions, open_device
from latpred.calibration.fitting import profile_fit
from latpred.calibration.fitting.dispatch_fit import call_costs, fit_in_place
from latpred.calibration.session import Row, measured
from latpred.calibration.timing import visits
from latpred.calibration.workloads import networks
from latpred.errors import CalibrationError
from latpred.profile import host_profile
from latpred.profile.document import DispatchFit
from latpred.profile.host_profile import HOST_SCHEMA, HostProfile

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
    host_profile.path(name)  # a bad name must not cost a measurement
    live = device or open_device("cpu")
    start = time.monotonic()
    cells = [schedules.network_cell(spec) for spec in (*schedules.chain_networks(), *schedules.tiny_networks(tiny))]
    rows = []
    with conditions.stated():
        schedule = schedules.Synchronous(live, ("fp32",))
        for index, cell in enumerate(cells):
            if progress is not None:
                progress(index, len(cells), cell.key)
            rows.append(measured(cell, schedule.measure))
    profile = HostProfile(
        name=name,
        kind="host",
        schema=HOST_SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=live.machine(),
        dispatch=_fitted(rows, live),
        seconds=round(time.monotonic() - start, 1),
    )
    host_profile.save(profile)
    return profile


def _fitted(rows: list[Row], live: Device) -> DispatchFit:
    """What dispatch costs by networks without errors, at one speed of the machine."""
    rows = visits.at_one_speed(row for row in rows if not row.error)
    runs = [(profile_fit.run_of(row, live.info()), schedules.network_spec(row.cell)) for row in rows]
    chains = [run for run, spec in runs if spec.chain]
    tiny = [run for run, spec in runs if spec.tiny and not spec.chain]
    if len(tiny) < FEWEST or not chains:
        raise CalibrationError(
            f"{len(tiny)} tiny networks and {len(chains)} chains of calls were timed, too few to know a host by. "
            f"Time at least {FEWEST}: latpred calibrate --host-only"
        )
    return fit_in_place(tiny, call_costs(chains))
