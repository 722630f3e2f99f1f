"""Data sets: `fedssl data`, `partition`, `public-dataset` and `evaluation-dataset`."""
