"""Every public function of the losses and the aggregation has a complete docstring, and its examples run."""

import doctest
import importlib
import inspect
from types import ModuleType

import pytest
import torch

from fedssl import aggregation, losses

PUBLIC = [(package, name) for package in (losses, aggregation) for name in package.__all__]


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=[f"{p.__name__}.{n}" for p, n in PUBLIC])
def test_examples_of_docstrings_run(package: ModuleType, name: str) -> None:
    member = getattr(package, name)
    if inspect.isclass(member) and issubclass(member, Exception):
        assert member.__doc__
        return
    module = importlib.import_module(member.__module__)
    (test,) = [t for t in doctest.DocTestFinder(recurse=False).find(member, name, module, {name: member}) if t.examples]
    test.globs = dict(vars(module))
    state = torch.get_rng_state()
    results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
    assert results.attempted > 0
    assert results.failed == 0
    assert torch.equal(torch.get_rng_state(), state), "the example draws from the global generator"


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=[f"{p.__name__}.{n}" for p, n in PUBLIC])
def test_docstrings_have_all_their_sections(package: ModuleType, name: str) -> None:
    member = getattr(package, name)
    if inspect.isclass(member) or name == "is_batch_norm_buffer":
        return
    text = inspect.getdoc(member) or ""
    first, blank, *_ = text.splitlines()
    assert first.endswith(".")
    assert blank == ""
    for part in ("Args:", "Returns:", "Example:", "Reference:"):
        assert f"\n{part}" in text, f"{name} has no {part}"
    for parameter in inspect.signature(member).parameters:
        assert parameter in text, f"{name} does not explain {parameter}"


@pytest.mark.parametrize("package", [losses, aggregation])
def test_all_lists_exactly_the_public_names_in_order(package: ModuleType) -> None:
    assert package.__all__ == sorted(package.__all__)
    found = {
        name
        for name, member in vars(package).items()
        if (inspect.isfunction(member) or inspect.isclass(member)) and member.__module__.startswith(package.__name__)
    }
    assert found == set(package.__all__)
