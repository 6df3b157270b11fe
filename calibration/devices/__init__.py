"""Devices that calibration runs on: CPU, CUDA, and a simulated one; their constants and identity."""
