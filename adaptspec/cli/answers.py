"""Answers in the format of Spec-Bench, so that its public evaluation scripts read our runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptspec.cli.measure import Measurement, Setting
from adaptspec.cli.outputs import check_output, write_output


def spec_bench_answers(
    units: Sequence[Sequence[Measurement]], settings: Sequence[Setting], *, model: str, timestamp: float
) -> dict[str, list[dict[str, Any]]]:
    """Per setting its lines: one per prompt, one choice per repeat.

    Args:
        units: per finished prompt and repeat, one measurement per setting in the order of `settings`.
        timestamp: seconds since 1970.
    """
    files: dict[str, list[dict[str, Any]]] = {}
    for index, setting in enumerate(settings):
        lines: dict[int | str, dict[str, Any]] = {}
        for unit in units:
            measurement = unit[index]
            prompt = measurement.prompt
            line = lines.setdefault(
                prompt.id,
                {
                    "question_id": prompt.id,
                    "category": prompt.domain,
                    "answer_id": f"{setting.name}-{prompt.id}",
                    "model_id": f"{model}/{setting.name}",
                    "choices": [],
                    "tstamp": timestamp,
                },
            )
            line["choices"].append(_choice(measurement))
        files[setting.name] = list(lines.values())
    return files


def _choice(measurement: Measurement) -> dict[str, Any]:
    turns = measurement.turns
    return {
        "index": measurement.repeat,
        "turns": [turn.text for turn in turns],
        "decoding_steps": [len(turn.generated.accept_lengths) for turn in turns],
        "new_tokens": [len(turn.generated.token_ids) for turn in turns],
        "wall_time": [turn.seconds for turn in turns],
        "accept_lengths": [length for turn in turns for length in turn.generated.accept_lengths],
    }


def check_answers(path: Path, settings: Sequence[str], *, force: bool) -> None:
    """Raises what `check_output` raises, for every file that `write_answers` would write."""
    for file in [path / _file_name(name) for name in settings] if path.is_dir() else [path]:
        check_output(file, force=force)


def write_answers(path: Path, files: Mapping[str, Sequence[Mapping[str, Any]]], *, force: bool) -> list[Path]:
    """Write the lines of all settings into one file, or into a folder with one file per setting.

    The public evaluation script takes one file per method, which is what the folder is for.

    Returns:
        The files that were written.
    """
    if path.is_dir():
        return [write_output(path / _file_name(name), _text(lines), force=force) for name, lines in files.items()]
    return [write_output(path, _text([line for lines in files.values() for line in lines]), force=force)]


def _text(lines: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _file_name(setting: str) -> str:
    """`eagle3@32/fr:16384` becomes `eagle3@32_fr_16384.jsonl`."""
    return "".join(c if c.isalnum() or c in "@.-+" else "_" for c in setting) + ".jsonl"
