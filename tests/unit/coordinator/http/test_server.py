"""How the API process keeps its memory, and how many connections may wait in its backlog."""

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


def test_later_bodies_reuse_the_memory_of_earlier_ones() -> None:
    """Runs in a separate process, because the setting cannot be undone. 20 bodies have 1,953 pages of 4 KiB."""
    done = subprocess.run([sys.executable, "-c", _BODIES], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 200


@pytest.mark.parametrize(("most", "waiting"), [(100, 2048), (20_000, 20_000)])
def test_the_backlog_has_room_for_all_permitted_connections(
    most: int, waiting: int, change_settings: Callable[..., None]
) -> None:
    change_settings(DATABASE_URL="postgresql+psycopg://x", REDIS_URL="redis://x", STORE_PATH="x", MAX_CONNECTIONS=most)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Never called."""

    assert server_config(app, ListenOptions(host="127.0.0.1", port=0)).backlog == waiting
