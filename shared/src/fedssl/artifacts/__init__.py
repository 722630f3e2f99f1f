"""Artifacts: how they are declared, checked and stored. Imports no torch, because the API process imports this."""
