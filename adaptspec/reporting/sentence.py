"""Why a step was decided as it was, as a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from adaptspec.types import StepRecord

if TYPE_CHECKING:
    from adaptspec.reporting.report import GuardLine

NOTHING_SEEN = "No step was taken yet."

_BECAUSE: Mapping[str, str] = {
    "fixed": "as this strategy always does",
    "in turn": "the first drafter in the order of the pool that had something to propose",
    "set aside": "because the drafter that was chosen is set aside for this request",
    "cold": "because the drafter that was chosen would have to catch up for longer than it is known to be worth",
    "pays": "because they were worth their seconds",
    "nothing pays": "because none was worth its seconds",
    "no draft": "because no drafter had anything to propose",
    "survey": "to learn what sizes cost",
    "probe": "to see whether costs have changed",
}


def why(record: StepRecord | None, *, proposed: Mapping[str, int], rate: float | None, guard: GuardLine | None) -> str:
    """One to three sentences on the latest step.

    Args:
        record: of the step.
        proposed: nodes that each asked drafter proposed in it.
        rate: running tokens per second.
        guard: its state after the step.
    """
    if record is None:
        return NOTHING_SEEN
    sentences = [f"Step {record.step_id} {_deed(record, proposed)}{_cause(record, guard)}."]
    sentences.append(f"{_expectation(record, rate)}it gave {tokens(record.emitted)} in {seconds(record.seconds)}.")
    if record.fault is not None:
        sentences.append(f"A drafter was set aside in it: {record.fault}.")
    return " ".join(sentences)


def _deed(record: StepRecord, proposed: Mapping[str, int]) -> str:
    """What was done, up to the comma before the reason."""
    names = [name for name, size in proposed.items() if size]
    if record.reason == "no draft":
        return "verified nothing, "
    if record.reason in ("pays", "nothing pays", "survey", "probe") and names:
        how_many = str(record.verified) if record.verified else "none"
        return f"verified {how_many} of the {record.drafted} nodes that {listed(names)} proposed, "
    if record.arm == "ar":
        return "played ar (no speculation), "
    return f"played {record.arm} with {nodes(record.verified)}, "


def _cause(record: StepRecord, guard: GuardLine | None) -> str:
    if record.reason == "policy":
        return f"which the policy chose with probability {record.propensity:.2f}"
    if record.reason == "guard":
        return _guard_cause(record, guard)
    return _BECAUSE.get(record.reason, "for a reason that the strategy does not tell")


def _guard_cause(record: StepRecord, guard: GuardLine | None) -> str:
    if guard is None:
        return "because the guard overruled the policy"
    if record.arm != "ar":
        return f"because the guard tries an arm again after {guard.probe_every} steps without speculation"
    if guard.baseline_steps <= guard.warmup:
        return f"because the guard first measures no speculation ({guard.baseline_steps} of {guard.warmup} steps)"
    if guard.balance < 0.0:
        return (
            f"because the guard refused what the policy chose: speculation is {-guard.balance:.1f} tokens short of "
            f"its allowance of {guard.allowance:.0%}".replace("%", " %")
        )
    return (
        f"because the guard measured no speculation again, or refused what the policy chose: it may lose "
        f"{guard.balance:.1f} tokens at most"
    )


def _expectation(record: StepRecord, rate: float | None) -> str:
    if record.expected_tokens is None or not record.expected_seconds:
        return "Nothing was expected of it; "
    text = f"Expected were {record.expected_tokens:.1f} tokens in {seconds(record.expected_seconds)}"
    if rate:
        ahead = record.expected_tokens / record.expected_seconds / rate - 1.0
        text += f", {abs(ahead):.0%}".replace("%", " %")
        text += f" {'above' if ahead >= 0.0 else 'below'} the running {rate:.1f} tokens/s"
    return f"{text}; "


def listed(names: Sequence[str]) -> str:
    """Like "suffix, sam and rest"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def nodes(count: int) -> str:
    """Like "1 node" and "6 nodes"."""
    return f"{count} node{'' if count == 1 else 's'}"


def tokens(count: int) -> str:
    """Like "1 token" and "6 tokens"."""
    return f"{count} token{'' if count == 1 else 's'}"


def seconds(value: float) -> str:
    """With three digits that count, in seconds or milliseconds."""
    if value >= 1.0:
        return f"{value:.1f} s" if value < 100.0 else f"{value:.0f} s"
    milliseconds = 1e3 * value
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f} ms"
