"""From results to tables, pictures and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from adaptspec.control.trace import Trace
from adaptspec.control.trace_file import trace_bytes
from experiments import report
from experiments.analysing import Results, live_scores, read_published
from experiments.drifting import WORLDS, make_world, play_world
from experiments.fleet import make_table, play_fleet
from experiments.recording import FILE
from experiments.replaying import play_comparators, play_policy
from experiments.store import RunFolder
from experiments.sweeps import Configuration, find_experiment
from experiments.tasks import Outcome, Settings, Task
from experiments.vocabulary.analysis import published_head

PUBLISHED = """\
method,configuration,date,headline,column_28,column_29
Vanilla,"Model=M, Strategy=Vanilla",2025.10,,20,1
UCB,"Model=M, Strategy=UCB",2025.10,,50,4.0
HedgeSpec,"Model=M, Strategy=Hedge",2025.10,,60,5.0
Medusa,"Target=T, Nodes=30, Temperature (T)=0.0",2025.10,2.5,,
"""
LAW = """\
domain,method,configuration,date,tokens_per_second
law,Vanilla SD,,2026,100
law,FR-Spec,Static Vocabulary Size=8k,2026,110
law,EvoSpec,"Static Vocabulary Size=16k, Dynamic Buffer Size (Dyna)=512",2026,120
"""


def finished(path: Path, name: str, outcomes: dict[str, Outcome]) -> RunFolder:
    """A run with these results."""
    manifest = {
        "experiment": name,
        "quick": True,
        "model": "m",
        "dtype": "float32",
        "max_new_tokens": 8,
        "prompts": {"count": 3, "sha256": "f" * 64},
        "sessions": [{"argv": ["python", "-m", "experiments.run", name], "begun": "2026-01-01T00:00:00"}],
    }
    folder = RunFolder.create(path / f"{name}-1", manifest)
    for key, outcome in outcomes.items():
        folder.save(key, outcome, provenance={"git_sha": "f00"}, seconds=1.0)
    return folder


def task(name: str, inputs: dict[str, Any], seed: int = 0, **parameters: Any) -> Task:
    return Task(Configuration(name, "x:y", parameters, seed=seed), Settings(), inputs)


@pytest.fixture(scope="module")
def trace(small_trace: Trace) -> dict[str, dict[str, bytes]]:
    return {"trace-0": {FILE: trace_bytes(small_trace)}}


@pytest.fixture(scope="module")
def regret_run(trace: dict[str, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Two seeds of three policies."""
    outcomes: dict[str, Outcome] = {}
    common = {"costs": "h100", "order": "shuffle", "budgets": (2, 4), "switches": 2}
    for seed in range(2):
        oracle = play_comparators(task(f"oracles-s{seed}", trace, seed, **common))
        outcomes[f"oracles-s{seed}"] = oracle
        for policy in ("hedge", "ucb", "mixture"):
            inputs = {**trace, "oracles": dict(oracle.files)}
            outcomes[f"{policy}-s{seed}"] = play_policy(task(policy, inputs, seed, policy=policy, **common))
    return finished(tmp_path_factory.mktemp("runs"), "regret", outcomes)


def test_regret(regret_run: RunFolder) -> None:
    results = Results.of(regret_run)
    analysis = find_experiment("regret").analysis
    table = analysis.score(results.frame).set_index("policy")["h100"]
    assert table["best-fixed"] == pytest.approx(1.0)
    assert table["ar"] < 1.0 <= table["best-per-domain"] <= table["best-per-prompt"] <= table["best-per-step"]
    assert table["hedge"] <= table["best-per-step"] + 1e-9
    found = analysis.tables(results)["Costs: h100"].set_index("policy")
    assert found.at["best-fixed", "regret (seconds)"] != found.at["best-fixed", "regret (seconds)"]  # against itself
    assert found.at["ucb", "of per-step"] < 1.0
    assert analysis.score(pd.DataFrame()).empty and analysis.plots(Results([])) == {}


def test_drift(tmp_path: Path, trace: dict[str, dict[str, bytes]], small_trace: Trace) -> None:
    outcomes = {}
    for world in WORLDS:
        for policy in ("ema", "ucb"):
            made = task(f"{policy}-{world}", trace, world=world, policy=policy, budgets=(2, 4), repeats=3)
            outcomes[made.configuration.id] = play_world(made)
    results = Results.of(finished(tmp_path, "drift", outcomes))
    analysis = find_experiment("drift").analysis
    table = analysis.score(results.frame).set_index(["world", "policy"])
    assert set(table.index) == {(world, policy) for world in WORLDS for policy in ("ema", "ucb")}
    assert table["recovered"].between(0.0, 1.0).all() and (table["seconds lost per change"] < 1e3).all()
    assert list(analysis.plots(results)) == ["speed"]
    broken = make_world("broken", small_trace, repeats=1, seed=0)
    broken.trace.validate()
    assert len(broken.order) == 3 * len(small_trace.requests) and broken.starts == (0, 4, 8)
    with pytest.raises(ValueError, match="unknown world 'brocken'; did you mean 'broken'"):
        make_world("brocken", small_trace, repeats=1, seed=0)


def test_a_broken_drafter_earns_nothing_while_it_is_broken(small_trace: Trace) -> None:
    from adaptspec.control.trace_reach import reaches

    world = make_world("broken", small_trace, repeats=1, seed=0)
    drafter = world.names[1].split()[0]
    for place, index in enumerate(world.order):
        lengths = reaches(world.trace.requests[index], drafter).lengths(4)
        assert (lengths.max() == 1) == (4 <= place < 8)


def test_scale(tmp_path: Path, trace: dict[str, dict[str, bytes]]) -> None:
    tables = make_table(task("table", trace, budgets=(2, 4)))
    outcomes = {"table": tables}
    arms = ("ar", "a@2", "a@4", "b@2", "b@4")
    plays = [(f"fixed:{arm}", "isolated") for arm in arms] + [("hedge", "isolated"), ("hedge", "shared")]
    for number, (policy, sharing) in enumerate(plays):
        made = task(
            f"p{number}",
            {"table": dict(tables.files)},
            hardware="a40",
            batch=2,
            policy=policy,
            sharing=sharing,
            requests=64,
            replicas=8,
        )
        outcomes[f"p{number}"] = play_fleet(made)
    results = Results.of(finished(tmp_path, "scale", outcomes))
    analysis = find_experiment("scale").analysis
    (row,) = analysis.score(results.frame).to_dict("records")
    assert (row["hardware"], row["batch"]) == ("a40", 2) and row["best arm"] in arms
    assert row["ar"] < 1.0 and 0.5 < row["hedge isolated"] <= 1.1
    found = analysis.tables(results)
    assert found["Size of the simulation"]["requests"].iloc[0] == 7 * 64
    assert found["Where the numbers are from"]["source"].str.len().min() > 20
    assert set(analysis.plots(results)) == {"of-best", "along-the-stream"}


def live_row(**columns: Any) -> dict[str, Any]:
    base = {"seed": 0, "prompts": 2, "new_tokens": 100, "seconds": 2.0, "prefill_seconds": 0.5, "answers": 2}
    base |= {"steps": 49, "gained": 98, "verified": 300, "accepted": 49, "draft_seconds": 0.049, "faults": 0}
    base |= {"controller_seconds": 0.0, "ar_new_tokens": 100, "ar_seconds": 3.0, "ar_prefill_seconds": 0.5}
    return {**base, "identical": 2, "compared": 2, **columns}


def test_live_scores_are_ratios_of_sums() -> None:
    frame = pd.DataFrame(
        [
            live_row(method="x", domain="law"),
            live_row(method="x", domain="code", seconds=4.0, identical=1),
            live_row(method="x", domain="code", seed=1, seconds=6.0),
        ]
    )
    (row,) = live_scores(frame, ["method"]).to_dict("records")
    assert row["tokens/s"] == pytest.approx(300 / 12.0) and row["speed-up"] == pytest.approx(9.0 / 12.0)
    assert row["decode speed-up"] == pytest.approx((3 * 2.5) / (12.0 - 1.5))
    assert row["length"] == pytest.approx(2.0) and row["identical"] == "5/6"
    assert row["over seeds"] == "0.50 to 1.00" and row["draft ms/step"] == pytest.approx(1.0)
    assert live_scores(pd.DataFrame(), ["method"]).empty


def test_published_figures_stand_beside_measured_ones(tmp_path: Path) -> None:
    (tmp_path / "spec.csv").write_text(PUBLISHED)
    (tmp_path / "law.csv").write_text(LAW)
    files = [tmp_path / "spec.csv", tmp_path / "law.csv"]
    assert len(read_published(files)) == 3 + 3 + 1 + 3
    rows = [
        live_row(group="full pool", strategy=name, domain="law", seconds=s) for name, s in (("hedge", 1.5), ("ucb", 2))
    ]
    folder = finished(tmp_path, "strategies", {"a": Outcome(rows=rows, curves={"arms": []})})
    table = find_experiment("strategies").analysis.tables(Results.of(folder, files))["Published beside measured"]
    found = table.set_index(["whose", "strategy"])
    assert found.loc[("published, M", "hedge"), "speed-up"] == pytest.approx(3.0)
    assert found.loc[("published, M", "ucb"), "of hedge"] == pytest.approx(50 / 60)
    assert found.loc[("measured, full pool", "hedge"), "speed-up"] == pytest.approx(2.0)
    assert found.loc[("measured, full pool", "ucb"), "of hedge"] == pytest.approx(0.75)

    heads = [
        live_row(head=head, draft="coupled", domain="law", seconds=s)
        for head, s in (("full", 2.0), ("fr:8192", 1.6), ("evospec:16384+512", 1.0))
    ]
    times = {"head": "fr:8192", "hidden_states": 1, "head_rows": 8192, "head_milliseconds": 1.0}
    head = Outcome(rows=[{**times, "full_milliseconds": 4.0, "seed": 0}])
    folder = finished(tmp_path, "vocabulary", {"a": Outcome(rows=heads), "h": head})
    analysis = find_experiment("vocabulary").analysis
    both = analysis.tables(Results.of(folder, files))["Published beside measured"].set_index("head")
    assert both.at["fr:8192", "published, of full head"] == pytest.approx(1.1)
    assert both.at["fr:8192", "measured, of full head"] == pytest.approx(1.25)
    assert set(analysis.plots(Results.of(folder, files))) == {"head-ms", "published-measured"}
    assert published_head("EvoSpec", "Static Vocabulary Size=8k, Dynamic Vocabulary Size=256") == "evospec:8192+256"

    trees = [live_row(drafter="suffix", builder="chain", temperature=0.0, budget=b, domain="x") for b in (16, 32)]
    folder = finished(tmp_path, "trees", {"a": Outcome(rows=trees)})
    analysis = find_experiment("trees").analysis
    table = analysis.tables(Results.of(folder, files))["Published beside measured"]
    assert table.set_index("tree").loc["Medusa", ["budget", "speed-up"]].tolist() == [30, 2.5]
    assert list(analysis.plots(Results.of(folder))) == ["builders"]

    bench = [live_row(method="medusa@30", domain=d, seconds=s) for d, s in (("qa", 1.0), ("math", 2.0))]
    folder = finished(tmp_path, "specbench", {"a": Outcome(rows=bench)})
    analysis = find_experiment("specbench").analysis
    table = analysis.tables(Results.of(folder, files))["Published beside measured"]
    assert table["speed-up"].tolist() == pytest.approx([2.0, 2.5])
    assert set(analysis.plots(Results.of(folder))) == {"speed-up", "by-category"}
    with pytest.raises(ValueError, match="lacks configuration, method"):
        (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
        read_published([tmp_path / "bad.csv"])


def test_pictures_of_many_policies_colour_the_best_and_the_headline() -> None:
    from experiments.regret.analysis import MOST_COLOURED, pick_out

    def curve(policy: str, lost: float, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
        regret = {"best-fixed": {"seconds": [0.0, lost * seconds]}}
        return {"policy": policy, "seconds": seconds}, {"regret": regret}

    few = [curve(name, lost, 1.0) for name, lost in (("exp3", 0.3), ("a", 0.1), ("b", 0.2))]
    assert pick_out(few) == ["exp3", "a", "b"]
    # A slow machine must not outweigh a fast one: z loses a tenth there and gains a half here.
    many = few + [curve(f"p{i}", 0.5 + i, 1.0) for i in range(9)]
    many += [curve("z", 0.1, 1000.0), curve("z", -0.5, 1.0), curve("mixture", 9.0, 1.0)]
    assert pick_out(many) == ["mixture", "exp3", "z", "a", "b", "p0", "p1", "p2"] and MOST_COLOURED == 8


def test_the_page_needs_nothing_besides_itself(tmp_path: Path, regret_run: RunFolder) -> None:
    folder = regret_run
    folder.save_problem("eagle3-s0", {"kind": "not available", "reason": "no <weights>"})
    out = tmp_path / "report"
    report.report([folder.path], out=out, published=None, force=False)
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "src=" in page and page.count("data:image/png;base64,") == page.count("src=") == 3
    assert "href=" in page and "http" not in page.split("</style>")[1].replace("http://www.w3.org", "")
    assert "python -m experiments.run regret" in page
    assert "no &lt;weights&gt;" in page and "not available" in page
    names = {path.name for path in out.iterdir()}
    pictures = {"regret-h100-shuffle", "shares-h100-shuffle", "regret-by-comparator"}
    assert names >= {"regret-1-rows.csv", "regret-1-costs-h100.csv", *(f"regret-1-{name}.png" for name in pictures)}
    rows = pd.read_csv(out / "regret-1-rows.csv")
    assert set(rows["from_git_sha"]) == {"f00"}
    with pytest.raises(FileExistsError, match="already holds something"):
        report.report([folder.path], out=out, published=None, force=False)
    with pytest.raises(FileNotFoundError, match="there is no run in"):
        report.report([tmp_path], out=tmp_path / "other", published=None, force=False)
    assert json.loads((folder.path / "manifest.json").read_text())["experiment"] == "regret"
