"""The operator's client: the methods for weights that runs may start from."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from fedssl.artifacts.weight_files import Weights, read_weights, write_weights
from fedssl.client.connection import Connection, request_body
from fedssl.client.downloads import OnBytes
from fedssl.client.errors import NotFound
from fedssl.client.uploads import upload
from fedssl.protocol.views import WeightsCreate, WeightsView

_PATH = "/v1/weights"


class WeightMethods:
    """The methods that register, list and remove weights."""

    _connection: Connection

    def add_weights(
        self,
        name: str,
        source: Path | Weights,
        *,
        project: str | None = None,
        on_bytes: OnBytes = lambda count: None,
    ) -> WeightsView:
        """Register weights under a name: a safetensors file, or what `read_weights` returned for one.

        The file may have the names of fedssl, torchvision, timm or Hugging Face's ResNets. It is written in the
        registered form, and uploaded if the coordinator does not have it. Registering the same weights again is not an
        error. Raises ArtifactError if the file cannot be weights, Conflict if the name has other weights, and Rejected.
        """
        weights = source if isinstance(source, Weights) else read_weights(source)
        with tempfile.TemporaryDirectory(prefix="fedssl-") as folder:
            file = Path(folder) / "weights.safetensors"
            body = request_body(
                WeightsCreate,
                name=name,
                digest=write_weights(weights, file),
                family=weights.family,
                source_digest=weights.source_digest,
                project=project,
            )
            try:
                return self._connection.call("POST", _PATH, WeightsView, body=body)
            except NotFound:  # the coordinator does not have the weights yet
                upload(self._connection, body.digest, file, on_bytes=on_bytes)
            return self._connection.call("POST", _PATH, WeightsView, body=body)

    def weights(self) -> Iterator[WeightsView]:
        """Yield all registered weights, by name."""
        return self._connection.pages(_PATH, WeightsView)

    def weights_named(self, name: str) -> WeightsView:
        """Return the weights registered under a name. Raises NotFound."""
        return self._connection.call("GET", f"{_PATH}/{quote(name, safe='')}", WeightsView)

    def remove_weights(self, name: str) -> None:
        """Remove a name. Runs that were created with it keep its weights. Raises NotFound."""
        self._connection.send("DELETE", f"{_PATH}/{quote(name, safe='')}")
