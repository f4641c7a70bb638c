from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from adaptspec.cli.prompts import Prompt, built_in_prompts, by_domain, read_prompts, select_prompts

NINE_DOMAINS = {
    "code",
    "law",
    "medical",
    "maths",
    "summarisation",
    "translation",
    "extraction",
    "chat",
    "retrieval",
}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_built_in_prompts_cover_the_domains() -> None:
    prompts = built_in_prompts()
    assert len(prompts) >= 40
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    counts = Counter(prompt.domain for prompt in prompts)
    assert set(counts) == NINE_DOMAINS
    assert min(counts.values()) >= 4
    assert sum(len(prompt.turns) > 1 for prompt in prompts) >= 3


@pytest.mark.parametrize("domain", ["summarisation", "extraction", "retrieval", "translation"])
def test_built_in_prompts_that_copy_have_a_source_text(domain: str) -> None:
    for prompt in by_domain(built_in_prompts())[domain]:
        assert 80 <= len(prompt.turns[0].split()) <= 260, prompt.id


def test_reads_spec_bench_lines(prompt_file: Path) -> None:
    prompts = read_prompts(prompt_file)
    assert prompts[1] == Prompt(82, "writing", ("Name three birds.", "Name them again."))


def test_reads_own_lines_and_plain_prompts(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"id": "a", "domain": "law", "turns": ["one", "two"], "source": "ignored"}\n\n{"prompt": "three"}\n',
    )
    assert read_prompts(path) == [Prompt("a", "law", ("one", "two")), Prompt(3, "general", ("three",))]


def test_reads_a_byte_order_mark_and_line_separators_inside_texts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "first\u2028second"}\r\n'.encode())
    assert read_prompts(path)[0].turns == ("first\u2028second",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object, got list"),
        ('{"id": 1, "text": "a"}', "needs the field 'turns' or 'prompt', the fields are 'id', 'text'"),
        ('{"turns": []}', "'turns' must be a list of at least one text, got []"),
        ('{"turns": "a"}', "'turns' must be a list of at least one text, got 'a'"),
        ('{"turns": ["a", 2]}', "every turn must be a text that is not empty, got 2"),
        ('{"turns": ["a", " "]}', "every turn must be a text that is not empty, got ' '"),
        ('{"prompt": 3}', "'prompt' must be a text that is not empty, got 3"),
        ('{"prompt": "a", "id": true}', "the id must be a whole number or a text, got True"),
        ('{"prompt": "a", "id": [1]}', "the id must be a whole number or a text, got [1]"),
        ('{"prompt": "a", "domain": 3}', "the domain must be a text that is not empty, got 3"),
        ('{"prompt": "a", "id": 7}', "the id 7 is already used in line 1"),
    ],
)
def test_errors_name_file_line_and_fault(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, '{"prompt": "fine", "id": 7}\n' + line + "\n")
    with pytest.raises(ValueError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert message in str(caught.value)


def test_empty_and_binary_and_missing_files(tmp_path: Path) -> None:
    path = write(tmp_path, "\n\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(path)
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match="is not a UTF-8 text file: invalid start byte at byte 12"):
        read_prompts(path)
    with pytest.raises(FileNotFoundError):
        read_prompts(tmp_path / "missing.jsonl")


def stream() -> list[Prompt]:
    domains = ["a"] * 4 + ["b"] * 3 + ["c"]
    return [Prompt(number, domain, ("x",)) for number, domain in enumerate(domains)]


def ids(prompts: list[Prompt]) -> list[int | str]:
    return [prompt.id for prompt in prompts]


def test_selection_takes_from_all_domains_in_turn() -> None:
    assert ids(select_prompts(stream(), limit=5, order="blocks")) == [0, 1, 4, 5, 7]
    assert ids(select_prompts(stream(), per_category=1, order="blocks")) == [0, 4, 7]
    assert ids(select_prompts(stream(), per_category=2, limit=4, order="blocks")) == [0, 1, 4, 7]
    assert ids(select_prompts(stream(), order="blocks")) == list(range(8))


def test_shuffle_is_a_permutation_of_the_same_choice_and_follows_the_seed() -> None:
    blocks = ids(select_prompts(stream(), limit=6, order="blocks"))
    first = ids(select_prompts(stream(), limit=6, order="shuffle", seed=1))
    assert sorted(first) == sorted(blocks)
    assert first == ids(select_prompts(stream(), limit=6, order="shuffle", seed=1))
    assert any(first != ids(select_prompts(stream(), limit=6, order="shuffle", seed=seed)) for seed in range(2, 6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": 0}, "limit must be >= 1, got 0"),
        ({"per_category": -1}, "per_category must be >= 1, got -1"),
        ({"order": "random"}, "order must be one of shuffle, blocks, got 'random'"),
    ],
)
def test_selection_errors(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_prompts(stream(), **arguments)
