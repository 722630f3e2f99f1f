"""Data owners: shown and revoked."""
