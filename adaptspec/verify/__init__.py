"""Verification: from a draft tree and the target's probabilities to the tokens that are emitted.

| name | trees | siblings | lossless |
|---|---|---|---|
| greedy | any | any | at temperature 0 |
| deterministic | any | any; made for deterministic | yes |
| token-wise | chains | any | yes |
| block, hsd | chains | any | yes |
| multi-round | any | iid, deterministic | yes |
| spectr | any | iid | yes |
| recursive | any | without-replacement, deterministic | yes |
| traversal | any | any | yes |
| typical | any | any | **no** |

A rule refuses (ValueError) a tree for which it would not be lossless.
"""

from __future__ import annotations

import functools

from adaptspec.names import unknown_name
from adaptspec.types import DraftTree
from adaptspec.verify.base import VERIFIERS, Rows, Uniforms, VerifierInfo, Verify
from adaptspec.verify.block import verify_block, verify_hsd
from adaptspec.verify.greedy import verify_greedy
from adaptspec.verify.rows import sample
from adaptspec.verify.sampling import (
    verify_deterministic,
    verify_multi_round,
    verify_recursive,
    verify_spectr,
    verify_token_wise,
)
from adaptspec.verify.traversal import verify_traversal
from adaptspec.verify.typical import check_typical_options, verify_typical

__all__ = [
    "VERIFIERS",
    "Rows",
    "Uniforms",
    "VerifierInfo",
    "Verify",
    "choose_verifier",
    "make_verifier",
    "sample",
    "verify_block",
    "verify_deterministic",
    "verify_greedy",
    "verify_hsd",
    "verify_multi_round",
    "verify_recursive",
    "verify_spectr",
    "verify_token_wise",
    "verify_traversal",
    "verify_typical",
]


def make_verifier(name: str, *, tau: float | None = None, alpha: float | None = None) -> Verify:
    """The rule called `name`: `(tree, target_probs, rng) -> Verdict`; "greedy" is `(tree, target_argmax) -> Verdict`.

    Args:
        name: a key of `VERIFIERS`.
        tau: only for "typical": hard threshold, 0.3 if not given.
        alpha: only for "typical": threshold relative to exp(-entropy), 0.09 if not given.

    Raises:
        ValueError: unknown name, an option that the rule does not have, or one out of range.
    """
    if name not in VERIFIERS:
        raise unknown_name("verifier", name, VERIFIERS)
    options = {key: value for key, value in (("tau", tau), ("alpha", alpha)) if value is not None}
    if not options:
        return VERIFIERS[name].verify
    if name != "typical":
        raise ValueError(f"only the verifier 'typical' takes {' and '.join(options)}, got it for {name!r}")
    check_typical_options(tau=options.get("tau", 0.3), alpha=options.get("alpha", 0.09))
    return functools.partial(verify_typical, **options)


def choose_verifier(tree: DraftTree, greedy: bool, name: str = "auto") -> VerifierInfo:
    """The rule to verify `tree` with.

    At temperature 0 always "greedy": every rule comes down to it when p is one-hot. Otherwise "auto" takes

    - "deterministic" for deterministic trees and for the empty tree,
    - "block" for chains of drawn tokens,
    - "traversal" for other drawn trees, i.i.d. or without replacement: in every tree enumerated in the tests it accepts
      at least as much as multi-round and recursive rejection, at the price of reading rows on paths it then gives up.

    Args:
        tree: what was drafted.
        greedy: temperature 0.
        name: "auto" or a key of `VERIFIERS`.

    Raises:
        ValueError: unknown name, "greedy" for a sampled target, or a rule that is not right for this tree.
    """
    if name != "auto" and name not in VERIFIERS:
        raise unknown_name("verifier", name, [*VERIFIERS, "auto"])
    if greedy:
        return VERIFIERS["greedy"]
    if name == "greedy":
        raise ValueError("verifier 'greedy' is right only at temperature 0; use 'auto' or a rule for sampling")
    if name == "auto":
        if tree.siblings == "deterministic" or not len(tree):
            return VERIFIERS["deterministic"]
        return VERIFIERS["traversal" if VERIFIERS["block"].objection(tree) else "block"]
    info = VERIFIERS[name]
    if (problem := info.objection(tree)) is not None:
        fitting = [i.name for i in VERIFIERS.values() if i.reads == "probabilities" and i.objection(tree) is None]
        raise ValueError(f"{problem}. For this tree: {', '.join(fitting)}, auto")
    return info
