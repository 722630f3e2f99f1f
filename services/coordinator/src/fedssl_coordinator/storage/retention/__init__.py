"""Retention: which artifacts are kept and for how long, and the check that the store has all of them."""
