"""Why a serving step was decided as it was, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adaptspec.reporting.sentence import listed, seconds, tokens
from adaptspec.serving.choosing import REASONS
from adaptspec.serving.records import PREFIX


def explain_step(record: Mapping[str, Any]) -> str:
    """A record of `records.step_attributes` as one to three sentences.

    Raises:
        ValueError: not such a record.
    """
    found = {key.removeprefix(PREFIX): value for key, value in record.items()}
    if missing := {"step", "plan", "reason", "rows", "asked"} - found.keys():
        raise ValueError(f"a step record must have {', '.join(sorted(PREFIX + name for name in missing))}")
    sentences = [f"Step {found['step']}: {_deed(found)}, because {_cause(found['reason'])}."]
    if found["reason"] == "strategy":
        sentences[0] = sentences[0].removesuffix(".") + f" (probability {found.get('propensity', 1.0):.2f})."
    if (outcome := _outcome(found)) is not None:
        sentences.append(outcome)
    if found.get("refresh"):
        sentences.append(f"The state of {listed(found['refresh'])} was kept up to date.")
    return " ".join(sentences)


def explain_state(state: Mapping[str, Any], *, last: int) -> Iterator[str]:
    """What a saved serving policy knows, and why its latest steps were decided as they were.

    Args:
        state: `ServingPolicy.state_dict()`.
        last: steps at most.
    """
    settings = state["settings"]
    chooser = state["chooser"]
    yield f"Serving policy: strategy {settings['strategy']}, arms {listed(state['arms'])}."
    if chooser is not None:
        floor, progress = chooser["floor"], chooser["progress"]
        if floor["share"] is None:
            yield "There is no guard."
        else:
            balance = floor["balance"]
            held = "" if balance > 0.0 else ", so that nothing is drafted until that is made good"
            yield (
                f"The guard lets speculation lose {100.0 * floor['share']:.0f} % of the speed without it; in hand are "
                f"{balance:.1f} steps' worth{held}."
            )
        if progress["off_streak"]:
            wait = max(progress["next_probe"] - progress["off_streak"], 0)
            yield (
                f"Speculation has been off for {progress['off_streak']} steps; a drafter is tried again in {wait} at "
                "the latest."
            )
    records = state["records"][-last:] if last else []
    if not records:
        yield "No step had an outcome yet."
    for record in records:
        yield explain_step(record)


def _deed(found: Mapping[str, Any]) -> str:
    rows = f"{found['rows']} row{'' if found['rows'] == 1 else 's'}"
    if not found["asked"]:
        return f"no speculation on {rows}"
    parts = [f"{arm} on {count}" for arm, count in zip(found["arms"], found["arm_rows"], strict=True)]
    return f"{tokens(found['asked'])} asked for on {found['drafting_rows']} of {rows} ({', '.join(parts)})"


def _cause(reason: str) -> str:
    return REASONS.get(reason, "of a reason that is not told")


def _outcome(found: Mapping[str, Any]) -> str | None:
    if "tokens" not in found:
        return None
    parts = []
    if "expected_tokens" in found and "expected_seconds" in found:
        expected = f"{found['expected_tokens']:.1f} tokens in {seconds(found['expected_seconds'])}"
        parts.append(f"Expected were {expected}; it gave {tokens(found['tokens'])}")
    else:
        parts.append(f"It gave {tokens(found['tokens'])}")
    if "seconds" in found:
        parts[0] += f" in {seconds(found['seconds'])}"
    if found.get("verified"):
        parts.append(f"{found['accepted']} of {found['verified']} verified draft tokens were accepted")
    return "; ".join(parts) + "."
