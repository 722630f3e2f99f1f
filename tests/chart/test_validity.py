"""Every values file of ci/ gives objects that Helm and several versions of Kubernetes accept strictly."""

import helm_python as helm
import kubernetes_validate
import pytest

from support.chart import CASES, CHART, case, rendered

VERSIONS = ("1.27", "1.31", "1.34")
# These kinds are not part of Kubernetes, so there are no schemas here.
CUSTOM = {"ScaledObject", "TriggerAuthentication", "ServiceMonitor", "PodMonitor", "PrometheusRule", "HTTPRoute"}
HARMLESS = "icon is recommended"


@pytest.mark.parametrize("name", CASES)
def test_helm_lint_finds_no_problems(name: str) -> None:
    found = helm.lint(CHART, case(name))
    assert [message for message in found["messages"] if message["error"] != HARMLESS] == []
    assert found["errors"] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_kubernetes_accepts_every_object(name: str, version: str) -> None:
    for item in rendered(name).objects:
        if item["kind"] in CUSTOM:
            continue
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            pytest.fail(f"{item['kind']} {item['metadata']['name']}: {list(error.path)}: {error.message}")


def test_one_values_file_creates_every_kind_of_object() -> None:
    made = {item["kind"] for name in CASES for item in rendered(name).objects}
    assert {item["kind"] for item in rendered("everything").objects} == made
    assert made >= CUSTOM
