"""The profile store: finds, reads and writes device profiles, and says whether one fits a machine.

A profile is one JSON document. Reading is strict and never executes anything; writing is atomic, so a reader sees the
old document or the new one. Nothing here measures or predicts.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from enum import Enum
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import NamedTuple

from latpred import host, storage
from latpred.errors import NoProfileError, ProfileError
from latpred.profile import datasheet, gpus
from latpred.profile.document import (
    ADAPTED,
    BENCHMARK,
    CUDNN,
    FLOAT32,
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
    ALIKE = "the same hardware as far as is known, but perhaps another machine"
    ANOTHER = "another machine"


def owner(machine: Machine) -> Owner:
    """Whose a profile's machine is.

    The hardware must agree: the processor with its model and vector instructions, the number of cores, the memory. An
    id that differs makes it another machine of the same hardware, as nodes of a cluster are; so may be that of an older
    profile, which has neither model nor id. On systems that tell no model the rest decides.
    """
    if difference(machine):
        return Owner.ANOTHER
    here = host.machine_id()
    older = not machine.cpu_model and host.cpu_model()  # as this machine's own records say more
    if older or (machine.machine_id and here and machine.machine_id != here):
        return Owner.ALIKE
    return Owner.THIS


def difference(machine: Machine) -> str:
    """The first thing about the hardware that is not as here, as "here …"; "" where all that is known agrees."""
    if machine.cpu != host.cpu_name():
        return f"here {host.cpu_name()}"
    if machine.cpu_model and machine.cpu_model != host.cpu_model():
        return f"model {machine.cpu_model}, here {host.cpu_model()}"
    if machine.cores != host.cores():
        return f"{machine.cores} cores, here {host.cores()}"
    memory = host.memory_bytes()
    if abs(machine.memory_bytes - memory) > MEMORY_TOLERANCE * max(memory, machine.memory_bytes):
        return f"{machine.memory_bytes / 2**30:.1f} GiB of memory, here {memory / 2**30:.1f}"
    return ""


def caveat(profile: DeviceProfile) -> str:
    """What predictions from a profile say where its machine is not certainly this one; "" where it is."""
    machine = profile.machine
    whose = owner(machine)
    if whose is Owner.THIS:
        return ""
    if whose is Owner.ANOTHER:
        where = machine.accelerator or machine.cpu
        return (
            f"measured on another machine ({machine.cpu}, {difference(machine)}): kernel times hold on {where}, "
            "dispatch costs may differ"
        )
    if machine.machine_id:
        return f"measured on another machine of the same hardware ({machine.cpu}, {machine.cores} cores)"
    return (
        "perhaps measured on another machine: processor name, cores and memory are as here, and this older profile "
        f"records nothing else to tell. To be sure, measure this one with: {calibration(profile)}"
    )


_LIVE = re.compile(r"cpu|simulated|cuda(:\d+)?")
LIVE_CUDA = "cuda:0"  # the GPU that "cuda" is, where one is measured and where a profile is looked for


class Entry(NamedTuple):
    """One file of the store."""

    name: str  # what `load` and `--device` take
    path: Path
    source: str  # "user" (calibrated here) or "shipped"
    profile: DeviceProfile | None  # none when the file cannot be read
    problem: str  # why not; "" when it can


def directory() -> Path:
    """Directory of the user's profiles; it need not exist yet."""
    return storage.profiles_dir()


def file_of(name: str) -> Path:
    """File a user profile of this name is kept in, whether or not it exists."""
    told = name.replace(":", "-") if os.name == "nt" else name  # where a colon cannot be in a file's name
    return storage.document_path(directory(), told, "profile", "cpu-laptop", ProfileError)


def name_here(name: str) -> str:
    """A name for a profile of this machine, of which another machine that shares the folder has none of that name."""
    entry = next((one for one in _own_entries() if one.path == file_of(name)), None)
    return apart(name, entry.profile.machine if entry and entry.profile else None)


def apart(name: str, machine: Machine | None) -> str:
    """The name where it is free or of this machine, with digits of this machine where it is of another."""
    return name if machine is None or owner(machine) is Owner.THIS else f"{name}-{host.short_id()}"


def _shipped() -> Path:
    return Path(str(files("latpred.models"))) / "profiles"


def is_live(name: str) -> bool:
    """Whether a name is that of a device of this machine, as "cuda:0" is, and not of a profile."""
    return _LIVE.fullmatch(name) is not None


def live_name(profile: DeviceProfile) -> str:
    """The device that a profile is of, as it is opened; older profiles tell the number of a GPU by their name alone."""
    if profile.device.kind != "cuda":
        return profile.device.kind
    numbered = re.match(r"cuda:\d+", profile.protocol.get(OPENED, profile.name))
    return numbered[0] if numbered else profile.device.kind


def _opened(profile: DeviceProfile) -> str:
    """The device that a profile is of, as it is measured again."""
    live = live_name(profile)
    return LIVE_CUDA if live == "cuda" else live


def calibration(profile: DeviceProfile) -> str:
    """The command that measures a profile's device again, in the same way and under its name where it is of here."""
    opened, protocol = _opened(profile), profile.protocol
    command = f"latpred calibrate --device {opened}"
    if profile.provenance != "measured" or owner(profile.machine) is Owner.ANOTHER:
        return command
    command += f" --threads {profile.machine.threads}" * (THREADS in protocol)
    command += " --cudnn-benchmark" * cudnn_benchmarked(profile)
    named = profile.name != opened and ADAPTED not in protocol
    return command + f" --name {shlex.quote(profile.name)}" * named


def listing() -> list[Entry]:
    """All profiles in sight, the user's first, unreadable ones included with the reason."""
    entries = _own_entries()
    own = {entry.name for entry in entries}
    return entries + [_entry(file, "shipped") for file in storage.documents(_shipped()) if file.stem not in own]


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
    except IsADirectoryError:
        raise ProfileError(f"{file} is a directory, not a profile. Name the .json file in it.") from None
    except OSError as error:
        raise ProfileError(f"cannot read {file}: {error.strerror or error}. {REPAIR}") from error
    return decode(data, str(file))


def _unknown(name: str) -> str:
    if name.lower() in ("gpu", "nvidia"):
        return (
            f"no profile is called {name!r}. This machine's own GPU is cuda or cuda:0; others go by name, as in a100."
        )
    names = [entry.name for entry in listing()]
    longer = (one for one in names if one.startswith(f"{name}-"))  # as cpu-2-threads for cpu
    near = {*longer, *difflib.get_close_matches(name, names, n=3, cutoff=0.5), *gpus.nearest(name)}
    likeliest = sorted(near, key=lambda one: (-difflib.SequenceMatcher(None, name, one).ratio(), one))
    hint = f"Did you mean {', '.join(likeliest[:6])}? " if near else ""
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
    wanted = {"threads": threads, "cudnn_benchmark": cudnn_benchmark}
    if device is not None and not (isinstance(device, str) and is_live(device)):
        named = load(device)
        if _differing(named, wanted):
            raise NoProfileError(_not_measured_so([named], wanted))
        return named
    device = LIVE_CUDA if device == "cuda" else device
    anywhere = ("cuda",) if cudnn_benchmark is not None else ("cpu",) if threads is not None else ("cuda", "cpu")
    kinds = (device.partition(":")[0],) if device else anywhere
    entries = _own_entries()
    owners = [(entry.profile, owner(entry.profile.machine)) for entry in entries if entry.profile is not None]
    for kind, whose in product(kinds, (Owner.THIS, Owner.ALIKE)):
        own = [profile for profile, its in owners if its is whose and profile.device.kind == kind]
        if device is not None:  # of several GPUs the one that is meant, or what may be it
            own = [profile for profile in own if live_name(profile) in (device, kind)]
        fitting = [profile for profile in own if not _differing(profile, wanted)]
        if own and not fitting:
            raise NoProfileError(_not_measured_so(own, wanted))
        if own:
            of_number = [profile for profile in fitting if live_name(profile) == device]
            return max(of_number or fitting, key=_preference)
    damaged = [entry for entry in entries if entry.problem]
    if damaged:
        raise ProfileError(damaged[0].problem)
    of = device or (kinds[0] if len(kinds) == 1 else "")  # settings may have told which kind is meant
    said, flags, _ = _settings(wanted)
    measured = f" measured with {said}" if said else ""
    foreign = [one.name for one, whose in owners if whose is Owner.ANOTHER and one.device.kind in kinds]
    hint = f" (another machine's can be named, as in --device {foreign[0]})" if foreign else ""
    raise NoProfileError(
        f"no profile of {of or 'this machine'}{measured} in {directory()}{hint}. "
        f"Make one with: latpred calibrate{f' --device {of}' * bool(of)}{flags}"
    )


def _preference(profile: DeviceProfile) -> tuple[bool, bool, str]:
    """What makes one of several profiles the better answer: PyTorch's own settings, no adaptation, a later date."""
    as_asked = THREADS in profile.protocol or cudnn_benchmarked(profile)
    return not as_asked, ADAPTED not in profile.protocol, profile.created


def cudnn_benchmarked(profile: DeviceProfile) -> bool:
    """Whether cudnn timed its convolutions, and kept the fastest, while a profile was measured."""
    return profile.protocol.get(CUDNN) == BENCHMARK


def without_tf32(profile: DeviceProfile) -> list[str]:
    """That a GPU's convolutions and RNNs in fp32 were measured without the TF32 that PyTorch has them use."""
    of_gpu = profile.device.kind == "cuda" and profile.provenance == "measured"
    if not of_gpu or "tf32" not in profile.kernels or FLOAT32 in profile.protocol:
        return []
    return [
        "convolutions and RNNs in fp32 were measured without TF32, which PyTorch has them use: measure anew with: "
        + calibration(profile)
    ]


def _differing(profile: DeviceProfile, wanted: dict[str, int | bool | None]) -> list[str]:
    """What of how a profile was measured is not as wanted, in the words of the command line."""
    measured = {"threads": profile.machine.threads, "cudnn_benchmark": cudnn_benchmarked(profile)}
    return [name for name, value in wanted.items() if value is not None and value != measured[name]]


def _not_measured_so(own: list[DeviceProfile], wanted: dict[str, int | bool | None]) -> str:
    kind = own[0].device.kind
    if wanted["cudnn_benchmark"] and kind != "cuda":
        return f"cudnn runs on CUDA devices only, and {own[0].name} is of kind {kind}. Ask without --cudnn-benchmark."
    if owner(own[0].machine) is Owner.ANOTHER:  # whose profile nothing here can make anew
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in _differing(own[0], wanted))
        holds = f", and holds for {how}" if (how := _how(own[0])) else ""
        return f"profile {own[0].name!r} is of another machine{holds}. Ask without {flags}."
    said, flags, suffix = _settings(wanted)
    live = _opened(own[0])
    there = ", ".join(f"{profile.name}: {_how(profile)}" for profile in own)
    return (
        f"no profile of {kind} was measured with {said} (there is {there}). "
        f"Make one with: latpred calibrate --device {live}{flags} --name {live}{suffix}"
    )


def _settings(wanted: dict[str, int | bool | None]) -> tuple[str, str, str]:
    """What is wanted in words, as options of the command line, and as the end of a profile's name."""
    said, flags, suffix = [], "", ""
    threads, benchmark = wanted["threads"], wanted["cudnn_benchmark"]
    if threads is not None:
        said.append(threads_text(threads))
        flags, suffix = f" --threads {threads}", f"-{threads}"
    if benchmark is not None:
        said.append(f"cudnn.benchmark {'on' if benchmark else 'off'}")
        flags, suffix = f"{flags}{' --cudnn-benchmark' * benchmark}", f"{suffix}{'-benchmark' * benchmark}"
    return " and ".join(said), flags, suffix


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


def mismatch(profile: DeviceProfile, machine: Machine) -> list[str]:
    """What differs between the machine of a profile and another, as plain sentences; empty when nothing does."""
    return unlike(profile.machine, machine)


def unlike(then: Machine, now: Machine) -> list[str]:
    """The same of two machines; a package that only one of them has makes no difference."""
    threads = [] if then.accelerator else [("the number of threads", then.threads, now.threads)]  # a CPU's ops use them
    pairs = [
        ("the host CPU", then.cpu, now.cpu),
        ("the processor's model", then.cpu_model or now.cpu_model, now.cpu_model),
        ("the number of cores", then.cores, now.cores),
        ("the accelerator", then.accelerator, now.accelerator),
        ("the driver", then.driver, now.driver),
        ("the operating system", then.system, now.system),
        *threads,
        *((name, then.stack[name], now.stack[name]) for name in sorted(then.stack.keys() & now.stack.keys())),
    ]
    return [f"{label} is {new or 'none'}, the profile's is {old or 'none'}" for label, old, new in pairs if old != new]
