"""Estimators: the roofline with its residual, tile constants, and corrections from measured latencies."""
