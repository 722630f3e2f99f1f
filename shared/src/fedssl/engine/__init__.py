"""Training and aggregation: the only owners of optimisers. Simulation, workers and Celery tasks call these
functions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
