"""Rounds: opened, waited for, aggregated and closed."""
