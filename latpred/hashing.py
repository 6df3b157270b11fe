"""Hashes of records that hold dictionaries: equal records have equal ones, so that sets and caches can hold them."""

from __future__ import annotations

import msgspec


def hash_of(record: msgspec.Struct) -> int:
    """The hash of everything that a record holds besides dictionaries, which have none."""
    held = (getattr(record, name) for name in record.__struct_fields__)
    return hash((type(record), *(value for value in held if not isinstance(value, dict))))
