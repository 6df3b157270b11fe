"""Profiles as bytes: the strict JSON form, its checksum, and a plain sentence for everything that can be wrong with it.

The checksum covers the document as written, not as decoded, so a reader that knows more fields still verifies it.
Nothing here touches the file system.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from latpred.errors import ProfileError
from latpred.profile.document import OLDEST_SCHEMA, SCHEMA_VERSION, DeviceProfile

REPAIR = "Restore it from a copy, or make a new one with: latpred calibrate"


def encode(profile: DeviceProfile) -> bytes:
    """The document, with the sha256 of its own body; numbers that are not finite, which JSON has not, are refused."""
    document = to_document(profile)
    for where, number in _floats(document, "$"):
        if not math.isfinite(number):
            raise ProfileError(
                f"profile {profile.name!r} cannot be saved: {where} is {number}. "
                "Calibrate again with: latpred calibrate --fresh"
            )
    document["sha256"] = _digest(document)
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def to_document(profile: DeviceProfile) -> dict[str, Any]:
    """The profile as JSON-able builtins."""
    document: dict[str, Any] = msgspec.to_builtins(profile)
    return document


def decode(data: bytes, source: str) -> DeviceProfile:
    """Read what `encode` wrote; `source` is what messages call it."""
    document = _parse(data, source)
    _check_schema(document, source)
    try:
        profile = msgspec.convert(document, DeviceProfile)
    except msgspec.ValidationError as error:
        raise ProfileError(f"{source} is not a valid profile: {error}. {REPAIR}") from None
    if "sha256" not in document:
        raise ProfileError(f"{source} has no sha256, so nobody can tell whether it was altered. {REPAIR}")
    if document["sha256"] != _digest(document):
        raise ProfileError(f"{source} was altered after it was written: its sha256 does not match its body. {REPAIR}")
    return profile


def _parse(data: bytes, source: str) -> dict[str, Any]:
    if not data.strip():
        raise ProfileError(f"{source} is empty. {REPAIR}")
    try:
        document = msgspec.json.decode(data)
        json.loads(data, object_pairs_hook=_demand_once)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{source} {_diagnosis(data, str(error))} {REPAIR}") from None
    except RecursionError:
        raise ProfileError(f"{source} is JSON but not a profile: it is nested too deeply. {REPAIR}") from None
    except _TwiceError as error:
        raise ProfileError(f"{source} is not a valid profile: it has the key {error} twice. {REPAIR}") from None
    if not isinstance(document, dict):
        raise ProfileError(f"{source} is JSON but not a profile: it holds a {type(document).__name__}. {REPAIR}")
    return document


class _TwiceError(Exception):
    """An object has a key twice, of which readers would see only one."""


def _demand_once(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise _TwiceError(repr(next(name for name in names if names.count(name) > 1)))


def _diagnosis(data: bytes, error: str) -> str:
    constants: list[str] = []
    try:
        json.loads(data, parse_constant=constants.append)
    except ValueError:
        constants.clear()
    if constants:
        return f"holds {constants[0]} where a number must be; no prediction can rest on it."
    if "truncated" in error.lower():
        return "is cut short: the document ends before it is complete."
    return f"is damaged: {error.rstrip('.')}."


def _check_schema(document: dict[str, Any], source: str) -> None:
    schema = document.get("schema")
    if type(schema) is not int:
        raise ProfileError(f"{source} is JSON but not a profile: it states no schema version. {REPAIR}")
    if schema > SCHEMA_VERSION:
        raise ProfileError(
            f"{source} has schema {schema} and this latpred reads up to {SCHEMA_VERSION}. "
            "Upgrade with: python -m pip install --upgrade latpred"
        )
    if schema < OLDEST_SCHEMA:
        raise ProfileError(
            f"{source} has schema {schema}, which this latpred ({SCHEMA_VERSION}) no longer reads. "
            "Make a new one with: latpred calibrate"
        )


def _digest(document: dict[str, Any]) -> str:
    body = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(msgspec.json.encode(body, order="sorted")).hexdigest()


def _floats(value: Any, where: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield where, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _floats(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _floats(item, f"{where}[{index}]")
