"""The work that this worker has claimed, in a file that its owner can review: `fedssl-worker page` reads it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog
from pydantic import ValidationError

from fedssl.files import write_atomically
from fedssl.protocol.work import WorkItem

log = structlog.get_logger()

FILE = "work.json"
_MAX_BYTES = 64 << 20


class CurrentWork:
    """Writes the work of one worker. A full disk does not end the work: the file is only for its owner to read."""

    def __init__(self, state: Path) -> None:
        self._path = state / FILE

    @contextmanager
    def shown(self, item: WorkItem) -> Iterator[None]:
        """Show the work for the length of the block.

        A killed worker leaves the file behind: its next claim returns the same work.
        """
        try:
            write_atomically(self._path, item.model_dump_json(), mode=0o600, durable=False)
        except OSError as error:
            log.warning("work.not_shown", reason=error.strerror or type(error).__name__)
        try:
            yield
        finally:
            with suppress(OSError):
                self._path.unlink()


def read_current_work(state: Path) -> WorkItem | None:
    """Return the work that was claimed and has not ended, or None if there is none that can be read."""
    try:
        with (state / FILE).open("rb") as file:
            return WorkItem.model_validate_json(file.read(_MAX_BYTES))
    except (OSError, ValidationError):
        return None
