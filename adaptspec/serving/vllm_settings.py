"""What a user may set for vLLM: `additional_config={"adaptspec": {...}}`, and per request in `extra_args`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adaptspec.drafters.lookup import real_number, switch, whole_number
from adaptspec.names import unknown_name
from adaptspec.serving.policy import ServingPolicy

logger = logging.getLogger("adaptspec")

SECTION = "adaptspec"
SPECULATE = "adaptspec_speculate"
MAX_LENGTH = "adaptspec_max_length"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the proposer and of the scheduler. Where one of them has no use for a setting it is not looked at.

    Attributes:
        drafters: of the proposer: "suffix", "prompt-lookup", "token-recycling", "draft-model:PATH".
        lengths: draft lengths to choose among, besides none; powers of two up to the longest, and it, by default.
        strategy, objective, guard, seed: see `ServingPolicy`.
        max_requests: requests remembered at once.
        max_context: tokens up to which lookups index a request; longer ones are not drafted for by lookups.
        max_past_tokens: past outputs kept by the suffix drafter.
        max_caches: requests for which a draft model keeps its KV cache at once.
        off_steps: once it is decided to draft nothing, the next decision is taken so many steps later, or when a
            request joins: in between, being off costs nothing. Where nothing can be drafted, one is taken in every so
            many steps.
        capture: take request ids and what was scheduled from the model runner.
        log_seconds: how often to log what was decided; 0 for never.
    """

    drafters: tuple[str, ...] = ("suffix", "token-recycling")
    lengths: tuple[int, ...] = ()
    strategy: str = "hedge"
    objective: str = "throughput"
    guard: float | None = 0.05
    seed: int = 0
    max_requests: int = 1024
    max_context: int = 16_384
    max_past_tokens: int = 100_000
    max_caches: int = 32
    off_steps: int = 4
    capture: bool = True
    log_seconds: float = 60.0

    def policy(self, names: Sequence[str], *, uniform: bool, most_rows: int, stateful: Sequence[str]) -> ServingPolicy:
        """The policy over every drafter and length."""
        return ServingPolicy(
            [f"{name}@{length}" for name in names for length in self.lengths],
            self.strategy,
            objective=self.objective,
            guard=self.guard,
            seed=self.seed,
            uniform=uniform,
            stateful=stateful,
            max_requests=max(self.max_requests, most_rows),
        )


def read_settings(additional_config: Any, *, longest: int) -> Settings:
    """The section "adaptspec" of vLLM's `additional_config`, checked.

    Args:
        longest: `num_speculative_tokens`.

    Raises:
        ValueError: an unknown setting or a value out of range.
    """
    given = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ValueError(f'additional_config["{SECTION}"] must be a mapping of settings, got {given!r}')
    known = {field.name for field in dataclasses.fields(Settings)}
    for name in given:
        if name not in known:
            raise unknown_name(f'setting in additional_config["{SECTION}"]:', name, known)
    values = dict(given)
    for name in ("drafters", "lengths"):
        if name in values:
            if isinstance(values[name], str) or not isinstance(values[name], Sequence):
                raise ValueError(f"{name} must be a list, got {values[name]!r}")
            values[name] = tuple(values[name])
    if not values.get("drafters", ("",)):
        raise ValueError("drafters must name at least one drafter, got none")
    lengths = values.get("lengths") or default_lengths(longest)
    for length in lengths:
        whole_number("lengths", length, 1, longest)
    values["lengths"] = tuple(sorted(set(lengths)))
    for name in ("max_requests", "max_context", "max_caches", "off_steps"):
        if name in values:
            whole_number(name, values[name], 1)
    for name in ("seed", "max_past_tokens"):
        if name in values:
            whole_number(name, values[name], 0)
    if "log_seconds" in values:
        real_number("log_seconds", values["log_seconds"], 0.0)
    if "capture" in values:
        switch("capture", values["capture"])
    return Settings(**values)


def default_lengths(longest: int) -> tuple[int, ...]:
    """Powers of two from 2, and the longest itself.

    >>> default_lengths(12), default_lengths(1)
    ((2, 4, 8, 12), (1,))
    """
    powers = {1 << bit for bit in range(1, longest.bit_length()) if 1 << bit <= longest}
    return tuple(sorted(powers | {longest}))


def request_limit(extra_args: Mapping[str, Any] | None, *, longest: int) -> int:
    """The most draft tokens that a request allows: 0 if it opted out. A value that makes no sense is passed over."""
    if not extra_args:
        return longest
    wanted = extra_args.get(SPECULATE, True)
    if wanted in (False, 0, "0", "false", "False"):
        return 0
    limit = extra_args.get(MAX_LENGTH, longest)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        logger.warning("%s must be a whole number >= 0, got %r; it is not looked at", MAX_LENGTH, limit)
        return longest
    return min(limit, longest)
