"""Secure rounds: the phases of secure aggregation, their messages, and the lists that end each phase."""
