"""No module imports itself through others, counting the imports inside functions and under TYPE_CHECKING."""

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

PACKAGES = ("fedssl", "fedssl_coordinator", "fedssl_local", "fedssl_worker")


def test_no_module_is_part_of_an_import_circle() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert all(any(name.startswith(f"{package}.") for name in imports) for package in PACKAGES)
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
