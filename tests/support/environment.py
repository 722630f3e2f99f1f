"""The coordinator's environment, for subprocesses and for this process."""

import os
import subprocess
import sys
from pathlib import Path


def coordinator_environment(database_url: str, redis_url: str, store: Path, **more: str) -> dict[str, str]:
    """Return the variables for a coordinator process."""
    return {
        **os.environ,
        "FEDSSL_DATABASE_URL": database_url,
        "FEDSSL_REDIS_URL": redis_url,
        "FEDSSL_STORE_PATH": str(store),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def migrate(environment: dict[str, str]) -> None:
    """Run the migrations as an operator would."""
    subprocess.run([sys.executable, "-m", "fedssl_coordinator", "migrate"], env=environment, check=True)
