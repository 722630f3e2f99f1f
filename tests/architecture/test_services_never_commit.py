"""Services and repositories work in the caller's transaction: they do not open, commit or roll back transactions."""

import ast
from pathlib import Path

import pytest

import fedssl_coordinator

ROOT = Path(fedssl_coordinator.__file__).parent
MODULES = sorted(path for name in ("service.py", "repository.py") for path in ROOT.rglob(name))
OWNERS = {"transaction", "exclusive", "session_dependency", "engine", "direct_engine"}
ENDS = {"commit", "rollback"}


def test_services_are_found() -> None:
    assert len(MODULES) > 20


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_service_never_opens_or_ends_a_transaction(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call)
              and isinstance(node.func, ast.Attribute)}  # fmt: skip
    assert not imported & OWNERS, "take the session as an argument; endpoints, commands and tasks own transactions"
    assert not called & ENDS
