"""Artifacts on their way in and out."""
