"""The Python reference builds without a warning, loads nothing from other hosts, and contains all public names."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "python_reference.py"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("python_reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_has_a_docstring() -> None:
    for name in _script().PUBLIC:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            member = getattr(module, public)
            if inspect.isfunction(member) or inspect.isclass(member):
                assert inspect.getdoc(member), f"{name}.{public} has no docstring"


@pytest.mark.full
def test_the_reference_contains_every_public_name_and_loads_nothing(tmp_path: Path) -> None:
    script = _script()
    script.write(tmp_path)
    for name in script.PUBLIC:
        text = (tmp_path / f"{name.replace('.', '/')}.html").read_text()
        assert not re.findall(r'(?:src|<link[^>]*href)="https?:', text), "it loads something from elsewhere"
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            assert f'id="{public}"' in text, f"{name}.{public}"
