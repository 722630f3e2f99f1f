"""Uploads in parts, as the API shows them."""

from pydantic import Field

from fedssl.protocol.views.base import View


class UploadPart(View):
    """A part of an upload: PUT `num_bytes` bytes, starting at `offset`, to `url`."""

    offset: int = Field(ge=0, lt=2**53)
    num_bytes: int = Field(ge=1, lt=2**53)
    url: str = Field(max_length=8192)


class UploadParts(View):
    """The missing parts of an upload, or the first of them. Empty when the upload has been checked and stored."""

    parts: tuple[UploadPart, ...] = Field(max_length=10_000)
