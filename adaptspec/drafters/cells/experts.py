"""Feed-forward layers of published draft heads: the gated kind, and mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)). With `limit`, the gate is cut above it and the other factor on both sides."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, limit: float | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = functional.silu(self.gate_proj(x)), self.up_proj(x)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down_proj(gate * up)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts.

    Attributes:
        experts, chosen: how many there are, and how many each row uses.
        intermediate_size: of one expert; `shared_size` of the expert that every row uses, 0 for none.
        scoring: "sigmoid" with a correction bias for choosing (DeepSeek-V3, GLM), or "softmax" (Qwen).
        groups, chosen_groups: only the groups with the two best experts in sum are looked at (DeepSeek-V3).
        normalise: weights of the chosen add up to 1 before `scale`.
        shared_gate: the shared expert is weighted by a sigmoid (Qwen).
    """

    hidden_size: int
    experts: int
    chosen: int
    intermediate_size: int
    shared_size: int = 0
    scoring: str = "sigmoid"
    groups: int = 1
    chosen_groups: int = 1
    normalise: bool = True
    scale: float = 1.0
    shared_gate: bool = False


class MixtureOfExperts(nn.Module):
    """Every row goes through its best experts and the shared one; see `ExpertsConfig`.

    Weights of all experts lie in two tensors: `gate_up_proj` [E, 2 I, H] (gate first) and `down_proj` [E, H, I].
    """

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        assert config.scoring in ("sigmoid", "softmax") and config.experts % config.groups == 0
        self.config = config
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate = nn.Linear(hidden, config.experts, bias=False)
        if config.scoring == "sigmoid":
            self.correction_bias = nn.Parameter(torch.zeros(config.experts))
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(config.experts, hidden, inner))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        if config.shared_size:
            self.shared = FeedForward(hidden, config.shared_size)
            if config.shared_gate:
                self.shared_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        experts, weights = self.route(rows)
        output = torch.zeros_like(rows)
        for expert in experts.unique().tolist():
            row, place = (experts == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(rows[row], self.gate_up_proj[expert]).chunk(2, dim=-1)
            result = functional.linear(functional.silu(gate) * up, self.down_proj[expert])
            output.index_add_(0, row, result * weights[row, place, None].to(result.dtype))
        if self.config.shared_size:
            shared = self.shared(rows)
            output = output + (torch.sigmoid(self.shared_gate(rows)) * shared if self.config.shared_gate else shared)
        return output.view_as(x)

    def route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chosen experts int64 [M, chosen] of rows [M, H], and their weights float32."""
        config = self.config
        logits = functional.linear(rows.float(), self.gate.weight.float())
        if config.scoring == "softmax":
            scores = merit = torch.softmax(logits, dim=-1)
        else:
            scores = torch.sigmoid(logits)
            merit = scores + self.correction_bias.float()  # decides who is chosen, not how much it counts
        if config.chosen_groups < config.groups:
            grouped = merit.unflatten(-1, (config.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(config.chosen_groups, dim=-1).indices
            kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=rows.device).scatter_(1, best, True)
            merit = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        chosen = merit.topk(config.chosen, dim=-1).indices
        weights = scores.gather(1, chosen)
        if config.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * config.scale
