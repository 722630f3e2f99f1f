"""The only owners of optimisers: simulation, workers and Celery tasks all call these functions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
