"""Read run specs: TOML or YAML, changed by `--set key=value`. Errors name the key and how to correct it."""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedssl.cli.errors import UsageError
from fedssl.errors import SpecError
from fedssl.protocol.data import PartitionConfig
from fedssl.protocol.explanation import spec_of
from fedssl.protocol.runs import RunSpec

if TYPE_CHECKING:
    import yaml

_MAX_YAML_VALUES = 100_000
_TOO_DEEP = "it is nested too deeply"


def read_spec(source: str, changes: Sequence[str] | None = None) -> RunSpec:
    """Read the spec in a file, or on standard input for `-`, and apply the changes.

    Raises:
        SpecError: if it cannot be read, or is not a run spec. The message has a line per wrong key.
    """
    values = read_values(source)
    for change in changes or ():
        apply_change(values, change)
    return spec_of(values, "the spec" if source == "-" else source)


def require_partition(spec: RunSpec, source: str) -> PartitionConfig:
    """Return the partition of a spec. Raises UsageError if it has none."""
    if spec.partition is None:
        raise UsageError(
            f"{source} has no [partition] section, which names the images to train on: see examples/demo.toml"
        )
    return spec.partition


def read_values(source: str) -> dict[str, Any]:
    """Read the keys and values in a file or on standard input, without checking them. Raises SpecError."""
    if source == "-":
        name, suffix = "the spec on standard input", ""
        if sys.stdin is None:
            raise SpecError(f"cannot read {name}: it is closed")
    else:
        name, suffix = source, Path(source).suffix.lower()
        if suffix not in (".toml", ".yaml", ".yml", ".json"):
            raise SpecError(f"{source}: the name of a spec must end in .toml, .yaml or .json")
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read {name}: {getattr(error, 'strerror', 'it is not UTF-8 text')}") from None
    values = _parse(text.removeprefix("\ufeff"), suffix, name)  # some editors begin a file with this mark
    if not isinstance(values, dict):
        raise SpecError(f"{name} must be a table of keys and values, such as `num_rounds = 10`")
    return values


def apply_change(values: dict[str, Any], change: str) -> None:
    """Set one key of nested tables, and create missing tables. Raises SpecError.

    >>> values = {"training": {"batch_size": 128}}
    >>> apply_change(values, "training.batch_size=64")
    >>> apply_change(values, "method.name=fedbyol")
    >>> values
    {'training': {'batch_size': 64}, 'method': {'name': 'fedbyol'}}
    """
    path, equals, text = change.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SpecError(f"--set {change}: write it as KEY=VALUE, for example --set training.batch_size=64")
    table = values
    for depth, key in enumerate(keys[:-1], start=1):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise SpecError(f"--set {change}: {'.'.join(keys[:depth])} is a value, which has no keys")
    table[keys[-1]] = _value(text.strip())


def _parse(text: str, suffix: str, name: str) -> Any:
    if suffix == ".toml":
        return _parse_toml(text, name)
    if suffix:
        return _parse_yaml(text, name)
    # Standard input has no file name that would show the format. No text is a table in both TOML and YAML.
    try:
        return _parse_toml(text, name)
    except SpecError as not_toml:
        try:
            values = _parse_yaml(text, name)
        except SpecError:
            raise not_toml from None
        if isinstance(values, dict):
            return values
        raise


def _parse_toml(text: str, name: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{name} is not valid TOML: {error}") from None
    except RecursionError:
        raise SpecError(f"{name} is not valid TOML: {_TOO_DEEP}") from None
    except ValueError:  # int() reads 4300 digits at most
        raise SpecError(f"{name} is not valid TOML: a number has too many digits") from None


def _parse_yaml(text: str, name: str) -> Any:
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        tree = loader.get_single_node()
        if tree is not None and (twice := _repeated_key(tree, set())) is not None:
            raise SpecError(f"{name}: the key {twice.value} is given twice, again in line {twice.start_mark.line + 1}")
        if tree is not None and _num_values(tree, {}) > _MAX_YAML_VALUES:
            raise SpecError(f"{name} has more than {_MAX_YAML_VALUES:,} values, if each alias is written out")
        return {} if tree is None else loader.construct_document(tree)
    except ValueError:  # the loader reads dates, and int() 4300 digits at most
        raise SpecError(f"{name} is not valid YAML: a date does not exist, or a number has too many digits") from None
    except (yaml.YAMLError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or _TOO_DEEP
        where = f" (line {place.line + 1}, column {place.column + 1})" if place else ""
        raise SpecError(f"{name} is not valid YAML: {problem}{where}") from None


def _repeated_key(node: "yaml.Node", visited: set[int]) -> "yaml.Node | None":
    """Return the first key that a YAML mapping has twice. PyYAML would silently use the last value.

    `visited` are the ids of the nodes that need not be checked again: an alias is the node that it refers to.
    """
    import yaml

    if id(node) in visited:
        return None
    visited.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            name = key.value if isinstance(key.value, str) else id(key)
            if name in seen:
                return key  # type: ignore[no-any-return]
            seen.add(name)
            if (found := _repeated_key(value, visited)) is not None:
                return found
    elif isinstance(node, yaml.SequenceNode):
        return next((found for item in node.value if (found := _repeated_key(item, visited)) is not None), None)
    return None


def _num_values(node: "yaml.Node", known: dict[int, int]) -> int:
    """Return how many values a node holds if each alias is written out. A few lines of aliases can stand for 10^9."""
    import yaml

    if id(node) not in known:
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = (each if isinstance(each, tuple) else (each,) for each in children)
        known[id(node)] = 1 + sum(_num_values(each, known) for pair in pairs for each in pair)
    return known[id(node)]


def _value(text: str) -> Any:
    if text == "null":
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, a number of too many digits, or nested too deeply
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text
