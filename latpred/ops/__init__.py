"""Cost formulas: what each op does on the device, as pure functions of shapes.

`cost` registers a formula, `Work` is what it returns, `work_of` evaluates one. Nothing here imports torch or knows
how long anything takes.
"""

from __future__ import annotations

from latpred.ops import pointwise, products  # noqa: F401 (imported to register)
from latpred.ops.families import Formula, Work, cost, formula_of, generation, work_of

BUILT_IN = generation()  # as long as nobody registers formulas of their own

__all__ = ["BUILT_IN", "Formula", "Work", "cost", "formula_of", "generation", "work_of"]
