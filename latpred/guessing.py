"""What stands in for kernels that a profile has no measurements of: a plain roofline from those that it has."""

from __future__ import annotations

import numpy as np

from latpred.profile import DeviceProfile, KernelFit
from latpred.trust import UNJUDGED_SPREAD


def guess(profile: DeviceProfile, fits: dict[str, KernelFit], spread: float) -> KernelFit:
    """A fit for families never measured, from the rates of those that were; `spread`: how wrong it may be."""
    rates = [fit.macs_per_us for fit in fits.values() if fit.macs_per_us]
    widths = [fit.activation_bytes_per_us for fit in fits.values() if fit.activation_bytes_per_us]
    width = float(np.median(widths)) if widths else profile.device.bandwidth_bytes_per_us
    return KernelFit.plain(
        family="other",
        floor_us=float(np.median([fit.floor_us for fit in fits.values()])),
        macs_per_us=float(np.median(rates)) if rates else 0.0,
        weight_bytes_per_us=width,
        activation_bytes_per_us=width,
        spread=spread if rates else UNJUDGED_SPREAD,  # without any rate, multiply-adds come out for free
    )
