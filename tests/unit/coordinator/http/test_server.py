"""How the API's process keeps its memory, and how many connections may wait for it."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fedssl_coordinator.http.server import ListenOptions, server_config

_BODIES = """
import resource

from fedssl_coordinator.http.server import settle_memory

def num_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bodies = [b"x" * 400_000 for _ in range(20)]
    del bodies
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

settle_memory()
num_faults()
print(num_faults())
"""


def test_the_next_bodies_get_the_memory_of_the_last_ones() -> None:
    """In a process of its own, because what it sets stays. 20 bodies have 1,953 pages of 4 KiB."""
    done = subprocess.run([sys.executable, "-c", _BODIES], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 200


@pytest.mark.parametrize(("most", "waiting"), [(100, 2048), (20_000, 20_000)])
def test_all_connections_that_there_may_be_may_come_at_once(
    most: int, waiting: int, change_settings: Callable[..., None]
) -> None:
    change_settings(DATABASE_URL="postgresql+psycopg://x", REDIS_URL="redis://x", STORE_PATH="x", MAX_CONNECTIONS=most)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Is never called."""

    assert server_config(app, ListenOptions(host="127.0.0.1", port=0)).backlog == waiting
