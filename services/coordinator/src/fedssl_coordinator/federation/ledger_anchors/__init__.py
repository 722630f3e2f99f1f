"""How far every client's ledger goes: kept for ever, so that a ledger that was cut or rewritten does not go unseen."""
