"""Representations of many images in one file, made by a trained encoder, and what can be searched for in it."""
