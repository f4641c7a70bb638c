"""Load on vLLM: the adaptive proposer against vLLM's own n-gram drafts and against no speculation.

    python experiments/serving/load.py run OUT        # in the environment that `make test-vllm` makes
    python experiments/serving/load.py report OUT     # in any with matplotlib: a table and a plot

Requests of mixed domains arrive as a Poisson process, the same for every system; at most C run at once. Every system
is a process of its own, and the order of the systems rotates from round to round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

SYSTEMS: Mapping[str, dict[str, Any]] = {
    "off": {},
    **{
        f"ngram-{length}": {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": length,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 2,
            }
        }
        for length in (2, 4, 8)
    },
    "adaptive": {
        "speculative_config": {
            "method": "custom_class",
            "model": "adaptspec.serving.vllm.AdaptiveProposer",
            "num_speculative_tokens": 8,
        },
        "additional_config": {"adaptspec": {"drafters": ["suffix", "token-recycling"], "log_seconds": 0}},
    },
    "adaptive-off": {
        "speculative_config": {
            "method": "custom_class",
            "model": "adaptspec.serving.vllm.AdaptiveProposer",
            "num_speculative_tokens": 8,
        },
        "additional_config": {"adaptspec": {"strategy": "fixed:ar"}},
    },
}
"""What vLLM is given. "adaptive-off": configured and forced off, which must cost nothing."""

COUNTERS = ("num_draft_tokens", "num_accepted_tokens")


def read_prompts() -> list[tuple[str, str]]:
    """(domain, text), domains in turns."""
    text = resources.files("adaptspec.cli").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    by_domain: dict[str, list[str]] = defaultdict(list)
    for line in text.splitlines():
        entry = json.loads(line)
        by_domain[entry["domain"]].append(entry["turns"][0])
    most = max(map(len, by_domain.values()))
    return [(domain, texts[i]) for i in range(most) for domain, texts in by_domain.items() if i < len(texts)]


def make_requests(concurrency: int, arguments: argparse.Namespace) -> list[tuple[float, str, str]]:
    """(arrival in units of one answer's time, domain, text). Equal for all systems of a round."""
    prompts = read_prompts()
    count = max(arguments.least, round(arguments.per_slot * concurrency))
    rng = np.random.default_rng([arguments.seed, concurrency])
    order = [prompts[i % len(prompts)] for i in range(count)]
    rng.shuffle(order)
    arrivals = np.cumsum(rng.exponential(1.0 / concurrency, count)) / arguments.pressure
    return [(float(at), domain, text) for at, (domain, text) in zip(arrivals, order, strict=True)]


def serve(arguments: argparse.Namespace) -> dict[str, Any]:
    """One system, all concurrencies. Runs in a process of its own."""
    import vllm
    from vllm import LLM, SamplingParams

    model = arguments.model
    if model == "embedded":
        from adaptspec.target.embedded import embedded_folder

        model = str(embedded_folder())
    llm = LLM(
        model,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        max_num_seqs=max(arguments.concurrency),
        disable_log_stats=False,
        enable_prefix_caching=False,
        enforce_eager=arguments.eager,
        gpu_memory_utilization=arguments.memory,
        seed=arguments.seed,
        **SYSTEMS[arguments.system],
    )
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True)
    ids = encode(tokenizer, read_prompts()[0][1])
    for _ in range(2):  # what is compiled at its first use, with and without a cached start, is compiled now
        llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    if arguments.answer_seconds is None:
        started = time.perf_counter()
        llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        return {"answer_seconds": time.perf_counter() - started}
    runs = {}
    for concurrency in arguments.concurrency:
        before = counters(llm)
        requests = make_requests(concurrency, arguments)
        run = run_load(llm, tokenizer, params, requests, concurrency, arguments.answer_seconds)
        run.update({name: after - before[name] for name, after in counters(llm).items()})
        runs[str(concurrency)] = run
    return {
        "system": arguments.system,
        "round": arguments.round,
        "runs": runs,
        "vllm": vllm.__version__,
        "model": arguments.model,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "arguments": {name: value for name, value in vars(arguments).items() if name not in ("command", "out")},
    }


def encode(tokenizer: Any, text: str) -> list[int]:
    """As a chat with one message, if the model is one for chats."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def counters(llm: Any) -> dict[str, int]:
    found = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {name: int(found.get(f"vllm:spec_decode_{name}", 0)) for name in COUNTERS}


def run_load(
    llm: Any, tokenizer: Any, params: Any, requests: list[tuple[float, str, str]], concurrency: int, unit: float
) -> dict[str, Any]:
    """Feed requests as they arrive, never more than `concurrency` at once; times of each."""
    engine = llm.llm_engine
    waiting = [(at * unit, domain, encode(tokenizer, text)) for at, domain, text in requests][::-1]
    open_requests: dict[str, dict[str, Any]] = {}
    done: list[dict[str, Any]] = []
    started, processor = time.perf_counter(), time.process_time()
    number = 0
    while waiting or open_requests:
        now = time.perf_counter() - started
        while waiting and waiting[-1][0] <= now and len(open_requests) < concurrency:
            at, domain, ids = waiting.pop()
            name = f"{concurrency}-{number}"
            number += 1
            engine.add_request(name, {"prompt_token_ids": ids}, params)
            open_requests[name] = {"domain": domain, "arrived": at, "first": None, "tokens": 0}
        if not open_requests:
            time.sleep(max(0.0, waiting[-1][0] - now))
            continue
        for output in engine.step():
            entry = open_requests[output.request_id]
            now = time.perf_counter() - started
            entry["tokens"] = len(output.outputs[0].token_ids)
            if entry["first"] is None:
                entry["first"] = now
            if output.finished:
                entry["finished"] = now
                done.append(open_requests.pop(output.request_id))
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    tokens = sum(entry["tokens"] for entry in done)
    each = [(entry["finished"] - entry["first"]) / max(1, entry["tokens"] - 1) for entry in done]
    waits = [entry["first"] - entry["arrived"] for entry in done]
    domains: dict[str, list[float]] = defaultdict(list)
    for entry, pace in zip(done, each, strict=True):
        domains[entry["domain"]].append(pace)
    return {
        "requests": len(done),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "processor_milliseconds_per_token": 1e3 * processor / tokens,
        "milliseconds_per_token": 1e3 * statistics.fmean(each),
        "milliseconds_per_token_p95": 1e3 * float(np.quantile(each, 0.95)),
        "milliseconds_to_first_p95": 1e3 * float(np.quantile(waits, 0.95)),
        "milliseconds_per_token_by_domain": {
            domain: 1e3 * statistics.fmean(paces) for domain, paces in domains.items()
        },
    }


def run(arguments: argparse.Namespace) -> None:
    """All systems in all rounds, each in its own process; a file per system and round."""
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    systems = arguments.systems
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    unit = arguments.answer_seconds
    for number in range(arguments.rounds):
        turn = number % len(systems)
        for system in systems[turn:] + systems[:turn]:
            if unit is None:
                unit = one_process("off", 0, None, arguments, environment)["answer_seconds"]
                print(f"one answer alone takes {unit:.2f} s", flush=True)
            result = one_process(system, number, unit, arguments, environment)
            (out / f"{system}.{number}.json").write_text(json.dumps(result, indent=1))
            speeds = ", ".join(f"{name}: {one['tokens_per_second']:.1f}" for name, one in result["runs"].items())
            print(f"round {number}, {system}: tokens per second at {speeds}", flush=True)


def one_process(
    system: str, number: int, unit: float | None, arguments: argparse.Namespace, environment: Mapping[str, str]
) -> dict[str, Any]:
    command = [sys.executable, __file__, "serve", str(arguments.out), "--system", system, "--round", str(number)]
    for name in ("model", "dtype", "max_model_len", "max_tokens", "least", "per_slot", "pressure", "seed", "memory"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    command += ["--concurrency", *map(str, arguments.concurrency)]
    command += ["--eager"] if arguments.eager else []
    command += [] if unit is None else ["--answer-seconds", str(unit)]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def report(arguments: argparse.Namespace) -> None:
    """A Markdown table, and a plot beside it: speed against no speculation, by requests at once."""
    out = Path(arguments.out)
    results = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    if not results:
        raise SystemExit(f"{out} holds no results")
    table = summarise(results)
    lines = table_lines(table)
    (out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    plot(table, out / "load.png")


Table = dict[str, dict[int, dict[str, Any]]]


def summarise(results: Iterable[Mapping[str, Any]]) -> Table:
    """By system and concurrency: speeds of all rounds, ratios to "off" of the same round, acceptance."""
    by_round: dict[int, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for result in results:
        by_round[result["round"]][result["system"]] = result["runs"]
    table: Table = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for runs in by_round.values():
        for system, levels in runs.items():
            for level, one in levels.items():
                cell = table[system][int(level)]
                cell["speed"].append(one["tokens_per_second"])
                cell["pace"].append(one["milliseconds_per_token_p95"])
                cell["drafted"].append(one["num_draft_tokens"])
                cell["accepted"].append(one["num_accepted_tokens"])
                if "off" in runs:
                    off = runs["off"][level]
                    cell["ratio"].append(one["tokens_per_second"] / off["tokens_per_second"])
                    processor = "processor_milliseconds_per_token"
                    cell["processor"].append(off[processor] / one[processor])
    return table


def table_lines(table: Table) -> list[str]:
    levels = sorted({level for cells in table.values() for level in cells})
    lines = [
        "| system | " + " | ".join(f"{level} at once" for level in levels) + " |",
        "|---|" + "---|" * len(levels),
    ]
    for system in sorted(table, key=list(SYSTEMS).index):
        texts = []
        for level in levels:
            cell = table[system][level]
            if not cell["speed"]:
                texts.append("")
                continue
            text = f"{statistics.median(cell['speed']):.1f} tok/s"
            if cell["ratio"] and system != "off":
                low, high = min(cell["ratio"]), max(cell["ratio"])
                text += f", x{statistics.median(cell['ratio']):.2f} ({low:.2f} to {high:.2f})"
                text += f", x{statistics.median(cell['processor']):.2f} by processor time"
            if drafted := sum(cell["drafted"]):
                text += f", {sum(cell['accepted']) / drafted:.0%} of {drafted} accepted"
            texts.append(text)
        lines.append(f"| {system} | " + " | ".join(texts) + " |")
    return lines


def plot(table: Table, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for system in sorted(table, key=list(SYSTEMS).index):
        cells = {level: cell for level, cell in sorted(table[system].items()) if cell["ratio"]}
        middle = [statistics.median(cell["ratio"]) for cell in cells.values()]
        spread = [
            [m - min(cell["ratio"]) for m, cell in zip(middle, cells.values(), strict=True)],
            [max(cell["ratio"]) - m for m, cell in zip(middle, cells.values(), strict=True)],
        ]
        axes.errorbar(list(cells), middle, yerr=spread, marker="o", capsize=3, label=system)
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens per second, no speculation = 1")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "serve"):
        command = commands.add_parser(name)
        command.add_argument("out", help="folder of the results")
        command.add_argument("--model", default="embedded", help="a folder or hub id; default: the embedded model")
        command.add_argument("--dtype", default="float32")
        command.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
        command.add_argument("--max-tokens", type=int, default=64)
        command.add_argument("--max-model-len", type=int, default=1024)
        command.add_argument("--least", type=int, default=9, help="requests at least per concurrency")
        command.add_argument("--per-slot", type=float, default=1.5, help="requests per request at once")
        command.add_argument(
            "--pressure", type=float, default=1.0, help="arrivals per answer's time and request at once"
        )
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--memory", type=float, default=0.3, help="share of memory that vLLM may take")
        command.add_argument("--eager", action="store_true", help="without compilation")
        command.add_argument("--answer-seconds", type=float, help="time of one answer; default: measured first")
        if name == "run":
            command.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
            command.add_argument("--rounds", type=int, default=3)
            command.add_argument("--threads", type=int, default=1)
        else:
            command.add_argument("--system", choices=list(SYSTEMS), required=True)
            command.add_argument("--round", type=int, default=0)
    commands.add_parser("report").add_argument("out")
    arguments = parser.parse_args()
    if arguments.command == "serve":
        print(json.dumps(serve(arguments)))
    else:
        {"run": run, "report": report}[arguments.command](arguments)


if __name__ == "__main__":
    main()
