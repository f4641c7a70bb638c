"""Recording of position-indexed traces, in shards that different workers record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from adaptspec.cli.trace import contexts_of, make_drafters, request_names
from adaptspec.control.trace import Trace
from adaptspec.control.trace_file import parse_trace, trace_bytes
from experiments.models import ModelWork, part_of, prompts_of
from experiments.tasks import NotAvailable, Outcome, Settings, Task

FILE = "trace.parquet"


class RecordTrace(ModelWork):
    """Parameters: `pool` (drafters), `nodes` (budget of every proposal), `shard` of `shards`.

    Drafters that learn over requests learn from the requests of their shard. With a trace in the settings, that one is
    the first shard and the others are empty.
    """

    def __init__(self, settings: Settings, *, threads: int = 1) -> None:
        if settings.trace is None:
            super().__init__(settings, threads=threads)
        else:
            self.settings = settings

    def run(self, task: Task) -> Outcome:
        """Answer the shard's prompts."""
        if self.settings.trace is not None:
            return given_trace(self.settings.trace, first=task.parameter("shard", 0) == 0)
        from adaptspec.tracing import TracePrompt, TraceRecorder, measured_costs

        prompts = part_of(prompts_of(self.settings, task.parameter("domains")), task)
        if not prompts:
            return Outcome(rows=[{"requests": 0, "tokens": 0, "bytes": 0}], facts=self.facts)
        longest, nodes = self.settings.max_new_tokens, task.parameter("nodes")
        try:
            drafters = make_drafters([self.pool_entry(name) for name in task.parameter("pool")], temperature=0.0)
            lengths = [len(self.conversation.encode(prompt.turns[:1])) + longest // 2 for prompt in prompts]
            costs, fingerprint = measured_costs(
                self.network, nodes=nodes, contexts=contexts_of(lengths), tokenizer=self.tokenizer
            )
            recorder = TraceRecorder(
                self.network,
                drafters,
                nodes=nodes,
                max_new_tokens=longest,
                seed=task.configuration.seed,
                costs=costs,
                tokenizer=self.tokenizer,
            )
        except (ValueError, FileNotFoundError) as error:
            raise NotAvailable(str(error)) from error
        for prompt in prompts:
            answers: list[str] = []
            for turn, name in enumerate(request_names(prompt)):
                ids = self.conversation.encode(prompt.turns[: turn + 1], answers)
                request = recorder.record(TracePrompt(name, prompt.domain, ids))
                answers.append(self.conversation.decode(request.tokens.tolist()))
        origin = {"shard": task.parameter("shard", 0), **self.facts}
        return _outcome(recorder.trace(fingerprint=fingerprint, provenance=origin), self.facts)


def given_trace(data: bytes, *, first: bool) -> Outcome:
    """A trace from a file in place of a recorded one."""
    trace = parse_trace(data)
    facts = {key: trace.provenance.get(key) for key in ("model", "device", "dtype", "threads")}
    if not first:
        return Outcome(rows=[{"requests": 0, "tokens": 0, "bytes": 0}], facts=facts)
    return Outcome(rows=[_row(trace, len(data))], files={FILE: data}, facts=facts)


def _outcome(trace: Trace, facts: Mapping[str, object]) -> Outcome:
    data = trace_bytes(trace)
    return Outcome(rows=[_row(trace, len(data))], files={FILE: data}, facts=dict(facts))


def _row(trace: Trace, size: int) -> dict[str, int]:
    tokens = sum(request.positions for request in trace.requests)
    return {"requests": len(trace.requests), "tokens": tokens, "bytes": size}


_LATEST: dict[bytes, Trace] = {}
"""The trace that this worker read last: many configurations in a row replay the same."""


def joined_trace(inputs: Mapping[str, Mapping[str, bytes]]) -> Trace:
    """The trace whose shards are among the files of other configurations.

    Raises:
        ValueError: shards that were not recorded alike.
    """
    import hashlib

    shards = [files[FILE] for _, files in sorted(inputs.items()) if FILE in files]
    if not shards:
        raise NotAvailable("no prompt was recorded")
    key = hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in shards)).digest()
    if key not in _LATEST:
        _LATEST.clear()
        _LATEST[key] = _join([parse_trace(data) for data in shards])
    return _LATEST[key]


def _join(shards: list[Trace]) -> Trace:
    first = shards[0]
    for shard in shards[1:]:
        for name in ("nodes", "max_new_tokens", "temperature"):
            if getattr(shard, name) != getattr(first, name):
                raise ValueError(
                    f"shards must agree on {name}, got {getattr(first, name)!r} and {getattr(shard, name)!r}"
                )
    return replace(first, requests=tuple(request for shard in shards for request in shard.requests))
