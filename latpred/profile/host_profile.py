"""HostProfile: what dispatch costs on one host, whatever device it feeds; a small JSON document beside the profiles.

Reading is strict and executes nothing, writing is atomic. What a host's costs do to a prediction is
`latpred.prediction.host_swap`'s business, measuring them `latpred.calibration.host_only`'s.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import msgspec

from latpred import storage
from latpred.errors import HostError
from latpred.profile.document import DispatchFit, Machine

HOST_SCHEMA = 1
SUFFIX = ".json"
REPAIR = "Measure it again, in seconds, with: latpred calibrate --host-only"


class HostProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dispatch costs of one host.

    Attributes
    ----------
    name : str
        What `--host` takes.
    kind : str
        Always "host".
    schema : int
        Version of this document.
    created : str
        ISO 8601, UTC.
    machine : Machine
        The host and its software.
    dispatch : DispatchFit
        Costs by class, of calls and of a forward pass, in microseconds.
    seconds : float
        What measuring took.
    """

    name: str
    kind: str
    schema: int
    created: str
    machine: Machine
    dispatch: DispatchFit
    seconds: float


def directory() -> Path:
    """Directory of the user's host profiles; it need not exist yet."""
    return storage.data_dir() / "hosts"


def path(name: str) -> Path:
    """File a host profile of this name is kept in, whether or not it exists.

    Raises
    ------
    HostError
        When the name is not a plain file name.

    Examples
    --------
    >>> path("laptop").name
    'laptop.json'
    """
    if not name or name != Path(name).name or name.startswith("."):
        raise HostError(f"{name!r} cannot name a host: use letters, digits, dots and dashes, as in epyc-server.")
    return directory() / f"{name}{SUFFIX}"


def names() -> list[str]:
    """Hosts measured by this user."""
    folder = directory()
    return sorted(file.stem for file in folder.glob(f"*{SUFFIX}") if not file.name.startswith("."))


def listing() -> list[HostProfile]:
    """All that can be read."""
    found = []
    for name in names():
        try:
            found.append(load(name))
        except HostError:
            continue  # named, it says why
    return found


def load(source: str | os.PathLike[str]) -> HostProfile:
    """Read a host profile by name or file.

    Raises
    ------
    HostError
        When there is none, or it is damaged or of a newer schema.
    """
    text = os.fspath(source)
    is_file = not isinstance(source, str) or text.endswith(SUFFIX) or os.sep in text
    file = Path(text) if is_file else path(text)
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise HostError(_unknown(text)) from None
    except OSError as error:
        raise HostError(f"cannot read {file}: {error.strerror or error}. {REPAIR}") from error
    try:
        found = msgspec.json.decode(data, type=HostProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HostError(f"{file} is not a host profile: {error}. {REPAIR}") from None
    if found.kind != "host" or found.schema > HOST_SCHEMA:
        raise HostError(
            f"{file} holds a {found.kind!r} of schema {found.schema}, not a host of {HOST_SCHEMA}. {REPAIR}"
        )
    return found


def save(profile: HostProfile) -> Path:
    """Write a host profile atomically, under its name.

    Raises
    ------
    HostError
        When the directory cannot be written.
    """
    target = path(profile.name)
    try:
        storage.write(target, msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    except OSError as error:
        raise HostError(
            f"cannot write {target}: {error.strerror or error}. "
            f"Make {target.parent} writable, or choose another directory with {storage.VARIABLE}=DIR."
        ) from error
    return target


def _unknown(name: str) -> str:
    known = names()
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"Did you mean {', '.join(near)}?" if near else f"There are: {', '.join(known) or 'none'}."
    return f"no host profile is called {name!r}. {hint} Measure this host with: latpred calibrate --host-only"
