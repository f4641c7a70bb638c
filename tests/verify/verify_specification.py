"""The verification rules once more, in exact fractions and straight from their equations.

Keyword arguments switch on the known mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache

from verify_enumeration import ONE, ZERO, Choose, Dist, Draft, Model, Prefix, remaining


def draft_dist(draft: Draft, model: Model, prefix: Prefix, token: int) -> Dist:
    """q of one drawn token; one-hot where the token was chosen."""
    if draft.siblings == "deterministic":
        return tuple(ONE if x == token else ZERO for x in range(model.size))
    return model.q(prefix)


def surplus(p: Dist, q: Dist, weight: Fraction = ONE, *, positive_part: bool = True) -> Dist:
    differences = (weight * a - b for a, b in zip(p, q, strict=True))
    return tuple(max(d, ZERO) if positive_part else abs(d) for d in differences)


def normalised(row: Dist) -> Dist:
    total = sum(row)
    return tuple(x / total for x in row)


def target_walk(draft: Draft, model: Model, choose: Choose):
    node, path, tokens = -1, [], []
    while True:
        token = choose.token(model.p(tuple(tokens)))
        tokens.append(token)
        child = next((c for c in draft.children(node) if draft.tokens[c] == token), None)
        if child is None:
            return path, tokens
        path.append(child)
        node = child


def greedy_walk(draft: Draft, model: Model, choose: Choose):
    """The argmax instead of a sample; asks nothing."""

    class Argmax(Choose):
        def token(self, dist: Dist) -> int:
            return dist.index(max(dist))

    return target_walk(draft, model, Argmax())


def rejection_walk(draft: Draft, model: Model, choose: Choose, *, remove: bool = False, positive_part: bool = True):
    """Token-wise, multi-round and (with `remove`) recursive rejection."""
    node, path, tokens = -1, [], []
    while True:
        prefix = tuple(tokens)
        p, drawn, accepted = model.p(prefix), (), None
        for child in draft.children(node):
            x = draft.tokens[child]
            q = draft_dist(draft, model, prefix, x)
            if remove and draft.siblings == "without-replacement":
                q = remaining(q, drawn)
            if choose.accept(p[x] / q[x]):
                accepted = child
                break
            p = normalised(surplus(p, q, positive_part=positive_part))
            drawn += (x,)
        if accepted is None:
            return path, [*tokens, choose.token(p)]
        path.append(accepted)
        tokens.append(draft.tokens[accepted])
        node = accepted


def recursive_walk(draft: Draft, model: Model, choose: Choose, **mistakes):
    return rejection_walk(draft, model, choose, remove=True, **mistakes)


@cache
def k_seq_scale(p: Dist, q: Dist, k: int) -> Fraction:
    """A coarse rho: the smallest multiple of (k - 1) / 8 above 1 that keeps 1 - (1 - b)^k <= rho b."""
    for step in range(9):
        rho = 1 + Fraction((k - 1) * step, 8)
        b = sum(min(x / rho, y) for x, y in zip(p, q, strict=True))
        if 1 - (1 - b) ** k <= rho * b:
            return rho
    raise AssertionError("rho = k always satisfies the condition")


def k_seq_walk(draft: Draft, model: Model, choose: Choose, *, scale=k_seq_scale, share: bool = True):
    node, path, tokens = -1, [], []
    while True:
        prefix = tuple(tokens)
        p, accepted, children = model.p(prefix), None, draft.children(node)
        if children:
            q, k = model.q(prefix), len(children)
            rho = scale(p, q, k)
            for child in children:
                x = draft.tokens[child]
                if choose.accept(p[x] / (rho * q[x])):
                    accepted = child
                    break
            else:
                common = tuple(min(x / rho, y) for x, y in zip(p, q, strict=True))
                b = sum(common)
                factor = (1 - (1 - b) ** k) / b if b and share else ONE
                p = normalised(tuple(x - y * factor for x, y in zip(p, common, strict=True)))
        if accepted is None:
            return path, [*tokens, choose.token(p)]
        path.append(accepted)
        tokens.append(draft.tokens[accepted])
        node = accepted


def block_rule(draft: Draft, model: Model, choose: Choose, *, positive_part: bool = True):
    n = len(draft.tokens)
    weights = [ONE]
    for i, x in enumerate(draft.tokens):
        q = draft_dist(draft, model, draft.tokens[:i], x)
        weights.append(min(ONE, weights[-1] * model.p(draft.tokens[:i])[x] / q[x]))
    for i in range(n, -1, -1):
        prefix, weight = draft.tokens[:i], weights[i]
        if not weight:
            continue
        p = model.p(prefix)
        if i == n:
            if n == 0 or choose.accept(weight):
                return range(i), [*prefix, choose.token(p)]
            continue
        row = surplus(p, draft_dist(draft, model, prefix, draft.tokens[i]), weight, positive_part=positive_part)
        total = sum(row)
        if i == 0 or choose.accept(total / (total + 1 - weight)):
            return range(i), [*prefix, choose.token(normalised(row))]
    raise AssertionError("the empty prefix always passes")


def hierarchical_rule(draft: Draft, model: Model, choose: Choose, *, cap_last: bool = True):
    """From joint ratios; with `cap_last=False` as published, the maximum taken over the positions before."""
    n = len(draft.tokens)
    ratios = [ONE]
    for i, x in enumerate(draft.tokens):
        q = draft_dist(draft, model, draft.tokens[:i], x)
        ratios.append(ratios[-1] * model.p(draft.tokens[:i])[x] / q[x])
    for i in range(n, -1, -1):
        prefix = draft.tokens[:i]
        ratio = ratios[i] / max(ratios[: i + 1] if cap_last or i == 0 else ratios[:i])
        if not ratio:
            continue
        p = model.p(prefix)
        if i == n:
            if n == 0 or choose.accept(ratio):
                return range(i), [*prefix, choose.token(p)]
            continue
        q = draft_dist(draft, model, prefix, draft.tokens[i])
        more = surplus(p, q, ratio)
        less = sum(max(ZERO, b - ratio * a) for a, b in zip(p, q, strict=True))
        if i == 0 or choose.accept(sum(more) / less if less else ONE):
            return range(i), [*prefix, choose.token(normalised(more))]
    raise AssertionError("the empty prefix always passes")


def traversal_rule(draft: Draft, model: Model, choose: Choose, *, remove: bool = True, positive_part: bool = True):
    def visit(node: int, weight: Fraction):
        """The accepted nodes below `node` and the bonus, or None if the node is deleted."""
        prefix, drawn = draft.prefix(node), ()
        p = model.p(prefix)
        for child in draft.children(node):
            x = draft.tokens[child]
            q = draft_dist(draft, model, prefix, x)
            if remove and draft.siblings == "without-replacement":
                q = remaining(q, drawn)
            below = min(ONE, weight * p[x] / q[x])
            if below and (result := visit(child, below)) is not None:
                path, bonus = result
                return [child, *path], bonus
            row = surplus(p, q, weight, positive_part=positive_part)
            total = sum(row)
            if not total:
                assert weight < 1
                return None
            p, weight = normalised(row), total / (total + 1 - weight)
            drawn += (x,)
        if node < 0 or choose.accept(weight):
            return [], choose.token(p)
        return None

    path, bonus = visit(-1, ONE)
    return path, [*(draft.tokens[i] for i in path), bonus]


RULES: dict[str, Callable] = {
    "deterministic": target_walk,
    "token-wise": rejection_walk,
    "multi-round": rejection_walk,
    "recursive": recursive_walk,
    "spectr": k_seq_walk,
    "block": block_rule,
    "hsd": hierarchical_rule,
    "traversal": traversal_rule,
}
"""The lossless rules for a sampled target, by the names they are shipped under."""
