"""The profile store: finds, reads and writes device profiles, and says whether one fits a machine.

A profile is one JSON document. Reading is strict and never executes anything; writing is atomic, so a reader sees the
old document or the new one. Nothing here measures or predicts.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from contextlib import suppress
from enum import Enum
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec

from latpred import host, storage
from latpred.errors import NoProfileError, ProfileError
from latpred.profile import datasheet, gpus
from latpred.profile.document import (
    ADAPTED,
    BENCHMARK,
    CUDNN,
    OPENED,
    REPAIR,
    THREADS,
    DeviceProfile,
    Machine,
    decode,
    encode,
)

MEMORY_TOLERANCE = 0.03  # kernels keep more or less of it to themselves


class Owner(Enum):
    """Whose a machine is."""

    THIS = "this machine"
    ALIKE = "another machine of the same hardware"
    ANOTHER = "another machine"


def owner(machine: Machine) -> Owner:
    """Whose a profile's machine is.

    The hardware must agree: the processor with its model and vector instructions, the number of cores, the memory. An
    id that differs makes it another machine of the same hardware, as nodes of a cluster are.
    """
    if difference(machine):
        return Owner.ANOTHER
    here = host.machine_id()
    return Owner.ALIKE if machine.machine_id and here and machine.machine_id != here else Owner.THIS


def same_machine(one: Machine, other: Machine) -> bool:
    """Whether two are one machine: by the id where both have one, as names change, else by the name.

    Containers with a rented GPU have no id, and a new name each time: there processors and GPU decide.
    """
    if one.machine_id and other.machine_id:
        return one.machine_id == other.machine_id
    rented = one.accelerator == other.accelerator != "" and not (one.machine_id or other.machine_id)
    alike = (one.cpu, one.cpu_model, one.cores) == (other.cpu, other.cpu_model, other.cores)
    return one.hostname_hash == other.hostname_hash or (rented and alike)


def difference(machine: Machine) -> str:
    """The first thing about the hardware that is not as here, as "here …"; "" where all that is known agrees."""
    if machine.cpu != host.cpu_name():
        return f"here {host.cpu_name()}"
    if machine.cpu_model != host.cpu_model():
        return f"model {machine.cpu_model or 'unknown'}, here {host.cpu_model() or 'unknown'}"
    if machine.cores != host.cores():
        return f"{machine.cores} cores, here {host.cores()}"
    memory = host.memory_bytes()
    if abs(machine.memory_bytes - memory) > MEMORY_TOLERANCE * max(memory, machine.memory_bytes):
        return f"{machine.memory_bytes / 2**30:.1f} GiB of memory, here {memory / 2**30:.1f}"
    return ""


def caveat(profile: DeviceProfile) -> str:
    """What predictions from a profile say where its machine is another one; "" where it is this one."""
    machine = profile.machine
    whose = owner(machine)
    if whose is Owner.ALIKE:
        return f"measured on another machine of the same hardware ({machine.cpu}, {machine.cores} cores)"
    if whose is Owner.ANOTHER:
        gpu = machine.accelerator
        holds = f"kernel times hold on {gpu}, dispatch costs may differ" if gpu else "times are those of that machine"
        return f"measured on another machine ({machine.cpu}, {difference(machine)}): {holds}"
    return ""


_LIVE = re.compile(r"cpu|simulated|cuda(:\d+)?")
LIVE_CUDA = "cuda:0"  # the GPU that "cuda" is, where one is measured and where a profile is looked for


class Entry(NamedTuple):
    """One file of the store."""

    name: str  # what `load` and `--device` take
    path: Path
    source: str  # "user" (calibrated here) or "shipped"
    profile: DeviceProfile | None  # none when the file cannot be read
    problem: str  # why not; "" when it can

    @property
    def device(self) -> str:
        """What asks for it; a file that is called as a device of this machine goes by its path alone."""
        return str(self.path) if is_live(self.name) else self.name


def directory() -> Path:
    """Directory of the user's profiles; it need not exist yet."""
    return storage.profiles_dir()


def file_of(name: str) -> Path:
    """File a user profile of this name is kept in, whether or not it exists."""
    told = name.replace(":", "-") if os.name == "nt" else name  # where a colon cannot be in a file's name
    return storage.document_path(directory(), told, "profile", "cpu-laptop", ProfileError)


def name_here(name: str, device: str) -> str:
    """A name for a profile of a device of this machine that is of no other device, nor of another machine as yet."""
    with suppress(ProfileError):  # of a file that is not there, or that nobody can read
        name = apart(name, _read(file_of(name)).machine)
        if _read(file_of(name)).device.name != device:  # "cuda:0" is whichever GPU comes first
            name = f"{name}-{device}"
    return name


def apart(name: str, machine: Machine) -> str:
    """The name that a machine has taken where that is this one, else the name with digits of this machine."""
    return name if owner(machine) is Owner.THIS else f"{name}-{host.short_id()}"


def _shipped() -> Path:
    return Path(str(files("latpred.models"))) / "profiles"


def is_live(name: str) -> bool:
    """Whether a name is that of a device of this machine, as "cuda:0" is, and not of a profile."""
    return _LIVE.fullmatch(name) is not None


def live_name(profile: DeviceProfile) -> str:
    """The device that a profile is of, by the name that opens it; a shipped one does not say which GPU it was."""
    kind = profile.device.kind
    return profile.protocol.get(OPENED, LIVE_CUDA) if kind == "cuda" else kind


class _Settings(NamedTuple):
    """How a profile is to be measured; None leaves it open."""

    threads: int | None
    cudnn_benchmark: bool | None

    def unmet_by(self, profile: DeviceProfile) -> list[str]:
        """Options of the command line that ask for what a profile was not measured with."""
        options = []
        if self.threads not in (None, profile.machine.threads):
            options.append("--threads")
        if self.cudnn_benchmark not in (None, cudnn_benchmarked(profile)):
            options.append("--cudnn-benchmark")
        return options

    def __str__(self) -> str:
        said = [] if self.threads is None else [threads_text(self.threads)]
        if self.cudnn_benchmark is not None:
            said.append(f"cudnn.benchmark {'on' if self.cudnn_benchmark else 'off'}")
        return " and ".join(said)

    @property
    def flags(self) -> str:
        """What has the command line measure so."""
        threads = "" if self.threads is None else f" --threads {self.threads}"
        return threads + " --cudnn-benchmark" * bool(self.cudnn_benchmark)


def calibration(profile: DeviceProfile) -> str:
    """The command that measures a profile's device again, in the same way and under its name where it is of here."""
    opened, protocol = live_name(profile), profile.protocol
    command = f"latpred calibrate --device {opened}"
    if profile.provenance != "measured" or owner(profile.machine) is Owner.ANOTHER:
        return command
    settings = _Settings(profile.machine.threads if THREADS in protocol else None, cudnn_benchmarked(profile))
    named = profile.name != opened and ADAPTED not in protocol
    return command + settings.flags + f" --name {shlex.quote(profile.name)}" * named


def names() -> list[str]:
    """Names of all profiles in sight, the user's first, whether or not they can be read."""
    every = (*storage.documents(directory()), *storage.documents(_shipped()))
    return list(dict.fromkeys(file.stem for file in every))


def listing() -> list[Entry]:
    """All profiles in sight, the user's first, unreadable ones included with the reason."""
    entries = _own_entries()
    own = {entry.name for entry in entries}
    return entries + [_entry(file, "shipped") for file in storage.documents(_shipped()) if file.stem not in own]


def others_of_gpu(profile: DeviceProfile) -> list[str]:
    """What to ask for to get profiles of the GPU that a datasheet is of, the user's first."""
    shipped = (_entry(file, "shipped") for file in storage.documents(_shipped()) if file.stem.startswith(profile.name))
    readable = [(one, gpus.find(one.profile.machine.accelerator)) for one in (*_own_entries(), *shipped) if one.profile]
    alike = [one for one, gpu in readable if gpu and gpu.name == profile.name]
    return [one.device for one in alike]


def _own_entries() -> list[Entry]:
    return [_entry(file, "user") for file in storage.documents(directory())]


def _entry(file: Path, source: str) -> Entry:
    try:
        return Entry(file.stem, file, source, _read(file), "")
    except ProfileError as error:
        return Entry(file.stem, file, source, None, str(error))


def load(source: str | os.PathLike[str]) -> DeviceProfile:
    """Read a profile by path or name; a GPU that only its datasheet is known of gets a stated guess."""
    if _found(source) is None and (sheet := gpus.find(os.fspath(source))):
        return datasheet.profile_of(sheet)
    return _read(locate(source))


def locate(source: str | os.PathLike[str]) -> Path:
    """The file a path or a profile's name stands for."""
    file, name = _found(source), os.fspath(source)
    if file is not None:
        return file
    if gpus.find(name):
        raise ProfileError(
            f"{name!r} is known from its datasheet only, so there is no file of it. Measure one with: latpred calibrate"
        )
    raise ProfileError(_unknown(name))


def _found(source: str | os.PathLike[str]) -> Path | None:
    """A path as it is, or the file of a profile by its name or any other name of the GPU that it is called after."""
    name = os.fspath(source)
    if storage.is_path(source):
        return Path(name)
    for file in (file_of(name), _shipped() / f"{name}{storage.SUFFIX}"):
        if os.path.exists(file):  # which is False for a name that no file can have
            return file
    gpu = gpus.find(name)
    return None if gpu is None or gpu.name == name else _found(gpu.name)


def _read(file: Path) -> DeviceProfile:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise ProfileError(f"there is no profile at {file}. List what there is with: latpred profiles list") from None
    except OSError as error:
        raise ProfileError(f"cannot read {file}: {error.strerror or error}. {REPAIR}") from error
    return decode(data, str(file))


def _unknown(name: str) -> str:
    lower = name.lower()
    if lower in ("gpu", "nvidia"):
        return (
            f"no profile is called {name!r}. This machine's own GPU is cuda or cuda:0; others go by name, as in a100."
        )
    live = [lower] if is_live(lower) and lower != name else []  # as cpu for CPU, which may have no profile yet
    known = dict.fromkeys([*live, *names(), *gpus.nearest(name)])
    longer = [one for one in known if one.startswith(f"{name}-")]  # as cpu-2-threads for cpu
    near = list(dict.fromkeys([*difflib.get_close_matches(lower, known, n=3, cutoff=0.5), *longer]))
    hint = f"Did you mean {', '.join(near[:6])}? " if near else ""
    return f"no profile is called {name!r}. {hint}List them with: latpred profiles list (or list --datasheets)"


def find(
    device: str | os.PathLike[str] | None = None, *, threads: int | None = None, cudnn_benchmark: bool | None = None
) -> DeviceProfile:
    """The profile that predictions for a device rest on.

    `device` is "cpu", "cuda:0" ("cuda" is the same) or "simulated" for a profile calibrated on this machine; anything
    else is the name of a profile, a path to one, or a GPU's name, whose datasheet stands in where it has no profile.
    Without it: this machine's own, its GPU's if calibrated, else its CPU's. A shipped profile is used only when named.

    With `threads`, or `cudnn_benchmark` (`torch.backends.cudnn.benchmark`), only a profile that was measured so counts;
    without them one that was measured with PyTorch's own settings comes first.
    """
    wanted = _Settings(threads, cudnn_benchmark)
    if device is not None and not (isinstance(device, str) and is_live(device)):
        named = load(device)
        if wanted.unmet_by(named):
            raise NoProfileError(_not_measured_so([named], wanted))
        return named
    device = LIVE_CUDA if device == "cuda" else device
    anywhere = ("cuda",) if cudnn_benchmark is not None else ("cpu",) if threads is not None else ("cuda", "cpu")
    devices = (device,) if device else anywhere  # one, or all of a kind
    entries = _own_entries()
    owners = [(entry.profile, owner(entry.profile.machine)) for entry in entries if entry.profile is not None]
    for name, whose in product(devices, (Owner.THIS, Owner.ALIKE)):
        own = [one for one, its in owners if its is whose and name in (live_name(one), one.device.kind)]
        fitting = [profile for profile in own if not wanted.unmet_by(profile)]
        if own and not fitting:
            raise NoProfileError(_not_measured_so(own, wanted))
        if fitting:
            return max(fitting, key=_preference)
    damaged = [entry for entry in entries if entry.problem]
    if damaged:
        raise ProfileError(damaged[0].problem)
    of = devices[0] if len(devices) == 1 else ""
    measured = f" measured with {wanted}" if str(wanted) else ""
    kinds = [name.partition(":")[0] for name in devices]
    others = [one for one, whose in owners if whose is Owner.ANOTHER and one.device.kind in kinds]
    told = [entry.device for entry in entries if entry.profile in others]
    hint = f" (another machine's can be named, as in --device {shlex.quote(told[0])})" if told else ""
    raise NoProfileError(
        f"no profile of {of or 'this machine'}{measured} in {directory()}{hint}. "
        f"Make one with: latpred calibrate{f' --device {of}' * bool(of)}{wanted.flags}"
    )


def _preference(profile: DeviceProfile) -> tuple[bool, bool, str]:
    """What makes one of several profiles the better answer: PyTorch's own settings, no adaptation, a later date."""
    as_asked = THREADS in profile.protocol or cudnn_benchmarked(profile)
    return not as_asked, ADAPTED not in profile.protocol, profile.created


def cudnn_benchmarked(profile: DeviceProfile) -> bool:
    """Whether cudnn timed its convolutions, and kept the fastest, while a profile was measured."""
    return profile.protocol.get(CUDNN) == BENCHMARK


def _not_measured_so(own: list[DeviceProfile], wanted: _Settings) -> str:
    kind = own[0].device.kind
    if wanted.cudnn_benchmark and kind != "cuda":
        return f"cudnn runs on CUDA devices only, and {own[0].name} is of kind {kind}. Ask without --cudnn-benchmark."
    if owner(own[0].machine) is Owner.ANOTHER:  # whose profile nothing here can make anew
        holds = f", and holds for {how}" if (how := _how(own[0])) else ""
        options = " and ".join(wanted.unmet_by(own[0]))
        return f"profile {own[0].name!r} is of another machine{holds}. Ask without {options}."
    there = ", ".join(f"{profile.name}: {_how(profile)}" for profile in own)
    return (
        f"no profile of {kind} was measured with {wanted} (there is {there}). "
        f"Make one with: latpred calibrate --device {live_name(own[0])}{wanted.flags}"
    )


def _how(profile: DeviceProfile) -> str:
    threads = profile.machine.threads
    said = [threads_text(threads)] if threads else []  # a datasheet says nothing of them
    return ", ".join([*said, *["cudnn.benchmark on"] * cudnn_benchmarked(profile)])


def threads_text(threads: int) -> str:
    """How many threads an op may use, as "1 thread"."""
    return f"{threads} thread{'' if threads == 1 else 's'}"


def save(profile: DeviceProfile, path: str | os.PathLike[str] | None = None) -> Path:
    """Write a profile atomically, with its checksum, by default into the user's directory under its own name."""
    target = file_of(profile.name) if path is None else Path(path)
    return storage.save_document(target, encode(profile), ProfileError)


def rename(name: str, new: str) -> Path:
    """Give a profile of the user's another name, and tell the file that it is in now."""
    profile, file = _read(_own_file(name)), file_of(new)
    if is_live(new) or new in names() or gpus.find(new):
        raise ProfileError(f"{new!r} is the name of another profile, or of a device. Choose another one.")
    save(msgspec.structs.replace(profile, name=new))
    delete(name)
    return file


def delete(name: str) -> Path:
    """Delete a profile of the user's, and tell the file that it was in."""
    file = _own_file(name)
    try:
        file.unlink()
    except OSError as error:
        raise ProfileError(storage.unusable(f"cannot delete {file}", error)) from error
    return file


def _own_file(name: str) -> Path:
    """The file of a profile of the user's."""
    file = file_of(name)
    if not os.path.lexists(file):
        shipped = f"{name!r} ships with latpred, and stays as it is. List yours with: latpred profiles list"
        raise ProfileError(shipped if name in names() else _unknown(name))
    return file


def mismatch(then: Machine, now: Machine) -> list[str]:
    """What differs between the machine of a profile and another, as plain sentences; empty when nothing does.

    A package that only one of them has makes no difference.
    """
    threads = [] if then.accelerator else [("the number of threads", then.threads, now.threads)]  # a CPU's ops use them
    pairs = [
        ("the host CPU", then.cpu, now.cpu),
        ("the processor's model", then.cpu_model or now.cpu_model, now.cpu_model),
        ("the number of cores", then.cores, now.cores),
        ("the accelerator", then.accelerator, now.accelerator),
        ("the driver", then.driver or now.driver, now.driver or then.driver),
        ("the operating system", then.system, now.system),
        *threads,
        *((name, then.stack[name], now.stack[name]) for name in sorted(then.stack.keys() & now.stack.keys())),
    ]
    return [f"{label} is {new or 'none'}, the profile's is {old or 'none'}" for label, old, new in pairs if old != new]
