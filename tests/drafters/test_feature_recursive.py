"""Feature-recursive drafters: what they propose depends on the committed text alone, and is what the cell says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.drafters import Drafter, make_drafter
from adaptspec.drafters.cell_weights import CellWeights, save_cell, target_fingerprint
from adaptspec.drafters.cells.recursion import Recursion
from adaptspec.drafters.feature_recursive import FeatureRecursive
from adaptspec.target.hf import HFTarget
from adaptspec.types import DraftTree, Sampling
from adaptspec.vocab.counts import count_tokens, save_frequencies
from tests import tiny_models
from tests.drafters import cell_specification as specification
from tests.drafters.cell_cases import Request, same_proposal, tiny_cell, tiny_llama
from tests.drafters.cell_variants import DRAFTER_VARIANTS, VARIANTS

PROMPT = [11, 3, 50, 7, 7, 29, 40, 3]
NAME_OF_KIND = {"eagle1": "eagle2", "eagle3": "eagle3", "griffin": "griffin", "mtp": "mtp1"}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def drafter_of(variant: str, **options: Any) -> Any:
    """A drafter with a dynamic tree of depth 5 for a cell."""
    name = "mtp3" if variant == "mtp3" else NAME_OF_KIND[VARIANTS[variant]["kind"]]
    return make_drafter(name, path=tiny_cell(variant), **{"tree": "dynamic", "branching": 4, "max_depth": 5, **options})


def features_of(model: Any, drafter: Drafter, tokens: list[int]) -> dict[int, torch.Tensor]:
    target = HFTarget(model)
    target.tap(drafter.needs.taps)
    return dict(target.prefill(torch.tensor(tokens)).features)


def log_probs_along(model: Any, drafter: FeatureRecursive, tokens: list[int], path: list[int]) -> list[float]:
    """By the equations: log q of each token of a path."""
    cell = drafter._open().cell
    features = features_of(model, drafter, tokens[:-1])
    by_row = [[features[tap][i] for tap in cell.config.taps] for i in range(len(tokens) - 1)]
    with torch.no_grad():
        head_inputs = specification.head_inputs_along(
            tokens,
            by_row,
            path[:-1],
            embedding=model.get_input_embeddings().weight,
            w=cell.state_dict(),
            config=cell.config,
            final_norm=model.model.norm.weight,
        )
        logits = torch.stack(head_inputs) @ model.get_output_embeddings().weight.T
        log_probs = torch.log_softmax(logits, -1)
    return [float(row[token]) for row, token in zip(log_probs, path, strict=True)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tree_scores_what_the_equations_say(variant: str, model: Any) -> None:
    drafter = drafter_of(variant)
    tree = Request(model, drafter, PROMPT).ask(20)
    assert len(tree) == 20 and len(set(tree.parents.tolist())) > 3
    deepest = np.argsort(tree.depths(), kind="stable")[-2:].tolist()
    for node in (*deepest, 1):
        path = [node]
        while (parent := int(tree.parents[path[0]])) >= 0:
            path.insert(0, parent)
        wanted = log_probs_along(model, drafter, PROMPT, tree.token_ids[path].tolist())
        assert np.allclose(tree.evidence["log_prob"][path], wanted, atol=2e-3)
        assert np.isclose(tree.scores[node], sum(wanted), atol=2e-3)


def branches(request: Request) -> DraftTree:
    """A tree whose right path, whatever the test takes for right, lies in its second branches."""
    rng = np.random.default_rng(len(request.tokens))
    return DraftTree(rng.integers(1, 64, 8), np.array([-1, -1, 0, 1, 1, 3, 4, 6]), np.zeros(8))


def play(request: Request, habit: str) -> None:
    """One step of a request."""
    if habit == "accepted":
        tree = request.ask(24)
        path = [node for node in (0,)]
        while (below := np.flatnonzero(tree.parents == path[-1])).size:
            path.append(int(below[-1]))
        request.commit(tree, path, 17)
    elif habit == "rejected":
        request.commit(request.ask(24), [], 5)
    elif habit == "branch":
        request.ask(24)
        request.commit(branches(request), [1, 4, 6, 7], 33)
    else:
        request.commit(branches(request), [1, 3] if habit == "cold" else [], 21)


HABITS = {
    "accepted": ["accepted"],
    "rejected": ["rejected"],
    "another branch": ["branch"],
    "cold": ["cold", "cold and rejected", "cold"],
    "mixed": ["accepted", "branch", "cold", "rejected", "cold and rejected", "cold", "accepted"],
}


def depends_on_the_text_alone(model: Any, variant: str, habits: list[str]) -> bool:
    """Whether proposals after some steps are those of a request that starts with the same text."""
    request = Request(model, drafter_of(variant), PROMPT)
    for habit in habits:
        play(request, habit)
        fresh = Request(model, drafter_of(variant), request.tokens)
        if not habit.startswith("cold") and not same_proposal(request.ask(24), fresh.ask(24)):
            return False
    fresh = Request(model, drafter_of(variant), request.tokens)
    return same_proposal(request.ask(24), fresh.ask(24))


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("variant", ["eagle3-own", "mtp-window", "mtp3"])
def test_proposals_depend_on_the_text_alone(variant: str, habit: str, model: Any) -> None:
    assert depends_on_the_text_alone(model, variant, HABITS[habit])


def keep_guessed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted draft rows stay as they are, instead of being run again on the target's features."""
    advance = Recursion._advance

    def mutant(self: Recursion, tokens: torch.Tensor, features: list[torch.Tensor]) -> None:
        guessed = self._guess if self.rows else None
        advance(self, tokens, features)
        if guessed is not None:
            keys, values = guessed
            count = min(keys.shape[2], len(tokens) - 1)
            first = self.rows - len(tokens) + 1
            self.cache._keys[0][:, :, first : first + count] = keys[:, :, :count]
            self.cache._values[0][:, :, first : first + count] = values[:, :, :count]

    forget = Recursion._forget_draft

    def remember(self: Recursion) -> None:
        if self.cache.length() > self.rows:
            rows = slice(self.rows, self.cache.length())
            self._guess = (self.cache._keys[0][:, :, rows].clone(), self.cache._values[0][:, :, rows].clone())
        forget(self)

    monkeypatch.setattr(Recursion, "_advance", mutant)
    monkeypatch.setattr(Recursion, "_forget_draft", remember)
    monkeypatch.setattr(Recursion, "_guess", None, raising=False)


def forget_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step the bonus token gets no row."""
    push = Recursion.push

    def mutant(self: Recursion, token_ids: np.ndarray, features: Any) -> None:
        cut = len(token_ids) - (self.rows > 0 and len(token_ids) > 1)
        push(self, token_ids[:cut], {tap: rows[:cut] for tap, rows in features.items()})

    monkeypatch.setattr(Recursion, "push", mutant)


@pytest.mark.parametrize("mutate", [keep_guessed_rows, forget_the_last_row])
def test_stale_rows_are_noticed(mutate: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert not depends_on_the_text_alone(model, "eagle3-own", HABITS["mixed"])


def test_catching_up_is_counted_and_changes_nothing(model: Any) -> None:
    drafter, twin = drafter_of("mtp3"), drafter_of("mtp3")
    request, other = Request(model, drafter, PROMPT), Request(model, twin, PROMPT)
    assert drafter.lag == 0
    for each in (request, other):
        play(each, "cold")
    assert drafter.lag == 0  # a proposal at every step has as many rows to run
    for each in (request, other):
        play(each, "cold")
        play(each, "cold and rejected")
    assert drafter.lag == twin.lag == 6
    drafter.catch_up()
    assert drafter.lag == 0 and drafter._open().pending == 1
    assert same_proposal(request.ask(), other.ask())
    assert twin.lag == 0


def test_long_prompts_are_run_in_parts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptspec.drafters.cells.recursion._CHUNK", 3)
    parts = Request(model, drafter_of("mtp3"), PROMPT).ask()
    monkeypatch.undo()
    assert same_proposal(parts, Request(model, drafter_of("mtp3"), PROMPT).ask())


@pytest.mark.parametrize("options", [{"tree": "dynamic"}, {"tree": "static"}, {"tree": "chain"}])
def test_smaller_budgets_are_part_of_larger_ones(options: dict[str, Any], model: Any) -> None:
    request = Request(model, drafter_of("eagle3", **options), PROMPT)
    trees = [set(paths_of(request.ask(budget))) for budget in (1, 2, 5, 12, 40)]
    assert len(trees[0]) == 1
    for smaller, larger in zip(trees, trees[1:], strict=False):
        assert smaller <= larger


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_shapes_of_trees(model: Any) -> None:
    def ask(budget: int = 24, depth: int = 64, **options: Any) -> DraftTree:
        return Request(model, drafter_of("eagle3", **options), PROMPT).ask(budget, max_depth=depth)

    chain = ask(tree="chain")
    assert chain.parents.tolist() == [-1, 0, 1, 2, 3] and chain.siblings == "deterministic"
    static = ask(tree="static", branching=6)
    assert len(static) == 24 and static.evidence["rank"].max() <= 5
    assert np.allclose(static.scores, static.evidence["log_prob"] + np.append(static.scores, 0.0)[static.parents])
    assert set(paths_of(chain)[:3]) <= set(paths_of(static))  # rank 0 below rank 0
    assert ask(depth=2).depths().max() == ask(depth=2, tree="static").depths().max() == 2
    assert len(ask(tree="static", branching=1)) == 5
    few = drafter_of("eagle3", tree="static", branching=6)
    few.path = reduced("eagle3", [5, 9])
    tree = Request(model, few, PROMPT).ask(24)
    assert set(tree.token_ids.tolist()) == {5, 9} and tree.evidence["rank"].max() == 1


def reduced(variant: str, ids: list[int], *, seed: int = 4) -> CellWeights:
    """A cell with a head of its own over some tokens."""
    head = torch.randn((len(ids), 32), generator=torch.Generator().manual_seed(seed))
    return CellWeights(tiny_cell(variant, draft_vocab_size=len(ids)), head, torch.tensor(ids))


def test_own_heads_and_embeddings_are_used(model: Any) -> None:
    weights = reduced("eagle3", [60, 2, 31, 7])
    drafter = make_drafter("eagle3", path=weights, branching=4)
    tree = Request(model, drafter, PROMPT).ask(30)
    assert set(tree.token_ids.tolist()) <= {60, 2, 31, 7}
    hidden = drafter._open().root()[0]
    q = torch.softmax(hidden @ weights.head.T, -1)
    below = np.flatnonzero(tree.parents == -1)
    wanted = {token: float(value) for token, value in zip([60, 2, 31, 7], q.log(), strict=True)}
    assert all(abs(wanted[int(tree.token_ids[node])] - tree.scores[node]) < 1e-4 for node in below)

    other = CellWeights(weights.cell, weights.head, weights.token_ids, embeddings=torch.randn(64, 32))
    moved = Request(model, make_drafter("eagle3", path=other, branching=4), PROMPT).ask(30)
    assert not same_proposal(tree, moved)


def test_every_step_of_a_cell_with_several_layers_may_have_a_head_of_its_own(model: Any) -> None:
    rows = torch.arange(64.0)[:, None]
    heads = tuple(1e3 * torch.nn.functional.one_hot(torch.tensor(k), 32) * (rows == k) for k in (1, 2, 3))
    weights = CellWeights(tiny_cell("mtp3"), heads=heads)
    drafter = make_drafter("mtp3", path=weights, tree="chain", max_depth=5)
    chain = Request(model, drafter, PROMPT).ask()
    hidden = [drafter._open().root()]
    for step, token in enumerate(chain.token_ids[:-1].tolist()):
        hidden.append(drafter._open().draft(np.array([token]), np.array([step])))
    wanted = [int((x[0] @ heads[min(step, 2)].T).argmax()) for step, x in enumerate(hidden)]
    assert chain.token_ids.tolist() == wanted and len(set(wanted)) > 1


def test_reduced_vocabularies_and_what_they_learn(model: Any, tmp_path: Path) -> None:
    save_frequencies(tmp_path / "counts.safetensors", count_tokens([np.arange(64)], vocab_size=64))
    name = f"evospec:16+8+align:{tmp_path / 'counts.safetensors'}"

    def make() -> AdaptiveSpec:
        drafter = make_drafter("eagle3", path=tiny_cell("eagle3"))
        return AdaptiveSpec([drafter], f"fixed:eagle3@12/{name}", vocab=(name,), budgets=(12,))

    def run(spec: AdaptiveSpec, text: list[int]) -> list[int]:
        result = spec.generate(model, torch.tensor([text]), max_new_tokens=24, eos_token_id=64)
        assert result.stats.set_aside == {} and all(record.drafted for record in result.trace[:-1])
        return [record.accepted for record in result.trace]

    spec, again = make(), make()
    assert spec.drafters["eagle3"].state_dict() == {}
    for _ in range(2):
        run(spec, PROMPT)
    state = spec.drafters["eagle3"].state_dict()
    again.drafters["eagle3"].load_state_dict(state)  # before it has met a target
    assert run(spec, PROMPT[::-1]) == run(again, PROMPT[::-1])
    with pytest.raises(ValueError, match="must be a list of 1 states"):
        again.drafters["eagle3"].load_state_dict({"vocab": [{}, {}]})
    with pytest.raises(ValueError, match="no key but 'vocab', got other"):
        again.drafters["eagle3"].load_state_dict({"other": 1})


def test_sampled_chains_tell_the_distribution_they_are_drawn_from(model: Any) -> None:
    ids = [60, 2, 31, 7, 15]
    drafter = make_drafter("eagle1", path=reduced("eagle1", ids, seed=1))
    request = Request(model, drafter, PROMPT)
    sampling = Sampling(temperature=3.0, top_k=4)
    counts = np.zeros((2, 64))
    runs = 200
    pair: dict[tuple[int, ...], np.ndarray] = {}
    for seed in range(runs):
        tree = request.ask(2, sampling=sampling, rng=np.random.default_rng(seed))
        assert tree.siblings == "iid" and tree.draft_probs.shape == (2, 64)
        assert np.allclose(tree.draft_probs.sum(1), 1.0, atol=1e-5)
        assert (tree.draft_probs > 0).sum(1).tolist() == [4, 4]
        assert set(np.flatnonzero(tree.draft_probs.sum(0)).tolist()) <= set(ids)
        assert np.allclose(tree.evidence["log_prob"], np.log(tree.draft_probs[[0, 1], tree.token_ids]), atol=1e-6)
        counts[0, tree.token_ids[0]] += 1
        first = (int(tree.token_ids[0]),)
        pair.setdefault(first, tree.draft_probs[1])
        assert np.array_equal(pair[first], tree.draft_probs[1])  # q of the second token depends on the first alone
    logits = drafter._open().root()[0] @ reduced("eagle1", ids, seed=1).head.T / 3.0
    logits[logits < logits.topk(4).values[-1]] = -torch.inf
    wanted = np.zeros(64)
    wanted[ids] = torch.softmax(logits, -1).numpy()
    assert np.allclose(tree.draft_probs[0], wanted, atol=1e-5)
    assert abs(counts[0] / runs - wanted).max() < 0.1


def test_drawn_trees_and_their_rows(model: Any) -> None:
    sampling = Sampling(temperature=1.0)
    drafter = drafter_of("mtp3", tree="static", siblings="without-replacement")
    request = Request(model, drafter, PROMPT)
    tree = request.ask(12, sampling=sampling)
    assert tree.siblings == "without-replacement" and len(tree) == 12
    for node in (0, int(np.argmax(tree.depths()))):
        path = [node]
        while (parent := int(tree.parents[path[0]])) >= 0:
            path.insert(0, parent)
        along = drafter.draft_probs_along(request.context(sampling=sampling), tree.token_ids[path])
        rows = tree.draft_rows[tree.parents[path] + 1]
        assert np.allclose(tree.draft_probs[rows], along, atol=1e-5)
    assert request.ask(12).siblings == "deterministic"  # greedy
    assert request.ask(12, sampling=sampling, max_depth=1).depths().max() == 1


@pytest.mark.parametrize("variant", ["eagle3", "mtp3"])
def test_teacher_forced_distributions(variant: str, model: Any) -> None:
    drafter = drafter_of(variant)
    request = Request(model, drafter, PROMPT)
    before = request.ask()
    path = [9, 33, 9, 0]
    q = drafter.draft_probs_along(request.context(), np.array(path))
    wanted = log_probs_along(model, drafter, PROMPT, path)
    assert q.shape == (4, 64) and np.allclose(q.sum(1), 1.0, atol=1e-5)
    assert np.allclose(np.log(q[np.arange(4), path]), wanted, atol=2e-3)
    assert drafter.draft_probs_along(request.context(), np.zeros(0, np.int64)).shape == (0, 64)
    assert same_proposal(before, request.ask())


@pytest.mark.parametrize("name", ["eagle3", "mtp3"])
def test_a_session_hands_over_what_was_asked_for_at_bind(name: str, model: Any) -> None:
    drafter = make_drafter(name, path=tiny_cell(DRAFTER_VARIANTS[name]))
    assert drafter.needs.taps == ()
    spec = AdaptiveSpec([drafter], f"fixed:{name}@40")
    result = spec.generate(model, torch.tensor([PROMPT]), max_new_tokens=24, eos_token_id=64)
    assert drafter.needs.taps == ((1, 2, 4) if name == "eagle3" else (4,))
    assert result.stats.set_aside == {} and all(record.drafted for record in result.trace[:-1])


def test_16_bit_targets(model: Any) -> None:
    half = tiny_llama().to(torch.bfloat16)
    request = Request(half, drafter_of("eagle3-own"), PROMPT)
    play(request, "accepted")
    play(request, "cold")
    assert len(request.ask()) == 24
    assert request.drafter._open().root().dtype == torch.bfloat16


def test_binding_again(model: Any) -> None:
    cell = tiny_cell("eagle3")
    drafter = make_drafter("eagle3", path=cell)
    first = Request(model, drafter, PROMPT).ask()
    recursion = drafter._open()
    assert same_proposal(first, Request(model, drafter, PROMPT).ask()) and drafter._open() is recursion
    other = tiny_models.make_llama(vocab_size=64, layers=4, seed=3)
    assert not same_proposal(first, Request(other, drafter, PROMPT).ask())
    assert same_proposal(first, Request(model, drafter, PROMPT).ask())
    assert recursion.cell is not cell and cell.midlayer.mlp.up_proj.weight.requires_grad
    drafter.use_vocab(("full",))
    assert same_proposal(first, Request(model, drafter, PROMPT).ask())


def test_requests_that_are_too_short_to_draft_from(model: Any) -> None:
    request = Request(model, drafter_of("mtp3"), PROMPT[:2])
    assert len(request.ask()) == 0
    with pytest.raises(RuntimeError, match="mtp3 needs at least 4 committed tokens"):
        request.drafter.draft_probs_along(request.context(), np.array([1]))
    request.commit(DraftTree.empty(), [], 9)
    assert len(request.ask()) == 0
    request.commit(DraftTree.empty(), [], 10)
    fresh = Request(model, drafter_of("mtp3"), [*PROMPT[:2], 9, 10])
    assert len(request.ask()) == 24 and same_proposal(request.ask(), fresh.ask())


def test_a_folder_of_weights(model: Any, tmp_path: Path) -> None:
    weights = reduced("eagle3-own", list(range(0, 64, 2)))
    fingerprint = target_fingerprint(model)
    for bits in (8, 32):
        save_cell(
            tmp_path / str(bits),
            weights.cell,
            target=fingerprint,
            card={"steps": 3},
            head=weights.head,
            token_ids=weights.token_ids,
            bits=bits,
        )
    memory = Request(model, make_drafter("eagle3", path=weights), PROMPT).ask()
    exact, coarse = (Request(model, make_drafter(f"eagle3:{tmp_path}/{bits}"), PROMPT).ask() for bits in (32, 8))
    assert same_proposal(memory, exact)
    assert abs(memory.scores[0] - coarse.scores[0]) < 0.2
    half = tiny_llama().to(torch.float16)
    assert len(Request(half, make_drafter("eagle3", path=tmp_path / "32"), PROMPT).ask()) == 24


def test_foreign_folders(model: Any, tmp_path: Path) -> None:
    save_cell(tmp_path, tiny_cell("eagle3"), target=target_fingerprint(model), card={})
    retrained = tiny_models.make_llama(vocab_size=64, layers=4, seed=9)
    for other, message in (
        (tiny_models.make_llama(vocab_size=80, layers=4), "their target has vocab_size 64, this one 80"),
        (tiny_models.make_llama(vocab_size=64, layers=5), "their target has layers 4, this one 5"),
        (retrained, "their target is of the same shape and has other weights"),
    ):
        with pytest.raises(ValueError, match=message):
            make_drafter("eagle3", path=tmp_path).bind(HFTarget(other))
    with pytest.raises(ValueError, match="is a cell of kind 'eagle3', eagle2 needs 'eagle1'"):
        make_drafter("eagle2", path=tmp_path).bind(HFTarget(model))


def test_weights_that_do_not_fit(model: Any) -> None:
    target = HFTarget(model)
    head = torch.zeros(5, 32)
    for name, weights, message in (
        ("eagle3", tiny_cell("eagle3", hidden_size=48), "has hidden_size 48, the target 32"),
        ("eagle3", tiny_cell("eagle3", taps=(1, 2, 9)), r"taps the layers \[1, 2, 9\], the target has 4"),
        ("eagle3", tiny_cell("eagle3", draft_vocab_size=5), "lacks its head of 5 rows"),
        ("eagle1", CellWeights(tiny_cell("eagle1"), torch.zeros(65, 32)), "has 65 rows, the target's vocabulary 64"),
        ("eagle1", CellWeights(tiny_cell("eagle1"), torch.zeros(5, 31)), r"must be \[R, 32\], got \[5, 31\]"),
        ("eagle1", CellWeights(tiny_cell("eagle1"), head, torch.tensor([0, 1, 2, 3, 64])), r"\[0, 64\), got 64"),
        ("mtp1", tiny_cell("mtp3"), "mtp1 needs a cell of 1 layers, got one of 3"),
    ):
        with pytest.raises(ValueError, match=message):
            make_drafter(name, path=weights).bind(target)


def test_without_weights(model: Any) -> None:
    for name in DRAFTER_VARIANTS:
        with pytest.raises(ValueError, match=f"{name} has no weights for this target: .*write '{name}:FOLDER'"):
            make_drafter(name).bind(HFTarget(model))

    class Vocabulary:
        vocab_size = 64

    with pytest.raises(ValueError, match="eagle3 needs a transformers target, got Vocabulary"):
        make_drafter("eagle3").bind(Vocabulary())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="eagle3 has no target yet; call bind first"):
        make_drafter("eagle3").prefill(np.array(PROMPT))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "dynamc"}, "unknown tree 'dynamc'; did you mean 'dynamic'"),
        ({"branching": 33}, r"branching must be in \[1, 32\], got 33"),
        ({"max_depth": 0}, "max_depth must be >= 1, got 0"),
        ({"siblings": "id"}, "unknown siblings 'id'; did you mean 'iid'"),
        ({"siblings": "iid"}, "siblings of a dynamic tree must be 'deterministic', got 'iid'"),
        ({"tree": "chain", "siblings": "without-replacement"}, "siblings of a chain must be"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafter("eagle3", **options)


def test_features_that_are_missing(model: Any) -> None:
    drafter = drafter_of("eagle3")
    request = Request(model, drafter, PROMPT)
    features = features_of(model, drafter, PROMPT[:-1])
    with pytest.raises(ValueError, match=r"hidden states of the layers \[1, 2, 4\], got none"):
        drafter.prefill(np.array(PROMPT))
    with pytest.raises(ValueError, match=r"must hold the taps \[1, 2, 4\], got \[1, 4\]"):
        drafter.prefill(np.array(PROMPT), {tap: features[tap] for tap in (1, 4)})
    with pytest.raises(ValueError, match="features of tap 1 must have 7 rows, one per token, got 6"):
        drafter.prefill(np.array(PROMPT), {tap: rows[:-1] for tap, rows in features.items()})
    request.commit(DraftTree.empty(), [], 4)
    with pytest.raises(RuntimeError, match="call settle first"):
        drafter._open().root()
    with pytest.raises(RuntimeError, match="call push first"):
        Recursion(tiny_cell("eagle3"), torch.nn.Embedding(64, 32)).root()
