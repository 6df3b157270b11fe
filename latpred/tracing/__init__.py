"""Tracing: what one forward pass of a model does, op by op, found without computing it.

`trace` is the way in.
"""

from __future__ import annotations

from latpred.tracing.tracer import trace

__all__ = ["trace"]
