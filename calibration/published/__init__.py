"""Fits device profiles to tables of end-to-end latencies that others published.

`fit_profile` makes a profile, `latpred.calibration.published.leave_out` shows what the law is worth on models, devices
and runs that it did not see. Nothing here starts a clock.
"""
