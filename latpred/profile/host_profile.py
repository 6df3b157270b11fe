"""HostProfile: what dispatch costs on one host, whatever device it feeds; a small JSON document beside the profiles.

Reading is strict and executes nothing, writing is atomic. What a host's costs do to a prediction is
`latpred.prediction.host_swap`'s business, measuring them `latpred.calibration.calibrator`'s.
"""

from __future__ import annotations

import difflib
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from latpred import storage
from latpred.errors import HostError
from latpred.profile import hosts, store
from latpred.profile.document import DispatchFit, Machine

HOST_SCHEMA = 1
REPAIR = "Measure it again, in seconds, with: latpred calibrate --host-only"


class HostProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dispatch costs of one host."""

    name: str  # what `--host` takes
    kind: str  # always "host"
    schema: int
    created: str  # ISO 8601, UTC
    machine: Machine
    dispatch: DispatchFit  # costs by class, of calls and of a forward pass
    seconds: float  # what measuring took


def directory() -> Path:
    """Directory of the user's host profiles; it need not exist yet."""
    return storage.data_dir() / "hosts"


def path(name: str) -> Path:
    """File a host profile of this name is kept in, whether or not it exists."""
    try:
        float(name)
    except ValueError:
        return storage.document_path(directory(), name, "host", "epyc-server", HostError)
    raise HostError(f"{name!r} cannot name a host: --host takes a number for a factor. Use letters, as in laptop.")


def name_here(name: str) -> str:
    """A name for this host, of which another host that shares the folder has none of that name."""
    with suppress(HostError):
        return store.apart(name, load(name).machine)
    return name


def names() -> list[str]:
    """Hosts measured by this user."""
    return [file.stem for file in storage.documents(directory())]


def listing() -> list[HostProfile]:
    """All that can be read."""
    readable = []
    for name in names():
        with suppress(HostError):  # named, it says why
            readable.append(load(name))
    return readable


def load(source: str | os.PathLike[str]) -> HostProfile:
    """Read a host profile by name or file."""
    text = os.fspath(source)
    file = Path(text) if storage.is_path(source) else path(text)
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise HostError(unknown(text)) from None
    except OSError as error:
        raise HostError(f"cannot read {file}: {error.strerror or error}. {REPAIR}") from error
    try:
        profile = msgspec.json.decode(data, type=HostProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HostError(f"{file} is not a host profile: {error}. {REPAIR}") from None
    if profile.kind != "host" or profile.schema > HOST_SCHEMA:
        raise HostError(
            f"{file} holds a {profile.kind!r} of schema {profile.schema}, not a host of {HOST_SCHEMA}. {REPAIR}"
        )
    return profile


def save(profile: HostProfile) -> Path:
    """Write a host profile atomically, under its name."""
    data = msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"
    return storage.save_document(path(profile.name), data, HostError)


def unknown(name: str) -> str:
    """What to say of a name that no host has."""
    near = (*difflib.get_close_matches(name, names(), n=3, cutoff=0.5), *hosts.nearest(name))
    hint = f"Did you mean {', '.join(near[:3])}?" if near else "latpred profiles list --hosts names those known."
    return (
        f"no host is called {name!r}. {hint} Give its factor, as in --host 1.3, or measure it where it is: "
        "latpred calibrate --host-only"
    )
