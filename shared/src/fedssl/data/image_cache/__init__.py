"""Images of a folder, decoded once to a working size and kept on disk, from which random crops are cut.

`build` makes the cache, `records` is its format, `decoders` are the processes that decode, and `images` reads it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
