"""Settings, measurements and a tokenizer that need no model."""

from __future__ import annotations

from collections.abc import Sequence

from adaptspec.cli.conversation import Conversation
from adaptspec.cli.measure import Generate, Generated, Kind, Measurement, Measurer, Setting, Turn
from adaptspec.cli.prompts import Prompt
from adaptspec.types import StepRecord


class CharacterTokenizer:
    """One token per character."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in token_ids)


class TemplateTokenizer(CharacterTokenizer):
    """With a chat template: U for the user, A for the answer."""

    chat_template = "a template"

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert add_generation_prompt and not tokenize
        return "".join(f"{m['role'][0].upper()}({m['content']})" for m in messages) + "A("


def measurer(max_new_tokens: int = 8, context_limit: int | None = None) -> Measurer:
    """A measurer of characters."""
    return Measurer(Conversation(CharacterTokenizer(), chat=False), max_new_tokens, lambda: None, context_limit)


def echo(name: str, log: list[tuple[str, str]], kind: Kind = "fixed") -> Setting:
    """A setting that answers with how many prompts this instance has seen, and writes down what it was asked."""

    def start() -> Generate:
        seen = 0

        def generate(input_ids: Sequence[int], max_new_tokens: int) -> Generated:
            nonlocal seen
            seen += 1
            log.append((name, "".join(chr(i) for i in input_ids)))
            return Generated((ord("0") + seen,), None, (1,))

        return generate

    return Setting(name, kind, start)


def step(arm: str, *, verified: int, accepted: int, fault: str | None = None) -> StepRecord:
    """A step that took 1 ms of everything."""
    return StepRecord(
        step_id=1,
        position=0,
        arm=arm,
        propensity=1.0,
        drafted=verified,
        verified=verified,
        accepted=accepted,
        emitted=accepted + 1,
        draft_seconds=0.001,
        evaluate_seconds=0.001,
        verify_seconds=0.001,
        commit_seconds=0.001,
        observe_seconds=0.001,
        controller_seconds=0.001,
        other_seconds=0.001,
        fault=fault,
    )


def measurement(
    setting: str,
    prompt: Prompt,
    token_ids: Sequence[int],
    *,
    seconds: float,
    repeat: int = 0,
    prefill_seconds: float | None = 0.5,
    steps: Sequence[StepRecord] = (),
) -> Measurement:
    """One answer of one turn after the input (7, 8)."""
    lengths = tuple(s.emitted for s in steps) or (1,) * len(token_ids)
    generated = Generated(tuple(token_ids), prefill_seconds, lengths, tuple(steps), "length")
    return Measurement(setting, prompt, repeat, (Turn((7, 8), generated, "text", seconds),))
