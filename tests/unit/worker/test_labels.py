"""A worker registers for methods that train on labels only if it has such labels."""

import numpy as np
import torch

from fedssl.data.site_labels import SiteLabels
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData
from fedssl_worker.labels import OwnLabels, supported_methods


def test_methods_that_train_on_labels_need_labels() -> None:
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    plain, of_classes = ClientData(images, None), ClientData(images, torch.tensor([0, 1]))
    given = OwnLabels(SiteLabels(np.array([0, 1]), ("a", "b"), ("line 2", "line 3")), {})

    assert METHODS.keys() - supported_methods(plain, None).keys() == {"supervised", "ridge-probe", "classifier"}
    assert METHODS.keys() - supported_methods(of_classes, None).keys() == {"ridge-probe", "classifier"}
    assert METHODS.keys() - supported_methods(plain, given).keys() == {"supervised"}
    assert supported_methods(of_classes, given) == {name: method.version for name, method in METHODS.items()}
