"""Any names of releases, namespaces and other objects that Helm accepts give objects that Kubernetes accepts."""

from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest

from support.chart import Rendered, render

CUSTOM = {"ScaledObject", "TriggerAuthentication", "ServiceMonitor", "PodMonitor", "PrometheusRule", "HTTPRoute"}
CLIENT = {"data": {"hostPath": "/x"}}
NUMERIC: dict[str, Any] = {
    "nameOverride": "12",
    "fullnameOverride": "fedssl",
    "image": {"pullSecrets": ["12"]},
    "serviceAccounts": {"coordinator": {"name": "12"}, "others": {"name": "13"}},
    "postgresql": {"external": {"existingSecret": "12", "key": "13", "directKey": "14", "caSecret": {"name": "12"}}},
    "redis": {"external": {"existingSecret": "12", "key": "13"}},
    "store": {"storageClass": "12"},
    "api": {
        "oidc": {
            "issuer": "https://id.example.org",
            "clientId": "12",
            "clientSecret": {"name": "12", "key": "13"},
            "roles": {"12": "viewer"},
        },
        "ingress": {"enabled": True, "host": "12", "className": "12", "tls": {"secretName": "12"}},
        "trustedProxies": ["10.0.0.0/8"],
        "priorityClassName": "12",
        "runtimeClassName": "12",
        "serviceMonitor": {"enabled": True, "tokenSecret": {"name": "12", "key": "13"}},
    },
    "distiller": {"keda": {"enabled": True}},
    "worker": {
        "state": {"storageClass": "12"},
        "enrolmentSecret": {"name": "12", "key": "13"},
        "tls": {"secretName": "12", "ca": "13"},
        "clients": {
            "007": {"data": {"claim": {"name": "12", "subPath": "2024"}}},
            "1e3": {"data": {"s3": {"bucket": "123", "driver": "12"}}},
        },
    },
}


def _check(chart: Rendered) -> None:
    for item in chart.objects:
        if item["kind"] not in CUSTOM:
            kubernetes_validate.validate(item, "1.34", strict=True)
        assert all(isinstance(value, str) for value in item["metadata"]["labels"].values())
        assert isinstance(item["metadata"].get("namespace", ""), str)


@pytest.mark.parametrize(("release", "namespace"), [("true", "2024"), ("null", "1e3"), ("site", "0x10")])
def test_names_that_yaml_would_read_as_other_types_stay_strings(release: str, namespace: str) -> None:
    _check(render({"worker": {"clients": {"a": CLIENT}}}, release=release, namespace=namespace))


def test_names_of_digits_stay_strings() -> None:
    chart = render(NUMERIC, release="2024", namespace="2025")
    _check(chart)
    [monitor] = chart.of("ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["authorization"]["credentials"] == {"name": "12", "key": "13"}
    [authentication] = chart.of("TriggerAuthentication")
    assert authentication["spec"]["secretTargetRef"][0]["name"] == "12"
    [account, _] = [item["metadata"]["name"] for item in chart.of("ServiceAccount")]
    assert account == "13"


@pytest.mark.parametrize("release", ["fed.prod", "2024-fed", "a" * 31 + "-b.c.d.e.f"])
def test_a_release_name_that_services_cannot_start_with_is_refused(release: str) -> None:
    with pytest.raises(helm.HelmError, match="set fullnameOverride to such a name"):
        render({}, release=release)
    _check(render({"fullnameOverride": "fedssl"}, release=release))


@pytest.mark.parametrize("name", ["Fed", "fed_ssl", "fed.ssl", "2fed"])
def test_a_full_name_that_services_cannot_start_with_is_refused(name: str) -> None:
    with pytest.raises(helm.HelmError, match=f"would begin with {name}"):
        render({"fullnameOverride": name})


def test_a_workers_name_leaves_space_for_what_kubernetes_appends() -> None:
    """A label of its pods consists of the StatefulSet's name and a hash of up to ten characters, at most 63 in
    total."""
    longest = render({"worker": {"clients": {"a" * 20: CLIENT}}}, release="b" * 17)
    [name] = [item["metadata"]["name"] for item in longest.of("StatefulSet") if "-worker-" in item["metadata"]["name"]]
    assert len(name) == 52
    with pytest.raises(
        helm.HelmError, match=r"worker.clients.a+: .* with 53 characters.* set a shorter fullnameOverride"
    ):
        render({"worker": {"clients": {"a" * 20: CLIENT}}}, release="b" * 18)
