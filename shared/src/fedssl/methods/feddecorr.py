"""FedDecorr, as in SSD's tables: FedAlignUniform with the add-on `decorrelation` on the embeddings.

Shi et al. 2023; equations, variants and deviations are in `decorrelation.py`. FedDecorr itself is supervised, with the
term on the representation: the method `supervised` with this add-on on "h". What SSD's row ran is not documented; the
same loss and optimiser as its other rows, with the method's component added, is what fits its numbers.
"""

from fedssl.methods.objectives.align_uniform import AlignUniform
from fedssl.methods.registry import composed_method
from fedssl.protocol.methods.feddecorr import FedDecorrConfig

FEDDECORR = composed_method(FedDecorrConfig, AlignUniform)
