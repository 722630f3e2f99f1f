"""The operator's client: the methods for data sets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from pydantic import BaseModel

from fedssl.artifacts.store import digest_of
from fedssl.client.connection import Connection, M, request_body
from fedssl.client.downloads import OnBytes
from fedssl.client.errors import NotFound
from fedssl.client.uploads import upload
from fedssl.protocol.views import (
    EvaluationDatasetCreate,
    EvaluationDatasetView,
    PublicDatasetCreate,
    PublicDatasetView,
)

_PUBLIC, _EVALUATION = "/v1/public-datasets", "/v1/evaluation-datasets"


class DatasetMethods:
    """The methods that register and list data sets."""

    _connection: Connection

    def add_public_dataset(
        self,
        name: str,
        source: Path,
        *,
        split: Literal["train", "test"] = "train",
        project: str | None = None,
        on_bytes: OnBytes = lambda count: None,
    ) -> PublicDatasetView:
        """Register a file of public images, and upload it, or the rest of it, if the coordinator does not have it.

        Registering the same file again is not an error. Raises Conflict if the name has other images, and Rejected.
        """
        body = request_body(PublicDatasetCreate, name=name, digest=digest_of(source), split=split, project=project)
        return self._register(_PUBLIC, PublicDatasetView, body, body.digest, source, on_bytes)

    def public_datasets(self) -> Iterator[PublicDatasetView]:
        """Yield all public data sets, by name."""
        return self._connection.pages(_PUBLIC, PublicDatasetView)

    def public_dataset(self, name: str) -> PublicDatasetView:
        """Return one public data set."""
        return self._connection.call("GET", f"{_PUBLIC}/{quote(name, safe='')}", PublicDatasetView)

    def add_evaluation_dataset(
        self, name: str, source: Path, *, project: str | None = None, on_bytes: OnBytes = lambda count: None
    ) -> EvaluationDatasetView:
        """Register a file of labelled images, as `add_public_dataset` does."""
        body = request_body(EvaluationDatasetCreate, name=name, digest=digest_of(source), project=project)
        return self._register(_EVALUATION, EvaluationDatasetView, body, body.digest, source, on_bytes)

    def evaluation_datasets(self) -> Iterator[EvaluationDatasetView]:
        """Yield all evaluation data sets, by name."""
        return self._connection.pages(_EVALUATION, EvaluationDatasetView)

    def evaluation_dataset(self, name: str) -> EvaluationDatasetView:
        """Return one evaluation data set."""
        return self._connection.call("GET", f"{_EVALUATION}/{quote(name, safe='')}", EvaluationDatasetView)

    def _register(self, path: str, answer: type[M], body: BaseModel, digest: str, source: Path, on_bytes: OnBytes) -> M:
        try:
            return self._connection.call("POST", path, answer, body=body)
        except NotFound:  # the coordinator does not have the images yet
            upload(self._connection, digest, source, on_bytes=on_bytes)
        return self._connection.call("POST", path, answer, body=body)
