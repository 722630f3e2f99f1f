"""`fedssl weights` against a real coordinator."""

import json
from pathlib import Path

import pytest

from support.commands import Fedssl
from support.coordinator import Coordinator
from support.weights import encoder_file

pytestmark = pytest.mark.integration


def test_weights_are_added_listed_shown_and_removed(coordinator: Coordinator, fedssl: Fedssl, tmp_path: Path) -> None:
    file = encoder_file(tmp_path)
    added = fedssl("weights", "add", file, "--as", "start")
    assert added.exit_code == 0, added.output
    view = coordinator.client.weights_named("start")
    assert f"start is registered: 12 tensors of fedssl, digest {view.digest}" in added.stderr
    assert json.loads(fedssl("weights", "ls", "--format", "json").stdout) == [view.model_dump(mode="json")]
    assert view.digest[:12] in fedssl("weights", "ls").stdout
    assert view.source_digest in fedssl("weights", "show", "start").stdout
    assert fedssl("weights", "remove", "start").exit_code == 0
    assert fedssl("weights", "remove", "start").exit_code != 0
    assert "cannot be a name" in fedssl("weights", "add", file, "--as", "Not A Name").stderr
