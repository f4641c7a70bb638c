"""Traces as Parquet files: one row per drafter, request and position. `docs/traces.md` describes the format.

Rows come drafter by drafter, each in row groups of its own, so that one drafter can be read without the others.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptspec.control.trace import Trace
from adaptspec.control.trace_rows import check_reaches, check_schema, from_rows, table_schema, to_rows
from adaptspec.files import whole_file

FORMAT = "adaptspec-trace"
VERSION = 1

_HEADER: dict[str, type] = {
    "nodes": dict,
    "max_new_tokens": int,
    "temperature": float,
    "fingerprint": str,
    "costs": dict,
    "provenance": dict,
    "columns": list,
    "rows": int,
}
"""JSON values in the metadata, in the order in which they are summed up."""
_ROWS_PER_GROUP = 32_768


def write_trace(path: str | os.PathLike[str], trace: Trace, *, force: bool = False) -> None:
    """Write a trace file, whole or not at all.

    Raises:
        ValueError: the trace is impossible, or its provenance or costs are not plain values.
        FileExistsError: there is such a file and `force` is off.
        ImportError: pyarrow is missing.
    """
    path = Path(path)
    if path.exists() and not force:
        raise FileExistsError(f"{path} already exists; pass force=True to overwrite it")
    with whole_file(path) as file:
        file.write(trace_bytes(trace))
        if not force:
            path.open("xb").close()  # fails where a file has come into being since


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read what `write_trace` wrote: the same values, bit by bit.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a trace, of another version, damaged, or of impossible content.
        ImportError: pyarrow is missing.
    """
    data = Path(path).read_bytes()
    try:
        return parse_trace(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def trace_bytes(trace: Trace) -> bytes:
    """The content of a trace file. Raises as `write_trace`."""
    pa, pq = require_pyarrow()
    trace.validate()
    names = dict.fromkeys(name for r in trace.requests for p in r.proposals.values() for name in p.evidence)
    schema = table_schema(pa, list(names))
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        schema.with_metadata(_header(trace, columns=schema.names)),
        compression="zstd",
        compression_level=9,
        use_dictionary=[field.name for field in schema if not pa.types.is_list(field.type)],
        write_page_checksum=True,
    ) as writer:
        for drafter in trace.nodes:
            writer.write_table(to_rows(pa, trace, drafter=drafter, schema=schema), row_group_size=_ROWS_PER_GROUP)
    return sink.getvalue().to_pybytes()


def parse_trace(data: bytes) -> Trace:
    """The trace in the content of a file. Raises ValueError as `read_trace`."""
    pa, pq = require_pyarrow()
    # OSError is not of the disk: the bytes are in memory.
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        schema = file.schema_arrow
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"not a trace of adaptspec, or damaged ({error})") from error
    header = _read_header(schema.metadata or {})
    columns, rows = header.pop("columns"), header.pop("rows")
    try:
        check_schema(pa, schema)
        if schema.names != columns:
            raise ValueError(f"damaged (columns must be {', '.join(map(str, columns))}, got {', '.join(schema.names)})")
        table = file.read()
        table.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"damaged ({error})") from error
    if table.num_rows != len(header["nodes"]) * rows:
        raise ValueError(f"damaged (it has {table.num_rows} rows, {len(header['nodes']) * rows} were written)")
    trace = Trace(from_rows(table, nodes=header["nodes"]), **header)
    trace.validate()
    check_reaches(table, trace)
    return trace


def bytes_by_drafter(data: bytes) -> dict[str, int]:
    """Compressed bytes of each drafter's rows in the content of a trace file."""
    pa, pq = require_pyarrow()
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    found: dict[str, int] = {}
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        columns = [group.column(place) for place in range(group.num_columns)]
        drafter = next(column.statistics.min for column in columns if column.path_in_schema == "drafter")
        found[drafter] = found.get(drafter, 0) + sum(column.total_compressed_size for column in columns)
    return found


def require_pyarrow() -> tuple[Any, Any]:
    """`pyarrow` and `pyarrow.parquet`; ImportError that says what to install."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("trace files need the package pyarrow: pip install 'adaptspec[experiments]'") from error
    return pyarrow, pyarrow.parquet


# The header ----------------------------------------------------------------------------------------------------------


def _header(trace: Trace, *, columns: Sequence[str]) -> dict[str, str]:
    """The metadata of a file: everything that is not a row, as JSON, with a checksum (pages of rows have their own)."""
    rows = sum(max(request.positions, 1) for request in trace.requests)
    values = {
        "nodes": dict(trace.nodes),
        "max_new_tokens": trace.max_new_tokens,
        "temperature": float(trace.temperature),
        "fingerprint": trace.fingerprint,
        "costs": trace.costs,
        "provenance": trace.provenance,
        "columns": list(columns),
        "rows": rows,
    }
    try:
        texts = {name: json.dumps(values[name], allow_nan=False) for name in _HEADER}
    except (TypeError, ValueError) as error:
        raise ValueError(f"costs and provenance must be plain values that JSON can hold: {error}") from error
    return {"format": FORMAT, "version": str(VERSION), **texts, "sha256": _checksum(texts)}


def _checksum(texts: Mapping[str, str]) -> str:
    return hashlib.sha256("\n".join(texts[name] for name in _HEADER).encode()).hexdigest()


def _read_header(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    texts = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in metadata.items()}
    if texts.get("format") != FORMAT:
        raise ValueError(f"not a trace of adaptspec (format {texts.get('format')!r}, expected {FORMAT!r})")
    if texts.get("version") != str(VERSION):
        raise ValueError(f"version must be {VERSION}, got {texts.get('version')!r}")
    if missing := [name for name in (*_HEADER, "sha256") if name not in texts]:
        raise ValueError(f"damaged (the metadata lack {', '.join(missing)})")
    if texts["sha256"] != _checksum(texts):
        raise ValueError("damaged (the metadata do not agree with their checksum)")
    try:
        values = {name: json.loads(texts[name]) for name in _HEADER}
    except json.JSONDecodeError as error:
        raise ValueError(f"damaged (the metadata are not JSON: {error})") from error
    for name, kind in _HEADER.items():
        if not isinstance(values[name], kind):
            raise ValueError(f"{name} in the metadata must be {kind.__name__}, got {values[name]!r:.80}")
    return values
