"""Evaluation of encoders: probes, nearest neighbours, the geometry of the representations, and pictures."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
