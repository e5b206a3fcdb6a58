"""The router chooses the replica that serves a request: `Router.choose`. Imports core only."""

from penstock.router.index import hash_text, hash_tokens
from penstock.router.policies import POLICIES, Policy, PrefixAware, policy_named
from penstock.router.request import Decision, RandomSource, Reason, Replica, ReplicaState, RoutingRequest
from penstock.router.router import Router, RouterConfig

__all__ = [
    "POLICIES",
    "Decision",
    "Policy",
    "PrefixAware",
    "RandomSource",
    "Reason",
    "Replica",
    "ReplicaState",
    "Router",
    "RouterConfig",
    "RoutingRequest",
    "hash_text",
    "hash_tokens",
    "policy_named",
]
