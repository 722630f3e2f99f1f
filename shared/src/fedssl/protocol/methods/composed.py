"""What every composed method's config has: one objective's own fields, add-ons, a merge rule and a reducer."""

from pydantic import Field

from fedssl.protocol.methods.base import MethodConfig
from fedssl.protocol.methods.merges import AnyMerge, OverwriteConfig
from fedssl.protocol.methods.reducers import AnyReducer, MeanConfig


class ComposedConfig(MethodConfig):
    """An objective's parameters, and the parts that go with it."""

    merge: AnyMerge = Field(
        default=OverwriteConfig(), description="What a client does with the global model that it receives."
    )
    reducer: AnyReducer = Field(default=MeanConfig(), description="How the coordinator combines the clients' weights.")
