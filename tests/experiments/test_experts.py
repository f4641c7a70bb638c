"""Heads of domain experts: made, gone on with, refused, and chosen among in live runs."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from adaptspec.cli.prompts import Prompt
from adaptspec.pretrained import load_weights, read_card
from experiments import run as runs
from experiments.expert_folder import ExpertFolder, domain_folder
from experiments.experts import experts
from experiments.live import LiveRun
from experiments.sweeps import Configuration, find_experiment
from experiments.tasks import NotAvailable, Outcome, Settings, Task
from tests import tiny_models

TEXTS = {"law": ("abcd", "cdab", "abab"), "Q & A": ("xyx", "zyz", "xzx"), "chat": ("mnm", "nmn")}
ASKED = tuple(
    Prompt(f"p{n}", domain, (text,)) for n, (domain, text) in enumerate([("law", "abcdabcdab"), ("Q & A", "xyxyxyxyx")])
)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of three domains."""
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", TEXTS)


@pytest.fixture(scope="module")
def start(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """EAGLE-3 weights for the tiny target that have seen nothing."""
    return make_start(tiny_llama, tmp_path_factory.mktemp("start") / "eagle3")


@pytest.fixture(scope="module")
def made(prompt_file: Path, start: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts for two of the domains. Do not change it."""
    out = tmp_path_factory.mktemp("made") / "heads"
    make(prompt_file, start, out, tiny_folder, domains="law,Q & A")
    return out


def write_prompts(path: Path, texts: dict[str, tuple[str, ...]]) -> Path:
    lines = [{"domain": domain, "turns": [text, "Never read."]} for domain, found in texts.items() for text in found]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def make_start(model: Any, folder: Path, kind: str = "eagle3") -> Path:
    from adaptspec.training.recipes import make_trainee

    make_trainee(kind, model, taps=(1, 2) if kind == "eagle3" else None).save(folder, {})
    return folder


def make(texts: Path, start: Path | str, out: Path, model: Path, **options: Any) -> None:
    common = {"samples": 2, "max_new_tokens": 10, "steps": 2, "dtype": "float32", "device": "cpu", "quiet": True}
    experts(texts, str(start), out, model=str(model), **{**common, **options})


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Every file with its time, so that one that is written again shows."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def interrupt_at(call: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, and Ctrl-C at one of its calls."""
    calls = iter(range(1, 1000))

    def wrapped(*args: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return real(*args, **options)

    return wrapped


def test_one_head_per_domain(made: Path, start: Path, prompt_file: Path, tiny_folder: Path) -> None:
    listing = json.loads((made / "experts.json").read_text(encoding="utf-8"))
    assert listing["target"]["model"] == str(tiny_folder) and listing["target"]["hidden_size"] == 32
    assert listing["options"]["start"] == str(start) and listing["options"]["steps"] == 2
    assert list(listing["domains"]) == ["law", "Q & A"]
    assert len({domain_folder(name) for name in ("Q & A", "Q_&_A", "Q___A", "q")}) == 4
    assert set("./") & set(domain_folder("../x")) == set() and len(domain_folder("x" * 300)) < 100
    for domain, entry in listing["domains"].items():
        assert entry["folder"] == f"{domain_folder(domain)}/weights"
        card = read_card(made / entry["folder"])
        assert card["kind"] == "eagle3" and card["config"]["taps"] == [1, 2] and card["start"] == str(start)
        assert card["answers"]["origin"]["model"] == str(tiny_folder)
        assert (entry["sha256"], entry["steps"], entry["prompts"]) == (card["sha256"], 2, 3)
        assert {"length", "top1", "top8", "alpha"} <= entry["before"].keys() == entry["after"].keys()
        assert entry["after"]["length"] + entry["after"]["length8"] >= (
            entry["before"]["length"] + entry["before"]["length8"]
        )
        assert entry["provenance"]["argv"][:3] == ["python", "-m", "experiments.experts"]
        assert {path.name for path in (made / domain_folder(domain)).iterdir()} == {"answers", "features", "weights"}
    folders = list(ExpertFolder(made).heads().values())
    assert all(Path(folder).is_absolute() for folder in folders)
    assert not list(made.rglob("checkpoint.pt"))


def test_fine_tuning_begins_with_the_start_and_learns_from_the_domain(
    prompt_file: Path, start: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """Heads of two domains leave the start in different directions, by as little as the learning rate allows."""
    make(prompt_file, start, tmp_path / "slow", tiny_folder, domains="law", lr=1e-9)
    make(prompt_file, start, tmp_path / "fast", tiny_folder, domains="law,chat", lr=0.1, steps=30)
    name = "fc.weight"
    begun = load_weights(start)[0][name]
    slow, law, chat = (
        load_weights(tmp_path / folder / "weights")[0][name] for folder in ("slow/law", "fast/law", "fast/chat")
    )
    nearest = 2 * float(begun.abs().max()) / 127  # what 8 bits leave out
    assert float((slow - begun).abs().max()) < nearest
    listing = ExpertFolder(tmp_path / "fast").listing()["domains"]
    for entry, weights in ((listing["law"], law), (listing["chat"], chat)):
        moved = entry["after"] != entry["before"]
        assert (float((weights - begun).abs().max()) > nearest) == moved
    assert any(entry["after"]["alpha"] > entry["before"]["alpha"] for entry in listing.values())


def test_finished_domains_are_left_alone_and_others_join(
    prompt_file: Path, start: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, loads = tmp_path / "heads", []
    from adaptspec.cli.common import load_model

    def counting(*args: Any, **options: Any) -> Any:
        loads.append(args)
        return load_model(*args, **options)

    monkeypatch.setattr("experiments.experts.load_model", counting)
    make(prompt_file, start, out, tiny_folder, domains="law,chat")
    before = contents(out)
    make(prompt_file, start, out, tiny_folder, domains="law,chat")
    assert contents(out) == before and len(loads) == 2  # once per call
    make(prompt_file, start, out, tiny_folder)
    assert list(ExpertFolder(out).listing()["domains"]) == ["law", "chat", "Q & A"]
    after = contents(out)
    assert all(after[path] == known for path, known in before.items() if path.name != "experts.json")


@pytest.mark.parametrize(
    ("module", "name", "call", "finished"),
    [
        ("experiments.experts", "answer_prompts", 1, 0),
        ("adaptspec.training.training", "train_drafter", 1, 0),
        ("adaptspec.training.trainer", "batch_loss", 2, 0),
        ("adaptspec.training.training", "train_drafter", 2, 1),
        ("experiments.experts", "short_digest", 7, 1),  # the second head is written, and not listed
    ],
)
def test_an_interrupted_call_goes_on(
    made: Path, prompt_file: Path, start: Path, tiny_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    module: str, name: str, call: int, finished: int,
) -> None:  # fmt: skip
    """It ends with what a call that was left alone ends with."""
    out = tmp_path / "heads"
    with monkeypatch.context() as patch:
        real = getattr(importlib.import_module(module), name)
        patch.setattr(f"{module}.{name}", interrupt_at(call, real))
        with pytest.raises(typer.Exit) as stopped:
            make(prompt_file, start, out, tiny_folder, domains="law,Q & A")
    assert stopped.value.exit_code == 130 and "the same command goes on" in capsys.readouterr().err
    assert len(ExpertFolder(out).heads()) == finished
    make(prompt_file, start, out, tiny_folder, domains="law,Q & A")
    found, wanted = (ExpertFolder(folder).listing()["domains"] for folder in (out, made))
    assert [entry["sha256"] for entry in found.values()] == [entry["sha256"] for entry in wanted.values()]
    assert [entry["before"] for entry in found.values()] == [entry["before"] for entry in wanted.values()]


def test_training_goes_on_from_its_checkpoint(
    made: Path, prompt_file: Path, start: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adaptspec.training.trainer import Trainer

    steps: list[int] = []
    real = Trainer._step

    def step(trainer: Trainer, *args: Any) -> None:
        if trainer.progress.step == 1 and not steps.count(-1):
            trainer.save_checkpoint()
            steps.append(-1)
            raise KeyboardInterrupt
        steps.append(trainer.progress.step)
        real(trainer, *args)

    monkeypatch.setattr(Trainer, "_step", step)
    for _ in range(2):
        try:
            make(prompt_file, start, tmp_path / "heads", tiny_folder, domains="law")
        except typer.Exit:
            continue
    assert steps == [0, -1, 1]
    found, wanted = (ExpertFolder(folder).listing()["domains"]["law"] for folder in (tmp_path / "heads", made))
    assert found["sha256"] == wanted["sha256"]


def test_another_run_is_refused_with_what_differs(
    made: Path, prompt_file: Path, start: Path, tiny_folder: Path, tiny_llama: Any, tmp_path: Path
) -> None:
    before = contents(made)
    other_start = make_start(tiny_models.make_llama(seed=0), tmp_path / "other-start")
    other_model = tmp_path / "other-model"
    tiny_models.make_llama(seed=1).save_pretrained(other_model)
    tiny_models.save_tokenizer(other_model)
    same_shape = make_start(tiny_models.make_llama(seed=1), tmp_path / "same-shape")
    fewer = write_prompts(tmp_path / "fewer.jsonl", {**TEXTS, "law": TEXTS["law"][:2]})
    for options, problem in (
        ({"steps": 3}, r"made with steps = 2 \(options\), this call has 3"),
        ({"steps": None, "minutes": 0.1}, "made with minutes = None"),
        ({"samples": 3}, "made with samples = 2"),
        ({"max_new_tokens": 11}, "made with max_new_tokens = 10"),
        ({"seed": 1}, "made with seed = 0"),
        ({"dtype": "bfloat16"}, "made with dtype = 'float32'"),
        ({"precision": "bfloat16"}, "made with precision = 'float32'"),
        ({"start": other_start}, "made with start = "),
        ({"model": other_model, "start": same_shape}, r"made with model = .* \(target\), this call has .*other-model"),
        ({"texts": fewer, "domains": "law"}, "trained on other prompts of the domain 'law' than these 2"),
    ):
        chosen = {"texts": prompt_file, "start": start, "model": tiny_folder, "domains": "law,Q & A", **options}
        with pytest.raises(ValueError, match=problem):
            make(chosen.pop("texts"), chosen.pop("start"), made, chosen.pop("model"), **chosen)
    assert contents(made) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(FileExistsError, match="full already holds something other than experts"):
        make(prompt_file, start, tmp_path / "full", tiny_folder)
    with ExpertFolder(made).locked(), pytest.raises(RuntimeError, match="another process is at work"):
        make(prompt_file, start, made, tiny_folder, domains="law")


def test_bad_input_is_told_before_anything_is_written(
    prompt_file: Path, start: Path, tiny_folder: Path, tiny_llama: Any, tmp_path: Path
) -> None:
    out = tmp_path / "heads"
    single = write_prompts(tmp_path / "single.jsonl", {"law": ("ab",)})
    foreign = make_start(tiny_models.make_llama(seed=1), tmp_path / "foreign")
    other_kind = make_start(tiny_llama, tmp_path / "eagle1", kind="eagle1")
    for options, problem in (
        ({"steps": None}, "give --minutes or --steps"),
        ({"minutes": 1.0}, "give either minutes or steps"),
        ({"samples": 0}, "samples must be >= 1, got 0"),
        ({"lr": 0.0}, "lr must be > 0, got 0.0"),
        ({"precision": "float16"}, "unknown precision 'float16'"),
        ({"domains": "laws"}, "unknown domain 'laws'; did you mean 'law'"),
        ({"texts": single}, "the domain 'law' must have at least 2 prompts"),
        ({"start": foreign}, "was not trained for this target: .* same shape and has other weights"),
        ({"start": other_kind}, "is a cell of kind 'eagle1', eagle3 needs 'eagle3'"),
        (
            {"start": "no-such-name"},
            "or the name of shipped ones .* got 'no-such-name'; train .* `adaptspec train eagle3`",
        ),
    ):
        chosen = {"texts": prompt_file, "start": start, **options}
        with pytest.raises(ValueError, match=problem):
            make(chosen.pop("texts"), chosen.pop("start"), out, tiny_folder, **chosen)
        assert not out.exists()


def test_shipped_weights_are_a_start_by_name(
    prompt_file: Path, start: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "adaptspec.training.recipes.shipped_folder", lambda name: start if name == "shipped-eagle3" else None
    )
    make(prompt_file, "shipped-eagle3", tmp_path / "heads", tiny_folder, domains="law")
    listing = ExpertFolder(tmp_path / "heads").listing()
    assert listing["options"]["start"] == listing["domains"]["law"]["start"] == "shipped-eagle3"
    assert listing["options"]["start_sha256"] == read_card(start)["sha256"]


def live(model: Path, heads: dict[str, str], texts: dict[str, list[str]] | None = None) -> LiveRun:
    return LiveRun(
        Settings(model=str(model), device="cpu", prompts=ASKED, max_new_tokens=12, heads=heads, experts=texts or {}),
        threads=1,
    )


def play(work: LiveRun, **parameters: Any) -> Outcome:
    common = {"pool": (), "strategy": "ucb", "budgets": (4,), "experts": 2, "order": "blocks", "guard": None}
    return work.run(Task(Configuration("it-s0", "x:y", {**common, **parameters}), work.settings))


def test_strategies_choose_among_heads_by_domain(made: Path, tiny_folder: Path) -> None:
    heads = ExpertFolder(made).heads()
    work = live(tiny_folder, {**heads, "chat": heads["law"]}, {"law": ["abcdabcd"], "Q & A": ["xyxyxyxy"]})
    outcome = play(work, expert="eagle3")
    arms = {source for _, counts in outcome.curves["arms"] for source in counts}
    assert {"law", "Q & A"} <= arms | {"ar"} and arms <= {"law", "Q & A", "ar"}  # the prompts have no chat
    for row in outcome.rows:
        assert row["identical"] == row["compared"] == 1 and row["faults"] == 0
        assert (row["experts"], row["expert"], row["experts_for"]) == (2, "eagle3", "Q & A, law")
    both = play(work, expert="rest+eagle3")
    names = {f"{domain} ({kind})" for domain in ("law", "Q & A") for kind in ("REST store", "EAGLE head")}
    assert both.rows[0]["experts_for"] == ", ".join(sorted(names))
    arms = {source for _, counts in both.curves["arms"] for source in counts}
    assert len(arms & names) >= 2 and arms <= {*names, "ar"}
    stores = play(work)
    assert stores.rows[0]["experts_for"] == "Q & A, law"
    with pytest.raises(ValueError, match="unknown kind of expert 'eagle'; did you mean 'eagle3'"):
        play(work, expert="eagle")


def test_heads_that_are_not_there(made: Path, tiny_folder: Path, tmp_path: Path) -> None:
    heads = ExpertFolder(made).heads()
    how = "train them with python -m experiments.experts and give them by --heads DIR"
    with pytest.raises(NotAvailable, match=f"2 experts need heads of .* there are 0; {how}"):
        play(live(tiny_folder, {}), expert="eagle3")
    with pytest.raises(NotAvailable, match=rf"there are 1 \(law\); {how}"):
        play(live(tiny_folder, {"law": heads["law"], "chat": heads["law"]}), expert="eagle3")
    moved = {**heads, "law": str(tmp_path / "gone")}
    with pytest.raises(NotAvailable, match="the head of the domain 'law' is not at .*gone on "):
        play(live(tiny_folder, moved), expert="eagle3")


def test_heads_of_another_target(made: Path, tmp_path: Path) -> None:
    tiny_models.make_llama(seed=1).save_pretrained(tmp_path)
    tiny_models.save_tokenizer(tmp_path)
    with pytest.raises(NotAvailable, match="weights was not trained for this target: .* has other weights"):
        play(live(tmp_path, ExpertFolder(made).heads()), expert="eagle3")


def test_runs_take_heads_and_refuse_what_they_were_trained_on(made: Path, tmp_path: Path) -> None:
    folder = ExpertFolder(made)
    heads = runs._heads(folder, asked=list(ASKED))
    assert heads == folder.heads()
    digests = {domain: read_card(path)["sha256"] for domain, path in heads.items()}
    assert runs.described(Settings(heads=heads))["heads"] == digests
    assert runs.described(Settings())["heads"] is None  # as in runs that know no heads
    with pytest.raises(ValueError, match="trained on 1 of the 3 prompts that are asked, like 'known'"):
        runs._heads(folder, asked=[*ASKED, Prompt("known", "law", ("a first turn", TEXTS["law"][1]))])
    with pytest.raises(FileNotFoundError, match="holds no experts .* python -m experiments.experts"):
        runs._heads(ExpertFolder(tmp_path), asked=[])
    ExpertFolder.begin(tmp_path / "new", {"target": {}, "options": {}})
    with pytest.raises(ValueError, match="holds no finished head yet"):
        runs._heads(ExpertFolder(tmp_path / "new"), asked=[])
    for content, problem in (
        ("{", "is damaged"),
        ("[]", "does not describe experts"),
        ('{"format": "adaptspec-experts", "version": 9, "domains": {}}', "version must be 1, got 9"),
        ('{"format": "adaptspec-experts", "version": 1, "domains": {"law": {}}}', "'law' lacks its folder or turns"),
    ):
        (tmp_path / "experts.json").write_text(content)
        with pytest.raises(ValueError, match=problem):
            runs._heads(ExpertFolder(tmp_path), asked=[])


def test_tables_hold_both_kinds_beside_published_ones(tmp_path: Path) -> None:
    """One kind beside the other where both are for the same domains; heads first where the published figures are."""
    from experiments.analysing import Results

    analysis = find_experiment("strategies").analysis

    def row(group: str, strategy: str, seconds: float, *, seed: int = 0, **columns: Any) -> dict[str, Any]:
        base = {"domain": "law", "prompts": 1, "new_tokens": 100, "prefill_seconds": 0.0, "answers": 1, "steps": 40}
        base |= {"gained": 99, "verified": 300, "accepted": 59, "draft_seconds": 0.1, "faults": 0, "order": "shuffle"}
        base |= {"ar_new_tokens": 100, "ar_seconds": 6.0, "ar_prefill_seconds": 0.0, "identical": 1, "compared": 1}
        return {**base, "group": group, "strategy": strategy, "seed": seed, "seconds": seconds, **columns}

    stores = {"experts": 2, "expert": "rest", "experts_for": "code, law"}
    heads = {"experts": 2, "expert": "eagle3", "experts_for": "code, law"}
    rows = [
        row("full pool", "hedge", 3.0),
        row("2 experts, shuffle", "hedge", 4.0, **stores),
        row("2 experts, shuffle", "hedge", 1.0, seed=1, **{**stores, "experts_for": "chat, law"}),
        row("2 experts, shuffle", "ucb", 4.0, **stores),
        row("2 experts (EAGLE heads), shuffle", "hedge", 2.0, **heads),
        row("2 experts (EAGLE heads), shuffle", "hedge", 9.0, seed=1, **heads),
        row("2 experts (EAGLE heads), shuffle", "exp3", 4.0, **heads),
    ]
    results = Results([result(rows)], read_published_of(tmp_path))
    tables = analysis.tables(results)
    (both,) = tables["EAGLE heads beside REST stores"].to_dict("records")  # neither other domains nor other strategies
    assert (both["experts"], both["order"], both["strategy"]) == (2, "shuffle", "hedge")
    assert both["EAGLE heads, speed-up"] == pytest.approx(3.0) and both["REST stores, speed-up"] == pytest.approx(1.5)
    assert both["heads of stores"] == pytest.approx(2.0) and both["EAGLE heads, identical"] == "1/1"
    beside = tables["Published beside measured"]
    assert beside["chooses among"].tolist() == [
        *["EAGLE heads"] * 2, *["EAGLE heads"] * 2, "drafters", *["REST stores"] * 2,
    ]  # fmt: skip
    assert beside["whose"].drop_duplicates().tolist()[:2] == [
        "published, M",
        "measured, 2 experts (EAGLE heads), shuffle",
    ]
    # A run from before there were heads.
    old = [{key: value for key, value in each.items() if key not in ("expert", "experts_for")} for each in rows[:2]]
    tables = analysis.tables(Results([result(old)]))
    assert tables["EAGLE heads beside REST stores"].empty
    assert tables["Published beside measured"]["chooses among"].tolist() == ["drafters", "REST stores"]
    # One kind alone, and nothing at all.
    assert analysis.by_kind(Results([result(rows[:3])]).frame).empty
    assert all(table.empty for table in analysis.tables(Results([])).values())


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": "a", "rows": rows, "curves": {}, "provenance": {}, "seconds": 1.0}


def read_published_of(folder: Path) -> Any:
    from experiments.analysing import read_published

    lines = ["method,configuration,column_28,column_29", 'Vanilla,"Model=M, Strategy=Vanilla",20,1']
    lines += ['HedgeSpec,"Model=M, Strategy=Hedge",60,5']
    (folder / "published.csv").write_text("\n".join(lines) + "\n")
    return read_published([folder / "published.csv"])


@pytest.mark.parametrize("quick", [True, False])
def test_the_sweep_has_both_kinds(quick: bool) -> None:
    points = find_experiment("strategies").sweep(quick=quick).points
    kinds = {
        kind: {
            (p.parameters["experts"], p.parameters["order"], p.parameters["strategy"])
            for p in points
            if p.parameters.get("expert") == kind
        }
        for kind in ("rest", "eagle3")
    }
    assert kinds["rest"] == kinds["eagle3"] != set()
    groups = {p.parameters["group"] for p in points}
    assert {"2 experts, shuffle", "2 experts (EAGLE heads), shuffle", "2 experts (EAGLE heads), blocks"} <= groups
