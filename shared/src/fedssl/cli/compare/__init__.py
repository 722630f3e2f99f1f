"""`fedssl compare`: several methods on the same clients and budgets."""
