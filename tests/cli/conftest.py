"""A small model with a chat template and a context long enough for the built-in prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of hidden size 32 with a byte-level BPE of 400 tokens, as a model folder. Do not change it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from adaptspec.cli.prompts import built_in_prompts

    folder = tmp_path_factory.mktemp("chat")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([turn for prompt in built_in_prompts() for turn in prompt.turns], trainer)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **names)
    wrapped.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(wrapped),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,  # tied, it would repeat its last token; so it goes almost in circles
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Four short prompts of two domains, one of them with two turns."""
    lines: list[dict[str, Any]] = [
        {"question_id": 81, "category": "writing", "turns": ["Write about the sea and the sea and the sea."]},
        {"question_id": 82, "category": "writing", "turns": ["Name three birds.", "Name them again."]},
        {"question_id": 83, "category": "math", "turns": ["What is one and one and one?"]},
        {"question_id": 84, "category": "math", "turns": ["Count to ten, then count to ten."]},
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
