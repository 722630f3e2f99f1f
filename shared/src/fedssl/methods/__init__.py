"""Every method that this build can train, by name."""

from typing import Any

from fedssl.methods.api import Method
from fedssl.methods.fedalignuniform import FEDALIGNUNIFORM
from fedssl.methods.fedbyol import FEDBYOL
from fedssl.methods.fedca import FEDCA
from fedssl.methods.feddecorr import FEDDECORR
from fedssl.methods.fedema import FEDEMA
from fedssl.methods.fedmoco import FEDMOCO
from fedssl.methods.fedprotocl import FEDPROTOCL
from fedssl.methods.fedprox import FEDPROX
from fedssl.methods.fedrlc import FEDRLC
from fedssl.methods.fedsimclr import FEDSIMCLR
from fedssl.methods.fedsimsiam import FEDSIMSIAM
from fedssl.methods.fedu import FEDU
from fedssl.methods.fedu2 import FEDU2
from fedssl.methods.fedx import FEDX
from fedssl.methods.flesd import FLESD
from fedssl.methods.ldawa import LDAWA
from fedssl.methods.orchestra import ORCHESTRA
from fedssl.methods.scaffold import SCAFFOLD
from fedssl.methods.single import SINGLE
from fedssl.methods.ssd import SSD
from fedssl.methods.supervised import SUPERVISED

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
