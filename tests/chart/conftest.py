"""Fixture that reads the schemas of Kubernetes once for all tests of the chart."""

from collections.abc import Iterator
from functools import cache

import pytest
from kubernetes_validate import utils


@pytest.fixture(autouse=True, scope="session")
def schemas_are_read_once() -> Iterator[None]:
    """Keep every schema that `kubernetes_validate` has read, because it would read megabytes for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield
