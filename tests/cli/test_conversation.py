from __future__ import annotations

from typing import Any

import pytest

from adaptspec.cli.conversation import Conversation
from tests.cli.fakes import CharacterTokenizer, TemplateTokenizer


def encoded(conversation: Conversation, *arguments: Any) -> str:
    return "".join(chr(i) for i in conversation.encode(*arguments))


def test_without_a_template_turns_and_answers_are_joined() -> None:
    conversation = Conversation.choose(CharacterTokenizer(), None)
    assert not conversation.chat
    assert encoded(conversation, ["one"]) == "one"
    assert encoded(conversation, ["one", "two"], ["answer"]) == "one\n\nanswer\n\ntwo"


def test_with_a_template_earlier_answers_are_in_context() -> None:
    conversation = Conversation.choose(TemplateTokenizer(), None)
    assert conversation.chat
    assert encoded(conversation, ["one"]) == "U(one)A("
    assert encoded(conversation, ["one", "two"], ["answer"]) == "U(one)A(answer)U(two)A("


def test_the_template_can_be_switched_off_but_not_invented() -> None:
    assert not Conversation.choose(TemplateTokenizer(), False).chat
    with pytest.raises(ValueError, match="--chat needs a tokenizer with a chat template"):
        Conversation.choose(CharacterTokenizer(), True)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="empty after tokenisation"):
        Conversation(CharacterTokenizer(), chat=False).encode([""])
