"""One prefix of a bucket: the only module that knows the S3 library, how it is set up, and what it raises."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from fedssl.artifacts.s3.address import S3Address
from fedssl.errors import StoreUnavailable

CHUNK = 1 << 20
_MISSING = frozenset({"404", "NoSuchKey", "NotFound", "NoSuchUpload"})
ATTEMPTS = 3
SECONDS = 10.0  # how long each waits for a word from the store
_WHOLE_SECONDS = 120.0  # while it copies an object, or puts one together
_CONFIG = {
    "signature_version": "s3v4",
    # Checksums in trailers are newer than many stores; what counts here is the sha256.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "connect_timeout": 5,
    "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
    "max_pool_connections": 32,
}
_UPLOAD = TransferConfig(multipart_threshold=16 << 20, multipart_chunksize=16 << 20, max_concurrency=4)


class NoSuchObject(Exception):
    """There is no object, or no multipart upload, of this name."""


@dataclass(frozen=True, slots=True)
class Object:
    """`key` without the prefix; `etag`: the store's own name for these bytes, "" in a listing of parts."""

    key: str
    num_bytes: int
    modified_at: datetime
    etag: str


@dataclass(frozen=True, slots=True)
class Multipart:
    """An object that is being sent in parts and cannot be seen yet."""

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


class Bucket:
    """Every method raises StoreUnavailable, after trying for half a minute, and NoSuchObject. Shared by threads.

    `upload`, `copy` and `complete`, which make whole objects, may take some minutes: not in a transaction.
    """

    def __init__(self, address: S3Address, access_key: str | None = None, secret_key: str | None = None) -> None:
        """Without keys the library looks for them: the AWS_* variables, files, the pod's or the machine's own role."""
        session = boto3.session.Session(access_key, secret_key, region_name=address.region)
        self._name = address.bucket
        self._prefix = f"{address.prefix}/" if address.prefix else ""
        self._s3 = _client(session, address.endpoint, SECONDS)
        self._patient = _client(session, address.endpoint, _WHOLE_SECONDS)
        public = address.public_endpoint
        self._signing = self._s3 if public is None else _client(session, public, SECONDS)

    def find(self, key: str) -> Object | None:
        """What is known of an object; None: there is none."""
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
        """The bytes from `start` up to `stop`, which the object must have, a mebibyte at a time."""
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
        """A file, in parts where it is large; nothing can be seen before all of it has arrived."""
        with _translated():
            self._patient.upload_file(str(path), self._name, self._prefix + key, Config=_UPLOAD)

    def copy(self, source: Object, key: str) -> None:
        """Within the store; it takes at most `5 * 2**30` bytes at once."""
        origin = {"Bucket": self._name, "Key": self._prefix + source.key}
        with _translated():
            self._patient.copy_object(**self._at(key), CopySource=origin, CopySourceIfMatch=source.etag)

    def delete(self, key: str) -> None:
        """One that is not there is no error."""
        with _translated():
            self._s3.delete_object(**self._at(key))

    def objects(self, prefix: str = "") -> Iterator[Object]:
        """All whose keys begin so, in the order of their keys."""
        for found in self._pages("list_objects_v2", "Contents", Prefix=self._prefix + prefix):
            yield Object(self._short(found["Key"]), found["Size"], found["LastModified"], found["ETag"])

    def multiparts(self, prefix: str = "") -> Iterator[Multipart]:
        """What has begun to arrive in parts, under keys that begin so."""
        for found in self._pages("list_multipart_uploads", "Uploads", Prefix=self._prefix + prefix):
            yield Multipart(self._short(found["Key"]), found["UploadId"], found["Initiated"])

    def begin(self, key: str) -> str:
        """Begin to send an object in parts; the multipart upload's name."""
        with _translated():
            return str(self._s3.create_multipart_upload(**self._at(key))["UploadId"])

    def parts(self, upload: Multipart) -> list[SentPart]:
        """Those that have arrived, in their order."""
        found = self._pages("list_parts", "Parts", Key=self._prefix + upload.key, UploadId=upload.upload_id)
        return [SentPart(part["PartNumber"], part["Size"], part["LastModified"], part["ETag"]) for part in found]

    def complete(self, upload: Multipart, parts: list[SentPart]) -> None:
        """Make the object of its parts. From here on nobody can send another."""
        chosen = {"Parts": [{"PartNumber": part.number, "ETag": part.etag} for part in parts]}
        with _translated():
            self._patient.complete_multipart_upload(
                **self._at(upload.key), UploadId=upload.upload_id, MultipartUpload=chosen
            )

    def abort(self, upload: Multipart) -> None:
        """Drop the parts that have arrived; one that has ended is no error."""
        try:
            with _translated():
                self._s3.abort_multipart_upload(**self._at(upload.key), UploadId=upload.upload_id)
        except NoSuchObject:
            return

    def signed_get(self, key: str, seconds: int) -> str:
        """An address at which anybody may read the object for so long."""
        with _translated():
            return str(self._signing.generate_presigned_url("get_object", self._at(key), ExpiresIn=seconds))

    def signed_part(self, upload: Multipart, number: int, num_bytes: int, seconds: int) -> str:
        """An address to which anybody may send one part of exactly this size for so long, by PUT."""
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
            # Some stores say so where a bucket has no multipart uploads.


def _client(session: Any, endpoint: str | None, seconds: float) -> Any:
    # Stores of one's own rarely have a name for every bucket.
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
