"""Values with which operators extend the chart's objects, and invalid values that are refused."""

import re
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from fedssl_coordinator.core.metrics import REGISTRY as COORDINATORS
from fedssl_coordinator.core.settings import Settings
from fedssl_coordinator.core.state_counts import STATES
from fedssl_worker.metrics import REGISTRY as WORKERS
from support.chart import CASES, REGISTRY, Rendered, case, containers, pod, render, rendered

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "fedssl.json"
COORDINATORS_COMPONENTS = ("api", "aggregator", "distiller", "evaluator", "notifier", "beat", "migrations")
ENDINGS = {"api": "-api", "aggregator": "-aggregator", "distiller": "-distiller", "evaluator": "-evaluator",
           "notifier": "-notifier", "beat": "-beat", "postgresql": "-postgresql", "redis": "-redis"}  # fmt: skip
CLIENT = {"clients": {"a": {"data": {"hostPath": "/x"}}}}
ADDED: dict[str, Any] = {
    "extraEnvFrom": [{"configMapRef": {"name": "site"}, "prefix": "SITE_"}],
    "extraVolumes": [{"name": "site", "secret": {"secretName": "site"}}],
    "extraVolumeMounts": [{"name": "site", "mountPath": "/etc/site", "readOnly": True}],
    "extraContainers": [{"name": "proxy", "image": "registry.example.org/proxy:1"}],
    "podSecurityContext": {"fsGroup": 20000},
}


def _workload(component: str) -> dict[str, Any]:
    """Return the workload of a component to which all additions are made."""
    chart = render({component: ADDED, "worker": CLIENT | (ADDED if component == "worker" else {})})
    if component == "migrations":
        return chart.of("Job")[0]
    ending = ENDINGS.get(component, "-worker-a")
    [found] = [item for item in chart.of("Deployment", "StatefulSet") if item["metadata"]["name"].endswith(ending)]
    return found


@pytest.mark.parametrize("component", [*ENDINGS, "migrations", "worker"])
def test_every_component_includes_the_additions(component: str) -> None:
    spec = pod(_workload(component))["spec"]
    own, proxy = spec["containers"]
    assert proxy == ADDED["extraContainers"][0]
    assert ADDED["extraVolumes"][0] in spec["volumes"]
    # The container that waits for the tables connects to the same database.
    for container in [own, *spec.get("initContainers", [])]:
        assert ADDED["extraEnvFrom"][0] in container["envFrom"]
        assert ADDED["extraVolumeMounts"][0] in container["volumeMounts"]
    user = 999 if component in ("postgresql", "redis") else 10001
    assert spec["securityContext"]["fsGroup"] == 20000
    assert spec["securityContext"]["runAsUser"] == user


def test_no_pod_sets_a_user_on_openshift() -> None:
    for item in rendered("openshift").workloads():
        context = pod(item)["spec"]["securityContext"]
        assert set(context) == {"runAsNonRoot", "fsGroupChangePolicy", "seccompProfile"}


def test_existing_service_accounts_are_used_and_not_created() -> None:
    chart = rendered("openshift")
    assert chart.of("ServiceAccount") == []
    accounts = {item["metadata"]["name"]: pod(item)["spec"]["serviceAccountName"] for item in chart.workloads()}
    assert {accounts[name] for name in accounts if "worker" in name or name.endswith(("postgresql", "redis"))} == {
        "restricted",
    }
    assert accounts["site-fedssl-api"] == accounts["site-fedssl-beat"] == "federation"
    named = rendered("everything").of("ServiceAccount")
    assert [item["metadata"]["name"] for item in named] == ["sites", "federation"]


def test_pods_that_share_a_volume_of_one_node_run_on_one_node() -> None:
    own = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    chart = render({"api": {"affinity": own}, "worker": CLIENT})
    [claim] = chart.of("PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    for item in chart.workloads():
        component = item["metadata"]["labels"]["app.kubernetes.io/component"]
        affinity = pod(item)["spec"].get("affinity", {})
        uses_store = any(volume["name"] == "store" for volume in pod(item)["spec"].get("volumes", []))
        assert uses_store == (component in COORDINATORS_COMPONENTS) == ("podAffinity" in affinity)
        if not uses_store:
            continue
        [term] = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        labels = pod(item)["metadata"]["labels"]
        assert term["labelSelector"]["matchLabels"].items() <= labels.items()
        [among] = term["labelSelector"]["matchExpressions"]
        assert among["values"] == list(COORDINATORS_COMPONENTS)
    assert "nodeAffinity" in pod(chart.named("Deployment", "-api"))["spec"]["affinity"]
    assert "ReadWriteOnce" in chart.notes


def test_no_disruption_budget_is_created_if_all_pods_must_share_a_node() -> None:
    """An evicted pod cannot start on another node while others are left, so a budget would never allow an eviction."""
    budget = {"podDisruptionBudget": {"enabled": True}}
    values = {"api": budget, "aggregator": budget}
    assert render(values).of("PodDisruptionBudget") == []
    shared = render({**values, "store": {"accessModes": ["ReadWriteMany"]}})
    names = [item["metadata"]["name"] for item in shared.of("PodDisruptionBudget")]
    assert sorted(names) == ["site-fedssl-aggregator", "site-fedssl-api"]


@pytest.mark.parametrize(
    "store", [{"accessModes": ["ReadWriteMany"]}, {"type": "s3", "s3": {"bucket": "abc"}}], ids=["shared", "bucket"]
)
def test_pods_without_a_volume_of_one_node_may_run_on_any_node(store: dict[str, Any]) -> None:
    chart = render({"store": store})
    assert "podAffinity" not in str(chart.objects)
    assert "ReadWriteOnce" not in chart.notes


def test_images_come_from_the_registry_or_from_the_nodes() -> None:
    for item in rendered("default").workloads():
        for container in containers(item):
            assert container["image"].startswith((f"{REGISTRY}/fedssl-", "postgres:", "redis:"))
    assert REGISTRY in rendered("default").notes
    assert "fedssl-api:" in str(rendered("bare").objects)
    with pytest.raises(helm.HelmError, match=r"--set image.registry=.*set image.pullPolicy to Never instead"):
        render({"image": {"registry": ""}})


def test_certificates_of_external_servers_are_checked_against_the_given_authority() -> None:
    [container] = pod(rendered("external").named("Deployment", "-beat"))["spec"]["containers"]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (environment["PGSSLROOTCERT"], environment["PGSSLMODE"]) == ("/authorities/postgresql.crt", "verify-full")
    assert environment["FEDSSL_REDIS_CA_FILE"] == "/authorities/redis.crt"
    assert "AWS_CA_BUNDLE" not in environment
    [bucket] = pod(rendered("s3").named("Deployment", "-beat"))["spec"]["containers"]
    assert {"name": "AWS_CA_BUNDLE", "value": "/authorities/s3.crt"} in bucket["env"]
    for item in rendered("external").of("Deployment"):
        spec = pod(item)["spec"]
        [volume] = [volume for volume in spec["volumes"] if volume["name"] == "authorities"]
        files = {source["secret"]["items"][0]["path"]: source["secret"] for source in volume["projected"]["sources"]}
        assert set(files) == {"postgresql.crt", "redis.crt"}
        assert files["redis.crt"] == {
            "name": "fedssl-authorities",
            "items": [{"key": "redis.pem", "path": "redis.crt"}],
        }
        for each in [*spec["initContainers"], *spec["containers"]]:
            assert {"name": "authorities", "mountPath": "/authorities", "readOnly": True} in each["volumeMounts"]
    assert "authorities" not in str(rendered("default").objects)


def test_a_load_balancer_serves_https_to_the_allowed_addresses() -> None:
    chart = rendered("loadbalancer")
    service = chart.named("Service", "-api")["spec"]
    assert (service["type"], service["loadBalancerClass"]) == ("LoadBalancer", "example.org/network")
    assert service["loadBalancerSourceRanges"] == ["203.0.113.0/24"]
    assert service["externalTrafficPolicy"] == "Local"
    spec = pod(chart.named("Deployment", "-api"))["spec"]
    environment = {variable["name"]: variable.get("value") for variable in spec["containers"][0]["env"]}
    assert environment["FEDSSL_TLS_CERT"] == "/tls/tls.crt"
    assert environment["FEDSSL_TLS_KEY"] == "/tls/tls.key"
    assert "FEDSSL_INSECURE_PUBLIC" not in environment
    assert {"name": "tls", "secret": {"secretName": "fedssl-tls", "defaultMode": 0o440}} in spec["volumes"]
    [rule, *_] = chart.named("NetworkPolicy", "-api")["spec"]["ingress"]
    assert rule == {"ports": [{"port": 8000, "protocol": "TCP"}]}  # callers are outside the cluster
    worker = pod(chart.named("StatefulSet", "-worker-hospital-a"))["spec"]["containers"][0]["env"]
    assert {"name": "FEDSSL_WORKER_COORDINATOR", "value": "https://site-fedssl-api:443"} in worker
    assert "FEDSSL_WORKER_INSECURE_HTTP" not in str(worker)
    assert "https://site-fedssl-api:443/readyz" in str(chart.named("Pod", "-test"))


def test_a_route_of_a_gateway_leads_to_the_api() -> None:
    [route] = rendered("everything").of("HTTPRoute")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "gateways", "sectionName": "https"}]
    assert route["spec"]["hostnames"] == ["api.example.org"]
    service = rendered("everything").named("Service", "-api")
    [rule] = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}]
    assert rule["timeouts"] == {"request": "0s"}  # models are large, and events are streams


def test_network_policies_allow_traces() -> None:
    chart = rendered("everything")
    rule = {
        "ports": [{"port": 4318, "protocol": "TCP"}],
        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
    }
    sending = {
        item["metadata"]["labels"]["app.kubernetes.io/component"]
        for item in chart.of("NetworkPolicy")
        if rule in item["spec"]["egress"]
    }
    traced = {
        item["metadata"]["labels"]["app.kubernetes.io/component"]
        for item in chart.workloads()
        for container in containers(item)
        for variable in container.get("env", [])
        if variable["name"] == "OTEL_EXPORTER_OTLP_ENDPOINT"
    }
    assert sending == traced
    assert {*COORDINATORS_COMPONENTS, "worker-hospital-a", "worker-hospital-d"} <= traced
    assert not {"postgresql", "redis", "test"} & traced
    assert "OTEL_" not in str(rendered("default").objects)
    https = render({"tracing": {"endpoint": "https://collector.example.org"}}).named("NetworkPolicy", "-beat")
    assert {"ports": [{"port": 443, "protocol": "TCP"}]} in https["spec"]["egress"]


def test_additional_network_rules_apply_only_to_their_component() -> None:
    policies = {
        item["metadata"]["labels"]["app.kubernetes.io/component"]: item["spec"]
        for item in rendered("everything").of("NetworkPolicy")
    }
    own = {"ports": [{"port": 443}], "to": [{"ipBlock": {"cidr": "198.51.100.0/24"}}]}
    assert [name for name, spec in policies.items() if own in spec["egress"]] == ["api"]
    workers = {name for name, spec in policies.items() if {"ports": [{"port": 3128}]} in spec["egress"]}
    assert workers == {name for name in policies if name.startswith("worker-")}
    assert policies["postgresql"]["egress"] == [{"ports": [{"port": 9000}]}]
    assert len(policies["redis"]["ingress"]) == 2
    assert policies["redis"]["egress"] == []
    ports = [rule["ports"] for rule in policies["worker-hospital-a"]["ingress"]]
    assert ports == [[{"port": 9101, "protocol": "TCP"}]]


def test_alerts_and_dashboard_are_the_same_as_those_of_compose() -> None:
    chart = rendered("everything")
    [rule] = chart.of("PrometheusRule")
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    dashboard = chart.named("ConfigMap", "-dashboard")
    assert dashboard["data"] == {"fedssl.json": DASHBOARD.read_text()}
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboard["metadata"]["annotations"] == {"grafana_folder": "fedssl"}
    assert not re.search(r"PrometheusRule|dashboard", str(rendered("default").objects))


def test_alerts_name_metrics_and_labels_that_exist() -> None:
    served = {metric.name for registry in (COORDINATORS, WORKERS) for metric in registry.collect()}
    served |= {f"fedssl_{kind}" for kind in STATES} | {"fedssl_queue_depth"}
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])
    for rule in group["rules"]:
        used = set(re.findall(r"\bfedssl_\w+", rule["expr"]))
        assert used
        assert {name.removesuffix("_total") for name in used} <= served, used - served
        for state in re.findall(r'state="(\w+)"', rule["expr"]):
            assert any(state in states for states in STATES.values())
        # With a single sample, the lowest value is that sample, so only `for` makes an alert wait for a series that has
        # just begun.
        assert "for" in rule or "_over_time" not in rule["expr"]
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        kept = set(re.findall(r"by \((\w+)\)", rule["expr"]))
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= kept


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"api": {"extraVolumeMount": []}}, "'extraVolumeMount' not allowed"),
        ({"api": {"extraVolumes": [{"configMap": {"name": "a"}}]}}, "missing property 'name'"),
        ({"api": {"extraVolumes": [{"name": "a"}]}}, "extraVolumes/0.*minProperties"),
        ({"api": {"extraVolumes": {"a": {}}}}, "extraVolumes.*want array"),
        ({"api": {"extraVolumeMounts": [{"name": "a"}]}}, "missing property 'mountPath'"),
        ({"api": {"extraVolumeMounts": [{"name": "a", "mountPath": "etc"}]}}, "mountPath.*does not match pattern"),
        ({"beat": {"extraEnvFrom": [{"secretref": {"name": "a"}}]}}, "'secretref' not allowed"),
        ({"beat": {"extraEnvFrom": [{"secretRef": {}}]}}, "missing property 'name'"),
        ({"redis": {"extraContainers": [{"name": "a"}]}}, "missing property 'image'"),
        ({"worker": {"clients": {"a": {"extraContainers": [{"image": "b"}]}}}}, "missing property 'name'"),
        ({"podSecurityContext": {"runAsuser": 1}}, "'runAsuser' not allowed"),
        ({"api": {"podSecurityContext": {"runAsUser": 0}}}, "runAsUser.*minimum"),
        ({"podSecurityContext": {"runAsNonRoot": False}}, "runAsNonRoot"),
        ({"serviceAccounts": {"coordinator": {"name": "A"}}}, "name.*does not match pattern"),
        ({"serviceAccounts": {"worker": {}}}, "'worker' not allowed"),
        ({"networkPolicy": {"extraEgress": [{"ports": [{"port": 1}]}]}}, "extraEgress.*want object"),
        ({"networkPolicy": {"extraEgress": {"workers": []}}}, "'workers' not allowed"),
        ({"networkPolicy": {"extraEgress": {"api": [{"from": [{}]}]}}}, "'from' not allowed"),
        ({"networkPolicy": {"extraIngress": {"api": [{}]}}}, "minProperties"),
        ({"postgresql": {"external": {"caSecret": "ca"}}}, "caSecret.*want object"),
        ({"api": {"service": {"loadBalancerSourceRanges": ["10.0.0.1"]}}}, "does not match pattern"),
        ({"api": {"service": {"externalTrafficPolicy": "local"}}}, "externalTrafficPolicy"),
        ({"api": {"gateway": {"parentRefs": ["public"]}}}, "want object"),
        ({"api": {"gateway": {"timeouts": {"request": "none"}}}}, "does not match pattern"),
        ({"api": {"gateway": {"hosts": []}}}, "'hosts' not allowed"),
        ({"tracing": {"endpoint": "collector:4318"}}, "endpoint.*does not match pattern"),
        ({"prometheusRule": {"enabled": "yes"}}, "want boolean"),
        ({"dashboard": {"labels": {"a": 1}}}, "want string"),
        ({"store": {"accessModes": ["ReadWriteOncePod"]}}, "accessModes/0"),
        ({"image": {"registry": "https://registry.example.org"}}, "registry.*does not match pattern"),
        ({"image": {"registry": "registry.example.org/ml/"}}, "registry.*does not match pattern"),
    ],
    ids=str,
)
def test_the_schema_error_names_the_key_and_the_problem(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=f"(?s)schema.*{message}"):
        render(values)


TLS = {"tls": {"secretName": "fedssl-tls"}}
PROXIES = {"trustedProxies": ["10.42.0.0/16"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {
                "api": {
                    "extraVolumeMounts": [{"name": "b", "mountPath": "/b"}],
                    "extraVolumes": [{"name": "a", "emptyDir": {}}],
                }
            },
            "api.extraVolumeMounts mounts the volume b, which api.extraVolumes does not have: it has a",
        ),
        (
            {"worker": {"extraVolumeMounts": [{"name": "b", "mountPath": "/b"}]}},
            "worker.extraVolumes does not have: it has none",
        ),
        (
            {
                "worker": {
                    "clients": {"a": {"data": {"hostPath": "/x"}, "extraVolumes": [{"name": "state", "emptyDir": {}}]}}
                }
            },
            "worker.clients.a.extraVolumes has a volume named state",
        ),
        (
            {"serviceAccounts": {"others": {"create": False}}},
            "set serviceAccounts.others.name to the account that exists",
        ),
        (
            {"serviceAccounts": {"others": {"name": "one"}, "coordinator": {"name": "one"}}},
            "workers must not have the coordinator's account",
        ),
        ({"redis": {"external": {"caSecret": {"name": "ca"}}}}, "needs redis.external.existingSecret"),
        (
            {"store": {"type": "s3", "s3": {"bucket": "abc", "caSecret": {"name": "ca"}}}},
            "needs store.s3.endpoint with https",
        ),
        (
            {"api": {"service": {"type": "LoadBalancer"}}},
            "LoadBalancer would send tokens unencrypted: set api.tls.secretName",
        ),
        ({"api": {"service": {"type": "NodePort"}}}, "NodePort would send tokens unencrypted"),
        ({"api": {"service": {"loadBalancerClass": "a"}}}, "no effect with api.service.type ClusterIP"),
        (
            {"api": {**TLS, "service": {"type": "NodePort", "loadBalancerSourceRanges": ["10.0.0.0/8"]}}},
            "no effect with api.service.type NodePort",
        ),
        ({"api": {"service": {"externalTrafficPolicy": "Local"}}}, "no effect with api.service.type ClusterIP"),
        (
            {"api": {**TLS, **PROXIES, "ingress": {"enabled": True, "host": "a"}}},
            "api.ingress.enabled and api.tls.secretName exclude",
        ),
        ({"api": {"gateway": {"enabled": True}}}, "needs api.gateway.host"),
        ({"api": {"gateway": {"enabled": True, "host": "a"}}}, "needs api.gateway.parentRefs"),
        (
            {"api": {"gateway": {"enabled": True, "host": "a", "parentRefs": [{"name": "b"}]}}},
            "needs api.trustedProxies",
        ),
    ],
    ids=str,
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(message)):
        render(values)


def test_a_load_balancer_without_tls_must_be_allowed_explicitly() -> None:
    chart = render({"api": {"service": {"type": "LoadBalancer", "allowHttp": True}}})
    assert chart.named("Service", "-api")["spec"]["type"] == "LoadBalancer"


def test_notifications_are_sent_by_a_separate_pod() -> None:
    """The pod is small, only its network policy allows it to reach receivers, and notifications do not wait for
    evaluations."""
    chart = render({"networkPolicy": {"notificationsTo": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}})
    main, *_ = pod(chart.named("Deployment", "-notifier"))["spec"]["containers"]
    assert main["args"] == ["aggregator", "--queues", "notify"]
    assert "fedssl-api:" in main["image"]
    evaluator, *_ = pod(chart.named("Deployment", "-evaluator"))["spec"]["containers"]
    assert evaluator["args"] == ["aggregator", "--queues", "evaluate"]
    out = {"ports": [{"port": port, "protocol": "TCP"} for port in (443, 465, 587)],
           "to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}  # fmt: skip
    let_out = [item["metadata"]["name"] for item in chart.of("NetworkPolicy") if out in item["spec"].get("egress", [])]
    assert [name.rpartition("-")[2] for name in let_out] == ["notifier"]


def test_only_the_api_has_the_sign_in_settings_and_reaches_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    at = [{"ipBlock": {"cidr": "198.51.100.0/24"}}]
    chart = render(case("everything") | {"networkPolicy": {"providerAt": at}})
    variables = _sign_in(chart, "api")
    secret = variables.pop("FEDSSL_OIDC_CLIENT_SECRET")["valueFrom"]["secretKeyRef"]
    assert secret == {"name": "fedssl-sign-in", "key": "secret"}
    for name, variable in variables.items():
        monkeypatch.setenv(name, variable["value"])
    monkeypatch.setenv("FEDSSL_DATABASE_URL", "postgresql+psycopg://x")
    monkeypatch.setenv("FEDSSL_REDIS_URL", "redis://x")
    monkeypatch.setenv("FEDSSL_STORE_PATH", "/store")
    settings = Settings()
    assert settings.oidc_issuer == "https://id.example.org:8443/realms/research"
    assert settings.oidc_roles == {"fedssl-admins": "admin", "heart-team": "cardiology:operator"}
    assert (settings.oidc_roles_claim, settings.oidc_ca_file) == ("realm_access.roles", Path("/authorities/oidc.crt"))
    volumes = pod(chart.named("Deployment", "-api"))["spec"]["volumes"]
    [trusted] = [volume["projected"]["sources"] for volume in volumes if volume["name"] == "authorities"]
    assert trusted == [{"secret": {"name": "fedssl-sign-in", "items": [{"key": "ca.crt", "path": "oidc.crt"}]}}]
    assert _sign_in(chart, "beat") == {}
    out = {"ports": [{"port": 8443, "protocol": "TCP"}], "to": at}
    let_out = [item["metadata"]["name"] for item in chart.of("NetworkPolicy") if out in item["spec"].get("egress", [])]
    assert [name.rpartition("-")[2] for name in let_out] == ["api"]
    assert _sign_in(rendered("default"), "api") == {}


def _sign_in(chart: Rendered, component: str) -> dict[str, dict[str, Any]]:
    """Return the environment variables of a component for signing in at a provider."""
    main, *_ = pod(chart.named("Deployment", f"-{component}"))["spec"]["containers"]
    return {variable["name"]: variable for variable in main["env"] if variable["name"].startswith("FEDSSL_OIDC")}


def test_a_workers_readiness_probe_checks_that_it_can_work() -> None:
    main, *_ = pod(render({"worker": CLIENT}).named("StatefulSet", "-worker-a"))["spec"]["containers"]
    assert main["readinessProbe"]["exec"]["command"][-1] == "--ready"


def test_an_added_volume_must_not_have_the_name_of_one_of_the_charts_volumes() -> None:
    used = {volume["name"] for name in CASES for item in rendered(name).workloads() for volume in _volumes(item)}
    added = {volume["name"] for name in CASES for component in case(name).values() for volume in _added(component)}
    assert {"gpus", "store", "tls"} <= used - added
    for name in sorted(used - added):
        with pytest.raises(helm.HelmError, match=f"beat.extraVolumes has a volume named {name}, "):
            render({"beat": {"extraVolumes": [{"name": name, "emptyDir": {}}]}})


def _volumes(workload: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        *pod(workload)["spec"].get("volumes", []),
        *(template["metadata"] for template in workload["spec"].get("volumeClaimTemplates", [])),
    ]


def _added(component: Any) -> list[dict[str, Any]]:
    return component.get("extraVolumes", []) if isinstance(component, dict) else []
