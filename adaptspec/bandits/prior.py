"""A slow learner over all traffic, and a fast one per request that starts from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from adaptspec.bandits.base import Choice, Feedback, Policy, PolicyDecision
from adaptspec.bandits.checks import check_between, check_count
from adaptspec.bandits.merge import combine
from adaptspec.bandits.state import read_int
from adaptspec.bandits.wrapper import as_played, child_seed, context_key


class WithPrior(Policy):
    """Each request has its own policy, which begins with what all requests taught, shrunk to `strength` rounds.

    A single global learner runs from one request's best arm to the next one's on mixed traffic; a fresh learner per
    request knows nothing at first. Here the sums that the global policy learnt (gains, regrets, counts, estimates) are
    scaled down to `strength` rounds' worth and handed to the request's policy: the average is kept, the certainty is
    not. For Hedge this is the prior weight exp(eta * strength * mean gain); for means it is `strength` pseudo-rounds.
    The global policy learns from every step of every request.

    The context is `PolicyContext(request=...)`, or the request's key itself; without one the global policy plays. Call
    `finish` when a request ends; beyond `max_requests` open ones the least recently played is dropped.

    Args:
        make: makes a policy from a seed. It must be one whose learnt state adds up (`Policy.additive`).
        strength: rounds that the prior counts for, at most; 0 starts every request afresh.

    Raises:
        ValueError: the policy's learnt state does not add up.
    """

    def __init__(
        self, make: Callable[[int], Policy], *, strength: float = 20.0, seed: int = 0, max_requests: int = 256
    ) -> None:
        self._make, self._seed = make, check_count("seed", seed, minimum=0)
        self.prior = make(child_seed(seed, 0))
        if not self.prior.additive:
            raise ValueError(f"with_prior needs a policy whose learnt state adds up, {self.prior.name!r} does not")
        super().__init__(self.prior.n_arms, seed)
        self._strength = check_between("strength", strength, low=0.0, high=1e9, open_low=False)
        self._max_requests = check_count("max_requests", max_requests, minimum=1)
        self.options |= {"strength": self._strength, "max_requests": self._max_requests}
        self.name = f"with-prior({self.prior.name})"
        self.full_information, self.off_policy = self.prior.full_information, self.prior.off_policy
        self._requests: dict[str | int, tuple[int, Policy]] = {}
        self._begun = 0

    @property
    def open_requests(self) -> int:
        """Requests that have their own policy now."""
        return len(self._requests)

    def finish(self, request: str | int) -> None:
        """Drop the request's own policy. Feedback that still comes teaches the global one."""
        self._requests.pop(request, None)

    def _choose(self, context: Any) -> Choice:
        request = context_key(context, "request")
        if request is None:
            inner = self.prior.select(context)
            return inner.index, inner.propensity, inner.probabilities, (None, 0, inner)
        number, policy = self._requests.pop(request, (0, None))
        if policy is None:
            number, policy = self._begin()
        self._requests[request] = (number, policy)  # now the most recently played
        if len(self._requests) > self._max_requests:
            del self._requests[next(iter(self._requests))]
        inner = policy.select(None if context is request else context)
        return inner.index, inner.propensity, inner.probabilities, (request, number, inner)

    def _begin(self) -> tuple[int, Policy]:
        self._begun += 1
        policy = self._make(child_seed(self._seed, self._begun))
        if self.prior.rounds > 0.0 and self._strength > 0.0:
            fresh, learned = policy.state_dict(), self.prior.state_dict()
            factor = min(1.0, self._strength / self.prior.rounds)
            policy.load_state_dict(combine(policy, own=fresh, base=fresh, states=[learned], factor=factor))
        return self._begun, policy

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        request, number, inner = decision.memo
        inner = as_played(inner, decision)
        if request is None:
            self.prior.update(inner, feedback)
        else:
            open_number, policy = self._requests.get(request, (0, None))
            if policy is not None and open_number == number:  # the key may have been used again since
                policy.update(inner, feedback)
            # The step id belongs to the request's policy, so the checks of `update` do not apply; they were made here.
            self.prior._learn(inner, feedback)
        self.rounds += 1.0

    def _state(self) -> dict[str, Any]:
        requests = [[key, number, policy.state_dict()] for key, (number, policy) in self._requests.items()]
        return {"begun": self._begun, "prior": self.prior.state_dict(), "requests": requests}

    def _load(self, learned: Mapping[str, Any]) -> None:
        begun = read_int(learned, "begun")
        rows = learned.get("requests")
        if not isinstance(rows, list) or not all(isinstance(row, (list, tuple)) and len(row) == 3 for row in rows):
            raise ValueError(f"state: requests must be a list of (key, number, state), got {rows!r:.80}")
        requests: dict[str | int, tuple[int, Policy]] = {}
        for key, number, state in rows:
            policy = self._make(child_seed(self._seed, number))
            policy.load_state_dict(state)
            requests[key] = (number, policy)
        self.prior.load_state_dict(learned.get("prior"))
        self._begun, self._requests = begun, requests
