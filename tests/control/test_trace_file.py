"""Trace files: every bit comes back, and everything else than a whole and possible trace is refused."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptspec.control.trace import Trace
from adaptspec.control.trace_file import bytes_by_drafter, parse_trace, read_trace, trace_bytes, write_trace
from adaptspec.control.trace_reach import reaches
from tests.control.trace_cases import example, same, traces, with_proposals


@settings(derandomize=True, deadline=None, max_examples=60)
@given(traces())
def test_every_bit_comes_back(trace: Trace) -> None:
    assert same(parse_trace(trace_bytes(trace)), trace)


def test_the_comparison_notices_single_bits() -> None:
    trace = example()
    scores = trace.requests[0].proposals["copy"].scores
    nudged = scores.copy()
    nudged[3] = np.nextafter(nudged[3], -np.inf)
    assert same(trace, with_proposals(trace, "copy", scores=scores.copy()))
    assert not same(trace, with_proposals(trace, "copy", scores=nudged))
    assert not same(trace, with_proposals(trace, "copy", evidence={}))
    assert not same(trace, replace(trace, requests=trace.requests[::-1]))


def test_files_are_written_whole_and_never_over_others(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_trace(path, example())
    assert same(read_trace(path), example())
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    before = path.read_bytes()
    other = replace(example(), fingerprint="other")
    with pytest.raises(FileExistsError, match="already exists; pass force=True"):
        write_trace(path, other)
    assert path.read_bytes() == before
    write_trace(path, other, force=True)
    assert read_trace(path).fingerprint == "other"
    with pytest.raises(ValueError, match="max_new_tokens"):
        write_trace(path, replace(other, max_new_tokens=0), force=True)
    assert read_trace(path).fingerprint == "other"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "plain"]


def test_a_file_that_comes_into_being_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"

    def slow(trace: Trace) -> bytes:
        path.write_text("precious")
        return b"ours"

    monkeypatch.setattr("adaptspec.control.trace_file.trace_bytes", slow)
    with pytest.raises(FileExistsError):
        write_trace(path, example())
    assert path.read_text() == "precious" and len(list(tmp_path.iterdir())) == 1


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("old")

    def full(self: Path, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_trace(path, example(), force=True)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_costs_and_provenance_must_be_plain(tmp_path: Path) -> None:
    for value in (np.zeros(2), float("nan")):
        with pytest.raises(ValueError, match="costs and provenance must be plain values that JSON can hold"):
            trace_bytes(replace(example(), provenance={"x": value}))


def test_pandas_reads_it_without_this_package(tmp_path: Path) -> None:
    """What the documentation promises: accepted lengths from plain columns."""
    path = tmp_path / "a.parquet"
    trace = example()
    write_trace(path, trace)
    code = (
        "import sys, pandas as pd\n"
        f"frame = pd.read_parquet({str(path)!r}, filters=[('drafter', '==', 'copy')])\n"
        "frame = frame[frame['next_token'].notna()]\n"
        "lengths = frame['accepted_ranks'].map(lambda ranks: 1 + sum(rank < 2 for rank in ranks))\n"
        "print(lengths.tolist(), frame['request'].tolist(), 'adaptspec' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    expected = [n for request in trace.requests for n in reaches(request, "copy").lengths(2).tolist()]
    names = [request.name for request in trace.requests for _ in range(request.positions)]
    assert done.stdout == f"{expected} {names} False\n"
    assert max(expected) == 3


def test_rows_and_metadata_are_as_documented() -> None:
    table = pq.read_table(io.BytesIO(trace_bytes(example())))
    assert table.num_rows == 2 * (8 + 1 + 1)
    assert table.column("drafter").to_pylist() == ["copy"] * 10 + ["mute"] * 10
    rows = table.to_pylist()
    assert [row["position"] for row in rows[:10]] == [*range(8), 0, 0]
    assert (rows[8]["request"], rows[8]["token"], rows[8]["next_token"], rows[8]["token_ids"]) == ("82/1", 0, None, [])
    assert rows[0]["prompt_length"] == 12 and rows[0]["domain"] == "writing"
    assert rows[10]["evidence_count"] is None and rows[0]["evidence_count"] is not None
    metadata = table.schema.metadata
    assert metadata[b"format"] == b"adaptspec-trace" and metadata[b"version"] == b"1"
    assert json.loads(metadata[b"nodes"]) == {"copy": 8, "mute": 4}
    assert json.loads(metadata[b"provenance"]) == {"seed": 3}
    assert json.loads(metadata[b"costs"]) == example().costs


def test_bytes_are_counted_by_drafter() -> None:
    data = trace_bytes(example())
    sizes = bytes_by_drafter(data)
    assert list(sizes) == ["copy", "mute"]
    assert sizes["copy"] > sizes["mute"] > 0 and sum(sizes.values()) < len(data)


# What must be refused ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def whole() -> bytes:
    return trace_bytes(example())


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.data())
def test_a_changed_byte_is_noticed_or_changes_nothing(data: st.DataObject) -> None:
    content = bytearray(whole())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(ValueError):
        assert same(parse_trace(bytes(content)), example())


def test_changed_bytes_in_pages_are_noticed() -> None:
    """Pages carry checksums: every byte of the column of scores counts."""
    column = pq.ParquetFile(io.BytesIO(whole())).metadata.row_group(0).column(9)
    assert column.path_in_schema == "scores.list.element"
    last = column.data_page_offset + column.total_compressed_size - 1
    for place in range(last - 20, last + 1):
        content = bytearray(whole())
        content[place] ^= 1
        with pytest.raises(ValueError, match="damaged"):
            parse_trace(bytes(content))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated_files(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(whole()[: int(share * len(whole()))])
    with pytest.raises(ValueError, match=r"a\.parquet: not a trace of adaptspec, or damaged"):
        read_trace(path)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pytest.raises(FileNotFoundError):
        read_trace(path)
    path.write_text("just text")
    with pytest.raises(ValueError, match="not a trace of adaptspec, or damaged"):
        read_trace(path)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(ValueError, match=r"not a trace of adaptspec \(format None"):
        read_trace(path)


def rewritten(change: Callable[[pa.Table], pa.Table], **metadata: str) -> bytes:
    """The example's file after a change to its table, checksums of pages made anew."""
    table = pq.read_table(io.BytesIO(whole()))
    known = dict(table.schema.metadata)
    table = change(table)
    sink = io.BytesIO()
    pq.write_table(
        table.replace_schema_metadata({**known, **{k.encode(): v.encode() for k, v in metadata.items()}}), sink
    )
    return sink.getvalue()


def test_rewriting_alone_changes_nothing() -> None:
    assert same(parse_trace(rewritten(lambda table: table)), example())


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"format": "something-else"}, "not a trace of adaptspec"),
        ({"version": "2"}, "version must be 1, got '2'"),
        ({"nodes": '{"copy": 9, "mute": 4}'}, "the metadata do not agree with their checksum"),
        ({"costs": "{}"}, "the metadata do not agree with their checksum"),
    ],
)
def test_other_metadata(metadata: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_trace(rewritten(lambda table: table, **metadata))


def column(name: str, change: Callable[[list[Any]], None]) -> Callable[[pa.Table], pa.Table]:
    """A change to the values of one column."""

    def apply(table: pa.Table) -> pa.Table:
        values = table.column(name).to_pylist()
        change(values)
        field = table.schema.field(name)
        return table.set_column(table.column_names.index(name), field, pa.array(values, field.type))

    return apply


def put(row: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda values: values.__setitem__(row, value)


def node(row: int, place: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda values: values[row].__setitem__(place, value)


def first_long_row() -> int:
    return next(p for p in range(8) if example().requests[0].proposals["copy"].sizes()[p] >= 2)


LONG = first_long_row()


def twins(table: pa.Table) -> pa.Table:
    def repeat(values: list[Any]) -> None:
        values[LONG][1] = values[LONG][0]

    return column("token_ids", repeat)(column("parents", repeat)(table))


def proposal_of_an_ended_output(table: pa.Table) -> pa.Table:
    for name, value in (("token_ids", 1), ("parents", -1), ("scores", -1.0)):
        table = column(name, put(8, [value]))(table)
    for name in ("evidence_count", "evidence_match_length"):
        table = column(name, put(8, None))(table)
    return table


IMPOSSIBLE: list[tuple[str, Callable[[pa.Table], pa.Table], str]] = [
    ("parent that comes later", column("parents", node(LONG, 0, 1)), "parents must satisfy"),
    ("parents too short", column("parents", lambda v: v[LONG].pop()), "'parents' must be as long as token_ids"),
    ("scores too long", column("scores", lambda v: v[LONG].append(-9.0)), "'scores' must be as long as token_ids"),
    ("evidence too short", column("evidence_count", lambda v: v[LONG].pop()), "evidence 'count' must be as long"),
    ("evidence in one row only", column("evidence_count", put(10, [])), "must be as long as token_ids in every row"),
    ("negative token", column("token_ids", node(LONG, 0, -5)), "token_ids must be in"),
    ("probability above 1", column("scores", node(LONG, 0, 0.5)), "scores must be log-probabilities"),
    ("twins", twins, "siblings must carry different tokens"),
    ("another token", column("token", put(3, 6)), "'token' must be the same for every drafter"),
    ("another next token", column("next_token", lambda v: [put(i, 6)(v) for i in (3, 13)]), "next_token must be the"),
    ("no next token", column("next_token", lambda v: [put(i, None)(v) for i in (3, 13)]), "next_token may be missing"),
    ("another domain", column("domain", lambda v: [put(i, "law")(v) for i in (3, 13)]), "'domain' must be the same at"),
    ("prompt length", column("prompt_length", lambda v: [put(i, 7)(v) for i in (3, 13)]), "'prompt_length' must be"),
    ("position", column("position", lambda v: [put(i, 9)(v) for i in (3, 13)]), "positions of a request must be 0, 1"),
    ("split request", column("request", lambda v: [put(i, "81")(v) for i in (9, 19)]), "must lie together"),
    ("ranks", column("accepted_ranks", put(LONG, [7])), "accepted_ranks of drafter 'copy' contradict"),
    ("complete", column("complete", put(0, False)), "complete of drafter 'copy' contradicts"),
    ("drafter", column("drafter", put(0, "mute")), "rows must come drafter by drafter"),
    ("nowhere to propose", proposal_of_an_ended_output, "an output of one token has no positions at which to propose"),
    ("fewer rows", lambda table: table.slice(0, 18), "it has 18 rows, 20 were written"),
    ("drafters swapped", lambda table: table.take([*range(10, 20), *range(10)]), "rows must come drafter by drafter"),
    ("column renamed", lambda t: t.rename_columns({"evidence_count": "evidence_size"}), "columns must be"),
    ("column missing", lambda table: table.drop_columns(["scores"]), "columns must be"),
    ("column too many", lambda table: table.append_column("x", table.column("token")), "columns must be"),
    (
        "another type",
        lambda t: t.set_column(4, pa.field("position", pa.int64(), nullable=False), t.column("position").cast("int64")),
        "column 'position' must be int32 not null, got int64 not null",
    ),
]


@pytest.mark.parametrize(("change", "problem"), [case[1:] for case in IMPOSSIBLE], ids=[case[0] for case in IMPOSSIBLE])
def test_impossible_content(change: Callable[[pa.Table], pa.Table], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_trace(rewritten(change))


def test_a_missing_pyarrow_is_named() -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from adaptspec.control.trace_file import read_trace\n"
        f"read_trace({os.fspath(Path(__file__))!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert "ImportError: trace files need the package pyarrow: pip install 'adaptspec[experiments]'" in done.stderr
