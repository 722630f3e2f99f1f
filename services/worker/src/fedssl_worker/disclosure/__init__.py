"""What leaves this machine: the policy that permits it, the one way out (egress), and the signed ledger of it."""
