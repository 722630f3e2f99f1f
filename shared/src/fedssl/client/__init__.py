"""Typed Python clients for the REST API: `Client` for operators, `WorkerClient` for a data owner's process.

Both are synchronous, can be shared between threads, and are closed by their `with` block:

    with Client("http://127.0.0.1:8000", token) as client:
        run = client.create_run(spec)
        for event in client.events(run.id):
            print(event.message)

If the coordinator cannot be reached, a request is retried for as long as `Retry` allows. If the coordinator refuses a
request, an `ApiError` is raised.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
