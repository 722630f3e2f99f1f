"""Artifacts: who may send and fetch them, the checks on upload, and the transfer of their bytes."""
