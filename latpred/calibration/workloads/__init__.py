"""What is timed: generated networks, single ops, and suites of whole models."""
