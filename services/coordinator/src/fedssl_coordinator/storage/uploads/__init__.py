"""Uploads that can be resumed, with the protocol tus 1.0."""
