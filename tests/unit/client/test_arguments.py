"""Wrong arguments in Python raise the same messages as on the command line, and nothing is sent."""

from typing import Any
from uuid import uuid4

import pytest

from fedssl.client import Client, ClientError, InvalidRequest
from fedssl.errors import SpecError


@pytest.fixture
def client() -> Client:
    return Client("http://127.0.0.1:1", "token")  # no server listens there


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_rouds": 3}, "num_rouds: there is no such key; did you mean num_rounds?"),
        ({"num_rounds": 0}, r"num_rounds: should be greater than or equal to 1 \(it is 0\)"),
        ({"method": {"name": "fedsimcl"}}, "method.name: there is no 'fedsimcl' here; did you mean fedsimclr?"),
        ([1], "must be a RunSpec or a table of keys and values, not list"),
    ],
)
def test_wrong_keys_of_a_spec_are_explained(client: Client, values: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        client.create_run(values)


def test_wrong_arguments_are_named(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="role: Input should be 'admin', 'operator', 'viewer' or 'worker'"):
        client.create_token("root")  # type: ignore[arg-type]
    with pytest.raises(ClientError, match="client_id: "):
        client.create_enrolment_token("Hospital A")
    with pytest.raises(InvalidRequest, match=r"config\.dataset: Field required"):
        client.request_evaluation(uuid4(), {})
    with pytest.raises(InvalidRequest, match="identity: String should match pattern"):
        client.confirm_identity("hospital-a", "ab" * 31)
