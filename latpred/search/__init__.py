"""Predictions for searches: many candidates, workers, resume, ranking, latency budgets and supernets."""
