"""Predicted against measured: comparison, metrics, recordings, adaptation and drift."""
