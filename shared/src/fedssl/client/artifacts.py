"""The operator's client: the methods for weights and other artifacts."""

from pathlib import Path
from typing import Literal
from uuid import UUID

from fedssl.artifacts.header import LENGTH_BYTES, Header, header_length, parse_header
from fedssl.client.connection import Connection
from fedssl.client.downloads import OnBytes, OnSize, download

_LARGEST_HEADER = 1 << 26


class ArtifactMethods:
    """The methods that download the artifacts of runs."""

    _connection: Connection

    def download_model(
        self,
        run_id: UUID,
        destination: Path,
        which: Literal["latest", "initial"] = "latest",
        *,
        on_bytes: OnBytes = lambda count: None,
        on_size: OnSize = lambda size: None,
    ) -> str:
        """Download a run's weights (safetensors) to a file, and return their digest.

        The file appears only when it is complete. Bytes of the same weights that an earlier attempt downloaded are
        kept. Raises DigestMismatch, and NotFound if the run has no weights yet.
        """
        return download(
            self._connection,
            f"/v1/runs/{run_id}/model",
            destination,
            params={"which": which},
            on_bytes=on_bytes,
            on_size=on_size,
        )

    def download_artifact(self, digest: str, destination: Path) -> None:
        """Download an artifact (a broadcast, an update, a server state) to a file, which appears only when complete.

        Raises DigestMismatch, and NotFound if the coordinator has no artifact with this digest.
        """
        download(self._connection, f"/v1/artifacts/{digest}", destination, digest=digest)

    def artifact_header(self, digest: str) -> Header:
        """Return an artifact's tensors, without their values. Raises ArtifactError if it is not a safetensors file."""
        path = f"/v1/artifacts/{digest}"
        prefix = self._connection.fetch(path, 0, LENGTH_BYTES - 1)
        end = LENGTH_BYTES + header_length(prefix, _LARGEST_HEADER)
        rest = self._connection.fetch(path, LENGTH_BYTES, end - 1)
        return parse_header(rest)
