"""Uploads that continue where they broke off, by the protocol tus 1.0."""
