"""Device profiles: the document, its codec, the store on disk, datasheets, and hosts.

>>> load("rtx-8000").device.multiprocessors
72
"""

from __future__ import annotations

from latpred.profile.store import find, load, save

__all__ = ["find", "load", "save"]
