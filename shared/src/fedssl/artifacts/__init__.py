"""Artifacts: what is declared, how it is checked, and where it is kept. No torch here: the API process imports this."""
