"""`python -m fedssl_worker`."""

from fedssl_worker.main import app

app(prog_name="fedssl-worker")
