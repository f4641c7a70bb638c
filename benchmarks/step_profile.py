"""Where the time of one step goes: the parts of a verify pass beside one plain forward of as many tokens.

    python benchmarks/step_profile.py --model embedded --dtype float32 --nodes 8,32,64

Prints the median and the fastest of many rounds in milliseconds; the parts take turns, so that drift hits all alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

from adaptspec.processor import prefer_fast_kernels

prefer_fast_kernels()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from adaptspec.target.compat import cache_argument  # noqa: E402
from adaptspec.target.hf import HFTarget, tree_rows  # noqa: E402
from adaptspec.target.loading import load_target  # noqa: E402
from adaptspec.target.rows import TargetRows, TokenBuffer, top_ids  # noqa: E402
from adaptspec.types import DraftTree  # noqa: E402
from adaptspec.verify import verify_greedy  # noqa: E402


def binary_tree(nodes: int) -> DraftTree:
    """A tree in which every node has two children."""
    parents = np.array([-1 if node == 0 else (node - 1) // 2 for node in range(nodes)], dtype=np.int64)
    return DraftTree(np.arange(nodes), parents, np.zeros(nodes))


def parts_of(model: Any, *, nodes: int, prefix: int) -> dict[str, Callable[[], object]]:
    """The parts of a step by name; "own Python" is what the step adds to the forward and to the drafter."""
    target = HFTarget(model)
    ids = torch.arange(prefix) % target.vocab_size
    target.prefill(ids)
    tree = binary_tree(nodes)
    logits = target.score(1, tree).logits
    tokens = TokenBuffer(ids)
    best = TargetRows(logits, tree=tree, tokens=tokens, processors=None).argmax()
    path = np.array([0, 2, 6])  # a way down that skips rows, so that rows must move
    _, depths, visible = tree_rows(1, tree)
    cache = DynamicCache(config=model.config)
    argument = {cache_argument(type(model)): cache, "use_cache": True}
    row = torch.arange(nodes + 1)[None] % target.vocab_size
    with torch.inference_mode():
        model(ids[None], logits_to_keep=1, **argument)

    def score() -> None:
        target.rollback(prefix)
        target.score(1, tree)

    def plain_forward() -> None:
        with torch.inference_mode():
            model(row, **argument)
        cache.crop(-(nodes + 1))

    def commit() -> None:
        target.commit(path)
        target.rollback(prefix)

    return {
        f"score a tree of {nodes} nodes": score,
        f"plain forward of {nodes + 1} tokens": plain_forward,
        "  of the score: token, position and visibility rows": lambda: tree_rows(1, tree),
        "  of the score: attention masks": lambda: target._masks(depths, visible, depths),
        "validate the tree": lambda: tree.validate(vocab_size=target.vocab_size, budget=nodes),
        "argmax per row": lambda: TargetRows(logits, tree=tree, tokens=tokens, processors=None).argmax(),
        "greedy walk": lambda: verify_greedy(tree, best),
        "commit three rows": commit,
        "top 8 per row (token recycling only)": lambda: top_ids(logits, 8),
    }


def measure(parts: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds per part and round; the order is rotated from round to round."""
    names = list(parts)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        parts[name]()
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started = perf_counter()
            parts[name]()
            seconds[name].append(perf_counter() - started)
    return seconds


def main() -> None:
    """Read options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--nodes", default="8,32,64")
    parser.add_argument("--prefix", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model, _ = load_target(options.model, dtype=options.dtype)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for nodes in (int(text) for text in options.nodes.split(",")):
        seconds = measure(parts_of(model, nodes=nodes, prefix=options.prefix), rounds=options.rounds)
        results[str(nodes)] = {
            name: {"median_ms": 1e3 * statistics.median(values), "fastest_ms": 1e3 * min(values)}
            for name, values in seconds.items()
        }
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for table in results.values():
        for name, row in table.items():
            print(f"{name:56s} {row['median_ms']:9.3f} ms median {row['fastest_ms']:9.3f} ms fastest")
        print()


if __name__ == "__main__":
    main()
