"""The operator's client, as far as data sets are concerned."""

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
    """Registers data sets and looks at them."""

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
        """Register a file of public images, uploading it where the coordinator lacks it, or the rest of it.

        The same again is no error. Raises Conflict where the name has other images, and Rejected.
        """
        body = request_body(PublicDatasetCreate, name=name, digest=digest_of(source), split=split, project=project)
        return self._register(_PUBLIC, PublicDatasetView, body, body.digest, source, on_bytes)

    def public_datasets(self) -> Iterator[PublicDatasetView]:
        """Every public data set, by name."""
        return self._connection.pages(_PUBLIC, PublicDatasetView)

    def public_dataset(self, name: str) -> PublicDatasetView:
        """One public data set."""
        return self._connection.call("GET", f"{_PUBLIC}/{quote(name, safe='')}", PublicDatasetView)

    def add_evaluation_dataset(
        self, name: str, source: Path, *, project: str | None = None, on_bytes: OnBytes = lambda count: None
    ) -> EvaluationDatasetView:
        """Register a file of labelled images, as `add_public_dataset` does."""
        body = request_body(EvaluationDatasetCreate, name=name, digest=digest_of(source), project=project)
        return self._register(_EVALUATION, EvaluationDatasetView, body, body.digest, source, on_bytes)

    def evaluation_datasets(self) -> Iterator[EvaluationDatasetView]:
        """Every evaluation data set, by name."""
        return self._connection.pages(_EVALUATION, EvaluationDatasetView)

    def evaluation_dataset(self, name: str) -> EvaluationDatasetView:
        """One evaluation data set."""
        return self._connection.call("GET", f"{_EVALUATION}/{quote(name, safe='')}", EvaluationDatasetView)

    def _register(self, path: str, answer: type[M], body: BaseModel, digest: str, source: Path, on_bytes: OnBytes) -> M:
        try:
            return self._connection.call("POST", path, answer, body=body)
        except NotFound:  # the images themselves are not there yet
            upload(self._connection, digest, source, on_bytes=on_bytes)
        return self._connection.call("POST", path, answer, body=body)
