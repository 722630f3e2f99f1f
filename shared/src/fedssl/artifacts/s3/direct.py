"""Parts that a sender uploads directly to the object store, at URLs that were signed for it."""

from fedssl.artifacts.s3.bucket import Bucket, Multipart, NoSuchObject, SentPart
from fedssl.artifacts.s3.partial import S3Partial, direct_key_of
from fedssl.artifacts.store import DirectPart
from fedssl.errors import StoreUnavailable

SIGNED_SECONDS = 900
_PART_BYTES = 16 << 20
_MAX_PARTS = 1000  # one page of the store's listing


class S3Direct:
    """An upload directly to the store: an S3 multipart upload, whose object is what has arrived.

    Until it is complete, the object does not exist. After that, no one can change it any more.
    """

    def __init__(self, bucket: Bucket, partial: S3Partial, name: str, num_bytes: int) -> None:
        self._bucket = bucket
        self._partial = partial
        self._name = name
        self._num_bytes = num_bytes
        even = -(-num_bytes // _MAX_PARTS)
        self.part_bytes = max(_PART_BYTES, -(-even // _PART_BYTES) * _PART_BYTES)

    def missing(self, limit: int) -> list[DirectPart]:
        """Return where to send the missing parts, at most `limit` of them.

        If there are none, the upload is complete and final. Raises StoreUnavailable.
        """
        if self._partial.size == self._num_bytes:
            return []
        upload = self._upload()
        try:
            sent = {part.number: part for part in self._bucket.parts(upload)}
            wanted = [number for number in self._numbers() if not self._is_whole(number, sent.get(number))]
            if not wanted:
                self._bucket.complete(upload, [sent[number] for number in self._numbers()])
        except NoSuchObject:  # completed by another process, or dropped
            return []
        return [self._part(upload, number) for number in wanted[:limit]]

    def _upload(self) -> Multipart:
        """Return the upload, begun here if there is none, or the first if two processes have begun one."""
        if not (begun := self._partial.multiparts()):
            self._bucket.begin(direct_key_of(self._name))
            begun = self._partial.multiparts()
        if not begun:
            raise StoreUnavailable("the object store does not list the multipart upload that it has just begun")
        return begun[0]

    def _part(self, upload: Multipart, number: int) -> DirectPart:
        num_bytes = self._size_of(number)
        url = self._bucket.signed_part(upload, number, num_bytes, SIGNED_SECONDS)
        return DirectPart((number - 1) * self.part_bytes, num_bytes, url)

    def _numbers(self) -> range:
        return range(1, -(-self._num_bytes // self.part_bytes) + 1)

    def _size_of(self, number: int) -> int:
        return min(self.part_bytes, self._num_bytes - (number - 1) * self.part_bytes)

    def _is_whole(self, number: int, part: SentPart | None) -> bool:
        return part is not None and part.num_bytes == self._size_of(number)
