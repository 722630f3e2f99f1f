"""The reference of the REST API has every operation and object, and no broken links."""

import re

from support.openapi import api_document, operations
from support.pages import Browser


def test_the_reference_describes_every_operation_and_object(viewer: Browser) -> None:
    document = api_document()
    text = viewer.get("/reference").text
    described = {f"{verb} {path}" for verb, path in re.findall(r'ref-v">(\w+)</b> <code>([^<]+)</code>', text)}
    assert described == {str(operation) for operation in operations(document)}
    ids = set(re.findall(r'id="([^"]+)"', text))
    assert {f"s-{name}" for name in document["components"]["schemas"]} <= ids
    assert set(re.findall(r'href="#([^"]+)"', text)) - {"main"} <= ids
    run = text[text.index('id="post-v1-runs"') :]
    assert "RunCreate" in run[: run.index("</section>")]
    assert "admin, operator" in run[: run.index("</section>")]
    assert len(text) < 700_000
