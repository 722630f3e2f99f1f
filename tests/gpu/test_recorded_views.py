"""On a GPU, recorded views have the same bits as eager ones."""

import warnings

import pytest
import torch

from fedssl.data.image_batches import each_view
from fedssl.data.image_cache.images import ImageBatch
from fedssl.engine import recorded_views
from fedssl.engine.cuda_graphs import on_own_stream
from fedssl.engine.recorded_views import RecordedViews
from support.recorded_views import DATA, assert_equal_views


@pytest.mark.parametrize("name", DATA)
def test_recorded_views_have_the_same_bits_as_eager_ones(name: str) -> None:
    make_views = RecordedViews(4)
    with on_own_stream(torch.device("cuda")), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_equal_views(make_views, DATA[name], "cuda")
    assert make_views._capture is not None


def test_views_that_cannot_be_recorded_are_made_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(*args: object) -> object:
        views = each_view(*args)  # type: ignore[arg-type]
        assert float(views[0].sum()) > 0
        return views

    make_views, data = RecordedViews(4), DATA["as by default"]
    pixels = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8, device="cuda")
    generators = [torch.Generator("cuda").manual_seed(1) for _ in range(2)]
    with on_own_stream(torch.device("cuda")):
        monkeypatch.setattr(recorded_views, "each_view", waiting)
        with pytest.warns(UserWarning, match="views cannot be recorded"):
            found = [make_views([ImageBatch(pixels)], data, generators[0]) for _ in range(4)]
        expected = [each_view([ImageBatch(pixels)], data, generators[1]) for _ in range(4)]
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for [one], [other] in zip(found, expected, strict=True))
