"""Data owners, as the coordinator knows them."""
