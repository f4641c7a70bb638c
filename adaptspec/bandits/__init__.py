"""Online learners that choose among numbered arms: numpy and the standard library only.

`make_policy(name, n_arms=..., seed=...)` makes one; `select` and `update` run it; wrappers change how it is played:
`Delayed`, `Lazy`, `Blocked`, `WithPrior`, `PerContext`, `Guard`. `merge` adds up what replicas learnt.

>>> policy = make_policy("hedge", n_arms=3, seed=0)
>>> for _ in range(200):
...     policy.update(policy.select(), Feedback.from_gains([0.2, 0.9, 0.5]))
>>> policy.select().index
1
"""

from adaptspec.bandits import baselines, exp3, hedge, linucb, normal_hedge, thompson, ucb, ucb_drifting  # noqa: F401
from adaptspec.bandits.base import PENDING_WINDOW, Feedback, Policy, PolicyContext, PolicyDecision
from adaptspec.bandits.delayed import Delayed
from adaptspec.bandits.guard import Guard
from adaptspec.bandits.lazy import Blocked, Lazy
from adaptspec.bandits.merge import merge
from adaptspec.bandits.per_context import PerContext
from adaptspec.bandits.prior import WithPrior
from adaptspec.bandits.registry import POLICIES, make_policy, register_policy

__all__ = [
    "PENDING_WINDOW",
    "POLICIES",
    "Blocked",
    "Delayed",
    "Feedback",
    "Guard",
    "Lazy",
    "PerContext",
    "Policy",
    "PolicyContext",
    "PolicyDecision",
    "WithPrior",
    "make_policy",
    "merge",
    "register_policy",
]
