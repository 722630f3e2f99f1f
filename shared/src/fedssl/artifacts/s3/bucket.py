"""One prefix of a bucket. Only this module knows the S3 library, how it is set up, and what it raises."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import botocore.loaders
import botocore.session
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from fedssl.artifacts.s3.address import S3Address
from fedssl.errors import StoreUnavailable

CHUNK = 1 << 20
_MISSING = frozenset({"404", "NoSuchKey", "NotFound", "NoSuchUpload"})
_CHANGED = frozenset({"412", "PreconditionFailed", "ConditionalRequestConflict"})
ATTEMPTS = 3
SECONDS = 10.0  # how long each attempt waits for bytes from the store
_WHOLE_SECONDS = 120.0  # the same, while the store copies or assembles an object
_CONFIG = {
    "signature_version": "s3v4",
    # Many stores do not support checksums in trailers; fedssl checks the sha256 itself.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "connect_timeout": 5,
    "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
    "max_pool_connections": 32,
}
_UPLOAD = TransferConfig(multipart_threshold=16 << 20, multipart_chunksize=16 << 20, max_concurrency=4)


class NoSuchObject(Exception):
    """There is no object or multipart upload with this name."""


@dataclass(frozen=True, slots=True)
class Object:
    """One object. `key` is without the prefix, and `etag` is the store's own name for these bytes."""

    key: str
    num_bytes: int
    modified_at: datetime
    etag: str


@dataclass(frozen=True, slots=True)
class Multipart:
    """An object that is being sent in parts and is not visible yet."""

    key: str
    upload_id: str
    begun_at: datetime


@dataclass(frozen=True, slots=True)
class SentPart:
    """A part that has arrived; numbers begin at 1."""

    number: int
    num_bytes: int
    sent_at: datetime
    etag: str


@cache
def _descriptions() -> botocore.loaders.Loader:
    """Return the reader of the descriptions of services. Reading them takes 0.2 s, here once per process."""
    return botocore.loaders.create_loader()


class Bucket:
    """One prefix of a bucket. Threads may share it.

    Every method raises StoreUnavailable, after retrying for half a minute, and NoSuchObject. `upload`, `copy` and
    `complete`, which create whole objects, may take some minutes: do not call them in a transaction.
    """

    def __init__(self, address: S3Address, access_key: str | None = None, secret_key: str | None = None) -> None:
        """Set up the access. Without keys, the library uses AWS_* variables, files, or the pod's or machine's role."""
        core = botocore.session.get_session()
        core.register_component("data_loader", _descriptions())
        session = boto3.session.Session(access_key, secret_key, region_name=address.region, botocore_session=core)
        self._name = address.bucket
        self._prefix = f"{address.prefix}/" if address.prefix else ""
        self._s3 = _client(session, address.endpoint, SECONDS)
        self._patient = _client(session, address.endpoint, _WHOLE_SECONDS)
        public = address.public_endpoint
        self._signing = self._s3 if public is None else _client(session, public, SECONDS)

    def find(self, key: str) -> Object | None:
        """Return an object's metadata, or None if it does not exist."""
        try:
            with _translated():
                found = self._s3.head_object(**self._at(key))
        except NoSuchObject:
            return None
        return Object(key, found["ContentLength"], found["LastModified"], found["ETag"])

    def url(self, key: str) -> str:
        """Return an object's address, for people."""
        return f"s3://{self._name}/{self._prefix}{key}"

    def read(self, key: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` up to `stop`, which the object must have, one MiB at a time."""
        while start < stop:
            before = start
            try:
                with _translated():
                    answer = self._s3.get_object(**self._at(key), Range=f"bytes={start}-{stop - 1}")
                    with closing(answer["Body"]) as body:
                        while chunk := body.read(CHUNK):
                            start += len(chunk)
                            yield chunk
            except StoreUnavailable:
                if start == before:
                    raise
            if start == before:
                raise StoreUnavailable(f"the object store has nothing of {key} from byte {start} on")

    def put(self, key: str, data: bytes) -> None:
        with _translated():
            self._s3.put_object(**self._at(key), Body=data)

    def upload(self, key: str, path: Path) -> None:
        """Upload a file, in parts if it is large. The object is not visible until all of it has arrived."""
        with _translated():
            self._patient.upload_file(str(path), self._name, self._prefix + key, Config=_UPLOAD)

    def copy(self, source: Object, key: str) -> None:
        """Copy an object within the store, which copies at most `5 * 2**30` bytes at once."""
        origin = {"Bucket": self._name, "Key": self._prefix + source.key}
        with _translated():
            self._patient.copy_object(**self._at(key), CopySource=origin, CopySourceIfMatch=source.etag)

    def delete(self, key: str) -> None:
        """Delete an object. It is not an error if it does not exist."""
        with _translated():
            self._s3.delete_object(**self._at(key))

    def delete_unchanged(self, found: Object) -> bool:
        """Delete an object unless it was stored again since it was found. Return whether it was deleted.

        Some stores ignore or refuse the condition of a request to delete (MinIO, rclone). There, what is stored between
        the comparison and that request is deleted.
        """
        now = self.find(found.key)
        if now is not None and now.etag != found.etag:
            return False
        with _translated():
            try:
                self._s3.delete_object(**self._at(found.key), IfMatch=found.etag)
            except ClientError as error:
                code = error.response.get("Error", {}).get("Code")
                if code in _CHANGED:
                    return False
                if code == "NotImplemented":
                    self.delete(found.key)
                elif code not in _MISSING:
                    raise
        return True

    def objects(self, prefix: str = "") -> Iterator[Object]:
        """Yield all objects whose keys begin with `prefix`, in the order of their keys."""
        for found in self._pages("list_objects_v2", "Contents", Prefix=self._prefix + prefix):
            yield Object(self._short(found["Key"]), found["Size"], found["LastModified"], found["ETag"])

    def multiparts(self, prefix: str = "") -> Iterator[Multipart]:
        """Yield the multipart uploads in progress whose keys begin with `prefix`."""
        for found in self._pages("list_multipart_uploads", "Uploads", Prefix=self._prefix + prefix):
            yield Multipart(self._short(found["Key"]), found["UploadId"], found["Initiated"])

    def begin(self, key: str) -> str:
        """Begin to send an object in parts, and return the multipart upload's name."""
        with _translated():
            return str(self._s3.create_multipart_upload(**self._at(key))["UploadId"])

    def parts(self, upload: Multipart) -> list[SentPart]:
        """Return the parts that have arrived, in order."""
        found = self._pages("list_parts", "Parts", Key=self._prefix + upload.key, UploadId=upload.upload_id)
        return [SentPart(part["PartNumber"], part["Size"], part["LastModified"], part["ETag"]) for part in found]

    def complete(self, upload: Multipart, parts: list[SentPart]) -> None:
        """Assemble the object from its parts. After that, no other part can be sent."""
        chosen = {"Parts": [{"PartNumber": part.number, "ETag": part.etag} for part in parts]}
        with _translated():
            self._patient.complete_multipart_upload(
                **self._at(upload.key), UploadId=upload.upload_id, MultipartUpload=chosen
            )

    def abort(self, upload: Multipart) -> None:
        """Drop the parts that have arrived. It is not an error if the upload has already ended."""
        try:
            with _translated():
                self._s3.abort_multipart_upload(**self._at(upload.key), UploadId=upload.upload_id)
        except NoSuchObject:
            return

    def signed_get(self, key: str, seconds: int) -> str:
        """Return a URL at which anyone may read the object for `seconds`."""
        with _translated():
            return str(self._signing.generate_presigned_url("get_object", self._at(key), ExpiresIn=seconds))

    def signed_part(self, upload: Multipart, number: int, num_bytes: int, seconds: int) -> str:
        """Return a URL to which anyone may send one part of exactly this size for `seconds`, by PUT."""
        what = {"UploadId": upload.upload_id, "PartNumber": number, "ContentLength": num_bytes}
        with _translated():
            values = {**self._at(upload.key), **what}
            return str(self._signing.generate_presigned_url("upload_part", values, ExpiresIn=seconds))

    def _at(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._name, "Key": self._prefix + key}

    def _short(self, key: str) -> str:
        return key.removeprefix(self._prefix)

    def _pages(self, operation: str, items: str, **values: Any) -> Iterator[dict[str, Any]]:
        try:
            with _translated():
                for page in self._s3.get_paginator(operation).paginate(Bucket=self._name, **values):
                    yield from page.get(items, [])
        except NoSuchObject:
            if operation == "list_parts":
                raise
            # Some stores report this if a bucket has no multipart uploads.


def _client(session: Any, endpoint: str | None, seconds: float) -> Any:
    # Self-hosted stores rarely have a host name for every bucket.
    style = {"addressing_style": "auto" if endpoint is None else "path"}
    return session.client("s3", endpoint_url=endpoint, config=Config(s3=style, read_timeout=seconds, **_CONFIG))


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        told = error.response.get("Error", {})
        if told.get("Code") in _MISSING:
            raise NoSuchObject(str(error)) from None
        message = f"the object store refuses ({told.get('Code')}): {told.get('Message') or error}"
        raise StoreUnavailable(message) from None
    except (BotoCoreError, Boto3Error) as error:
        raise StoreUnavailable(f"the object store does not do as asked: {error}") from None
