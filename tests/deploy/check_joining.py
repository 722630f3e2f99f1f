"""`make compose-test`: a site joins with its kit, over TLS, and is healthy only if it can work.

The coordinator is published over https under a name that only the site's hosts file, or its proxy, knows.
"""

import json
import os
import re
import secrets
import shutil
import socket
import ssl
import stat
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from fedssl.client import Client, Tls
from support.certificates import Authority
from support.compose import PATIENCE_SECONDS, VERSION, Federation, docker, eventually, free_port, require_engine
from support.connect_proxy import ConnectProxy, InspectingProxy

NAME = "fedssl.test"
ON_THE_ENGINE_S_MACHINE = """
services:
  worker:
    extra_hosts: ["{name}:host-gateway"]
"""

# The test's own ACME server, which finds the proxy by its public name.
ACME = """
services:
  authority:
    image: ${{FEDSSL_CADDY_IMAGE:-caddy:2}}
    volumes: ["{folder}/Caddyfile:/etc/caddy/Caddyfile:ro"]
    networks: [edge]
  proxy:
    networks: {{ edge: {{ aliases: [{name}] }} }}
"""
CADDYFILE = """
authority {
	tls internal
	acme_server
}
"""


class Site:
    """A data owner's folder, from a kit. `host`: the name that refers to the engine's machine."""

    def __init__(self, kit: Path, folder: Path, host: str) -> None:
        with zipfile.ZipFile(kit) as archive:
            archive.extractall(folder)
            for entry in archive.infolist():
                (folder / entry.filename).chmod(stat.S_IMODE(entry.external_attr >> 16))
        (self.folder,) = folder.iterdir()
        (self.folder / "test.yml").write_text(ON_THE_ENGINE_S_MACHINE.format(name=host))
        lines = (self.folder / ".env").read_text().splitlines()
        self.secret = next(line.partition("=")[2] for line in lines if line.startswith("FEDSSL_ENROLMENT_TOKEN="))
        # The engine may still have a site with this name.
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("FEDSSL_")}
        self._environment["COMPOSE_PROJECT_NAME"] = f"fedssl-test-{secrets.token_hex(4)}"

    def set(self, **settings: str) -> None:
        with (self.folder / ".env").open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in settings.items())

    def save_as_windows_does(self, name: str) -> None:
        """Give a file the byte order mark and the line ends that editors on Windows write."""
        path = self.folder / name
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))

    def add_images(self) -> None:
        random = np.random.default_rng(0)
        for number in range(12):
            image = random.integers(0, 256, (16, 16), dtype=np.uint8)
            Image.fromarray(image).save(self.folder / "images" / f"{number}.png")

    def compose(self, *arguments: str) -> str:
        return docker("compose", *self._files, *arguments, environment=self._environment, folder=self.folder)

    def starts(self) -> bool:
        """Start the worker, and return whether `up --wait` succeeds."""
        up = ["up", "--detach", "--wait", "--force-recreate"]
        done = subprocess.run(
            ["docker", "compose", *self._files, *up], cwd=self.folder, env=self._environment, capture_output=True,
            text=True, timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip
        assert self.secret not in done.stdout + done.stderr
        return done.returncode == 0

    def state(self, service: str = "worker") -> Any:
        return json.loads(docker("inspect", self.compose("ps", "--all", "--quiet", service).strip()))[0]

    def reason(self) -> str:
        """Return why the worker is unhealthy: what its health check printed, which is also in its log.

        Asserts that the worker was not restarted.
        """
        state = self.state()
        assert (state["RestartCount"], state["State"]["Health"]["Status"]) == (0, "unhealthy")
        reason = str(state["State"]["Health"]["Log"][-1]["Output"]).strip()
        assert reason in self.compose("logs", "--no-color", "--no-log-prefix", "worker").replace('\\"', '"')
        return reason

    _files = ("--file", "docker-compose.yml", "--file", "test.yml")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Yield a coordinator behind a proxy with a certificate from the proxy's own authority."""
    require_engine()
    ports = {"FEDSSL_HTTP_PORT": free_port(), "FEDSSL_HTTPS_PORT": free_port()}
    folder = tmp_path_factory.mktemp("acme")
    (folder / "Caddyfile").write_text(CADDYFILE)
    (folder / "acme.yml").write_text(ACME.format(folder=folder, name=NAME))
    overlays = ("compose.tls.yml", str(folder / "acme.yml"))
    started = Federation(*overlays, FEDSSL_DOMAIN=NAME, FEDSSL_TLS_MODE="internal", **ports)
    try:
        started.compose("build", "data", "enrol")
        started.up("proxy")
        started.compose("run", "--rm", "-T", "operator-token")
        root = started.compose("exec", "-T", "proxy", "cat", "/data/caddy/pki/authorities/local/root.crt")
        (started.results / "root.crt").write_text(root)
        yield started
    finally:
        started.remove()


@pytest.fixture
def site(published: Federation, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(client: str, *options: str, host: str = NAME) -> Site:
        address = f"https://{NAME}:{published.environment['FEDSSL_HTTPS_PORT']}"
        named = ("--address", address, "--image", f"fedssl-worker:{VERSION}")
        kit = f"results/kits/{client}.zip"
        printed = published.compose(
            "run", "--rm", "-T", "cli", "token", "enrol", client, "--kit", kit, *named, *options
        )
        made.append(Site(published.results / "kits" / f"{client}.zip", tmp_path / client, host))
        assert made[-1].secret not in printed
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            each.compose("--profile", "page", "down", "--volumes")


def test_a_site_joins_with_its_kit(published: Federation, site: Callable[..., Site]) -> None:
    joining = site("hospital-a", "--ca", "results/root.crt")
    assert not joining.starts()
    assert "/data" in joining.reason()  # there are no images; the token is not used up

    joining.add_images()
    assert joining.starts()
    known = published.fedssl("client", "show", "hospital-a")
    assert (known["num_images"], known["policy"]["allow"]) == (12, [])
    assert "hospital-a" in joining.compose("run", "--rm", "-T", "worker", "policy", "check", "/site/policy.toml")
    assert joining.secret not in joining.compose("logs", "worker")
    _review(joining)

    published.fedssl_done("client", "revoke", "hospital-a")
    assert not joining.starts()
    assert "token" in joining.reason()


def _review(joined: Site) -> None:
    """Open the owner's page, which listens on the loopback of the engine's machine, and end it as Ctrl-C does."""
    port = free_port()
    joined.set(FEDSSL_PAGE_PORT=port)
    joined.compose("up", "--detach", "page")
    printed = eventually(lambda: re.search(rf"http://127\.0\.0\.1:{port}/\S+", joined.compose("logs", "page")))
    with httpx.Client(follow_redirects=True) as browser:
        text = browser.get(printed[0]).raise_for_status().text
    assert "What no rule allows stays here." in text
    assert "hospital-a" in text
    joined.compose("stop", "page")
    assert joined.state("page")["State"]["ExitCode"] == 0


def test_an_untrusted_certificate_is_reported_as_the_reason(site: Callable[..., Site]) -> None:
    joining = site("hospital-b")
    joining.add_images()
    assert not joining.starts()
    assert "shows a certificate that is not trusted" in joining.reason()


def test_a_site_joins_with_its_own_user_through_a_company_proxy(
    published: Federation, site: Callable[..., Site]
) -> None:
    target = f"{NAME}:{published.environment['FEDSSL_HTTPS_PORT']}"
    server = ("127.0.0.1", int(published.environment["FEDSSL_HTTPS_PORT"]))
    with ConnectProxy({target: server}, host="0.0.0.0") as proxy:
        # The site does not know the coordinator's name, but the proxy does.
        joining = site("hospital-c", "--ca", "results/root.crt", host="proxy.test")
        joining.add_images()
        (joining.folder / "state").mkdir(mode=0o700)
        user, group = (os.getuid(), os.getgid()) if os.getuid() else (4711, 4711)
        os.chown(joining.folder / "state", user, group)
        joining.set(
            FEDSSL_PROXY=f"http://proxy.test:{proxy.port}", FEDSSL_USER=f"{user}:{group}", FEDSSL_STATE="./state"
        )
        assert joining.starts()
        assert set(proxy.connected) == {target}
        assert (joining.folder / "state" / "token.json").exists()
    assert published.fedssl("client", "show", "hospital-c")["num_images"] == 12


def test_a_site_joins_through_an_inspecting_proxy_with_files_saved_on_windows(
    published: Federation, site: Callable[..., Site], tmp_path: Path
) -> None:
    target = f"{NAME}:{published.environment['FEDSSL_HTTPS_PORT']}"
    server = ("127.0.0.1", int(published.environment["FEDSSL_HTTPS_PORT"]))
    company = Authority(tmp_path, "company")
    with InspectingProxy({target: server}, company.sign("inspection", NAME), host="0.0.0.0") as proxy:
        joining = site("hospital-d", "--ca", "results/root.crt", host="proxy.test")
        joining.add_images()
        joining.set(FEDSSL_PROXY=f"http://proxy.test:{proxy.port}")
        joining.save_as_windows_does(".env")
        joining.save_as_windows_does("site/policy.toml")
        assert not joining.starts()
        assert "shows a certificate that is not trusted" in joining.reason()
        shutil.copyfile(company.file, joining.folder / "site" / "ca.crt")
        assert joining.starts()
        assert proxy.seen
    assert published.fedssl("client", "show", "hospital-d")["policy"]["allow"] == []


def test_the_proxy_can_use_a_certificate_of_the_operator(published: Federation, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("api", "127.0.0.1")
    certificates = tmp_path / "certificates"
    certificates.mkdir()
    (certificates / "tls.crt").write_bytes(pair.certificate.read_bytes())
    (certificates / "tls.key").write_bytes(pair.key.read_bytes())
    published.environment |= {
        "FEDSSL_DOMAIN": "127.0.0.1",
        "FEDSSL_TLS_MODE": "files",
        "FEDSSL_CERTIFICATES": str(certificates),
    }
    published.up("proxy")
    token = published.compose("run", "--rm", "-T", "--entrypoint", "cat", "cli", "/run/operator/token").strip()
    address = f"https://127.0.0.1:{published.environment['FEDSSL_HTTPS_PORT']}"
    with Client(address, token, tls=Tls(ca_file=authority.file)) as client:
        assert "hospital-c" in {known.id for known in client.clients()}


def test_the_proxy_can_get_a_certificate_from_the_operators_acme_server(published: Federation, tmp_path: Path) -> None:
    published.compose("up", "--detach", "authority")
    root = "/data/caddy/pki/authorities/local/root.crt"
    certificate = eventually(
        lambda: published.compose("exec", "-T", "authority", "sh", "-c", f"cat {root} 2>&- || true")
    )
    (tmp_path / "acme-root.crt").write_text(certificate)
    published.environment |= {
        "FEDSSL_DOMAIN": NAME,
        "FEDSSL_TLS_MODE": "acme",
        "FEDSSL_CERTIFICATES": str(tmp_path),
        "FEDSSL_ACME_SERVER": "https://authority/acme/local/directory",
        "FEDSSL_ACME_ROOT": "/certificates/acme-root.crt",
    }
    published.up("proxy")
    trusting = ssl.create_default_context(cadata=certificate)
    address = ("127.0.0.1", int(published.environment["FEDSSL_HTTPS_PORT"]))
    with socket.create_connection(address) as plain, trusting.wrap_socket(plain, server_hostname=NAME) as connection:
        shown = connection.getpeercert()
    assert shown is not None
    assert shown["subjectAltName"] == (("DNS", NAME),)


def test_a_proxy_without_a_certificate_is_not_healthy(published: Federation) -> None:
    published.environment |= {
        "FEDSSL_DOMAIN": "name-without-a-dot",
        "FEDSSL_TLS_MODE": "acme",
        "FEDSSL_ACME_SERVER": "https://127.0.0.1:1/directory",
    }
    with pytest.raises(AssertionError, match=r"proxy.*unhealthy"):
        published.up("proxy")
