"""OpenID Connect providers: a real one as a process, and one in this process that lies as a test requires."""

import base64
import hashlib
import html
import json
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import httpx
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

from support.certificates import Pair
from support.coordinator import Coordinator
from support.listening import LoopbackServer, QuietHandler
from support.object_store import wait_for_answer
from support.openid_server import CLIENT_ID, CLIENT_SECRET, password_of
from support.processes import free_port
from support.servers import Servers
from support.tables import Tables

ROLES = {"chiefs": "admin", "ml-team": "operator", "readers": "viewer"}


def settings_for(issuer: str, **changes: str) -> dict[str, str]:
    """Return the coordinator's variables for a provider, with `changes`."""
    return {
        "FEDSSL_OIDC_ISSUER": issuer,
        "FEDSSL_OIDC_CLIENT_ID": CLIENT_ID,
        "FEDSSL_OIDC_CLIENT_SECRET": CLIENT_SECRET,
        "FEDSSL_OIDC_SCOPES": "openid profile email groups",
        "FEDSSL_OIDC_ROLES": json.dumps(ROLES),
        **changes,
    }


class Canaille:
    """A real provider, whose only client is a coordinator at `coordinator_url`."""

    def __init__(self, folder: Path, coordinator_url: str) -> None:
        self._folder, self._port, self._coordinator = folder, free_port(), coordinator_url
        self.issuer = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        script = Path(__file__).with_name("openid_server.py")
        redirects = [f"{self._coordinator}/sign-in/oidc/callback", f"{self._coordinator}/sign-in"]
        with (self._folder / "canaille.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, script, self._folder / "canaille.sqlite", str(self._port), *redirects],
                stdout=log,
                stderr=log,
            )
        wait_for_answer(self.issuer, self._process)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class SignInSetup:
    """A coordinator, the provider at which its people sign in, and its database."""

    coordinator: Coordinator
    provider: Canaille
    tables: Tables


@contextmanager
def sign_in_setup(servers: Servers, folder: Path) -> Iterator[SignInSetup]:
    """Yield a coordinator and a real provider that are configured for each other."""
    port = free_port()
    with (
        servers.database() as url,
        Canaille(folder, f"http://127.0.0.1:{port}") as provider,
        Coordinator(
            url, servers.redis_url, folder / "store", listening={"port": port}, **settings_for(provider.issuer)
        ) as coordinator,
        Tables(url) as tables,
    ):
        yield SignInSetup(coordinator, provider, tables)


class ProviderSession:
    """One person's browser at the provider."""

    def __init__(self) -> None:
        self.http = httpx.Client(trust_env=False, timeout=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def sign_in(self, url: str, name: str, answer: str = "accept") -> str:
        """Fill in the provider's forms, and return the address to which it redirects the browser."""
        page = self._follow(self.http.get(url))
        if page.url.path == "/login":
            page = self._follow(self._send(page, login=name))
            page = self._follow(self._send(page, password=password_of(name)))
        if page.is_redirect:
            return page.headers["location"]
        return self._send(page, answer=answer).headers["location"]

    def _follow(self, response: httpx.Response) -> httpx.Response:
        """Follow redirects within the provider."""
        while response.is_redirect:
            where = response.url.join(response.headers["location"])
            if where.port != response.url.port:
                return response
            response = self.http.get(where)
        assert response.status_code == 200, response.text
        return response

    def _send(self, page: httpx.Response, **fields: str) -> httpx.Response:
        [token] = set(re.findall(r'name="csrf_token"[^>]*value="([^"]+)"', page.text))
        action = re.search(r'<form[^>]*action="([^"]+)"', page.text)
        where = page.url.join(html.unescape(action[1])) if action else page.url
        return self.http.post(where, data={"csrf_token": token, **fields})


class Liar:
    """A provider that answers correctly until a test changes `document`, `keys`, `claims`, `sign` or `answers`."""

    def __init__(self, certificate: Pair | None = None) -> None:
        """Start the provider. `certificate` is for https."""
        self.key = RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})
        self.requests: list[str] = []
        liar = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:  # noqa: N802
                liar.answer(self)

            do_POST = do_GET  # noqa: N815

        self._server = LoopbackServer(Handler)
        self.issuer = self._server.url
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.certificate, certificate.key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self.issuer = self.issuer.replace("http:", "https:")
        self.behave()

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def behave(self) -> None:
        """Reset all answers to honest ones, and clear the recorded requests."""
        self.requests.clear()
        self.document: dict[str, Any] = {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
            "userinfo_endpoint": f"{self.issuer}/userinfo",
        }
        self.keys: dict[str, Any] = KeySet([self.key]).as_dict(private=False)
        self.claims: dict[str, Any] = {}
        self.userinfo: dict[str, Any] = {}
        self.sign: Callable[[dict[str, Any]], str] = lambda claims: self.signed(claims)
        self.answers: dict[str, tuple[int, bytes]] = {}

    def expect(self, nonce: str, /, **claims: Any) -> None:
        """Prepare the claims of an honest ID token for this nonce. `claims` replace them, and None omits one."""
        now = int(time.time())
        honest = {
            "iss": self.issuer,
            "aud": CLIENT_ID,
            "sub": "1",
            "nonce": nonce,
            "iat": now,
            "exp": now + 60,
            "groups": ["ml-team"],
            "at_hash": access_token_hash("access"),
        }
        self.claims = {name: value for name, value in {**honest, **claims}.items() if value is not None}

    def signed(self, claims: dict[str, Any], key: RSAKey | None = None, kid: str = "one", alg: str = "RS256") -> str:
        """Return an ID token, signed by default with the published key."""
        return jwt.encode({"alg": alg, "kid": kid}, claims, key or self.key, algorithms=[alg])

    def answer(self, request: QuietHandler) -> None:
        """Answer one request of the coordinator."""
        path = urlsplit(request.path).path
        request.rfile.read(int(request.headers.get("Content-Length", 0)))
        self.requests.append(path)
        status, body = self.answers.get(path) or (200, json.dumps(self._content(path)).encode())
        request.send_response(status)
        request.send_header("Location", f"{self.issuer}/elsewhere")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _content(self, path: str) -> dict[str, Any]:
        match path:
            case "/.well-known/openid-configuration":
                return self.document
            case "/keys":
                return self.keys
            case "/userinfo":
                return self.userinfo
            case _:
                return {"token_type": "Bearer", "access_token": "access", "id_token": self.sign(self.claims)}


def query_of(url: str) -> dict[str, str]:
    """Return the parameters in the query of an address, with the first value of each."""
    return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}


def access_token_hash(access_token: str) -> str:
    """Return the claim at_hash of an access token for RS256."""
    return base64.urlsafe_b64encode(hashlib.sha256(access_token.encode()).digest()[:16]).rstrip(b"=").decode()
