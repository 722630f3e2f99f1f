"""How the API's process keeps its memory."""

import subprocess
import sys

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
