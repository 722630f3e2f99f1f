"""Evaluations: a round's encoder evaluated on labelled images, next to the run, which never waits for one."""
