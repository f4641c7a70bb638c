"""Prometheus metrics of a serving policy, with names like vLLM's and an `arm` label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.serving.types import Decision, StepOutcome

if TYPE_CHECKING:
    from adaptspec.serving.policy import ServingPolicy

PREFIX = "adaptspec:"

COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "spec_decode_num_drafts": ("Rows for which a draft was verified.", ("arm",)),
    "spec_decode_num_proposed_tokens": ("Draft tokens that drafters proposed.", ("arm",)),
    "spec_decode_num_draft_tokens": ("Draft tokens that the target verified.", ("arm",)),
    "spec_decode_num_accepted_tokens": ("Draft tokens that were accepted, bonus tokens not counted.", ("arm",)),
    "spec_decode_num_accepted_tokens_per_pos": ("Accepted draft tokens by position.", ("arm", "position")),
    "decisions": ("Steps by plan and by why it was chosen.", ("plan", "reason")),
    "decision_rows": ("Rows of the steps, by the arm that they were given.", ("arm",)),
    "step_seconds": ("Wall time of the steps.", ()),
    "controller_seconds": ("Time taken by deciding and observing.", ()),
}
"""Names without the prefix; Prometheus shows counters with "_total" behind them. What each tells, and its labels."""

GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "arm_probability": ("Weight of every expert of the strategy at the latest load.", ("arm",)),
    "guard_balance": ("What speculation may still lose, in steps without it; at most 0: it is held back.", ()),
    "guard_holding": ("1 while the guard refused the latest plan.", ()),
    "off_streak": ("Latest steps in a row without speculation.", ()),
    "requests": ("Requests remembered.", ()),
}


def metric_names() -> tuple[str, ...]:
    """All names as Prometheus shows them."""
    return (*(f"{PREFIX}{name}_total" for name in COUNTERS), *(PREFIX + name for name in GAUGES))


class ServingMetrics:
    """Counts what a policy decided and what came of it. Needs the package prometheus_client.

    Args:
        registry: a `prometheus_client.CollectorRegistry`; None for the default one.

    Raises:
        ImportError: prometheus_client is missing.
        ValueError: the registry holds such metrics already.
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ImportError("metrics need the package prometheus-client: pip install 'adaptspec[serving]'") from error
        registry = prometheus_client.REGISTRY if registry is None else registry
        self._counters = {
            name: prometheus_client.Counter(PREFIX + name, text, labels, registry=registry)
            for name, (text, labels) in COUNTERS.items()
        }
        self._gauges = {
            name: prometheus_client.Gauge(PREFIX + name, text, labels, registry=registry)
            for name, (text, labels) in GAUGES.items()
        }

    def record(self, policy: ServingPolicy, decision: Decision, outcome: StepOutcome) -> None:
        """Count one step, after `policy.observe(decision, outcome)`."""
        counters = self._counters
        arms = decision.arms
        by_arm = {
            "decision_rows": np.bincount(arms),
            "spec_decode_num_drafts": np.bincount(arms, outcome.verified > 0),
            "spec_decode_num_proposed_tokens": np.bincount(arms, outcome.proposed),
            "spec_decode_num_draft_tokens": np.bincount(arms, outcome.verified),
            "spec_decode_num_accepted_tokens": np.bincount(arms, outcome.accepted),
        }
        for name, values in by_arm.items():
            for arm in np.flatnonzero(values).tolist():
                counters[name].labels(decision.names[arm]).inc(float(values[arm]))
        per_position = counters["spec_decode_num_accepted_tokens_per_pos"]
        for arm in np.flatnonzero(by_arm["spec_decode_num_accepted_tokens"]).tolist():
            lengths = outcome.accepted[arms == arm]
            for position in range(int(lengths.max())):
                accepted = int(np.count_nonzero(lengths > position))
                per_position.labels(decision.names[arm], str(position)).inc(accepted)
        counters["decisions"].labels(decision.plan, decision.reason).inc()
        counters["step_seconds"].inc(outcome.wall_seconds or 0.0)
        counters["controller_seconds"].inc(outcome.policy_seconds)
        status = policy.status()
        for name, value in status.probabilities.items():
            self._gauges["arm_probability"].labels(name).set(value)
        if status.guard_balance is not None:
            self._gauges["guard_balance"].set(status.guard_balance)
            self._gauges["guard_holding"].set(float(decision.reason == "guard"))
        self._gauges["off_streak"].set(status.off_streak)
        self._gauges["requests"].set(status.requests)
