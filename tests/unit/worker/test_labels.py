"""A worker registers methods that train on labels only if it has such labels."""

import numpy as np

from fedssl.data.site_labels import SiteLabels
from fedssl.methods import METHODS
from fedssl_worker.labels import OwnLabels, supported_methods


def test_methods_that_train_on_labels_need_labels() -> None:
    given = OwnLabels(SiteLabels(np.array([0, 1]), ("a", "b"), ("line 2", "line 3")), {})

    assert METHODS.keys() - supported_methods(None, has_labels=False).keys() == {
        "supervised",
        "ridge-probe",
        "classifier",
    }
    assert METHODS.keys() - supported_methods(None, has_labels=True).keys() == {"ridge-probe", "classifier"}
    assert METHODS.keys() - supported_methods(given, has_labels=False).keys() == {"supervised"}
    assert supported_methods(given, has_labels=True) == {name: method.version for name, method in METHODS.items()}
