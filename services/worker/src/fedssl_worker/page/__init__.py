"""The owner's page: what has left this machine, what may leave, and what the current work would send."""
