"""From turns and earlier answers to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Conversation:
    """How the turns of a prompt become the model's input.

    With `chat` the tokenizer's chat template is used; without it, turns and answers are joined by empty lines.

    Attributes:
        tokenizer: a transformers tokenizer.
        chat: use the chat template.
    """

    tokenizer: Any
    chat: bool

    @classmethod
    def choose(cls, tokenizer: Any, chat: bool | None) -> Conversation:
        """`chat` None means: if the tokenizer has a chat template.

        Raises:
            ValueError: chat was asked for and the tokenizer has no chat template.
        """
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat and not has_template:
            raise ValueError("--chat needs a tokenizer with a chat template, this model's tokenizer has none")
        return cls(tokenizer, has_template if chat is None else chat)

    def encode(self, turns: Sequence[str], answers: Sequence[str] = ()) -> list[int]:
        """Token ids that ask for the next answer.

        Args:
            turns: the user's messages so far, one more than `answers`.
            answers: the answers to all but the last of them.
        """
        if self.chat:
            messages = []
            for turn, answer in zip(turns, answers, strict=False):
                messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
            messages.append({"role": "user", "content": turns[-1]})
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            parts = [part for turn, answer in zip(turns, answers, strict=False) for part in (turn, answer)]
            ids = self.tokenizer("\n\n".join([*parts, turns[-1]]))["input_ids"]
        if not ids:
            raise ValueError("the prompt is empty after tokenisation")
        return list(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, special tokens left out."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True).strip()
