"""The policy for what may leave this machine, the only way out (egress), and the signed ledger of what left."""
