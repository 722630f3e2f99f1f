"""A linear classifier on top of a trained encoder: fitted to labelled images, kept in a file, and applied to images."""
