"""Single-client training: every client by itself, the lower baseline of FedU (and of FLESD, as Min-Local).

FedU (Zhuang et al. 2021) trains BYOL for 500 epochs at each client and reports the clients' mean; FLESD the minimum
over clients of its own objective after 200 epochs. The merge rule `local` keeps a client's weights from round to round,
the reducer `none` combines nothing, and the update holds no tensor; the two go onto any other method by config. All
clients start from the run's initial weights.

The trained encoders are the clients' states (`Result.client_states` in a simulation: `encoder.*`); the run's own model
stays what it was before the first round. R rounds of E epochs are R * E epochs of training, in which the optimiser's
momentum starts anew every round: take one round of all epochs for none of that. A client that is not sampled in a round
does not train in it.
"""

from fedssl.methods.objectives.byol import BYOL
from fedssl.methods.registry import composed_method
from fedssl.protocol.methods.single import SingleConfig

SINGLE = composed_method(SingleConfig, BYOL)
