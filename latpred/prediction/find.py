"""What predicts on a device: finds the profile and keeps its predictor until a profile changes on disk.

A profile of another machine or other software is used with caveats that say so. A machine that has no profile yet is
calibrated (see `latpred.prediction.find`) where no device is named.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, NamedTuple

from latpred import host, storage
from latpred import host as speed
from latpred.errors import BusyError, CalibrationError, NoProfileError, ProfileError, UsageError
from latpred.prediction import host_swap
from latpred.prediction.predictor import Predictor
from latpred.profile import datasheet, host_profile, store
from latpred.profile.document import ADAPTED, FITTED, THREADS, DeviceProfile
from latpred.profile.store import Owner, caveat, difference, owner
from latpred.storage import locked

if TYPE_CHECKING:
    from latpred.progress import ProgressEvent

VARIABLE = "LATPRED_CALIBRATE"
CHOICES = ("quick", "never")
WAIT_S = 300.0  # several times what a quick calibration takes
_BUSY = (
    f"another process has been calibrating this machine for more than {WAIT_S / 60:.0f} minutes. "
    "Stop it, or calibrate once before starting many: latpred calibrate --quick"
)


def allowed() -> bool:
    """Whether a machine without a profile may be calibrated without being asked."""
    value = os.environ.get(VARIABLE, "").strip().lower() or CHOICES[0]
    if value not in CHOICES:
        raise UsageError(f"{VARIABLE}={value!r} is not known; set it to {' or '.join(CHOICES)}.")
    return value != "never"


def busy_note() -> str:
    """What to know before a calibration beside other work, part of a sentence; "" when the processors are free."""
    notes = host.busy_notes(host.usable_cores())
    if not notes:
        return ""
    return f"; other work keeps the processors busy ({', '.join(notes)}), so figures will be rough"


def calibrate_once(
    find: Callable[[], object] = store.find,
    calibrate: Callable[[], object] | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Calibrate this machine unless another process did so in the meantime.

    Processes that come second wait for the first: two calibrations at once would measure each other.
    """
    folder = storage.data_dir() / "calibration"
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder / "first.lock", _BUSY))
        except BusyError:
            (say or _say)("another process calibrates this machine for the first time; waiting for it")
            held.enter_context(locked(folder / "first.lock", _BUSY, WAIT_S))
        except OSError as error:
            raise CalibrationError(
                f"cannot keep a calibration in {folder}: {error.strerror or error}. "
                f"Make it writable, or choose another directory with {storage.VARIABLE}=DIR."
            ) from None
        try:
            find()
        except NoProfileError:
            (calibrate or _calibrate)()


def _calibrate() -> None:
    from latpred.calibration import calibrate

    _say(
        f"no profile of this machine in {store.directory()}; calibrating its CPU now, once, in under a minute "
        f"(latpred calibrate is more exact and does a GPU; {VARIABLE}=never switches this off){busy_note()}"
    )
    profile = calibrate("cpu", quick=True, progress=_Quarters())
    _say(f"calibrated: {store.path(profile.name)}")


class _Quarters:
    """Says each time another quarter of a calibration is done."""

    def __init__(self) -> None:
        self._last = 0

    def __call__(self, at: ProgressEvent) -> None:
        quarter = min(3, int(4 * at.done / at.total))
        if quarter > self._last:
            self._last = quarter
            _say(f"calibrating: {25 * quarter} %")


def _say(sentence: str) -> None:
    print(f"latpred: {sentence}", file=sys.stderr, flush=True)


if TYPE_CHECKING:
    import torch

    Device = torch.device | str | os.PathLike[str]

_COMPARED = ("torch", "transformers")


class Where(NamedTuple):
    """Which device, by what name, on which host, and how it runs there; see `latpred.predict`."""

    device: str | None = None
    is_path: bool = False
    host: float | str | None = None
    threads: int | None = None
    cudnn_benchmark: bool | None = None


def located(
    device: Device | None,
    host: float | str | None = None,
    threads: int | None = None,
    cudnn_benchmark: bool | None = None,
) -> Where:
    """A device as users name it.

    Raises
    ------
    UsageError
        When the device or the host can be no name.
    """
    if host is not None and (isinstance(host, bool) or not isinstance(host, int | float | str | os.PathLike)):
        raise UsageError(
            f"host={host!r} is not a host; give a factor such as 1.3, the name of a host, or 'this' for this machine."
        )
    is_path = isinstance(device, os.PathLike)
    name = None if device is None else os.fspath(device) if isinstance(device, os.PathLike) else str(device)
    if name is not None and "\0" in name:
        raise UsageError(
            f"device={name!r} is neither a name nor a path; give cpu, cuda:0, the name of a profile or a path to one."
        )
    return Where(name, is_path, host, threads, cudnn_benchmark)


def predictor_now(predictor: Predictor) -> Predictor:
    """The same predictor for the machine as it is at this moment: a second of timing says how fast that is."""
    profile = predictor.profile
    if owner(profile.machine) is Owner.ANOTHER:
        raise ProfileError(
            f"profile {profile.name!r} was measured on another machine ({profile.machine.cpu}, "
            f"{difference(profile.machine)}), whose present speed cannot be timed here. Ask without now=True (--now), "
            "or make a profile of this machine: latpred calibrate"
        )
    if not profile.speed:
        raise ProfileError(
            f"profile {profile.name!r} does not record how fast the machine was when it was measured, so the present "
            "speed cannot be compared with that. Ask without now=True (--now), or calibrate again: latpred calibrate"
        )
    from latpred.calibration.timing.reference_speed import speed_now

    now = speed_now(profile.machine.threads)
    slowdown = speed.slowdown(profile.speed, now, asynchronous=profile.device.asynchronous)
    ratios = speed.sentence(speed.ratio(profile.speed, now))
    said = f"adjusted to the present speed of the machine; reference times, relative to the profile's: {ratios}"
    return Predictor(profile, (*predictor.caveats, said), slowdown)


def predictor_of(asked: Where) -> Predictor:
    """The predictor of a device, kept until a profile changes on disk.

    Raises
    ------
    ProfileError
        When there is no profile of the device, or none measured in the way asked for.
    """
    try:
        return _kept(asked, _state_of(asked))
    except NoProfileError:
        plain = asked._replace(host=None) == Where()
        if not plain or not allowed():
            raise
    calibrate_once()
    return _kept(asked, _state_of(asked))


@lru_cache(maxsize=8)
def _kept(asked: Where, _state: tuple[object, ...]) -> Predictor:
    named = Path(asked.device) if asked.device is not None and asked.is_path else asked.device
    profile = store.find(named, threads=asked.threads, cudnn_benchmark=asked.cudnn_benchmark)
    if asked.host is None:
        return Predictor(profile, [*_foreign(profile), *_other_threads(asked, profile)])
    swap = host_swap.find(asked.host, profile)
    caveats = [swap.caveat, *_foreign(profile, swapped=True), *_other_threads(asked, profile)]
    return Predictor(host_swap.swapped(profile, swap), caveats)


def _state_of(asked: Where) -> tuple[object, ...]:
    """Whatever changes when a profile does, or what is said of it."""
    file = () if asked.device is None else _file_state(asked.device)
    state = (str(store.directory()), _threads_now(), file, *_directory_state(store.directory()))
    return state if asked.host is None else (*state, *_directory_state(host_profile.directory()))


def _directory_state(folder: Path) -> list[tuple[object, ...]]:
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [(name, *_file_state(os.fspath(folder / name))) for name in names]


def _file_state(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_size)


def _foreign(profile: DeviceProfile, *, swapped: bool = False) -> list[str]:
    """What this machine and its software do not share with the one the profile was measured on."""
    machine = profile.machine
    if profile.provenance == datasheet.PROVENANCE:
        return []
    if profile.provenance == FITTED:
        return [_fitted(profile, swapped)]
    whose = owner(machine)
    if whose is Owner.ANOTHER and swapped:
        return [f"kernel times were measured on another machine ({machine.accelerator or machine.cpu})"]
    if whose is Owner.ANOTHER:
        return [caveat(machine)]
    here = {"python": python_version(), **{name: _version(name) for name in _COMPARED}}
    others = [
        f"measured with {name} {machine.stack[name]}, here it is {version}: times may differ; measure anew with: "
        "latpred calibrate"
        for name, version in here.items()
        if machine.stack.get(name, version) != version
    ]
    return others if whose is Owner.THIS else [caveat(machine), *others]


def _other_threads(asked: Where, profile: DeviceProfile) -> list[str]:
    """That PyTorch uses another number of threads here and now than in a CPU's profile that nobody asked for by it."""
    meant = asked.threads is not None or (THREADS in profile.protocol and asked.device is not None)
    if meant or profile.device.kind != "cpu" or owner(profile.machine) is Owner.ANOTHER:
        return []
    here, then = _threads_now(), profile.machine.threads
    if here == then:
        return []
    return [
        f"measured with {then} thread{'s' * (then != 1)}, but torch uses {here} here: make a profile for that with "
        f"latpred calibrate --threads {here}, or set torch.set_num_threads({then}) where the model runs"
    ]


def _threads_now() -> int:
    import torch

    return torch.get_num_threads()


def _fitted(profile: DeviceProfile, swapped: bool) -> str:
    """Where the latencies come from that a profile was fitted to, and what that says of the host that asks."""
    machine = profile.machine
    if swapped:
        return f"kernel times were fitted to published latencies of a {machine.accelerator}"
    if ADAPTED in profile.protocol:
        return f"fitted to published latencies of a {machine.accelerator}, then adapted to those measured on one host"
    hosts = re.match(r"\D*(\d+) published hosts", machine.cpu)
    if hosts is None:
        return (
            f"fitted to published latencies of a {machine.accelerator} on one host: dispatch is that host's; give "
            "yours with --host"
        )
    return (
        f"fitted to published latencies of a {machine.accelerator} on {hosts[1]} hosts: dispatch is that of the median "
        "host, and the interval covers all of them; give yours with --host"
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
