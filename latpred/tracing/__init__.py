"""Tracing: what one forward pass of a model does, op by op, found without computing it.

`trace` is the way in; `names` builds models by name, `check` compares counts with other counters.
"""

from __future__ import annotations

from latpred.tracing.tracer import trace

__all__ = ["trace"]
