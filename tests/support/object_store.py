"""S3 servers installed from wheels. rclone serves a folder, and checks signatures, expiry and lengths."""

import os
import secrets
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Self

import boto3
import httpx
from botocore.config import Config

from fedssl.artifacts.s3.address import S3Address
from fedssl.artifacts.s3.bucket import Bucket
from support.preloaded import Forked
from support.processes import free_port

REGION = "us-east-1"
_LISTED = "50ms"  # how long rclone caches a folder's listing; with 0 its clean-up would run without a pause


class ObjectStore:
    """rclone as an S3 server, in which each bucket is a folder. Objects survive `stop` and `start`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "buckets"
        self.folder.mkdir(parents=True)
        self._log = folder / "rclone.log"
        self._port = free_port()
        self.endpoint = f"http://127.0.0.1:{self._port}"
        self.access_key, self.secret_key = secrets.token_hex(8), secrets.token_hex(16)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        program = Path(sys.executable).parent / "rclone"
        options = ["--config", os.devnull, "--addr", f"127.0.0.1:{self._port}", "--dir-cache-time", _LISTED]
        options += ["--disable-multipart-streaming"]  # otherwise a listing would wait for streamed uploads
        keys = f"{self.access_key},{self.secret_key}"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, "serve", "s3", *options, "--auth-key", keys, str(self.folder)], stdout=log, stderr=log
            )
        wait_for_answer(self.endpoint, self._process)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def new_bucket(self) -> str:
        """Create an empty bucket and return its name."""
        name = f"b{secrets.token_hex(6)}"
        (self.folder / name).mkdir()
        self.look_again()
        return name

    def look_again(self) -> None:
        """Wait until rclone has noticed changes that were made directly in its folder."""
        time.sleep(0.1)

    def url(self, bucket: str, prefix: str = "some/where", **options: str) -> str:
        """Return the coordinator's FEDSSL_STORE_URL for a bucket."""
        query = "&".join(f"{name}={value}" for name, value in {"endpoint": self.endpoint, **options}.items())
        return f"s3://{bucket}/{prefix}?region={REGION}&{query}"

    def environment(self, bucket: str, cache: Path, **options: str) -> dict[str, str]:
        """Return the coordinator's settings for a bucket."""
        return {
            "FEDSSL_STORE_URL": self.url(bucket, **options),
            "FEDSSL_STORE_CACHE_PATH": str(cache),
            "FEDSSL_S3_ACCESS_KEY_ID": self.access_key,
            "FEDSSL_S3_SECRET_ACCESS_KEY": self.secret_key,
        }

    def bucket(self, name: str) -> Bucket:
        return Bucket(S3Address.parse(self.url(name)), self.access_key, self.secret_key)

    def objects(self, bucket: str) -> list[str]:
        """Return the paths of all stored objects, whichever request created them."""
        top = self.folder / bucket
        return sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())

    def backdate(self, bucket: str, digest: str, seconds: float) -> None:
        """Make an artifact older."""
        then = datetime.now().timestamp() - seconds
        [path] = (self.folder / bucket).rglob(digest)
        os.utime(path, (then, then))
        self.look_again()


class Moto:
    """Moto, an imitation of AWS for tests, as an S3 server. It checks less than rclone."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        self._log = folder / "moto.log"
        self.endpoint = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        command = [Path(sys.executable).parent / "moto_server", "-H", "127.0.0.1", "-p", str(self._port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for_answer(self.endpoint, self._process)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def bucket(self) -> Bucket:
        """Create a bucket and return it."""
        name, keys = f"b{secrets.token_hex(6)}", ("any", "anything")
        config = Config(s3={"addressing_style": "path"})
        boto3.session.Session(*keys, region_name=REGION).client(
            "s3", endpoint_url=self.endpoint, config=config
        ).create_bucket(Bucket=name)
        return Bucket(S3Address.parse(f"s3://{name}/a?endpoint={self.endpoint}&region={REGION}"), *keys)


def wait_for_answer(url: str, process: subprocess.Popen[bytes] | Forked) -> None:
    end = time.monotonic() + 60
    while True:
        assert process.poll() is None, f"what was started for {url} has ended: another may have the port"
        try:
            httpx.get(url, trust_env=False, timeout=60)
        except httpx.TransportError:
            assert time.monotonic() < end, f"{url} does not answer"
            time.sleep(0.02)
        else:
            return
