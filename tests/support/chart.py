"""The Helm chart, rendered by Helm's own engine."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

CHART = Path(__file__).parents[2] / "helm" / "fedssl"
REGISTRY = "registry.example.org/ml"
CASES = sorted(path.stem for path in (CHART / "ci").glob("*.yaml"))


@dataclass(frozen=True, slots=True)
class Rendered:
    """The chart as rendered with a values file. `objects` are in the order of the templates."""

    objects: list[dict[str, Any]]
    notes: str

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [item for item in self.objects if item["kind"] in kinds]

    def named(self, kind: str, ending: str) -> dict[str, Any]:
        """Return the only object of this kind whose name has this ending."""
        [found] = [item for item in self.of(kind) if item["metadata"]["name"].endswith(ending)]
        return found

    def workloads(self) -> list[dict[str, Any]]:
        return self.of("Deployment", "StatefulSet", "Job", "Pod")


class _Loader(yaml.CSafeLoader):  # libyaml's parser takes an eighth of the time of Python's
    """Refuses a mapping with the same key twice, as Helm does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - as PyYAML has it
        read = super().construct_mapping(node, deep)
        if len(read) < len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key stands there twice", node.start_mark)
        return read


def case(name: str) -> dict[str, Any]:
    """Return the values of ci/NAME.yaml."""
    return yaml.safe_load((CHART / "ci" / f"{name}.yaml").read_text()) or {}


@cache
def rendered(name: str) -> Rendered:
    """Return the chart with the values of ci/NAME.yaml, rendered once per process. Tests must not change it."""
    return render(case(name))


def render(values: dict[str, Any], *, release: str = "site", namespace: str = "research") -> Rendered:
    """Render these values over the defaults, with a registry unless they set one. Raises helm's errors."""
    values = {**values, "image": {"registry": REGISTRY, **values.get("image", {})}}
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name=release, namespace=namespace)
    notes = "".join(text for path, text in texts.items() if path.endswith("NOTES.txt"))
    manifests = [text for path, text in texts.items() if path.endswith(".yaml")]
    return Rendered([item for text in manifests for item in yaml.load_all(text, _Loader) if item], notes)


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the pod template of a workload, or the pod itself."""
    return workload if workload["kind"] == "Pod" else workload["spec"]["template"]


def containers(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the workload's containers, including init containers."""
    spec = pod(workload)["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]
