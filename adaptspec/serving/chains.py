"""Drafters for stacks that verify chains: one object per drafter and request, what was learnt shared by all requests.

A stack tells tokens late, in bursts, or not at all for a while. A `ChainDrafter` is therefore handed the whole text of
its request whenever it is asked, takes in what is new, and costs nothing while it is not asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaptspec.drafters import DRAFTERS, Drafter
from adaptspec.drafters.past_outputs import PastOutputs
from adaptspec.drafters.prompt_lookup import NgramPositions, common_suffix
from adaptspec.drafters.suffix import SuffixDrafter
from adaptspec.names import unknown_name
from adaptspec.serving.types import EVIDENCE_LEVELS
from adaptspec.types import DraftContext, DraftTree, Observation, Sampling, Verdict

_GREEDY = Sampling()
_NOBODY = np.random.default_rng(0)
_NO_PATH = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Chain:
    """A draft.

    Attributes:
        tokens: what to verify, in order; empty to decline.
        evidence: how sure the drafter is, in [0, EVIDENCE_LEVELS); -1 where it cannot say.
    """

    tokens: list[int]
    evidence: int = -1


DECLINED = Chain([])


class ChainDrafter(ABC):
    """One drafter in one request.

    Class attributes:
        cheap: asking costs microseconds, so that one asks first and decides then.
    """

    cheap: bool = True

    @abstractmethod
    def draft(self, text: np.ndarray, length: int) -> Chain:
        """At most `length` >= 1 tokens behind `text`, int32 or int64 [T]: the request's text, longer than before."""

    def catch_up(self, text: np.ndarray) -> None:
        """Take in what is new without drafting."""

    @property
    def seen(self) -> int:
        """Tokens taken in so far."""
        return 0

    def finish(self, prompt_length: int) -> None:
        """The request ended; its first `prompt_length` tokens were given."""


class TreeDrafterChain(ChainDrafter):
    """A `Drafter` of the library, of whose trees the best path is taken.

    Args:
        limit: the longest text, draft included, that the drafter's own context holds; None for any.
    """

    def __init__(self, drafter: Drafter, *, cheap: bool = True, limit: int | None = None) -> None:
        self.drafter = drafter
        self.cheap = cheap
        self.limit = limit
        self._seen = 0

    @property
    def seen(self) -> int:
        return self._seen

    def catch_up(self, text: np.ndarray) -> None:
        length = len(text)
        if self.limit is not None and length >= self.limit:
            return
        if not self._seen:
            self.drafter.prefill(text.astype(np.int64))
        elif length > self._seen:
            tokens = text[self._seen :].astype(np.int64)
            self.drafter.observe(Observation(DraftTree.empty(), Verdict(_NO_PATH, tokens), tokens))
        self._seen = length

    def draft(self, text: np.ndarray, length: int) -> Chain:
        self.catch_up(text)
        if self._seen < len(text):
            return DECLINED
        context = DraftContext(int(text[-1]), self._seen, length, _GREEDY, _NOBODY)
        tree = self.drafter.propose(context, length)
        if not len(tree):
            return DECLINED
        path = best_path(tree)
        return Chain(tree.token_ids[path].tolist(), evidence_level(tree))

    def finish(self, prompt_length: int) -> None:
        if self._seen:
            if isinstance(self.drafter, SharedSuffixDrafter):
                self.drafter.set_prompt_length(prompt_length)
            self.drafter.finish()
        self._seen = 0


class PromptLookupChain(ChainDrafter):
    """Prompt lookup without the detour over trees: it is asked for every row at every step."""

    def __init__(self, *, max_ngram: int = 3) -> None:
        self._index = NgramPositions(min_ngram=1, max_ngram=max_ngram, tie="latest")

    @property
    def seen(self) -> int:
        return len(self._index.text)

    def catch_up(self, text: np.ndarray) -> None:
        self._index.extend(text[len(self._index.text) :].tolist())

    def draft(self, text: np.ndarray, length: int) -> Chain:
        self.catch_up(text)
        start = self._index.find()
        if start is None:
            return DECLINED
        own = self._index.text
        copied = own[start : start + length].tolist()
        while len(copied) < length:  # a copy that reaches the end of the text goes on with itself
            copied.extend(copied[: length - len(copied)])
        return Chain(copied, min(EVIDENCE_LEVELS - 1, common_suffix(own, start, len(own)).bit_length()))


class SharedPast:
    """Past outputs of all requests, which their suffix drafters read.

    `version` changes with the automaton: places in an older one mean nothing any more.
    """

    def __init__(self, *, max_tokens: int, max_depth: int) -> None:
        self.outputs = PastOutputs(max_tokens=max_tokens, count_length=2 * max_depth)
        self.version = 0

    def add(self, output: list[int]) -> None:
        """Remember one output."""
        self.outputs.add(output)
        self.version += 1


class SharedSuffixDrafter(SuffixDrafter):
    """A `SuffixDrafter` for one of many requests at once: the past is shared, a chain is drafted.

    Another request may end, and its output join the past, between two proposals of this one. The match in the past is
    then looked up anew from the last `max_depth` tokens.
    """

    name = SuffixDrafter.name

    def __init__(self, past: SharedPast, *, max_depth: int) -> None:
        super().__init__(max_depth=max_depth, tree=False, max_past_tokens=0)
        self._past = past.outputs
        self._shared = past
        self._version = past.version

    def _extend(self, tokens: list[int]) -> None:
        if self._version == self._shared.version:
            super()._extend(tokens)
            return
        assert self._own is not None
        self._own.extend(tokens)
        self._version = self._shared.version
        recent = self._own.text[-self.max_depth :]
        self._past_match = self._past.automaton.follow(0, 0, recent)

    def _begin(self, tokens: list[int]) -> None:
        self._version = self._shared.version
        super()._begin(tokens)

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        if self._version != self._shared.version:
            self._extend([])
        return super()._draft(budget, max_depth)

    def set_prompt_length(self, length: int) -> None:
        """The first so many tokens are not output, although the drafter may have met the request later."""
        self._prompt_length = length

    def _end(self) -> None:
        assert self._own is not None
        self._shared.add(self._own.text[self._prompt_length :].tolist())
        self._own = None


class ObservedSuccessors:
    """Which token last followed each token, over all requests, and how steadily: two numbers per token of the text.

    Token Recycling (arXiv 2408.08696) keeps the target's runner-up tokens; a stack that hands out no logits leaves
    what was observed. A successor that was seen n times in a row needs as many contradictions, halving, to go.

    >>> table = ObservedSuccessors()
    >>> table.extend([3, 4, 5, 3, 4])
    >>> table.chain(3, 4)
    ([4, 5, 3, 4], 2)
    """

    def __init__(self) -> None:
        self._next: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._next)

    def extend(self, tokens: list[int]) -> None:
        """Take in consecutive tokens."""
        table = self._next
        for token, after in zip(tokens, tokens[1:], strict=False):
            known = table.get(token)
            if known is None or (known[0] != after and known[1] <= 1):
                table[token] = (after, 1)
            elif known[0] == after:
                table[token] = (after, min(known[1] + 1, 64))
            else:
                table[token] = (known[0], known[1] // 2)

    def chain(self, token: int, length: int) -> tuple[list[int], int]:
        """At most `length` tokens behind `token`, and how often the first of them was confirmed."""
        table = self._next
        found: list[int] = []
        steadiness = 0
        for _ in range(length):
            known = table.get(token)
            if known is None:
                break
            token = known[0]
            if not found:
                steadiness = known[1]
            found.append(token)
        return found, steadiness


class RecyclingChain(ChainDrafter):
    """Token recycling by observation, see `ObservedSuccessors`."""

    def __init__(self, table: ObservedSuccessors) -> None:
        self._table = table
        self._seen = 0

    @property
    def seen(self) -> int:
        return self._seen

    def catch_up(self, text: np.ndarray) -> None:
        self._table.extend(text[max(0, self._seen - 1) :].tolist())
        self._seen = len(text)

    def draft(self, text: np.ndarray, length: int) -> Chain:
        if len(text) > self._seen:
            self.catch_up(text)
        tokens, steadiness = self._table.chain(int(text[-1]), length)
        return Chain(tokens, min(EVIDENCE_LEVELS - 1, steadiness.bit_length())) if tokens else DECLINED


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a draft model must know of the target: how many token ids there are, and the tokenizer if at hand."""

    vocab_size: int
    tokenizer: Any = None
    dtype: Any = "auto"


Maker = Callable[[], ChainDrafter]
"""Makes the drafter of one more request."""


def chain_makers(names: list[str], *, vocabulary: Vocabulary, max_past_tokens: int = 100_000) -> dict[str, Maker]:
    """For each drafter, by its name without a path, what makes it for a request.

    Args:
        names: of drafters that need the committed tokens only, or "draft-model:PATH".
        vocabulary: of the target.
        max_past_tokens: past outputs that suffix drafters remember over requests.

    Raises:
        ValueError: an unknown name, one that needs more of the target than a stack hands out, or one twice.
    """
    makers: dict[str, Maker] = {}
    for text in names:
        if not isinstance(text, str):
            raise ValueError(f"drafters must be names, got {text!r}")
        name, _, path = text.partition(":")
        if name in makers:
            raise ValueError(f"drafters must be different, got {name!r} twice")
        if name not in CHAIN_DRAFTERS:
            if name in DRAFTERS:
                raise ValueError(
                    f"drafter {name!r} needs more than the stack hands out. Valid: {', '.join(CHAIN_DRAFTERS)}"
                )
            raise unknown_name("drafter", name, CHAIN_DRAFTERS)
        if bool(path) != (name == "draft-model"):
            problem = "needs a path or hub id: write 'draft-model:PATH'" if not path else f"takes no path, got {path!r}"
            raise ValueError(f"drafter {name!r} {problem}")
        makers[name] = CHAIN_DRAFTERS[name](text, vocabulary, max_past_tokens)
    return makers


def _suffix(text: str, vocabulary: Vocabulary, max_past_tokens: int) -> Maker:
    depth = 64
    past = SharedPast(max_tokens=max_past_tokens, max_depth=depth)
    return lambda: TreeDrafterChain(SharedSuffixDrafter(past, max_depth=depth))


def _recycling(text: str, vocabulary: Vocabulary, max_past_tokens: int) -> Maker:
    table = ObservedSuccessors()
    return lambda: RecyclingChain(table)


def _prompt_lookup(text: str, vocabulary: Vocabulary, max_past_tokens: int) -> Maker:
    return PromptLookupChain


def _draft_model(text: str, vocabulary: Vocabulary, max_past_tokens: int) -> Maker:
    from adaptspec.target.loading import load_target

    dtype = str(vocabulary.dtype).removeprefix("torch.")
    model, _ = load_target(text.partition(":")[2], dtype=dtype)

    def make() -> ChainDrafter:
        drafter = DRAFTERS["draft-model"](model)
        drafter.bind(vocabulary)
        return TreeDrafterChain(drafter, cheap=False, limit=getattr(model.config, "max_position_embeddings", None))

    make()  # a vocabulary that does not fit is better refused now than at the first request
    return make


CHAIN_DRAFTERS: Mapping[str, Callable[[str, Vocabulary, int], Maker]] = {
    "suffix": _suffix,
    "prompt-lookup": _prompt_lookup,
    "token-recycling": _recycling,
    "draft-model": _draft_model,
}


def best_path(tree: DraftTree) -> np.ndarray:
    """int64 [D], the nodes from the root down, at each depth the child with the best score.

    >>> best_path(DraftTree.chain([5, 6, 7])).tolist()
    [0, 1, 2]
    """
    count = len(tree)
    if (tree.parents == np.arange(-1, count - 1)).all():
        return np.arange(count)
    children: dict[int, int] = {}
    scores = tree.scores.tolist()
    for node, parent in enumerate(tree.parents.tolist()):
        if parent not in children or scores[node] > scores[children[parent]]:
            children[parent] = node
    path, node = [], -1
    while node in children:
        node = children[node]
        path.append(node)
    return np.asarray(path, dtype=np.int64)


def evidence_level(tree: DraftTree) -> int:
    """By the length of the match, doubling from level to level; else by the first node's score; -1 if it has none."""
    matched = tree.evidence.get("match_length")
    if matched is not None:
        return min(EVIDENCE_LEVELS - 1, int(matched[0]).bit_length())
    score = float(tree.scores[0])
    return -1 if score == 0.0 else min(EVIDENCE_LEVELS - 1, int(np.exp(score) * EVIDENCE_LEVELS))
