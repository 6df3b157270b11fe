"""Whole models measured: tables, recordings, validation, and checks of a profile."""
