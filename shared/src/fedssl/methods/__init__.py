"""Every method that this build can train, by name."""

from typing import Any

from fedssl.methods.api import Method
from fedssl.methods.feddecorr import FEDDECORR
from fedssl.methods.fedema import FEDEMA
from fedssl.methods.fedmoco import FEDMOCO
from fedssl.methods.fedprox import FEDPROX
from fedssl.methods.fedrlc import FEDRLC
from fedssl.methods.fedu import FEDU
from fedssl.methods.fedu2 import FEDU2
from fedssl.methods.fedx import FEDX
from fedssl.methods.ldawa import LDAWA
from fedssl.methods.objectives.align_uniform import FEDALIGNUNIFORM
from fedssl.methods.objectives.byol import FEDBYOL
from fedssl.methods.objectives.cross_entropy import SUPERVISED
from fedssl.methods.objectives.cross_view import FLESD
from fedssl.methods.objectives.dictionary_contrast import FEDCA
from fedssl.methods.objectives.orchestra import ORCHESTRA
from fedssl.methods.objectives.protocl import FEDPROTOCL
from fedssl.methods.objectives.simclr import FEDSIMCLR
from fedssl.methods.objectives.simsiam import FEDSIMSIAM
from fedssl.methods.scaffold import SCAFFOLD
from fedssl.methods.single import SINGLE
from fedssl.methods.ssd import SSD

METHODS: dict[str, Method[Any]] = {
    method.name: method
    for method in (
        FEDALIGNUNIFORM,
        FEDBYOL,
        FEDCA,
        FEDDECORR,
        FEDEMA,
        FEDMOCO,
        FEDPROX,
        FEDPROTOCL,
        FEDRLC,
        FEDSIMCLR,
        FEDSIMSIAM,
        FEDU,
        FEDU2,
        FEDX,
        FLESD,
        LDAWA,
        ORCHESTRA,
        SCAFFOLD,
        SINGLE,
        SSD,
        SUPERVISED,
    )
}

__all__ = ["METHODS", "Method"]
