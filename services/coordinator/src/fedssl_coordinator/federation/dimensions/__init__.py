"""Dimension assignments (SSD): which of the embedding's dimensions are whose in a run."""
