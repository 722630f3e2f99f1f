"""Dimension assignments (SSD): which client of a run owns which dimensions of the embedding."""
