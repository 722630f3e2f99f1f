from .build import CachedData, load_cached
from .images import CachedImages

__all__ = ["CachedData", "CachedImages", "load_cached"]
