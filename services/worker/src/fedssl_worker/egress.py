"""The one way out: every artifact that leaves this machine passes here, is checked, and is written down first."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from fedssl.artifacts.finite import check_finite
from fedssl.artifacts.header import Header, check_header, read_header
from fedssl.artifacts.store import digest_of
from fedssl.client import WorkerClient
from fedssl.errors import ArtifactError, DigestMismatch
from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.work import WorkItem
from fedssl_worker.files import sync


class Egress:
    """Sends updates, and nothing that the plan does not declare."""

    def __init__(self, client: WorkerClient, ledger: "Ledger") -> None:
        self._client = client
        self._ledger = ledger

    def send(self, item: WorkItem, update: Path, digest: str) -> None:
        """Check an update, write it into the ledger, then send it.

        Raises PlanMismatch, NotFinite, DigestMismatch or ArtifactError before the first byte has left, and ClientError.
        """
        header = check_update(update, item.plan)
        if digest_of(update) != digest:
            raise DigestMismatch("the update's file changed after it was trained: it is not sent")
        self._ledger.write(item, header, digest)
        self._client.upload(digest, update, item.assignment_id)


def check_update(path: Path, plan: ArtifactPlan) -> Header:
    """Raise ArtifactError unless the file holds exactly the update that the plan declares, in finite numbers."""
    with path.open("rb") as file:
        header = read_header(file)
    check_header(header, plan.update, "update")
    if path.stat().st_size != header.total_bytes:
        raise ArtifactError("the update's file is longer or shorter than its tensors: it is not sent")
    check_finite(path, header)
    return header


class Ledger:
    """What left, one JSON object a line, only ever added to. A line is on the disk before its artifact's first byte."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, item: WorkItem, header: Header, digest: str) -> None:
        """Add a line for an update that is about to leave."""
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "run": str(item.run_id),
            "round": item.round_number,
            "kinds": sorted({tensor.kind for tensor in item.plan.update}),
            "num_tensors": len(header.entries),
            "num_bytes": header.total_bytes,
            "digest": digest,
        }
        is_new = not self._path.exists()
        with self._path.open("a+b") as file:
            # A crash may have cut the last line short: the new one must not continue it.
            text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
            file.write(text if _ends_a_line(self._path) else b"\n" + text)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync(self._path.parent)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
