"""Secure aggregation: a coordinator learns the sum of vectors of integers, and no single one.

SecAgg+ (Bell et al. 2020) without a network: objects that take and return messages. `SecureClient` is one client in one
round, `SecureServer` the coordinator. Primitives come from `cryptography`; no one outside this project has reviewed the
protocol (docs/adr/0011-secure-aggregation.md). Simulations (`fedssl.engine.secure_rounds`), coordinators and workers
use it.
"""

from fedssl.secure_aggregation.client import SecureClient
from fedssl.secure_aggregation.context import Member, RoundContext
from fedssl.secure_aggregation.errors import (
    Conflict,
    InvalidMessage,
    NoSum,
    PhaseClosed,
    Refused,
    SecureAggregationError,
)
from fedssl.secure_aggregation.limits import OwnerLimits
from fedssl.secure_aggregation.masks import Words
from fedssl.secure_aggregation.server import SecureServer
from fedssl.secure_aggregation.thresholds import Thresholds, choose_thresholds
from fedssl.secure_aggregation.unmasking import UnmaskedSum

__all__ = [
    "Conflict",
    "InvalidMessage",
    "Member",
    "NoSum",
    "OwnerLimits",
    "PhaseClosed",
    "Refused",
    "RoundContext",
    "SecureAggregationError",
    "SecureClient",
    "SecureServer",
    "Thresholds",
    "UnmaskedSum",
    "Words",
    "choose_thresholds",
]
