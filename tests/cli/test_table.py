from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from adaptspec.cli.common import show
from adaptspec.cli.table import category_table, results_table


def text_of(table: Any) -> str:
    stream = io.StringIO()
    show(Console(file=stream, width=60), table)
    return stream.getvalue()


def run(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    numbers = {"tokens_per_second": 123456.7, "tokens_per_second_repeats": [100000.1, 199999.9]}
    return {"name": name, "kind": kind, **numbers, **fields}


REPORT = {
    "runs": [
        run("hf-generate", "reference", speedup=0.99),
        run("ar", "fixed", speedup=1.0, speedup_interval=[1.0, 1.0], identical=26, compared=26, max_margin=None),
        run(
            "eagle3@64/evospec:16384+512",
            "fixed",
            speedup=12.345,
            speedup_interval=[11.5, 13.25],
            decode_speedup=14.5,
            mean_accepted_length=3.456,
            acceptance_rate=0.256,
            identical=24,
            compared=26,
            max_margin=0.0312,
        ),
        run("mixture", "strategy", speedup=1.5, vs_best_fixed=1.02, identical=26, compared=26),
    ],
    "by_category": {
        "summarisation": {
            "ar": {"tokens_per_second": 9.0, "speedup": 1.0},
            "eagle3@64/evospec:16384+512": {"tokens_per_second": 5.0, "speedup": 0.5},
            "mixture": {"tokens_per_second": 6.0, "speedup": 0.6},
        }
    },
}


def test_every_number_is_there_and_none_is_cut() -> None:
    text = text_of(results_table(REPORT, title="a run"))
    for part in (
        "123456.7",
        "100000.1 to 199999.9",
        "12.35x",
        "11.50 to 13.25",
        "14.50x",
        "3.46",
        "26 %",
        "no (24/26)",
        "yes (26/26)",
        "0.0312",
        "1.02x",
        "eagle3@64/evospec:16384+512",
    ):
        assert part in text, part
    assert "…" not in text and "\x1b" not in text


def test_the_fastest_setting_of_a_domain_is_marked_no_speculation_aside() -> None:
    text = text_of(category_table(REPORT))
    assert "0.60x*" in text and "0.50x*" not in text
    assert "\n ar" not in text


def test_columns_without_content_are_left_out() -> None:
    plain = {"runs": [{**r, "tokens_per_second_repeats": [1.0]} for r in REPORT["runs"] if r["kind"] == "fixed"]}
    text = text_of(results_table(plain))
    assert "vs best arm" not in text and "over repeats" not in text
