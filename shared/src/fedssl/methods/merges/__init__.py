"""The merge rules, one per file: what a client does with the global model that it receives."""
