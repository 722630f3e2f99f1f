"""The address of an object store, in one line."""

from dataclasses import dataclass
from typing import Self
from urllib.parse import parse_qsl, urlsplit

from fedssl.errors import SpecError

_FORM = "s3://BUCKET/PREFIX?endpoint=https://HOST&region=REGION"


@dataclass(frozen=True, slots=True)
class S3Address:
    """The address of a bucket. `prefix` precedes every key, and has no slashes at its ends.

    If `endpoint` is None, it is AWS's own. `public_endpoint` is the address that clients use in direct transfer, if it
    differs.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    public_endpoint: str | None = None

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse an address. Raises SpecError.

        >>> S3Address.parse("s3://artifacts/fedssl?endpoint=https://s3.example.org").endpoint
        'https://s3.example.org'
        """
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.scheme != "s3" or not parts.netloc or "@" in parts.netloc or ":" in parts.netloc or parts.fragment:
            raise SpecError(f"the object store's address has the form {_FORM}, without keys in it")
        if unknown := sorted(options.keys() - {"endpoint", "region", "public_endpoint"}):
            raise SpecError(f"the object store's address has no option {unknown[0]!r}: its form is {_FORM}")
        for name in ("endpoint", "public_endpoint"):
            if name in options and not _is_origin(options[name]):
                raise SpecError(f"the object store's {name} must be http://HOST:PORT or https://HOST")
        return cls(parts.netloc, parts.path.strip("/"), **options)


def _is_origin(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc and not parts.query
