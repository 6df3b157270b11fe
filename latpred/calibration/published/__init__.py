"""Fits device profiles to tables of end-to-end latencies that others published.

`fitted_profiles.fit_profile` makes a profile, `leave_out.evaluate_left_out` shows what the latency model is worth on
models, GPUs and runs that it did not see. Nothing here starts a clock.
"""
