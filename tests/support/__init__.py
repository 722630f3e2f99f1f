"""Fixtures and helpers that several test packages share."""
