"""The additional image streams of a batch."""

import ast
from pathlib import Path

import pytest
import torch

import fedssl.methods
from fedssl.errors import DataError
from fedssl.methods.api import ClientData
from fedssl.methods.composition.streams import draw_batches, draw_streams, quarter_turns, turned
from support.methods import context, method_spec


def test_images_are_rotated_by_quarter_turns_in_sequence() -> None:
    images = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    quarters = quarter_turns(6, torch.device("cpu")).tolist()
    assert quarters == [0, 1, 2, 3, 0, 1]
    for image, result, quarter in zip(images, turned(images), quarters, strict=True):
        assert torch.equal(torch.rot90(image, quarter, dims=(1, 2)), result)


def test_references_cover_all_images_once_per_epoch() -> None:
    spec = method_spec("fedsimclr", training={"batch_size": 4})
    data = ClientData(torch.arange(12, dtype=torch.uint8).view(12, 1, 1, 1))
    ctx = context(spec, 1, "client-0")
    draw = draw_streams(frozenset({"references", "rotated"}), data, 0, ctx)
    drawn = [draw(start, torch.arange(start, start + 4)) for start in (0, 4, 8)]
    references = torch.cat([streams["references"].pixels for streams in drawn]).flatten().tolist()
    assert sorted(references) == list(range(12))
    assert references != list(range(12))
    assert [streams["rotated"].pixels.flatten().tolist() for streams in drawn] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    other = draw_streams(frozenset({"references"}), data, 1, ctx)(0, torch.arange(4))
    assert not torch.equal(other["references"].pixels, drawn[0]["references"].pixels)


def test_batches_and_references_have_at_most_one_image_of_each_group() -> None:
    spec = method_spec("fedsimclr", training={"batch_size": 4}, data={"distinct_groups": True})
    ctx = context(spec, 1, "client-0")
    groups = torch.tensor([0] * 5 + [1] * 3 + [2, 2, 3, 4])
    data = ClientData(torch.arange(12, dtype=torch.uint8).view(12, 1, 1, 1), groups=groups)
    batches = draw_batches(data, torch.Generator().manual_seed(0), ctx)
    draw = draw_streams(frozenset({"references"}), data, 0, ctx)
    num_drawn = 0
    for batch in batches:
        references = draw(num_drawn, batch)["references"].pixels.flatten().long()
        num_drawn += len(batch)
        assert len(references) == len(batch)
        assert len(set(groups[references].tolist())) == len(set(groups[batch].tolist())) == len(batch)
    assert num_drawn == 10, "three batches have one image each of the first group"
    part = data.at(torch.tensor([0, 5, 8]))
    assert part.groups is not None
    assert part.groups.tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=r"no groups, which data\.distinct_groups needs"):
        draw_batches(ClientData(data.images), torch.Generator(), ctx)


def test_a_fraction_of_an_epoch_consists_of_its_first_batches() -> None:
    data = ClientData(torch.arange(20, dtype=torch.uint8).view(20, 1, 1, 1), groups=torch.arange(20))
    for in_groups in ({}, {"data": {"distinct_groups": True}}):
        whole, part = (
            draw_batches(
                data,
                torch.Generator().manual_seed(0),
                context(method_spec("fedsimclr", training={"batch_size": 4, **fraction}, **in_groups), 1, "client-0"),
            )
            for fraction in ({}, {"epoch_fraction": 0.5})
        )
        assert (len(whole), len(part)) == (5, 3)
        assert all(torch.equal(*pair) for pair in zip(whole, part, strict=False))


def test_only_streams_draws_batches_of_a_clients_images() -> None:
    """Otherwise a method could put two images of a group into a batch. The other modules draw public images."""
    [folder] = fedssl.methods.__path__
    found = {
        path.name
        for path in Path(folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and {"epoch_batches", "distinct_batches"} & {each.name for each in node.names}
    }
    assert found == {"streams.py", "dictionary_contrast.py", "similarity_distillation.py"}
