"""Artifacts, uploads, registered data sets, and how long they are kept."""
