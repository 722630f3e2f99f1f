"""Weights that runs may start from, registered under names."""
