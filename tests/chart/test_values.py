"""Values and schema have the same keys, and invalid values are refused with a helpful message."""

import json
from typing import Any

import helm_python as helm
import pytest
import yaml

from support.chart import CHART, Rendered, case, pod, render, rendered

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
REMOVED = ("replicaCount", "resources", "service", "ingress", "autoscaling", "serviceMonitor", "persistence", "workers",
           "postgres")  # fmt: skip
COMPONENTS = (
    "api",
    "aggregator",
    "distiller",
    "evaluator",
    "notifier",
    "beat",
    "migrations",
    "worker",
    "postgresql",
    "redis",
)
SAME_KEYS = {
    "image", "resources", "gpu", "extraEnv", "podAnnotations", "podLabels", "nodeSelector", "tolerations", "affinity",
    "topologySpreadConstraints", "runtimeClassName", "priorityClassName", "terminationGracePeriodSeconds",
}  # fmt: skip


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return {**SCHEMA["$defs"][reference.rsplit("/", 1)[1]], **schema} if reference else schema


def _in_schema(schema: dict[str, Any], path: str = "") -> set[str]:
    schema = _resolved(schema)
    assert schema.get("description"), f"{path} has no description"
    if "items" in schema:
        assert _resolved(schema["items"]).get("description") or "enum" in schema["items"], path
    properties = schema.get("properties")
    if properties is None:
        return {path}
    assert schema["additionalProperties"] is False, f"{path} takes unknown keys"
    return {found for key, value in properties.items() for found in _in_schema(value, f"{path}.{key}")}


def _in_values(values: Any, known: set[str], path: str = "") -> set[str]:
    if not isinstance(values, dict) or path in known:
        return {path}
    return {found for key, value in values.items() for found in _in_values(value, known, f"{path}.{key}")}


def test_values_and_schema_have_the_same_keys() -> None:
    described = _in_schema(SCHEMA)
    absent = {f".{key}" for key in (*REMOVED, "global")}  # only in the schema
    assert _in_values(VALUES, described) == described - absent


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_has_the_common_keys(component: str) -> None:
    assert set(VALUES[component]) >= SAME_KEYS


def test_a_client_may_override_every_setting_of_the_workers() -> None:
    client = SCHEMA["$defs"]["client"]["properties"]
    assert client == {
        key: value for key, value in SCHEMA["properties"]["worker"]["properties"].items() if key != "clients"
    }


@pytest.mark.parametrize("channels", [1, 3, 4, 16])
def test_a_worker_accepts_any_number_of_channels_that_images_may_have(channels: int) -> None:
    clients = {"a": {"data": {"hostPath": "/x"}, "settings": {"channels": channels}}}
    worker = render({"worker": {"clients": clients}}).named("StatefulSet", "-worker-a")
    [own] = pod(worker)["spec"]["containers"]
    settings = {entry["name"]: entry.get("value") for entry in own["env"]}
    assert settings["FEDSSL_WORKER_CHANNELS"] == str(channels)


def test_labels_and_limits_for_images_become_variables_of_the_worker() -> None:
    def settings(**given: Any) -> dict[str, Any]:
        clients = {"a": {"data": {"hostPath": "/x"}, "settings": given}}
        [own] = pod(render({"worker": {"clients": clients}}).named("StatefulSet", "-worker-a"))["spec"]["containers"]
        return {entry["name"].removeprefix("FEDSSL_WORKER_"): entry.get("value") for entry in own["env"]}

    given = settings(
        maxUnreadable=0, labels="/etc/site/labels.csv", labelNames="/etc/site/names.csv", noImageCache=True, rescan=True
    )
    assert (given["MAX_UNREADABLE"], given["NO_IMAGE_CACHE"], given["RESCAN"]) == ("0", "true", "true")
    assert (given["LABELS"], given["LABEL_NAMES"]) == ("/etc/site/labels.csv", "/etc/site/names.csv")
    assert settings(maxUnreadable=0.05)["MAX_UNREADABLE"] == "0.05"
    assert not {"MAX_UNREADABLE", "NO_IMAGE_CACHE", "RESCAN", "LABELS", "LABEL_NAMES"} & set(settings())


@pytest.mark.parametrize(
    "values",
    [
        {"apis": {}},
        {"worker": {"settings": {"maxUnreadable": 1}}},
        {"worker": {"settings": {"labels": "labels.csv"}}},
        {"worker": {"settings": {"channels": 0}}},
        {"worker": {"settings": {"channels": 17}}},
        {"api": {"replica": 2}},
        {"api": {"image": {"tag": "latest"}}},
        {"worker": {"clients": {"Hospital A": {}}}},
        {"worker": {"clients": {"a": {"data": {"folder": "/x"}}}}},
        {"api": {"trustedProxies": ["*"]}},
        {"api": {"trustedProxies": ["0.0.0.0/0"]}},
        {"api": {"oidc": {"issuer": "http://id.example.org"}}},
        {"api": {"oidc": {"roles": {"ml-team": "root"}}}},
        {"beat": {"replicas": 2}},
        {"api": {"extraEnv": [{"name": "TZ", "value": 1}]}},
        {"api": {"extraEnv": [{"value": "1"}]}},
        {"api": {"healthPort": 8000}},
        {"api": {"podLabels": {"app.kubernetes.io/component": "web"}}},
        {"api": {"tolerations": [{"keys": "spot"}]}},
        {"nameOverride": "My App"},
        {"store": {"size": "much"}},
        {"store": {"type": "ftp"}},
        {"store": {"s3": {"key": "secret"}}},
        {"store": {"type": "s3", "s3": {"bucket": "a", "endpoint": "https://user:secret@host"}}},
    ],
    ids=str,
)
def test_the_schema_refuses_invalid_values(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError, match="schema"):
        render(values)


@pytest.mark.parametrize("key", REMOVED)
def test_moved_keys_name_their_replacement(key: str) -> None:
    with pytest.raises(helm.HelmError, match=f"{key} is not a value of this chart: use "):
        render({key: {}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"api": {"ingress": {"enabled": True}}}, "needs api.ingress.host"),
        ({"api": {"ingress": {"enabled": True, "host": "fedssl.example.org"}}}, "needs api.trustedProxies"),
        ({"api": {"serviceMonitor": {"enabled": True}}}, "tokenSecret.name"),
        ({"api": {"oidc": {"issuer": "https://id.example.org"}}}, "needs api.oidc.clientId.* and api.oidc.roles"),
        ({"api": {"oidc": {"clientSecret": {"name": "sign-in"}}}}, "api.oidc.issuer is not set"),
        ({"coordinator": {"enabled": False}}, "nothing to install"),
        ({"coordinator": {"enabled": False}, "worker": {"clients": {"a": {}}}}, "needs worker.coordinator"),
        ({"store": {"type": "s3"}}, "needs store.s3.bucket"),
        ({"store": {"s3": {"bucket": "abc"}}}, "set store.type to s3"),
        ({"store": {"s3": {"direct": True}}}, "store.s3.direct is set but store.type is filesystem"),
        ({"store": {"type": "s3", "s3": {"bucket": "abc", "cacheSize": "20G"}}}, "in Mi, Gi or Ti"),
        ({"worker": {"clients": {"a": {}}}}, "needs exactly one place for its images"),
        (
            {"worker": {"clients": {"a": {"data": {"hostPath": "/x"}, "tls": {"secretName": "s", "key": "k"}}}}},
            "set both tls.certificate and tls.key, or neither",
        ),
        (
            {"worker": {"clients": {"a": {"data": {"hostPath": "/x"}, "tls": {"certificate": "c", "key": "k"}}}}},
            "they need tls.secretName",
        ),
        (
            {"worker": {"clients": {"a": {"data": {"hostPath": "/x"}, "settings": {"labelNames": "/etc/names.csv"}}}}},
            "set both",
        ),
        ({"postgresql": {"external": {"directKey": "direct"}}}, "needs postgresql.external.existingSecret"),
        ({"worker": {"clients": {"a": {"data": {"hostPath": "/x", "claim": {"name": "y"}}}}}}, "exactly one place"),
    ],
    ids=str,
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        render(values)


def test_an_existing_secret_replaces_the_bundled_servers() -> None:
    external = rendered("external")
    assert external.of("StatefulSet", "Secret") == []
    environment = external.named("Deployment", "-api")["spec"]["template"]["spec"]["containers"][0]["env"]
    assert environment[0]["valueFrom"]["secretKeyRef"] == {"name": "fedssl-database", "key": "url"}


def test_the_api_trusts_forwarded_headers_of_the_ingress() -> None:
    """It trusts the forwarded address and scheme only from these proxies."""
    environment = {variable["name"]: variable.get("value") for variable in _api_environment(rendered("everything"))}
    assert environment["FEDSSL_PROXY_HEADERS"] == "true"
    assert environment["FEDSSL_FORWARDED_ALLOW_IPS"] == "10.42.0.0/16,fd00::42"
    names = {variable["name"] for variable in _api_environment(rendered("default"))}
    assert names.isdisjoint({"FEDSSL_PROXY_HEADERS", "FEDSSL_FORWARDED_ALLOW_IPS"})


def _api_environment(chart: Rendered) -> list[dict[str, Any]]:
    return pod(chart.named("Deployment", "-api"))["spec"]["containers"][0]["env"]


def test_a_bucket_needs_no_shared_volume() -> None:
    chart = rendered("s3")
    assert "-store" not in str([item["metadata"]["name"] for item in chart.of("PersistentVolumeClaim")])
    api = chart.named("Deployment", "-api")
    assert api["spec"]["replicas"] == 3
    spec = api["spec"]["template"]["spec"]
    assert {"name": "store", "emptyDir": {"sizeLimit": "40Gi"}} in spec["volumes"]
    environment = {variable["name"]: variable for variable in spec["containers"][0]["env"]}
    url = "s3://fedssl-artifacts/production?endpoint=https://s3.example.org:9000&region=eu-central-1"
    assert environment["FEDSSL_STORE_URL"]["value"] == url
    assert environment["FEDSSL_STORE_CACHE_BYTES"]["value"] == str(20 * 2**30)
    assert environment["FEDSSL_STORE_DIRECT"]["value"] == "true"
    key = {"name": "fedssl-s3", "key": "secret-access-key"}
    assert environment["FEDSSL_S3_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"] == key


@pytest.mark.parametrize(("size", "half"), [("1.5Gi", 768 * 2**20), ("300Mi", 150 * 2**20), ("2Ti", 2**40)])
def test_copies_get_half_of_the_cache(size: str, half: int) -> None:
    chart = render({"store": {"type": "s3", "s3": {"bucket": "abc", "cacheSize": size}}})
    environment = pod(chart.named("Deployment", "-api"))["spec"]["containers"][0]["env"]
    assert {"name": "FEDSSL_STORE_CACHE_BYTES", "value": str(half)} in environment


def test_every_component_that_needs_the_bucket_can_reach_it() -> None:
    chart = rendered("s3")
    rule = {"ports": [{"port": 9000, "protocol": "TCP"}], "to": [{"ipBlock": {"cidr": "10.2.0.0/16"}}]}
    reaching = {
        item["metadata"]["labels"]["app.kubernetes.io/component"]
        for item in chart.of("NetworkPolicy")
        if rule in item["spec"]["egress"]
    }
    assert reaching == {
        "api",
        "aggregator",
        "distiller",
        "evaluator",
        "notifier",
        "beat",
        "migrations",
        "worker-hospital-a",
    }


@pytest.mark.parametrize(
    ("s3", "of_the_coordinator", "of_workers"),
    [
        ({}, 443, 443),
        ({"endpoint": "https://s3.example.org"}, 443, 443),
        ({"endpoint": "http://minio"}, 80, 80),
        ({"endpoint": "http://minio:9000"}, 9000, 9000),
        ({"endpoint": "http://[fd00::1]:9000"}, 9000, 9000),
        ({"endpoint": "http://minio:9000", "publicEndpoint": "https://s3.example.org"}, 9000, 443),
        ({"endpoint": "http://minio:9000", "port": 9443}, 9443, 9443),
    ],
    ids=str,
)
def test_network_policies_allow_the_object_stores_port(
    s3: dict[str, Any], of_the_coordinator: int, of_workers: int
) -> None:
    workers = {"clients": {"a": {"data": {"hostPath": "/x"}}}}
    store = {"type": "s3", "s3": {"bucket": "abc", "direct": True, **s3}}
    chart = render({"store": store, "worker": workers})
    # The excluded ports: 53 for names, 5432 and 6379 for the servers, 8000 for the API.
    assert _ports(chart.named("NetworkPolicy", "-beat")) - {53, 5432, 6379} == {of_the_coordinator}
    assert _ports(chart.named("NetworkPolicy", "-worker-a")) - {53, 8000} == {of_workers}


def test_a_release_with_only_workers_can_allow_the_object_store_of_its_coordinator() -> None:
    values = case("worker-only")
    assert _ports(render(values).named("NetworkPolicy", "-worker-hospital-e")) == {53, 443}
    direct = render({**values, "store": {"s3": {"direct": True, "port": 9000}}})
    assert _ports(direct.named("NetworkPolicy", "-worker-hospital-e")) == {53, 443, 9000}


def test_workers_may_connect_to_the_port_in_their_coordinators_address() -> None:
    values = {**case("worker-only"), "networkPolicy": {}}
    values["worker"] = {**values["worker"], "coordinator": "https://fedssl.example.org:8443"}
    assert _ports(render(values).named("NetworkPolicy", "-worker-hospital-e")) == {53, 8443}
    values["networkPolicy"] = {"coordinatorPort": 9443}
    assert _ports(render(values).named("NetworkPolicy", "-worker-hospital-e")) == {53, 9443}


def test_clients_of_this_and_of_another_coordinator_reach_their_own() -> None:
    clients = {"a": {"coordinator": "", "data": {"hostPath": "/x"}}, "b": {"data": {"hostPath": "/x"}}}
    chart = render({"worker": {"coordinator": "https://fedssl.example.org", "clients": clients}})
    assert _ports(chart.named("NetworkPolicy", "-worker-a")) == {53, 8000}
    assert _ports(chart.named("NetworkPolicy", "-worker-b")) == {53, 443}


def test_network_policies_allow_the_port_of_the_dns_pods() -> None:
    for policy in rendered("openshift").of("NetworkPolicy"):
        if policy["spec"]["egress"]:
            assert {"port": 5353, "protocol": "UDP"} in policy["spec"]["egress"][0]["ports"]
            assert 53 not in _ports(policy)


def test_large_numbers_are_written_in_full() -> None:
    settings = {"maxConnections": 1_000_000, "maxConnectionsPerAddress": 2_000_000}
    chart = render({"coordinator": {"settings": settings}, "api": {"terminationGracePeriodSeconds": 1_000_000}})
    written = chart.named("ConfigMap", "-settings")["data"]
    assert written["FEDSSL_MAX_CONNECTIONS"] == "1000000"
    assert written["FEDSSL_MAX_CONNECTIONS_PER_ADDRESS"] == "2000000"
    assert pod(chart.named("Deployment", "-api"))["spec"]["terminationGracePeriodSeconds"] == 1_000_000


def _ports(policy: dict[str, Any]) -> set[int]:
    """Return the ports to which the pods may connect."""
    return {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}


def test_a_role_can_replace_the_keys_of_a_bucket() -> None:
    role = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/fedssl"}
    chart = render({"store": {"type": "s3", "s3": {"bucket": "abc", "serviceAccountAnnotations": role}}})
    given = {
        account["metadata"]["name"]: account["metadata"].get("annotations") for account in chart.of("ServiceAccount")
    }
    assert given == {"site-fedssl": None, "site-fedssl-coordinator": role}
    assert "FEDSSL_S3_ACCESS_KEY_ID" not in str(chart.objects)


@pytest.mark.parametrize("own", [{}, {"readOnly": False}, {"readOnly": True}], ids=str)
def test_images_of_an_inline_volume_are_mounted_read_only(own: dict[str, bool]) -> None:
    chart = render({"worker": {"clients": {"a": {"data": {"csi": {"driver": "images.example.org", **own}}}}}})
    volumes = pod(chart.named("StatefulSet", "-worker-a"))["spec"]["volumes"]
    [csi] = [volume["csi"] for volume in volumes if volume["name"] == "data"]
    assert csi == {"driver": "images.example.org", "readOnly": True}


def test_a_release_with_only_workers_has_no_objects_of_the_coordinator() -> None:
    kinds = {item["kind"] for item in rendered("worker-only").objects}
    assert kinds == {"ServiceAccount", "Service", "StatefulSet", "NetworkPolicy"}


def test_a_clients_own_settings_override_those_of_all_workers() -> None:
    everything = rendered("everything")
    nodes = {
        item["metadata"]["name"].rsplit("worker-", 1)[1]: item["spec"]["template"]["spec"]["nodeSelector"]
        for item in everything.of("StatefulSet")
        if "worker-" in item["metadata"]["name"]
    }
    assert nodes["hospital-a"] == {"pool": "gpu"}
    assert nodes["hospital-b"]["kubernetes.io/hostname"] == "node-b"


def test_a_worker_with_several_gpus_trains_on_all_of_them() -> None:
    settings = {}
    for name, suffix in (("everything", "hospital-a"), ("worker-only", "hospital-e")):
        (item,) = [each for each in rendered(name).of("StatefulSet") if each["metadata"]["name"].endswith(suffix)]
        main, *_ = pod(item)["spec"]["containers"]
        given = {each["name"]: each.get("value") for each in main["env"]}
        has_memory = any(mount["mountPath"] == "/dev/shm" for mount in main["volumeMounts"])
        settings[name] = (given["FEDSSL_WORKER_DEVICE"], given.get("FEDSSL_WORKER_GPUS"), has_memory)
    assert settings == {"everything": ("cuda", "2", True), "worker-only": ("cuda", None, False)}


def test_bundled_passwords_are_random() -> None:
    first, second = (render({}).named("Secret", "-postgresql")["stringData"]["password"] for _ in range(2))
    assert len(first) == len(second) == 40
    assert first != second


def test_the_notes_list_the_next_commands() -> None:
    assert "fedssl-coordinator token create --role admin" in rendered("default").notes
    assert "create secret generic site-fedssl-worker-hospital-e-enrolment" in rendered("worker-only").notes


def test_processes_get_the_address_of_the_pooler_and_the_direct_one() -> None:
    """Every process of the coordinator gets both, and may connect to both."""
    external = {"existingSecret": "db", "port": 6432, "directKey": "direct", "directPort": 5432}
    pooled = render({"postgresql": {"external": external}})
    secret = {"secretKeyRef": {"name": "db", "key": "direct"}}
    for ending in ("-api", "-aggregator", "-beat"):
        [container] = pooled.named("Deployment", ending)["spec"]["template"]["spec"]["containers"]
        given = {entry["name"]: entry.get("valueFrom") for entry in container["env"]}
        assert given["FEDSSL_DATABASE_DIRECT_URL"] == secret
    ports = {
        port["port"]
        for policy in pooled.of("NetworkPolicy")
        for rule in policy["spec"].get("egress", [])
        for port in rule.get("ports", [])
    }
    assert {5432, 6432} <= ports
