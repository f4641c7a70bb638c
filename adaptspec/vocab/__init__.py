"""Vocabulary heads by name: which rows of its language-model head a trained drafter computes."""

from adaptspec.vocab import coral, dynaspec, evospec, frequency, full, microspec, trim
from adaptspec.vocab.base import HeadData, TopTokens, VocabHead
from adaptspec.vocab.counts import FrequencyList, count_tokens, load_frequencies, save_frequencies
from adaptspec.vocab.head_sets import HeadSets
from adaptspec.vocab.heads import VocabHeads
from adaptspec.vocab.registry import VOCAB_HEADS, check_vocab, make_head, register_vocab_head
from adaptspec.vocab.routers import Router, load_router, save_router
from adaptspec.vocab.train_router import RouterTraining, train_router

__all__ = [
    "VOCAB_HEADS",
    "FrequencyList",
    "HeadData",
    "HeadSets",
    "Router",
    "RouterTraining",
    "TopTokens",
    "VocabHead",
    "VocabHeads",
    "check_vocab",
    "coral",
    "count_tokens",
    "dynaspec",
    "evospec",
    "frequency",
    "full",
    "load_frequencies",
    "load_router",
    "make_head",
    "microspec",
    "register_vocab_head",
    "save_frequencies",
    "save_router",
    "train_router",
    "trim",
]
