"""Estimates of a run's bytes and time, before it is created."""
