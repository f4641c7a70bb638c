"""Traces as rows of a pyarrow table: one per drafter, request and position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adaptspec.control.trace import Proposals, Trace, TracedRequest
from adaptspec.control.trace_reach import Reaches, reaches

EVIDENCE = "evidence_"
"""What columns of evidence are named with; the name of the evidence follows."""

_SHARED = ("request", "domain", "prompt_length", "position", "token", "next_token")
"""Columns that are the same for every drafter."""


def table_schema(pa: Any, evidence: Sequence[str]) -> Any:
    """The pyarrow schema of traces with these names of evidence."""

    def many(item: Any) -> Any:
        return pa.list_(pa.field("element", item, nullable=False))

    columns = {
        "drafter": pa.string(),
        "request": pa.string(),
        "domain": pa.string(),
        "prompt_length": pa.int32(),
        "position": pa.int32(),
        "token": pa.int32(),
        "next_token": pa.int32(),
        "token_ids": many(pa.int32()),
        "parents": many(pa.int16()),
        "scores": many(pa.float64()),
        "accepted_ranks": many(pa.int16()),
        "complete": pa.bool_(),
    }
    fields = [pa.field(name, kind, nullable=name == "next_token") for name, kind in columns.items()]
    return pa.schema([*fields, *(pa.field(EVIDENCE + name, many(pa.float64())) for name in evidence)])


def check_schema(pa: Any, found: Any) -> None:
    """Raises ValueError where a column is missing, unknown, or of another type."""
    expected = table_schema(pa, [name.removeprefix(EVIDENCE) for name in found.names if name.startswith(EVIDENCE)])
    if found.names != expected.names:
        raise ValueError(f"columns must be {', '.join(expected.names)}, got {', '.join(found.names) or 'none'}")
    for field in expected:
        if not found.field(field.name).equals(field):
            raise ValueError(
                f"column {field.name!r} must be {_described(field)}, got {_described(found.field(field.name))}"
            )


def _described(field: Any) -> str:
    return f"{field.type}{'' if field.nullable else ' not null'}"


def to_rows(pa: Any, trace: Trace, *, drafter: str, schema: Any) -> Any:
    """All rows of one drafter. An output of one token has no positions: its one row holds that token alone."""
    requests = trace.requests
    proposals = [request.proposals[drafter] for request in requests]
    reached = [reaches(request, drafter) for request in requests]
    counts = [max(request.positions, 1) for request in requests]
    owners = np.repeat(np.arange(len(counts)), counts)

    def each(values: Sequence[Any], kind: Any) -> Any:
        """One value per request, on all its rows."""
        return pa.array(values, kind).take(pa.array(owners, pa.int64()))

    def lists(name: str, sizes: np.ndarray, values: np.ndarray, absent: np.ndarray | None = None) -> Any:
        kind = schema.field(name).type
        offsets = pa.array(np.append(0, np.cumsum(sizes)), pa.int32())
        mask = None if absent is None else pa.array(absent, pa.bool_())
        return pa.ListArray.from_arrays(offsets, pa.array(values, kind.value_type), type=kind, mask=mask)

    nodes = _joined([_sizes(p.offsets) for p in proposals], np.int64)
    single = np.array([request.positions == 0 for request in requests], dtype=bool)[owners]
    columns = {
        "drafter": each([drafter] * len(counts), pa.string()),
        "request": each([request.name for request in requests], pa.string()),
        "domain": each([request.domain for request in requests], pa.string()),
        "prompt_length": each([request.prompt_length for request in requests], pa.int32()),
        "position": pa.array(_joined([np.arange(count) for count in counts], np.int32)),
        "token": pa.array(_joined([r.tokens[:n] for r, n in zip(requests, counts, strict=True)], np.int32)),
        "next_token": pa.array(
            _joined([r.tokens[-n:] for r, n in zip(requests, counts, strict=True)], np.int32), mask=single
        ),
        "token_ids": lists("token_ids", nodes, _joined([p.token_ids for p in proposals], np.int32)),
        "parents": lists("parents", nodes, _joined([p.parents for p in proposals], np.int16)),
        "scores": lists("scores", nodes, _joined([p.scores for p in proposals], np.float64)),
        "accepted_ranks": lists(
            "accepted_ranks",
            _joined([_sizes(r.offsets) for r in reached], np.int64),
            _joined([r.ranks for r in reached], np.int16),
        ),
        "complete": pa.array(_joined([_complete(r) for r in reached], np.bool_)),
    }
    for column in schema.names[len(columns) :]:
        name = column.removeprefix(EVIDENCE)
        absent = np.array([name not in p.evidence for p in proposals], dtype=bool)[owners]
        values = _joined([p.evidence[name] for p in proposals if name in p.evidence], np.float64)
        columns[column] = lists(column, np.where(absent, 0, nodes), values, absent)
    return pa.table(columns, schema=schema)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)


def _sizes(offsets: np.ndarray) -> np.ndarray:
    """Nodes per row; an output without positions has one row of none."""
    return np.diff(offsets) if len(offsets) > 1 else np.zeros(1, np.int64)


def _complete(reached: Reaches) -> np.ndarray:
    return reached.complete if len(reached.complete) else np.ones(1, np.bool_)


def from_rows(table: Any, *, nodes: Mapping[str, int]) -> tuple[TracedRequest, ...]:
    """The requests in a table of `table_schema`. What is in the trees is left to `Trace.validate`.

    Raises:
        ValueError: rows that are missing, out of order, or contradict each other.
    """
    if not nodes or table.num_rows % len(nodes):
        raise ValueError(f"must have the same number of rows for each of {len(nodes)} drafters, got {table.num_rows}")
    count = table.num_rows // len(nodes)
    parts = {name: table.slice(place * count, count) for place, name in enumerate(nodes)}
    shared = next(iter(parts.values()))
    for name, part in parts.items():
        if part.column("drafter").unique().to_pylist() not in ([name], []):
            raise ValueError(f"rows must come drafter by drafter in the order {', '.join(nodes)}")
        for column in _SHARED:
            if not part.column(column).equals(shared.column(column)):
                raise ValueError(f"column {column!r} must be the same for every drafter, {name!r} differs")
    starts = _request_starts(shared)
    columns = {column: shared.column(column).to_pylist() for column in ("request", "domain", "prompt_length")}
    tokens = _outputs(shared, starts)
    proposals = {name: _proposals(part, starts, tokens) for name, part in parts.items()}
    return tuple(
        TracedRequest(
            *(columns[column][start] for column in ("request", "domain", "prompt_length")),
            tokens[place],
            {name: proposals[name][place] for name in nodes},
        )
        for place, start in enumerate(starts[:-1].tolist())
    )


def _request_starts(rows: Any) -> np.ndarray:
    """int64 [R + 1]: the first row of every request, and the number of rows."""
    codes = {
        name: rows.column(name).combine_chunks().dictionary_encode().indices.to_numpy()
        for name in ("request", "domain", "prompt_length")
    }
    starts = np.flatnonzero(np.diff(codes["request"], prepend=-1))
    owner = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(rows)))
    if len(starts) != len(np.unique(codes["request"])):
        raise ValueError("the rows of a request must lie together, got some apart")
    for name in ("domain", "prompt_length"):
        if (codes[name] != codes[name][starts][owner]).any():
            raise ValueError(f"column {name!r} must be the same at all positions of a request")
    if (rows.column("position").to_numpy() != np.arange(len(rows)) - starts[owner]).any():
        raise ValueError("positions of a request must be 0, 1, 2, ..., got a gap or another order")
    return np.append(starts, len(rows))


def _outputs(rows: Any, starts: np.ndarray) -> list[np.ndarray]:
    """The tokens of every request."""
    tokens = rows.column("token").to_numpy().astype(np.int64)
    ended = rows.column("next_token").is_null().to_numpy()
    following = rows.column("next_token").fill_null(-1).to_numpy().astype(np.int64)
    outputs = []
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if stop - start == 1 and ended[start]:
            outputs.append(tokens[start:stop])
            continue
        if ended[start:stop].any():
            raise ValueError("next_token may be missing only in outputs of one token")
        if (following[start : stop - 1] != tokens[start + 1 : stop]).any():
            raise ValueError("next_token must be the token of the next position, got another")
        outputs.append(np.append(tokens[start:stop], following[stop - 1]))
    return outputs


def _proposals(rows: Any, starts: np.ndarray, tokens: Sequence[np.ndarray]) -> list[Proposals]:
    """What one drafter proposed, per request."""
    offsets, token_ids = _lists(rows, "token_ids", np.int64)
    columns = {}
    for name, dtype in (("parents", np.int64), ("scores", np.float64)):
        where, columns[name] = _lists(rows, name, dtype)
        if (where != offsets).any():
            raise ValueError(f"column {name!r} must be as long as token_ids in every row")
    evidence = {
        name.removeprefix(EVIDENCE): (rows.column(name).is_null().to_numpy(), *_lists(rows, name, np.float64))
        for name in rows.column_names
        if name.startswith(EVIDENCE)
    }
    found = []
    for start, stop, output in zip(starts[:-1].tolist(), starts[1:].tolist(), tokens, strict=True):
        part = slice(offsets[start], offsets[stop])
        known = {}
        for name, (absent, where, values) in evidence.items():
            if absent[start:stop].all():
                continue
            if (
                absent[start:stop].any()
                or (np.diff(where[start : stop + 1]) != np.diff(offsets[start : stop + 1])).any()
            ):
                raise ValueError(
                    f"evidence {name!r} must be as long as token_ids in every row of a request, or in none"
                )
            known[name] = values[where[start] : where[stop]]
        own = offsets[start : start + len(output)] - offsets[start]
        if len(output) == 1 and part.stop > part.start:
            raise ValueError("an output of one token has no positions at which to propose, got token_ids")
        found.append(Proposals(own, token_ids[part], columns["parents"][part], columns["scores"][part], known))
    return found


def _lists(rows: Any, name: str, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Offsets int64 [rows + 1] and values of a column of lists; missing lists count as empty."""
    sizes = rows.column(name).combine_chunks().value_lengths().fill_null(0).to_numpy()
    values = rows.column(name).combine_chunks().flatten().to_numpy()
    return np.append(0, np.cumsum(sizes, dtype=np.int64)), values.astype(dtype)


def check_reaches(table: Any, trace: Trace) -> None:
    """Raises ValueError where accepted_ranks or complete are not what the trees and the output make them."""
    count = table.num_rows // len(trace.nodes)
    for place, drafter in enumerate(trace.nodes):
        rows = table.slice(place * count, count)
        reached = [reaches(request, drafter) for request in trace.requests]
        offsets, ranks = _lists(rows, "accepted_ranks", np.int64)
        sizes = _joined([_sizes(r.offsets) for r in reached], np.int64)
        if (np.diff(offsets) != sizes).any() or (ranks != _joined([r.ranks for r in reached], np.int64)).any():
            raise ValueError(f"accepted_ranks of drafter {drafter!r} contradict what it proposed and the output")
        if (rows.column("complete").to_numpy() != _joined([_complete(r) for r in reached], np.bool_)).any():
            raise ValueError(f"complete of drafter {drafter!r} contradicts what it proposed and the output")
