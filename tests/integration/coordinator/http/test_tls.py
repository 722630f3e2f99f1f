"""TLS with a real authority, real certificates, and the API as it serves."""

import json
import socket
import ssl
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import save_tensors
from fedssl.cli.main import app as command
from fedssl.client import Client, ClientError, Retry, Tls, Unreachable, Untrusted, WorkerClient
from fedssl.protocol.work import Submit
from fedssl_coordinator import main
from fedssl_coordinator.app import create_app
from fedssl_coordinator.http.server import ListenOptions, ServingError, serve
from support.certificates import Authority, Pair
from support.coordinator import Coordinator
from support.federation import tensors_for
from support.scenario import Scenario
from support.servers import Servers
from support.tables import Tables
from support.tus import Tus

PATIENT = Retry(seconds=30)  # untrusted certificates are not retried


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def client_pair(authority: Authority) -> Pair:
    return authority.sign("hospital-a")


def _coordinator(servers: Servers, url: str, folder: Path, authority: Authority, **listening: Path) -> Coordinator:
    pair = authority.sign("api", "127.0.0.1")
    own = authority.sign("operator")
    return Coordinator(
        url,
        servers.redis_url,
        folder / "store",
        tls=Tls(ca_file=authority.file, client_cert=own.certificate, client_key=own.key),
        listening={"certificate": pair.certificate, "key": pair.key, **listening},
    )


@pytest.fixture(scope="module")
def encrypted(
    servers: Servers, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Coordinator]:
    with servers.database() as url, _coordinator(servers, url, tmp_path_factory.mktemp("tls"), authority) as running:
        yield running


def test_a_client_that_trusts_the_authority_can_connect(encrypted: Coordinator, authority: Authority) -> None:
    assert encrypted.url.startswith("https://")
    with Client(encrypted.url, encrypted.admin_token, tls=Tls(ca_file=authority.file)) as client:
        assert client.ready().status == "ok"
        assert list(client.runs()) == []
    assert encrypted.worker("tls").claim(0) is None


def test_a_certificate_of_an_unknown_authority_is_not_trusted(encrypted: Coordinator, tmp_path: Path) -> None:
    for tls in (Tls(), Tls(ca_file=Authority(tmp_path, "stranger").file)):
        with (
            Client(encrypted.url, encrypted.admin_token, retry=PATIENT, tls=tls) as client,
            pytest.raises(Untrusted, match=r"is not trusted.*FEDSSL_CA_FILE"),
        ):
            list(client.runs())


@pytest.mark.parametrize(
    ("addresses", "days"), [(("127.0.0.2",), 1), (("127.0.0.1",), 0)], ids=["another's", "expired"]
)
def test_a_certificate_that_is_expired_or_for_another_address_is_not_trusted(
    servers: Servers, authority: Authority, tmp_path: Path, addresses: tuple[str, ...], days: int
) -> None:
    pair = authority.sign("wrong", *addresses, days=days)
    listening = {"certificate": pair.certificate, "key": pair.key}
    with (
        servers.database() as url,
        Coordinator(url, servers.redis_url, tmp_path, listening=listening) as running,
        Client(running.url, running.admin_token, retry=PATIENT, tls=Tls(ca_file=authority.file)) as client,
        pytest.raises(Untrusted, match="is not trusted"),
    ):
        list(client.runs())


def test_versions_of_tls_before_1_2_are_refused(encrypted: Coordinator) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with warnings.catch_warnings(action="ignore"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    address = httpx.URL(encrypted.url)
    with socket.create_connection((address.host, address.port or 0), timeout=10) as plain, pytest.raises(OSError):  # noqa: PT011 - whichever way the handshake fails
        context.wrap_socket(plain)


def test_plain_http_to_the_encrypted_port_is_reported_as_unreachable(encrypted: Coordinator) -> None:
    plain = encrypted.url.replace("https", "http")
    with (
        Client(plain, encrypted.admin_token, retry=Retry(seconds=0)) as client,
        pytest.raises(Unreachable, match="check that the coordinator runs and that this is its address"),
    ):
        list(client.runs())


def test_mutual_tls_requires_a_client_certificate_and_a_token(
    servers: Servers, authority: Authority, client_pair: Pair, tmp_path: Path
) -> None:
    """The certificate only opens the connection. The token identifies the caller."""
    with (
        servers.database() as url,
        _coordinator(servers, url, tmp_path, authority, client_ca=authority.file) as running,
    ):
        mine = Tls(ca_file=authority.file, client_cert=client_pair.certificate, client_key=client_pair.key)
        both = tmp_path / "both.pem"
        both.write_bytes(client_pair.certificate.read_bytes() + client_pair.key.read_bytes())
        for tls in (mine, Tls(ca_file=authority.file, client_cert=both)):
            with WorkerClient(running.url, running.worker_token("a"), tls=tls) as worker:
                assert worker.claim(0) is None
        stranger = Authority(tmp_path, "stranger").sign("stranger")
        others = Tls(ca_file=authority.file, client_cert=stranger.certificate, client_key=stranger.key)
        for tls in (Tls(ca_file=authority.file), others):
            with (
                Client(running.url, running.admin_token, retry=Retry(seconds=0), tls=tls) as client,
                pytest.raises(ClientError, match=r"if it asks for certificates.*FEDSSL_CLIENT_CERT"),
            ):
                list(client.runs())
        with httpx.Client(verify=mine.context(httpx.URL(running.url)), timeout=60) as bare:
            assert bare.get(f"{running.url}/v1/runs").status_code == 401


@pytest.mark.full
def test_an_upload_is_continued_over_another_mutual_tls_connection(
    servers: Servers, authority: Authority, tmp_path: Path
) -> None:
    """It begins over one encrypted connection, breaks off, and is continued by the worker's own client over another."""
    with (
        servers.database() as url,
        _coordinator(servers, url, tmp_path, authority, client_ca=authority.file) as running,
        Tables(url) as tables,
    ):
        model = {"encoder": {"widths": [64, 128]}, "projector": {"hidden_dims": [512], "out_dim": 512}}
        scenario = Scenario(running, tables, tmp_path, "a", model=model)
        item, path = scenario.claim("a"), tmp_path / "update"
        save_tensors(tensors_for(item.plan.update, 1.0), path)
        data, digest = path.read_bytes(), digest_of(path)
        assert len(data) > 1 << 20  # a smaller file would not be sent with tus
        own = authority.sign("hospital-b")
        tls = Tls(ca_file=authority.file, client_cert=own.certificate, client_key=own.key)
        secret = running.worker_token("a")
        with Tus(running, secret, verify=tls.context(httpx.URL(running.url))) as tus:
            location = tus.begin(len(data), digest, item.assignment_id)
            assert tus.send(location, data[:700_000], 0).headers["upload-offset"] == "700000"
        with WorkerClient(running.url, secret, tls=tls) as worker:
            assert worker.upload(digest, path, item.assignment_id) == len(data) - 700_000
            worker.submit(Submit(assignment_id=item.assignment_id, update=digest, num_examples=9))
            back = tmp_path / "broadcast"
            worker.download(item.broadcast, back)
            assert digest_of(back) == item.broadcast
        assert scenario.states() == [("a", 1, "accepted")]


def test_the_command_takes_its_files_from_the_environment(encrypted: Coordinator, authority: Authority) -> None:
    environment = {"FEDSSL_URL": encrypted.url, "FEDSSL_TOKEN": encrypted.admin_token}

    def listed(**more: str) -> Result:
        return CliRunner().invoke(command, ["run", "ls", "--format", "json"], env={**environment, **more})

    done = listed(FEDSSL_CA_FILE=str(authority.file))
    assert (done.exit_code, done.stdout.strip()) == (0, "[]"), done.stderr
    done = listed()
    assert done.exit_code == 3
    assert "FEDSSL_CA_FILE" in done.stderr
    done = listed(FEDSSL_CA_FILE="/nowhere.pem")
    assert done.exit_code == 2
    assert "certificates cannot be used (No such file or directory): check /nowhere.pem" in done.stderr


def test_doctor_and_completion_take_their_files_from_the_environment(
    encrypted: Coordinator, authority: Authority
) -> None:
    trusted = {"FEDSSL_URL": encrypted.url, "FEDSSL_TOKEN": encrypted.admin_token}
    trusted["FEDSSL_CA_FILE"] = str(authority.file)
    done = CliRunner().invoke(command, ["doctor", "--format", "json"], env=trusted)
    found = {check["name"]: check["found"] for check in json.loads(done.stdout)["checks"]}
    assert (found["coordinator"], found["token and methods"]) == ("ok", "ok"), done.stdout
    encrypted.worker("to-complete")
    words = {"_FEDSSL_COMPLETE": "complete_bash", "COMP_WORDS": "fedssl client show to-c", "COMP_CWORD": "3"}
    done = CliRunner().invoke(command, [], prog_name="fedssl", env={**trusted, **words})
    assert done.stdout.split() == ["to-complete"]


@pytest.mark.parametrize("url", ["http://fed.example.org", "http://192.0.2.1:8000", "http://127.evil.example"])
def test_a_token_is_not_sent_to_another_machine_without_encryption(url: str) -> None:
    with pytest.raises(ClientError, match=r"is another machine.*use https://.*FEDSSL_INSECURE_HTTP=1"):
        Client(url, "fedssl_x")
    Client(url, "fedssl_x", tls=Tls(insecure_http=True)).close()
    Client(url).close()  # without a token there is no secret to protect


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost", "http://[::1]:8000", "http://127.1.2.3"])
def test_loopback_addresses_need_no_encryption(url: str) -> None:
    Client(url, "fedssl_x").close()


def _refused(*options: str, **environment: str) -> str:
    done = CliRunner().invoke(main.app, ["api", *options], env=environment)
    assert done.exit_code == 2, done.output
    return " ".join(done.stderr.split())


def test_the_api_does_not_serve_unencrypted_at_addresses_that_others_can_reach() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "fed.example.org"):
        said = _refused("--host", host)
        assert f"other machines can reach {host}" in said
        assert "--tls-cert" in said
        assert "--insecure-public" in said
        ListenOptions(host=host, port=0, is_insecure_allowed=True).check()
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        ListenOptions(host=host, port=0).check()


def test_unusable_certificates_are_named(encrypted: Coordinator, authority: Authority) -> None:
    pair, other = authority.sign("one", "127.0.0.1"), authority.sign("two", "127.0.0.1")
    assert "belong together" in _refused(FEDSSL_TLS_CERT=str(pair.certificate))
    assert "--tls-client-ca needs" in _refused("--tls-client-ca", str(authority.file))
    for certificate, key in ((Path("/none.pem"), pair.key), (pair.certificate, other.key), (pair.key, pair.key)):
        listening = ListenOptions(host="127.0.0.1", port=0, certificate=certificate, key=key)
        with pytest.raises(ServingError, match="the certificate or its key cannot be used"):
            serve(create_app(), listening)
