"""Experiments on one machine: runs that can be interrupted, comparisons of methods, and the papers' tables."""
