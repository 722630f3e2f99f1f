"""One client's images in the form that a run's method needs: with labels from a file, as numbers of the run's
classes."""

import torch

from fedssl.data import ImageData
from fedssl.data.image_batches import Images
from fedssl.data.image_cache.build import CachedData
from fedssl.data.site_labels import SiteLabels, own_labels, require_columns, split_labels, with_run_classes
from fedssl.methods.api import ClientData
from fedssl.protocol.methods.site_labels import SiteLabelsConfig
from fedssl.protocol.runs import RunSpec
from fedssl.seeding import derive_seed


def wants_site_labels(spec: RunSpec) -> SiteLabelsConfig | None:
    """Return the config that names the classes of the sites' labels, or None if the method does not use them."""
    return spec.method if isinstance(spec.method, SiteLabelsConfig) else None


def client_data(images: ImageData | CachedData, spec: RunSpec, client_id: str) -> ClientData:
    """Return a data set's images, on the CPU or in their cache, with its own labels.

    Raises DataError if the labels do not fit the run.
    """
    own = images.images if isinstance(images, CachedData) else torch.from_numpy(images.images)
    if (config := wants_site_labels(spec)) is None:
        labels, groups = (None if each is None else torch.from_numpy(each) for each in (images.labels, images.groups))
        return ClientData(own, labels, groups=groups)
    found = own_labels(images, f"the images of {client_id}")
    found = with_run_classes(found, config.classes, multi_label=config.multi_label)
    return with_site_labels(own, found, spec, client_id)


def with_site_labels(images: Images, labels: SiteLabels, spec: RunSpec, client_id: str) -> ClientData:
    """Return a client's images with their labels, some of which are held out, drawn by the run's seed.

    Args:
        images: uint8 or int16 (N, C, size, size), or in a cache.
        labels: of these images, as numbers of the run's classes; -1 for an image without a label.
        client_id: the client, whose name draws its split.

    Raises DataError as :func:`fedssl.data.site_labels.require_columns`.
    """
    require_columns(labels)
    config = wants_site_labels(spec)
    assert config is not None, "only for such methods"
    split = split_labels(labels, config.test_share, derive_seed(spec.seed, 0, client_id, "site labels"))
    held_out = torch.zeros(len(images), dtype=torch.bool)
    held_out[torch.from_numpy(split.test)] = True
    device = images.device
    groups = None if labels.groups is None else torch.from_numpy(labels.groups)
    return ClientData(images, torch.from_numpy(labels.labels).to(device), held_out.to(device), groups)
