"""The run: made from a spec, started, paused, stopped, shown."""
