"""Runs: created from a spec, started, paused, stopped, shown."""
