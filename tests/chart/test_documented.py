"""The objects of the chart as docs/deploy.md describes them."""

import re
from pathlib import Path

from support.chart import pod, rendered

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy.md"
COMPONENT = "app.kubernetes.io/component"


def test_a_restore_stops_whoever_could_remove_a_file() -> None:
    """That is everybody but the API, whose pod has the store too: the files are unpacked before the rows are there."""
    deployments = rendered("default").of("Deployment")
    [stopped] = re.findall(rf"{COMPONENT} in \((.*?)\)", DEPLOY.read_text())
    for labels in (
        [item["metadata"]["labels"] for item in deployments],
        [pod(item)["metadata"]["labels"] for item in deployments],
    ):
        assert {label[COMPONENT] for label in labels} == {*stopped.split(","), "api"}
    api = pod(rendered("default").named("Deployment", "-api"))["spec"]
    assert {"name": "store", "mountPath": "/var/lib/fedssl"} in api["containers"][0]["volumeMounts"]
