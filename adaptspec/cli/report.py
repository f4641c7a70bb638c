"""From measurements to the numbers that are reported. Knows nothing of printing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from adaptspec.cli.measure import Measurement, Setting
from adaptspec.cli.statistics import bootstrap_speedup, first_difference, rate

BASE = "ar"
REFERENCE = "hf-generate"
LEVEL = 0.9

Margin = Callable[[Sequence[int]], float | None]
"""From all tokens before a position to the difference of the target's two largest logits there."""


def summarise(
    units: Sequence[Sequence[Measurement]],
    settings: Sequence[Setting],
    *,
    greedy: bool,
    margin: Margin,
    seed: int,
) -> dict[str, Any]:
    """The fields `prompts`, `runs` and `by_category` of the benchmark's JSON.

    Args:
        units: per finished prompt and repeat, one measurement per setting in the order of `settings`.
        greedy: outputs can be compared token by token.
        margin: called for every divergence; may return None where there is no time to find out.
        seed: of the bootstrap.
    """
    names = [setting.name for setting in settings]
    columns = {name: [unit[index] for unit in units] for index, name in enumerate(names)}
    reference = next((name for name in (REFERENCE, BASE) if name in columns), None) if greedy else None
    known: dict[tuple[int, ...], float | None] = {}

    def remembered(tokens: Sequence[int]) -> float | None:
        key = tuple(tokens)
        if key not in known:
            known[key] = margin(key)
        return known[key]

    runs = []
    for setting in settings:
        run = {"name": setting.name, "kind": setting.kind, **totals(columns[setting.name])}
        base = columns.get(BASE, [])
        run |= speedups(columns[setting.name], base, rng=np.random.default_rng(seed))
        if reference is not None and setting.name != reference:
            run |= agreement(columns[setting.name], columns[reference], margin=remembered)
            run["compared_with"] = reference
            if setting.name != BASE and BASE in columns:
                same = agreement(columns[setting.name], base, margin=lambda tokens: 0.0)
                run["identical_to_ar"] = same["identical"]
        runs.append(run)
    _add_best_fixed(runs)
    return {
        "prompts": len({m.prompt.id for unit in units for m in unit}),
        "finished": len(units),
        "runs": runs,
        "by_category": by_category(columns),
    }


def totals(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Sums over all answers of one setting.

    `mean_accepted_length` includes the bonus token, `acceptance_rate` does not. Prefill counts into `seconds` and
    `tokens_per_second`; the `decode_` figures leave it and the first token out.
    """
    turns = [turn for m in measurements for turn in m.turns]
    generated = [turn.generated for turn in turns]
    steps = [step for g in generated for step in g.steps]
    new_tokens = sum(len(g.token_ids) for g in generated)
    seconds = sum(turn.seconds for turn in turns)
    lengths = [length for g in generated for length in g.accept_lengths]
    repeats = sorted({m.repeat for m in measurements})
    result: dict[str, Any] = {
        "new_tokens": new_tokens,
        "seconds": seconds,
        "tokens_per_second": rate(new_tokens, seconds),
        "tokens_per_second_repeats": [_rate([m for m in measurements if m.repeat == repeat]) for repeat in repeats],
        "steps": len(lengths),
        "mean_accepted_length": sum(lengths) / len(lengths) if lengths else None,
    }
    if all(g.prefill_seconds is not None for g in generated):
        prefill = sum(g.prefill_seconds or 0.0 for g in generated)
        result["prefill_seconds"] = prefill
        result["decode_seconds"] = seconds - prefill
        result["decode_tokens_per_second"] = rate(new_tokens - len(generated), seconds - prefill)
    if steps:
        verified = sum(step.verified for step in steps)
        result["acceptance_rate"] = sum(step.accepted for step in steps) / verified if verified else None
        for part in ("draft", "evaluate", "catch_up", "verify", "commit", "observe", "controller", "other"):
            result[f"{part}_seconds"] = sum(getattr(step, f"{part}_seconds") for step in steps)
        result["arms"] = {arm: n / len(steps) for arm, n in Counter(step.arm for step in steps).most_common()}
        result["faults"] = dict(Counter(step.fault for step in steps if step.fault))
    return result


def speedups(
    measurements: Sequence[Measurement], base: Sequence[Measurement], *, rng: np.random.Generator
) -> dict[str, Any]:
    """`speedup` against the base, its bootstrap interval over prompts, and `decode_speedup` without prefill."""
    if not base or not measurements:
        return {"speedup": None, "speedup_interval": None}
    base_rate = _rate(base)
    columns = _per_prompt(measurements), _per_prompt(base)
    interval = bootstrap_speedup(*columns[0], *columns[1], rng=rng, level=LEVEL)
    result: dict[str, Any] = {
        "speedup": _rate(measurements) / base_rate if base_rate else None,
        "speedup_interval": list(interval) if interval else None,
        "speedup_interval_level": LEVEL,
    }
    decode, base_decode = (totals(m).get("decode_tokens_per_second") for m in (measurements, base))
    result["decode_speedup"] = decode / base_decode if decode and base_decode else None
    return result


def agreement(
    measurements: Sequence[Measurement], reference: Sequence[Measurement], *, margin: Margin
) -> dict[str, Any]:
    """How many prompts have exactly the reference's token ids in every turn and repeat.

    For every other prompt the first place where they part is listed with the target's top-2 logit margin there: a
    margin near 0 is a near-tie that rounding may decide either way, a large one is a real error.
    """
    compared: set[int | str] = set()
    divergences: dict[int | str, dict[str, Any]] = {}
    for ours, theirs in zip(measurements, reference, strict=True):
        compared.add(ours.prompt.id)
        if ours.prompt.id in divergences:
            continue
        for number, (turn, expected) in enumerate(zip(ours.turns, theirs.turns, strict=True)):
            position = first_difference(turn.generated.token_ids, expected.generated.token_ids)
            if position is None:
                continue
            divergences[ours.prompt.id] = {
                "prompt": ours.prompt.id,
                "repeat": ours.repeat,
                "turn": number,
                "position": position,
                "margin": margin((*expected.input_ids, *expected.generated.token_ids[:position])),
            }
            break
    return {
        "identical": len(compared) - len(divergences),
        "compared": len(compared),
        "divergences": list(divergences.values()),
        "max_margin": max((d["margin"] for d in divergences.values() if d["margin"] is not None), default=None),
    }


def by_category(columns: dict[str, list[Measurement]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Speed and accepted length per domain and setting."""
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for name, measurements in columns.items():
        for domain in dict.fromkeys(m.prompt.domain for m in measurements):
            part = [m for m in measurements if m.prompt.domain == domain]
            base = [m for m in columns.get(BASE, []) if m.prompt.domain == domain]
            base_rate = _rate(base)
            row = totals(part)
            table.setdefault(domain, {})[name] = {
                "tokens_per_second": row["tokens_per_second"],
                "speedup": row["tokens_per_second"] / base_rate if base_rate else None,
                "mean_accepted_length": row["mean_accepted_length"],
                "new_tokens": row["new_tokens"],
            }
    return table


def _add_best_fixed(runs: list[dict[str, Any]]) -> None:
    fixed = [run for run in runs if run["kind"] == "fixed" and run["tokens_per_second"] > 0]
    if not fixed:
        return
    best = max(fixed, key=lambda run: run["tokens_per_second"])
    for run in runs:
        if run["kind"] == "strategy":
            run["best_fixed"] = best["name"]
            run["vs_best_fixed"] = run["tokens_per_second"] / best["tokens_per_second"]


def _rate(measurements: Sequence[Measurement]) -> float:
    return rate(sum(m.new_tokens for m in measurements), sum(m.seconds for m in measurements))


def _per_prompt(measurements: Sequence[Measurement]) -> tuple[list[int], list[float]]:
    tokens: dict[int | str, int] = {}
    seconds: dict[int | str, float] = {}
    for m in measurements:
        tokens[m.prompt.id] = tokens.get(m.prompt.id, 0) + m.new_tokens
        seconds[m.prompt.id] = seconds.get(m.prompt.id, 0.0) + m.seconds
    return list(tokens.values()), list(seconds.values())


def top_two_margin(model: Any) -> Margin:
    """The target's top-2 logit margin after a prefix, by one forward pass over the whole of it."""
    import torch

    def margin(token_ids: Sequence[int]) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([list(token_ids)], device=model.device), use_cache=False).logits[0, -1]
        top = logits.float().topk(2).values
        return float(top[0] - top[1])

    return margin
