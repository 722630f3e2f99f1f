"""Which coordinator a command connects to, and how it does."""
