"""Anchors: how far every client's ledger goes, kept permanently to detect a ledger that was cut or rewritten."""
