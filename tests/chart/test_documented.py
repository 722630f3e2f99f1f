"""The chart's objects match docs/deploy.md."""

import re
import textwrap
from pathlib import Path

import helm_python as helm
import pytest
import yaml

from support.chart import CHART, pod, render, rendered

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy.md"
VALUES = [textwrap.dedent(block) for block in re.findall(r"^ *```yaml\n(.*?)^ *```$", DEPLOY.read_text(), re.M | re.S)]
INSTALL = "helm install fedssl helm/fedssl"
COMPONENT = "app.kubernetes.io/component"


def test_a_restore_stops_every_process_that_could_remove_a_file() -> None:
    """These are all components but the API, whose pod has the store too: the files are unpacked before the rows
    exist."""
    deployments = rendered("default").of("Deployment")
    [stopped] = re.findall(rf"{COMPONENT} in \((.*?)\)", DEPLOY.read_text())
    for labels in (
        [item["metadata"]["labels"] for item in deployments],
        [pod(item)["metadata"]["labels"] for item in deployments],
    ):
        assert {label[COMPONENT] for label in labels} == {*stopped.split(","), "api"}
    api = pod(rendered("default").named("Deployment", "-api"))["spec"]
    assert {"name": "store", "mountPath": "/var/lib/fedssl"} in api["containers"][0]["volumeMounts"]


def test_the_documented_command_deletes_the_migration_job() -> None:
    """Helm creates an unchanged Job only if it is missing."""
    [selector] = re.findall(r"^\$ kubectl .* delete job --selector (\S+)$", DEPLOY.read_text(), re.M)
    [job] = rendered("default").of("Job")
    labels = {**job["metadata"]["labels"], "app.kubernetes.io/instance": "fedssl"}
    assert dict(each.split("=") for each in selector.split(",")).items() <= labels.items()


@pytest.mark.parametrize("values", VALUES, ids=lambda text: text.split(":")[0])
def test_the_documented_values_are_accepted(values: str) -> None:
    assert render(yaml.safe_load(values)).workloads()


def test_the_documented_installation_sets_every_required_value() -> None:
    documented = [
        path for path in (ROOT / "README.md", DEPLOY) if f"{INSTALL} --set image.registry=" in _commands(path)
    ]
    assert len(documented) == 2
    with helm.Chart.load(CHART) as chart:
        chart.render({"image": {"registry": "registry.example.org/ml"}}, name="fedssl", namespace="fedssl")
        with pytest.raises(helm.HelmError, match=r"image\.registry"):
            chart.render({}, name="fedssl", namespace="fedssl")


def _commands(path: Path) -> str:
    return path.read_text().replace(" --namespace fedssl --create-namespace", "")
