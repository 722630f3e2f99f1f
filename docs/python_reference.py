"""Write the reference of the library's public modules as pages that need nothing else: python_reference.py FOLDER.

Its text is that of the docstrings. A warning, for example of an annotation that cannot be resolved, is an error.
"""

import sys
import warnings
from pathlib import Path

import pdoc

from fedssl.models.torchvision_guard import import_torchvision

PUBLIC = (
    "fedssl.aggregation",
    "fedssl.client",
    "fedssl.data",
    "fedssl.errors",
    "fedssl.evaluation",
    "fedssl.evaluation.suite",
    "fedssl.local",
    "fedssl.losses",
    "fedssl.methods.api",
    "fedssl.models",
    "fedssl.protocol.runs",
    "fedssl.protocol.views",
    "fedssl.simulation",
)


def write(folder: Path) -> None:
    """One page a module, and an index."""
    import_torchvision()  # before anything else does
    pdoc.render.configure(docformat="google", show_source=False, search=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pdoc.pdoc(*PUBLIC, output_directory=folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    sys.stderr.write(f"the Python reference: {sys.argv[1]}/index.html\n")
