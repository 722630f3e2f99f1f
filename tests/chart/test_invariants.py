"""Properties of all objects of the chart that hold for any values."""

import re
from typing import Any

import pytest

from support.chart import CASES, Rendered, containers, pod, render, rendered

SELECTING = {"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"}
LEASE_SECONDS = 60  # the default of a run's cohort.lease_seconds
LONG_RUNNING = {"Deployment", "StatefulSet"}


@pytest.fixture(params=CASES)
def chart(request: pytest.FixtureRequest) -> Rendered:
    return rendered(request.param)


def _matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return selector["matchLabels"].items() <= labels.items()


def test_names_are_unique_labelled_and_short(chart: Rendered) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in chart.objects]
    assert len(set(names)) == len(names)
    for item in chart.objects:
        assert len(item["metadata"]["name"]) <= 63
        assert {*SELECTING, "app.kubernetes.io/managed-by", "helm.sh/chart"} <= set(item["metadata"]["labels"])
        if item["kind"] != "PersistentVolume":
            assert item["metadata"]["namespace"] == "research"


def test_selectors_select_their_own_pods_and_no_others(chart: Rendered) -> None:
    pods = {item["metadata"]["name"]: pod(item)["metadata"]["labels"] for item in chart.workloads()}
    for item in chart.of(*LONG_RUNNING):
        selector = item["spec"]["selector"]
        assert set(selector["matchLabels"]) == SELECTING
        assert [name for name, labels in pods.items() if _matches(selector, labels)] == [item["metadata"]["name"]]
    for service in chart.of("Service"):
        chosen = [name for name, labels in pods.items() if service["spec"]["selector"].items() <= labels.items()]
        assert chosen == [service["metadata"]["name"]]
    for kind in ("NetworkPolicy", "PodDisruptionBudget"):
        for item in chart.of(kind):
            key = "podSelector" if kind == "NetworkPolicy" else "selector"
            chosen = [name for name, labels in pods.items() if _matches(item["spec"][key], labels)]
            assert len(chosen) <= 1


def test_pods_are_not_labelled_with_the_charts_version(chart: Rendered) -> None:
    for item in chart.of(*LONG_RUNNING):
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(pod(item)["metadata"]["labels"])


def test_processes_are_unprivileged_with_a_read_only_file_system(chart: Rendered) -> None:
    for item in chart.workloads():
        spec = pod(item)["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        chosen = {"runAsUser", "runAsGroup", "fsGroup"} & set(spec["securityContext"])
        assert len(chosen) in (0, 3)  # either all of them or, on OpenShift, none
        assert all(spec["securityContext"][key] > 0 for key in chosen)
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in containers(item):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_images_are_pinned(chart: Rendered) -> None:
    for item in chart.workloads():
        for container in containers(item):
            assert re.search(r"(:(?!latest$)[\w.-]+|@sha256:[0-9a-f]{64})$", container["image"])


def test_containers_have_resource_limits_and_probes(chart: Rendered) -> None:
    for item in chart.workloads():
        for container in containers(item):
            assert "memory" in container["resources"]["limits"]
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        if item["kind"] in LONG_RUNNING:
            main, *_ = pod(item)["spec"]["containers"]
            assert {"startupProbe", "livenessProbe"} <= set(main)
            served = [port["name"] for port in main.get("ports", []) if port["name"] != "metrics"]
            assert ("readinessProbe" in main) == (bool(served) or main["name"] == "worker")


def test_secrets_are_referred_to_and_never_contained_in_other_objects(chart: Rendered) -> None:
    for item in chart.workloads():
        for container in containers(item):
            for variable in container.get("env", []):
                if re.search("PASSWORD|TOKEN|SECRET|KEY_ID|(DATABASE(_DIRECT)?|REDIS)_URL$|AUTH", variable["name"]):
                    assert "secretKeyRef" in variable["valueFrom"]
    for item in chart.of("ConfigMap"):
        assert not re.search("password|token|://", str(item["data"]))


def test_every_volume_is_mounted_and_every_mount_has_a_volume(chart: Rendered) -> None:
    for item in chart.workloads():
        templates = item["spec"].get("volumeClaimTemplates", [])
        there = {volume["name"] for volume in pod(item)["spec"].get("volumes", [])}
        there |= {template["metadata"]["name"] for template in templates}
        mounted = {mount["name"] for container in containers(item) for mount in container.get("volumeMounts", [])}
        assert mounted == there


def test_every_reference_is_to_an_object_of_the_chart_or_of_the_operator(chart: Rendered) -> None:
    made = {(item["kind"], item["metadata"]["name"]) for item in chart.objects}
    own = {
        "fedssl-database",
        "fedssl-redis",
        "fedssl-store",
        "fedssl-s3",
        "images",
        "images-a",
        "fedssl-tls",
        "fedssl-viewer",
        "fedssl-authorities",
        "fedssl-sign-in",
        "sign-in",
        "site",
        "site-c",
    }
    accounts = {"federation", "restricted"}
    for item in chart.workloads():
        spec = pod(item)["spec"]
        assert spec["serviceAccountName"] in accounts or ("ServiceAccount", spec["serviceAccountName"]) in made
        for container in containers(item):
            for source in container.get("envFrom", []):
                [name] = [value["name"] for key, value in source.items() if key != "prefix"]
                assert name in own or ("ConfigMap", name) in made
            for variable in container.get("env", []):
                reference = variable.get("valueFrom", {}).get("secretKeyRef", {"optional": True})
                assert reference.get("optional") or reference["name"] in own or ("Secret", reference["name"]) in made
        for volume in spec.get("volumes", []):
            if secret := volume.get("secret"):
                assert secret["secretName"] in own or ("Secret", secret["secretName"]) in made
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in own or ("PersistentVolumeClaim", claim["claimName"]) in made


def test_only_the_coordinators_pods_have_its_service_account(chart: Rendered) -> None:
    """The account may have a role that reads every client's updates."""
    for item in chart.workloads():
        component = item["metadata"]["labels"]["app.kubernetes.io/component"]
        is_coordinators = component in {"api", "aggregator", "distiller", "evaluator", "notifier", "beat", "migrations"}
        account = pod(item)["spec"]["serviceAccountName"]
        assert (account.endswith("-coordinator") or account == "federation") == is_coordinators
    for account in chart.of("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_an_upgrade_does_not_wait_for_a_gpu_that_the_old_pod_uses(chart: Rendered) -> None:
    for item in chart.of("Deployment"):
        main, *_ = pod(item)["spec"]["containers"]
        if any(name.endswith("/gpu") for name in main["resources"]["limits"]):
            assert item["spec"]["strategy"] == {"type": "Recreate"}


def test_a_pod_that_never_became_ready_is_replaced_by_an_upgrade(chart: Rendered) -> None:
    for item in chart.of("StatefulSet"):
        assert item["spec"]["podManagementPolicy"] == "Parallel"
    for service in chart.of("Service"):
        assert all(port["protocol"] == "TCP" for port in service["spec"].get("ports", []))


def test_processes_with_work_have_more_time_to_end_than_a_lease(chart: Rendered) -> None:
    for item in chart.of(*LONG_RUNNING):
        if re.search(
            "worker|aggregator|distiller|evaluator", item["metadata"]["labels"]["app.kubernetes.io/component"]
        ):
            assert pod(item)["spec"]["terminationGracePeriodSeconds"] > LEASE_SECONDS


def test_every_pod_has_a_network_policy(chart: Rendered) -> None:
    policies = chart.of("NetworkPolicy")
    if not policies:
        return
    for item in chart.workloads():
        labels = pod(item)["metadata"]["labels"]
        [policy] = [policy for policy in policies if _matches(policy["spec"]["podSelector"], labels)]
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_coordinator_pods_wait_for_the_migrations_and_restart_with_their_settings() -> None:
    before, after = rendered("default"), render({"coordinator": {"settings": {"sweepSeconds": 7}}})
    for item in before.of("Deployment"):
        [first] = pod(item)["spec"]["initContainers"]
        assert first["args"][:2] == ["migrate", "--wait"]
        changed = after.named("Deployment", item["metadata"]["name"])
        key = "checksum/settings"
        assert pod(item)["metadata"]["annotations"][key] != pod(changed)["metadata"]["annotations"][key]


def test_another_image_needs_another_migration_job() -> None:
    [before] = rendered("default").of("Job")
    [same] = render({"api": {"replicas": 5}}).of("Job")
    [other] = render({"image": {"tag": "0.2.0"}}).of("Job")
    assert before["metadata"]["name"] == same["metadata"]["name"] != other["metadata"]["name"]


def test_metrics_are_served_only_if_requested_and_only_to_scrapers() -> None:
    assert not any("ports" in pod(item)["spec"]["containers"][0] for item in rendered("worker-only").workloads())
    everything = rendered("everything")
    [monitor] = everything.of("PodMonitor")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    serving = []
    for item in everything.of(*LONG_RUNNING):
        main, *_ = pod(item)["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in main.get("ports", [])}
        if endpoint["port"] not in ports:
            continue
        serving.append(item["metadata"]["labels"]["app.kubernetes.io/component"])
        assert _matches(monitor["spec"]["selector"], pod(item)["metadata"]["labels"])
        environment = {variable["name"]: variable.get("value") for variable in main["env"]}
        [told] = [value for name, value in environment.items() if name.endswith("METRICS_PORT")]
        assert told == str(ports["metrics"])
        [policy] = [
            policy
            for policy in everything.of("NetworkPolicy")
            if _matches(policy["spec"]["podSelector"], pod(item)["metadata"]["labels"])
        ]
        [allowed] = policy["spec"]["ingress"]
        assert allowed["ports"] == [{"port": ports["metrics"], "protocol": "TCP"}]
        assert "monitoring" in str(allowed["from"])
    assert {"aggregator", "distiller", "evaluator", "notifier", "beat", "worker-hospital-a"} <= set(serving)
    assert not {"api", "postgresql", "redis"} & set(serving)


def test_probes_and_scrapes_of_the_api_use_a_port_that_clients_cannot_reach() -> None:
    everything = rendered("everything")
    main, *_ = pod(everything.named("Deployment", "-api"))["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in main["ports"]}
    environment = {variable["name"]: variable for variable in main["env"]}
    assert environment["FEDSSL_HEALTH_PORT"]["value"] == str(ports["health"])
    assert environment["FEDSSL_HEALTH_HOST"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert main[probe]["httpGet"]["port"] == "health"
    assert all(port["targetPort"] == "http" for port in everything.named("Service", "-api")["spec"]["ports"])
    [endpoint] = everything.named("ServiceMonitor", "-api")["spec"]["endpoints"]
    assert endpoint["targetPort"] == "health"
    clients, scrapers = everything.named("NetworkPolicy", "-api")["spec"]["ingress"]
    assert [port["port"] for port in clients["ports"]] == [8000]
    assert [port["port"] for port in scrapers["ports"]] == [ports["health"]]
    assert "monitoring" in str(scrapers["from"])
    assert len(rendered("default").named("NetworkPolicy", "-api")["spec"]["ingress"]) == 1


def test_a_worker_uses_the_given_authority_and_client_certificate() -> None:
    workload = rendered("everything").named("StatefulSet", "worker-hospital-c")
    [main] = pod(workload)["spec"]["containers"]
    environment = {variable["name"]: variable.get("value") for variable in main["env"]}
    assert environment["FEDSSL_WORKER_CA_FILE"] == "/tls/ca.crt"
    assert environment["FEDSSL_WORKER_CLIENT_CERT"] == "/tls/tls.crt"
    assert environment["FEDSSL_WORKER_CLIENT_KEY"] == "/tls/tls.key"
    assert {"name": "tls", "mountPath": "/tls", "readOnly": True} in main["volumeMounts"]
    assert "FEDSSL_WORKER_CA_FILE" not in str(rendered("everything").named("StatefulSet", "worker-hospital-a"))
