"""The most frequent tokens of what the target itself says."""

from __future__ import annotations

from typing import ClassVar

from adaptspec.vocab.counts import ListKind
from adaptspec.vocab.frequency import FrequencyHead
from adaptspec.vocab.registry import register_vocab_head


@register_vocab_head("trim")
class TrimHead(FrequencyHead):
    """VocabTrim (Goel et al. 2025, 2506.22694): as FR-Spec, calibrated on text that the target generated, which the
    authors found better than what drafters generate, and that better than raw text.

    "trim:8192" takes the list that is shipped for the target's vocabulary, "trim:8192:PATH" another one.
    """

    summary = "the tokens that the target says most: trim:ROWS or trim:ROWS:LIST (VocabTrim)"
    list_kind: ClassVar[ListKind] = "target"
