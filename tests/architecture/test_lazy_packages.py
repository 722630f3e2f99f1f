"""Packages that import their modules on first use: `import fedssl.evaluation` loads no torch."""

import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

LAZY = ("fedssl.client", "fedssl.data", "fedssl.engine", "fedssl.evaluation")


@pytest.mark.parametrize("name", LAZY)
def test_every_exported_name_resolves(name: str) -> None:
    package = import_module(name)
    assert package.__all__
    assert all(getattr(package, exported) is not None for exported in package.__all__)


@pytest.mark.parametrize("name", LAZY)
def test_no_exported_name_is_also_a_module(name: str) -> None:
    # The import of a submodule sets the package's attribute of that name, which would hide the exported object.
    package = import_module(name)
    assert not {module.name for module in pkgutil.iter_modules(package.__path__)} & set(package.__all__)


def test_torch_free_helpers_do_not_load_torch() -> None:
    modules = ", ".join(
        f"fedssl.{name}"
        for name in ("client.addresses", "engine.gpu_memory", "evaluation.monitoring", "evaluation.selection")
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
