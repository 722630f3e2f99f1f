"""Typed Python clients of the REST API: `Client` for operators, `WorkerClient` for the process of a data owner.

Both are synchronous, may be shared between threads and are closed by their `with` block:

    with Client("http://127.0.0.1:8000", token) as client:
        run = client.create_run(spec)
        for event in client.events(run.id):
            print(event.message)

What cannot be reached is tried again, for as long as `Retry` says; what the coordinator refuses raises an `ApiError`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
