"""What a reduced vocabulary saves on this machine: the whole head beside some of its rows, and what changes cost.

    python benchmarks/vocab_head.py --vocab-size 49152 --hidden-size 576 --rows 16384 --threads 1

Median and fastest of many rounds in which calls take turns, so that drift hits all alike. Heads give top-k tokens with
normalised log-probabilities. Changes are measured twice: after a whole head went through the caches, as in a real step,
and on their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter

from adaptspec.processor import prefer_fast_kernels

prefer_fast_kernels()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from adaptspec.kernels.dense_rows import DenseRows  # noqa: E402
from adaptspec.kernels.vocab_head import vocab_head  # noqa: E402

Calls = dict[str, Callable[[], object]]


def calls_of(
    *, vocab_size: int, hidden_size: int, rows: int, changed: int, k: int, dtype: torch.dtype
) -> tuple[Calls, Calls]:
    """Heads and changes by name; "1" and "8" are numbers of hidden states."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((vocab_size, hidden_size), generator=generator).to(dtype)
    order = torch.randperm(vocab_size, generator=generator).to(torch.int32).numpy()
    ids, other = order[:rows].copy(), order[:rows].copy()
    places = np.random.default_rng(0).permutation(rows)[:changed]
    other[places] = order[rows : rows + changed]
    dense, updated, replaced = (DenseRows(weight, ids, capacity=rows) for _ in range(3))
    sets, singles = [ids, other], [ids[places], other[places]]

    def update() -> None:
        sets.reverse()
        updated.update(sets[0])

    def replace() -> None:
        singles.reverse()
        replaced.replace(places, singles[0])

    heads: Calls = {}
    for count in (1, 8):
        hidden = torch.randn((count, hidden_size), generator=generator).to(dtype)
        heads[f"full head, {count}"] = lambda hidden=hidden: vocab_head(hidden, weight, k=k)
        heads[f"dense rows, {count}"] = lambda hidden=hidden: dense.top(hidden, k=k)
    return heads, {f"update all ids, {changed} of them new": update, f"replace {changed} rows": replace}


def measure(calls: Calls, *, rounds: int) -> dict[str, dict[str, float]]:
    """Median and fastest milliseconds by name."""
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            started = perf_counter()
            calls[name]()
            seconds[name].append(perf_counter() - started)
    return {
        name: {"median_ms": 1e3 * statistics.median(values[1:]), "fastest_ms": 1e3 * min(values[1:])}
        for name, values in seconds.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Read options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--rows", type=int, default=16384, help="rows of the head in use")
    parser.add_argument("--changed", type=int, default=64, help="rows that an update changes")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.rows + options.changed > options.vocab_size:
        parser.error(f"rows + changed must be <= vocab-size = {options.vocab_size}")
    torch.set_num_threads(options.threads)
    results = {}
    for name in options.dtype.split(","):
        heads, changes = calls_of(
            vocab_size=options.vocab_size,
            hidden_size=options.hidden_size,
            rows=options.rows,
            changed=options.changed,
            k=options.k,
            dtype=getattr(torch, name),
        )
        cold = {f"{what}, cold": call for what, call in changes.items()}
        results[name] = {
            **measure({**heads, **cold}, rounds=options.rounds),
            **measure(changes, rounds=20 * options.rounds),
        }
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for dtype, table in results.items():
        for name, row in table.items():
            print(f"{dtype:9s} {name:40s} {row['median_ms']:9.3f} ms median {row['fastest_ms']:9.3f} ms fastest")
        for count in (1, 8):
            ratio = table[f"full head, {count}"]["fastest_ms"] / table[f"dense rows, {count}"]["fastest_ms"]
            print(f"{dtype:9s} {f'full head / dense rows, {count}':40s} {ratio:9.2f} times, fastest")
        update = table[f"update all ids, {options.changed} of them new"]
        median, fastest = (1e3 * update[key] for key in ("median_ms", "fastest_ms"))
        print(f"{dtype:9s} {'update, warm, in microseconds':40s} {median:9.1f} median {fastest:9.1f} fastest")


if __name__ == "__main__":
    main()
