"""Every setting answers every prompt, in one process and in rotated order, so that what drifts hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from adaptspec.cli.conversation import Conversation
from adaptspec.cli.prompts import Prompt
from adaptspec.types import StepRecord

if TYPE_CHECKING:
    from adaptspec.results import GenerationResult

Kind = Literal["reference", "fixed", "strategy"]
KINDS: tuple[Kind, ...] = ("reference", "fixed", "strategy")


@dataclass(frozen=True, slots=True)
class Generated:
    """What one call of a setting returned.

    Attributes:
        token_ids: the new tokens.
        prefill_seconds: time to the first token, None if the setting cannot tell.
        accept_lengths: tokens gained by each step, bonus included.
        steps: the trace; empty for settings that keep none.
        finish_reason: why generation stopped; empty if the setting does not say.
    """

    token_ids: tuple[int, ...]
    prefill_seconds: float | None
    accept_lengths: tuple[int, ...]
    steps: tuple[StepRecord, ...] = ()
    finish_reason: str = ""

    @classmethod
    def of(cls, result: GenerationResult, *, prompt_length: int) -> Generated:
        """What `AdaptiveSpec.generate` returned for a prompt."""
        return cls(
            token_ids=tuple(result.sequences[0, prompt_length:].tolist()),
            prefill_seconds=result.stats.prefill_seconds,
            accept_lengths=tuple(step.emitted for step in result.trace),
            steps=tuple(result.trace),
            finish_reason=result.finish_reason,
        )


Generate = Callable[[Sequence[int], int], Generated]
"""From input token ids and the longest answer to what was generated."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to answer that is compared with others.

    Attributes:
        name: unique in a run.
        kind: "reference" (another implementation), "fixed" (one arm), or "strategy".
        start: a fresh instance that has learnt nothing; it serves all prompts of one repeat.
    """

    name: str
    kind: Kind
    start: Callable[[], Generate]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: the input's length, what came out, and the wall time of the whole call."""

    input_ids: tuple[int, ...]
    generated: Generated
    text: str
    seconds: float

    def expected_seconds(self, new_tokens: int) -> float:
        """How long an answer of another length would take: the same prefill, and the same time per later token."""
        prefill = self.generated.prefill_seconds or 0.0
        later = len(self.generated.token_ids) - 1
        return prefill + (self.seconds - prefill) * (new_tokens - 1) / later if later > 0 else self.seconds


@dataclass(frozen=True, slots=True)
class Measurement:
    """One setting's answers to all turns of one prompt."""

    setting: str
    prompt: Prompt
    repeat: int
    turns: tuple[Turn, ...]

    @property
    def new_tokens(self) -> int:
        return sum(len(turn.generated.token_ids) for turn in self.turns)

    @property
    def seconds(self) -> float:
        return sum(turn.seconds for turn in self.turns)


def rotation(index: int, repeat: int = 0, *, settings: int, prompts: int, repeats: int = 1) -> int:
    """By how many places the order of the settings is rotated for one prompt in one repeat.

    Over a whole run every setting takes every place equally often; with fewer measurements than settings, the places
    are spread as evenly as they can be.
    """
    number, total = repeat * prompts + index, repeats * prompts
    if total < settings:
        return number * settings // total
    # Without the extra shift a prompt would meet the same order in every repeat.
    return (number + (repeat if prompts % settings == 0 else 0)) % settings


def rotated(settings: Sequence[Setting], offset: int) -> list[Setting]:
    """The settings from `offset` on, then those before it."""
    return [*settings[offset:], *settings[:offset]]


@dataclass(frozen=True, slots=True)
class Measurer:
    """Runs settings on prompts.

    Attributes:
        conversation: turns prompts into token ids.
        max_new_tokens: longest answer per turn.
        synchronize: waits for the device, so that clocks read true times.
        context_limit: tokens that the model can take, None if unlimited.
    """

    conversation: Conversation
    max_new_tokens: int
    synchronize: Callable[[], None]
    context_limit: int | None = None

    @classmethod
    def for_model(cls, model: Any, conversation: Conversation, *, max_new_tokens: int) -> Measurer:
        """With the clock and the context length of a transformers model."""
        import torch

        device = model.device
        synchronize = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        return cls(conversation, max_new_tokens, synchronize, limit)

    def warm_up(self, setting: Setting, prompt: Prompt, *, max_new_tokens: int) -> Turn:
        """Run an instance that is thrown away, so that one-time costs are paid before the clock runs."""
        input_ids = self.conversation.encode(prompt.turns[:1])
        return self._turn(setting.start(), input_ids, min(max_new_tokens, self.max_new_tokens))

    def run(
        self,
        settings: Sequence[Setting],
        prompts: Sequence[Prompt],
        *,
        repeats: int = 1,
        before: Callable[[Setting, Prompt, int], None] = lambda setting, prompt, repeat: None,
    ) -> Iterator[list[Measurement]]:
        """One list per prompt and repeat, with one measurement per setting in the order of `settings`.

        A list is complete when it is yielded: stopping in between loses at most one prompt.

        Args:
            before: called before each measurement, for progress.
        """
        for repeat in range(repeats):
            instances = {setting.name: setting.start() for setting in settings}
            for index, prompt in enumerate(prompts):
                offset = rotation(index, repeat, settings=len(settings), prompts=len(prompts), repeats=repeats)
                measured = {}
                for setting in rotated(settings, offset):
                    before(setting, prompt, repeat)
                    turns = tuple(self._turns(instances[setting.name], prompt))
                    measured[setting.name] = Measurement(setting.name, prompt, repeat, turns)
                yield [measured[setting.name] for setting in settings]

    def check_lengths(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError for a prompt that may not fit into the model's context with all its answers."""
        limit = self.context_limit
        if limit is None:
            return
        for prompt in prompts:
            answers = [""] * (len(prompt.turns) - 1)
            needed = len(self.conversation.encode(prompt.turns, answers)) + len(prompt.turns) * self.max_new_tokens
            if needed > limit:
                raise ValueError(
                    f"prompt {prompt.id!r} may need {needed} tokens with max_new_tokens = {self.max_new_tokens},"
                    f" the model's context has {limit}"
                )

    def _turns(self, generate: Generate, prompt: Prompt) -> Iterator[Turn]:
        answers: list[str] = []
        for number in range(len(prompt.turns)):
            input_ids = self.conversation.encode(prompt.turns[: number + 1], answers)
            turn = self._turn(generate, input_ids, self.max_new_tokens)
            answers.append(turn.text)
            yield turn

    def _turn(self, generate: Generate, input_ids: Sequence[int], max_new_tokens: int) -> Turn:
        self.synchronize()
        start = time.perf_counter()
        generated = generate(input_ids, max_new_tokens)
        self.synchronize()
        seconds = time.perf_counter() - start
        return Turn(tuple(input_ids), generated, self.conversation.decode(generated.token_ids), seconds)
