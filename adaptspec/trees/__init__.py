"""Draft trees: how to build them (one method per file) and what can be done with them. numpy only.

Builders are pure functions that return a `DraftTree` whose path scores never rise from parent to child.

| known per step | builder |
|---|---|
| one path | `chain` |
| one distribution per position | `best_first`, `cost_aware` |
| ... that depends on the token before | `transitions`, `transition_tables` |
| ... judged edge by edge | `lattice_trie`, `select_prefixes` |
| a model that drafts level by level | `beam_rerank`, `opt_tree` |
| candidates by rank, fixed shape | `fill_by_rank`, `fill_by_successor` with a `Template` |
| retrieved continuations | `trie_from_counts` |
| distributions to sample from | `sampled_chain`, `sampled_tree`, `dyspec` |
| acceptance by rank, offline | `greedy_template`, `sequoia_dp` |
"""

from adaptspec.trees._layers import Expand, Stop
from adaptspec.trees._sampling import ExpandRows
from adaptspec.trees.algebra import (
    budget_order,
    expected_length,
    keep_first,
    limit_depth,
    nested_lengths,
    prune,
    sort_parents_first,
    subtree,
    truncate,
)
from adaptspec.trees.beam_rerank import beam_rerank
from adaptspec.trees.best_first import best_first, top_candidates
from adaptspec.trees.chain import chain
from adaptspec.trees.cost_aware import cost_aware, paying_budget
from adaptspec.trees.dyspec import dyspec
from adaptspec.trees.merge import merge
from adaptspec.trees.opt_tree import opt_tree
from adaptspec.trees.prefix_selection import lattice_trie, select_prefixes
from adaptspec.trees.sampled import sampled_chain, sampled_tree
from adaptspec.trees.sequoia_dp import SequoiaPlan, sequoia_dp
from adaptspec.trees.structure import (
    ancestor_mask,
    children_lists,
    depths,
    leaf_paths,
    parents_first_order,
    path_scores,
    path_to,
)
from adaptspec.trees.template import Template, fill_by_rank, fill_by_successor
from adaptspec.trees.template_shapes import greedy_template, medusa_template, token_recycling_template
from adaptspec.trees.transition_tables import transition_tables
from adaptspec.trees.transitions import transitions
from adaptspec.trees.trie_from_counts import trie_from_counts

__all__ = [
    "Expand",
    "ExpandRows",
    "SequoiaPlan",
    "Stop",
    "Template",
    "ancestor_mask",
    "beam_rerank",
    "best_first",
    "budget_order",
    "chain",
    "children_lists",
    "cost_aware",
    "depths",
    "dyspec",
    "expected_length",
    "fill_by_rank",
    "fill_by_successor",
    "greedy_template",
    "keep_first",
    "lattice_trie",
    "leaf_paths",
    "limit_depth",
    "medusa_template",
    "merge",
    "nested_lengths",
    "opt_tree",
    "parents_first_order",
    "path_scores",
    "path_to",
    "paying_budget",
    "prune",
    "sampled_chain",
    "sampled_tree",
    "select_prefixes",
    "sequoia_dp",
    "sort_parents_first",
    "subtree",
    "token_recycling_template",
    "top_candidates",
    "transition_tables",
    "transitions",
    "trie_from_counts",
    "truncate",
]
