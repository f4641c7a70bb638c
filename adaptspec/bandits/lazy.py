"""Fewer switches between arms: lazy play for full information, blocks for bandits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from adaptspec.bandits.base import Choice, Feedback, Policy, PolicyDecision
from adaptspec.bandits.checks import check_count
from adaptspec.bandits.encoding import decode, encode
from adaptspec.bandits.sampling import draw
from adaptspec.bandits.state import read_array, read_float, read_int
from adaptspec.bandits.wrapper import Wrapper, as_played
from adaptspec.names import unknown_name

_METHODS = ("dartboard", "coupling")


class Lazy(Wrapper):
    """Keeps the arm as long as it can while every step's arm still has the inner policy's distribution.

    dartboard: the shrinking dartboard (Geulen, Voecking and Winkler 2010): keep arm i with probability
    w_new(i) / w_old(i), else draw from p_new. Weights are scaled so that they only shrink, by the largest factor that
    allows it, m = min_j p_old(j) / p_new(j): keep with probability m p_new(i) / p_old(i). For Hedge this counts losses
    from the round's best arm.
    coupling (ours): keep with probability min(1, p_new(i) / p_old(i)), else draw from the excess [p_new - p_old]+. No
    other play with these distributions switches less often.

    Both need a distribution that does not depend on which arms were played, so the inner policy must draw from
    probabilities and use full information. `propensity` is the probability of the arm given all feedback.

    Raises:
        ValueError: the policy uses bandit feedback or draws from no distribution; another method.
    """

    kind = "lazy"

    def __init__(self, policy: Policy, *, method: str = "dartboard", seed: int = 0) -> None:
        super().__init__(policy, seed=seed)
        if not policy.full_information:
            raise ValueError(f"lazy play needs a full-information policy, got {policy.name!r}; see Blocked")
        if method not in _METHODS:
            raise unknown_name("method", method, _METHODS)
        self._method = method
        self.options["method"] = method
        self._current = -1
        self._previous = np.zeros(self.n_arms)

    def _choose(self, context: Any) -> Choice:
        inner = self.policy.select(context)
        new, old, index = inner.probabilities, self._previous, self._current
        if new is None:
            raise ValueError(f"lazy play needs a policy that draws from probabilities, got {self.policy.name!r}")
        if index < 0:
            index = inner.index
        else:
            keep = min(1.0, new.item(index) / old.item(index))
            if self._method == "dartboard":
                keep *= self._shrink(new, old, index)
            if self._rng.random() >= keep:
                index = self._redraw(inner, old)
        self._current, self._previous = index, new
        return index, new.item(index), new, inner

    def _shrink(self, new: np.ndarray, old: np.ndarray, index: int) -> float:
        """What turns coupling's min(1, ratio) into the dartboard's m * ratio."""
        support = new > 0.0
        factor = float((old[support] / new[support]).min())
        return factor * max(1.0, new.item(index) / old.item(index))

    def _redraw(self, inner: PolicyDecision, old: np.ndarray) -> int:
        if self._method == "dartboard":
            return inner.index  # drawn from p_new already, independently of the coin above
        excess = np.maximum(inner.probabilities - old, 0.0)
        if not excess.any():
            return inner.index  # equal but for rounding
        return draw(excess, np.empty(self.n_arms), uniform=self._rng.random())[0]

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        self.policy.update(as_played(decision.memo, decision), feedback)
        self.rounds += 1.0

    def _state(self) -> dict[str, Any]:
        state = {"current": self._current, "previous": self._previous.tolist()}
        return state | {"policy": self.policy.state_dict()}

    def _load(self, learned: Mapping[str, Any]) -> None:
        current = read_int(learned, "current", minimum=-1, maximum=self.n_arms - 1)
        previous = read_array(learned, "previous", (self.n_arms,), minimum=0.0, maximum=1.0)
        if current >= 0 and previous[current] == 0.0:
            raise ValueError(f"state: previous must be positive for the current arm {current}")
        self.policy.load_state_dict(learned.get("policy"))
        self._current, self._previous = current, previous


class Blocked(Wrapper):
    """Plays each choice for a block of `length` steps and teaches the inner policy the block's mean gains.

    For bandits under switching costs (mini-batching, Arora, Dekel and Tewari 2012): at most one switch per block, and
    the regret grows by a factor of about sqrt(length). A block is taught when all its feedback is in, or with what it
    has once `OPEN_BLOCKS` later ones were begun; feedback after that is ignored.
    """

    kind = "blocked"
    OPEN_BLOCKS = 64

    def __init__(self, policy: Policy, *, length: int = 8) -> None:
        super().__init__(policy)
        self._length = check_count("length", length, minimum=1)
        self.options["length"] = self._length
        self._played = 0
        self._blocks: dict[int, _Block] = {}

    def _choose(self, context: Any) -> Choice:
        number, position = divmod(self._played, self._length)
        if position == 0:
            self._blocks[number] = _Block(self.policy.select(context), self.n_arms)
            if len(self._blocks) > self.OPEN_BLOCKS:
                self._teach(next(iter(self._blocks)))
        self._played += 1
        inner = self._blocks[number].decision
        return inner.index, inner.propensity, inner.probabilities, number

    def _learn(self, decision: PolicyDecision, feedback: Feedback) -> None:
        block = self._blocks.get(decision.memo)
        if block is None:
            return
        block.add(feedback)
        if block.received == self._length:
            self._teach(decision.memo)

    def _teach(self, number: int) -> None:
        block = self._blocks.pop(number)
        if block.received:
            self.policy.update(block.decision, block.feedback())
            self.rounds += 1.0

    def _state(self) -> dict[str, Any]:
        blocks = [[number, block.state()] for number, block in self._blocks.items()]
        return {"played": self._played, "blocks": blocks, "policy": self.policy.state_dict()}

    def _load(self, learned: Mapping[str, Any]) -> None:
        played = read_int(learned, "played")
        pairs = learned.get("blocks")
        if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"state: blocks must be a list of pairs, got {pairs!r:.80}")
        blocks = {read_int({"blocks": n}, "blocks"): _Block.restore(state, self.n_arms) for n, state in pairs}
        number, position = divmod(played, self._length)
        if position and number not in blocks:
            raise ValueError(f"state: blocks must hold the current block {number}")
        self.policy.load_state_dict(learned.get("policy"))
        self._played, self._blocks = played, blocks


class _Block:
    """The feedback of one block, summed."""

    COUNTS = ("tokens", "seconds", "drafted", "accepted")

    def __init__(self, decision: PolicyDecision, n_arms: int) -> None:
        self.decision = decision
        self.received = 0
        self.sums = np.zeros(n_arms)
        self.counts = np.zeros(n_arms)
        self.totals: dict[str, float | None] = dict.fromkeys(self.COUNTS, 0)

    def add(self, feedback: Feedback) -> None:
        self.received += 1
        self.sums += feedback.gains
        self.counts += feedback.observed
        for name, total in self.totals.items():
            value = getattr(feedback, name)
            self.totals[name] = None if total is None or value is None else total + value

    def feedback(self) -> Feedback:
        observed = self.counts > 0.0
        gains = np.divide(self.sums, self.counts, out=np.zeros(len(self.sums)), where=observed)
        return Feedback(np.minimum(gains, 1.0), observed, **self.totals)

    def state(self) -> dict[str, Any]:
        arrays = {"sums": self.sums.tolist(), "counts": self.counts.tolist()}
        return {"decision": encode(self.decision), "received": self.received, **arrays, "totals": self.totals.copy()}

    @classmethod
    def restore(cls, state: Any, n_arms: int) -> _Block:
        if not isinstance(state, Mapping):
            raise ValueError(f"state: a block must be a mapping, got {type(state).__name__}")
        decision, totals = decode(state.get("decision")), state.get("totals")
        if (
            not isinstance(decision, PolicyDecision)
            or not isinstance(totals, Mapping)
            or set(totals) != set(cls.COUNTS)
        ):
            raise ValueError("state: a block must hold a decision and the totals " + ", ".join(cls.COUNTS))
        block = cls(decision, n_arms)
        block.received = read_int(state, "received")
        block.sums = read_array(state, "sums", (n_arms,), minimum=0.0)
        block.counts = read_array(state, "counts", (n_arms,), minimum=0.0)
        for name in cls.COUNTS:
            if totals[name] is not None:
                read_float(totals, name, minimum=0.0)
            block.totals[name] = totals[name]
        return block
