"""Nothing that arrives is unpickled: tensors are safetensors, messages are JSON, and arrays are plain numbers."""

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from celery.beat import Scheduler

from fedssl_coordinator.aggregator.beat import Beat
from fedssl_coordinator.core.celery_app import _configuration

ROOT = Path(__file__).parents[2]
SOURCES = [
    *ROOT.glob("shared/src/**/*.py"),
    *ROOT.glob("services/*/src/**/*.py"),
    *ROOT.glob("services/*/migrations/**/*.py"),
]
UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle"}
UNPICKLES = {"allow_pickle", "weights_only"}  # arguments of functions that can unpickle
EXECUTORS = {"eval", "exec", "compile", "__import__"}


def _imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


def _calls(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call with its dotted name."""
    yield from ((_name(node.func), node) for node in nodes if isinstance(node, ast.Call))


def _name(node: ast.expr) -> str:
    """Return what `ast.unparse` returns, faster for dotted names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return ast.unparse(node)


def _mistakes(path: Path) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    yield from (f"imports {name}" for name in _imported(nodes) if name in UNPICKLERS)
    for name, call in _calls(nodes):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg in UNPICKLES}
        if (
            name in ("torch.load", "torch.jit.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load")
            or name in EXECUTORS
        ):
            yield f"calls {name}"
        if name.endswith(("np.load", "numpy.load")) and given.get("allow_pickle") != "False":
            yield f"calls {name} without allow_pickle=False"
        if given.get("allow_pickle", "False") != "False" or given.get("weights_only", "True") != "True":
            yield f"calls {name} so that it unpickles"


def test_every_source_is_checked() -> None:
    assert len(SOURCES) > 250
    texts = [text for path in SOURCES if "np.load" in (text := path.read_text())]
    assert any("np.load" in name for text in texts for name, _ in _calls(ast.walk(ast.parse(text))))


@pytest.mark.parametrize("folder", ["shared", "services"])
def test_no_source_unpickles_or_executes(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): mistakes
        for path in SOURCES
        if path.is_relative_to(ROOT / folder) and (mistakes := list(_mistakes(path)))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from cloudpickle import loads", "torch.load(path)", "np.load(path)", "eval(text)",
     "np.load(path, allow_pickle=True)", "yaml.load(text, Loader)", "f(x, weights_only=False)"],
)  # fmt: skip
def test_the_check_detects_each_way_to_unpickle_or_execute(tmp_path: Path, text: str) -> None:
    path = tmp_path / "source.py"
    path.write_text(text)
    assert list(_mistakes(path))


def test_celery_accepts_and_sends_only_json(change_settings: Callable[..., None], tmp_path: Path) -> None:
    change_settings(DATABASE_URL="postgresql+psycopg://x", REDIS_URL="redis://x", STORE_PATH=str(tmp_path))
    configuration = _configuration()
    assert configuration["accept_content"] == ["json"]
    assert configuration["task_serializer"] == "json"
    assert configuration["task_ignore_result"]  # results are not stored in any form
    assert configuration["beat_scheduler"] == "fedssl_coordinator.aggregator.beat:Beat"
    assert Beat.__bases__ == (Scheduler,)  # the schedule is in memory: the default scheduler keeps a pickle on disk
