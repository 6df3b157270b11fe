"""Formulas of pooling and resampling."""

from __future__ import annotations

from math import prod
from typing import Any

from latpred.ops.registry import Formula, Work, cost
from latpred.ops.shapes import Tensor, first, nbytes


def _work(kind: str, out: Tensor, spatial: int, window: int) -> Work:
    shape = list(out.shape)
    lead = shape[:-spatial]
    plane = shape[-spatial:]
    dims = {
        "batch": prod(lead[:-1]),
        "channels": lead[-1] if lead else 1,
        "h_out": prod(plane[:-1]),
        "w_out": plane[-1],
        "window": window,
    }
    return Work(f"pooling.{kind}", dims)


def _windowed(kind: str, spatial: int) -> Formula:
    def formula(self: Tensor, kernel_size: Any, *_: Any, out: Any, **__: Any) -> Work:
        sides = [kernel_size] if isinstance(kernel_size, int) else list(kernel_size)
        window = sides[0] ** spatial if len(sides) == 1 else prod(sides)
        return _work(kind, first(out), spatial, window)

    return formula


def _adaptive(kind: str, spatial: int) -> Formula:
    def formula(self: Tensor, *_: Any, out: Any, **__: Any) -> Work:
        y = first(out)
        window = prod(self.shape[-spatial:]) // max(1, prod(y.shape[-spatial:]))
        return _work(kind, y, spatial, max(1, window))

    return formula


for _n in (1, 2, 3):
    cost(f"aten::max_pool{_n}d", f"aten::max_pool{_n}d_with_indices")(_windowed("max", _n))
    cost(f"aten::avg_pool{_n}d")(_windowed("avg", _n))
    cost(f"aten::adaptive_avg_pool{_n}d", f"aten::_adaptive_avg_pool{_n}d")(_adaptive("adaptive_avg", _n))
    cost(f"aten::adaptive_max_pool{_n}d")(_adaptive("adaptive_max", _n))


def _upsample(kind: str, spatial: int, taps: int) -> Formula:
    def formula(self: Tensor, *_: Any, out: Any, **__: Any) -> Work:
        work = _work(kind, first(out), spatial, taps)
        return work._replace(reads={0: min(nbytes(self), taps * nbytes(first(out)))})

    return formula


for _n, _mode, _taps in ((1, "linear", 2), (2, "bilinear", 4), (3, "trilinear", 8), (2, "bicubic", 16)):
    cost(f"aten::upsample_{_mode}{_n}d", f"aten::_upsample_{_mode}{_n}d_aa")(_upsample(f"upsample_{_mode}", _n, _taps))
for _n in (1, 2, 3):
    cost(f"aten::upsample_nearest{_n}d", f"aten::_upsample_nearest_exact{_n}d")(_upsample("upsample_nearest", _n, 1))
cost("aten::grid_sampler", "aten::grid_sampler_2d", "aten::grid_sampler_3d")(_upsample("grid_sample", 2, 4))
