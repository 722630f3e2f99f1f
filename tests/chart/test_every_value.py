"""Every value of the chart changes what is installed: no value is accepted but ignored."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import helm_python as helm
import pytest
import yaml

from support.chart import CASES, CHART, REGISTRY, case

pytestmark = pytest.mark.full

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
PEER = [{"ipBlock": {"cidr": "198.51.100.7/32"}}]
RULES = {"beat": [{"ports": [{"port": 4711}]}]}
VOLUME = {"name": "trial", "emptyDir": {}}

# Keyed by the last word of a value's path, or by the whole path if the last word is ambiguous.
TRIALS: dict[str, Any] = {
    "accessModes": ["ReadWriteMany"],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "api.oidc.roles": {"trial": "viewer"},
    "api.oidc.scopes": "openid trial",
    "bucket": "trial",
    "cacheSize": "7Gi",
    "coordinator": "https://trial.example.org",
    "csi": {"driver": "trial.example.org"},
    "digest": f"sha256:{'7' * 64}",
    "endpoint": "https://trial.example.org:8443",
    "extraContainers": [{"name": "trial", "image": "registry.example.org/trial:1"}],
    "extraEgress": RULES,
    "extraEnv": [{"name": "TRIAL", "value": "1"}],
    "extraEnvFrom": [{"secretRef": {"name": "trial"}}],
    "extraIngress": RULES,
    "extraVolumeMounts": [{"name": "trial", "mountPath": "/trial"}],
    "extraVolumes": [VOLUME],
    "hostPath": "/trial",
    "image.pullSecrets": ["trial"],
    "interval": "7s",
    "issuer": "https://trial.example.org:8443",
    "labelNames": "/trial.csv",
    "limits": {"memory": "7Gi"},
    "loadBalancerSourceRanges": ["198.51.100.7/32"],
    "maxUnavailable": 7,
    "mountOptions": ["trial"],
    "parentRefs": [{"name": "trial"}],
    "podSecurityContext": {"fsGroup": 4711},
    "publicEndpoint": "https://trial.example.org:8443",
    "requests": {"memory": "7Mi"},
    "resource": "example.org/trial",
    "size": "7Gi",
    "timeouts": {"request": "7s"},
    "tolerations": [{"key": "trial", "operator": "Exists"}],
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "trial", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
    "trustedProxies": ["198.51.100.7/32"],
    "worker.clients": {"trial": {"data": {"hostPath": "/trial"}}},
    "worker.settings.labels": "/trial.csv",
}
# Other values that a value needs to have an effect or to be accepted.
TOGETHER: dict[str, dict[str, Any]] = {
    "api.service.allowHttp": {"type": "LoadBalancer"},
    "api.service.type": {"allowHttp": True},
    "cooldownSeconds": {"enabled": True},
    "extraVolumeMounts": {"extraVolumes": [VOLUME]},
    "jobsPerReplica": {"enabled": True},
    "labelNames": {"labels": "own"},
    "maxReplicas": {"enabled": True},
    "maxUnavailable": {"enabled": True},
    "minReplicas": {"enabled": True},
    "mountOptions": {"bucket": "trial"},
    "resource": {"count": 1},
    "store.type": {"s3": {"bucket": "trial"}},
    "worker.tls.certificate": {"secretName": "trial", "key": "trial"},
    "worker.tls.key": {"secretName": "trial", "certificate": "trial"},
}

Path = tuple[str, ...]


def _leaves(schema: dict[str, Any], values: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    for key, below in schema["properties"].items():
        if key not in values:
            continue
        if "$ref" in below:
            below = {**SCHEMA["$defs"][below["$ref"].rsplit("/", 1)[1]], **below}
        if "properties" in below and isinstance(values[key], dict) and key != "podSecurityContext":
            yield from _leaves(below, values[key], (*path, key))
        else:
            yield (*path, key), below


def _trial(path: Path, schema: dict[str, Any], current: Any) -> Any:
    """Return a value that the schema accepts and that differs from the current one."""
    for name in (".".join(path), path[-1]):
        if name in TRIALS:
            return TRIALS[name]
    kinds = schema.get("type")
    if "enum" in schema:
        return next(value for value in schema["enum"] if value != current)
    if kinds == "boolean":
        return not current
    if "number" in kinds:
        return 0.5
    if "integer" in kinds:
        least, most = schema.get("minimum", 1), schema.get("maximum", 7)
        return current - 1 if current == most else min(most, max(least, 7))
    if kinds == "array":
        return PEER
    return {"trial": "trial"} if kinds == "object" else "trial"


def _get(values: Any, path: Path) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _with(values: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    changed = deepcopy(values)
    place = changed
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = value
    return changed


@pytest.fixture(scope="module")
def rendered() -> Iterator[Callable[[dict[str, Any]], str | None]]:
    """Yield a function that renders the chart without the Secrets, whose passwords are random, or returns None if
    the values are refused."""
    known: dict[str, str | None] = {}
    with helm.Chart.load(CHART) as chart:

        def render(values: dict[str, Any]) -> str | None:
            values = {**values, "image": {"registry": REGISTRY, **values.get("image", {})}}
            key = json.dumps(values, sort_keys=True)
            if key not in known:
                try:
                    files = chart.render(values, name="site", namespace="research")
                except helm.HelmError:
                    known[key] = None
                else:
                    documents = [text for name in sorted(files) for text in files[name].split("\n---\n")]
                    known[key] = "\n".join(text for text in documents if "\nkind: Secret\n" not in text)
            return known[key]

        yield render


LEAVES = dict(_leaves(SCHEMA, VALUES))
# The case that turns everything on comes first. In the last case a client has the place of images that is tried.
BASES = [case(name) for name in sorted(CASES, key=lambda name: name != "everything")] + [
    {"worker": {"clients": {"a": {}}}}
]


@pytest.mark.parametrize("path", LEAVES, ids=".".join)
def test_a_value_changes_what_is_installed(rendered: Callable[[dict[str, Any]], str | None], path: Path) -> None:
    for base in BASES:
        start = base
        for key, value in TOGETHER.get(".".join(path), TOGETHER.get(path[-1], {})).items():
            start = _with(start, (*path[:-1], key), value)
        current = _get(start, path)
        if current is None:
            current = _get(VALUES, path)
        after = rendered(_with(start, path, _trial(path, LEAVES[path], current)))
        if after is not None and after != rendered(start):
            return
    pytest.fail("no values file of ci/ accepts it and changes with it")
