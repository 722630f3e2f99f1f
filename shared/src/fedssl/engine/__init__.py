"""The only owners of optimisers: simulation, workers and Celery tasks all call these functions."""

from fedssl.engine.aggregation import run_aggregation, start_run
from fedssl.engine.local import LocalProgress, LocalResult, run_local_round

__all__ = ["LocalProgress", "LocalResult", "run_aggregation", "run_local_round", "start_run"]
