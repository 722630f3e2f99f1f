"""The reports of clients about their images: the federated data card."""
