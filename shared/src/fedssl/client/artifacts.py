"""The operator's client, as far as weights and other artifacts are concerned."""

from pathlib import Path
from typing import Literal
from uuid import UUID

from fedssl.artifacts.header import LENGTH_BYTES, Header, header_length, parse_header
from fedssl.client.connection import Connection
from fedssl.client.downloads import OnBytes, OnSize, download

_LARGEST_HEADER = 1 << 26


class ArtifactMethods:
    """Fetches what runs have made."""

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
        """Fetch a run's weights (safetensors) into a file and return their digest.

        The file appears whole or not at all; what an earlier attempt fetched of the same weights counts. Raises
        DigestMismatch, and NotFound before the first weights are made.
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
        """Fetch a file of the store (a broadcast, an update, a server state), which appears whole or not at all.

        Raises DigestMismatch, and NotFound where the coordinator has none of this digest.
        """
        download(self._connection, f"/v1/artifacts/{digest}", destination, digest=digest)

    def artifact_header(self, digest: str) -> Header:
        """Which tensors an artifact holds, without the values. Raises ArtifactError where it is no safetensors file."""
        path = f"/v1/artifacts/{digest}"
        prefix = self._connection.fetch(path, 0, LENGTH_BYTES - 1)
        end = LENGTH_BYTES + header_length(prefix, _LARGEST_HEADER)
        rest = self._connection.fetch(path, LENGTH_BYTES, end - 1)
        return parse_header(rest)
