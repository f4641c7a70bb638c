"""Drafting cells once more, from their equations: no cache, no batch, one row after the other. Not fast."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from adaptspec.drafters.cells import CellConfig

Weights = Mapping[str, torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor, config: CellConfig) -> torch.Tensor:
    return x / (x.square().mean() + config.rms_norm_eps).sqrt() * weight


def turned(head: torch.Tensor, position: int, config: CellConfig) -> torch.Tensor:
    """A head rotated pair by pair: number j with number j + half."""
    width = config.rotary_dim or config.head_dim
    out = head.clone()
    for j in range(width // 2):
        angle = position * config.rope_theta ** (-2 * j / width)
        a, b = head[j], head[j + width // 2]
        out[j] = a * math.cos(angle) - b * math.sin(angle)
        out[j + width // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(
    inputs: Sequence[torch.Tensor], positions: Sequence[int], w: Weights, name: str, config: CellConfig
) -> list[torch.Tensor]:
    """Every row attends to itself and the rows before it."""
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def projected(part: str, x: torch.Tensor, count: int) -> list[torch.Tensor]:
        y = w[f"{name}.{part}.weight"] @ x
        if config.attention_bias:
            y = y + w[f"{name}.{part}.bias"]
        return list(y.view(count, -1))

    keys, values = [], []
    outputs = []
    for x, position in zip(inputs, positions, strict=True):
        new_keys = projected("k_proj", x, groups)
        if config.qk_norm:
            new_keys = [norm(key, w[f"{name}.k_norm.weight"], config) for key in new_keys]
        keys.append([turned(key, position, config) for key in new_keys])
        values.append(projected("v_proj", x, groups))
        pieces = []
        for number, query in enumerate(projected("q_proj", x, heads)):
            gate = torch.ones(size)
            if config.output_gate:
                query, gate = query[:size], torch.sigmoid(query[size:])
            if config.qk_norm:
                query = norm(query, w[f"{name}.q_norm.weight"], config)
            query = turned(query, position, config)
            group = number // (heads // groups)
            first = 0 if config.sliding_window is None else max(0, position - config.sliding_window + 1)
            seen = [row for row in range(len(keys)) if positions[row] >= first]
            scores = torch.stack([query @ keys[row][group] for row in seen]) / math.sqrt(size)
            weights = torch.softmax(scores, 0)
            pieces.append(gate * sum(weight * values[row][group] for weight, row in zip(weights, seen, strict=True)))
        outputs.append(w[f"{name}.o_proj.weight"] @ torch.cat(pieces))
    return outputs


def mlp(x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    gate, up = w[f"{name}.gate_proj.weight"] @ x, w[f"{name}.up_proj.weight"] @ x
    return w[f"{name}.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


def fused(features: Sequence[torch.Tensor], w: Weights, config: CellConfig, final_norm: torch.Tensor) -> torch.Tensor:
    """The hidden state of one position from the target's [H] per tap."""
    if config.kind != "eagle3":
        return norm(features[0], final_norm, config) if config.final_norm else features[0]
    if config.fc_norm:
        features = [norm(x, w[f"fc_norm.{i}.weight"], config) for i, x in enumerate(features)]
    joined = torch.cat(list(features))
    if config.norm_before_fc:
        joined = norm(joined, w["input_norm.weight"], config)
    return w["fc.weight"] @ joined


Row = tuple[torch.Tensor, torch.Tensor, int]
"""Embedding, hidden state, position."""


def cell_rows(
    rows: Sequence[Row], w: Weights, config: CellConfig, *, layer: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(head input, next hidden) per row; each row sees itself and those before it."""
    positions = [position for _, _, position in rows]
    out = []
    if config.kind == "eagle3":
        p = "midlayer."
        inputs, residuals = [], []
        for e, h, _ in rows:
            e = norm(e, w[p + "input_layernorm.weight"], config)
            if config.embedding_skip:
                h = h + w[p + "embed_proj.weight"] @ e
            normed = norm(h, w[p + "hidden_norm.weight"], config)
            inputs.append(torch.cat([e, normed]))
            residuals.append(normed if config.norm_before_residual else h)
        for attended, residual in zip(attention(inputs, positions, w, p + "self_attn", config), residuals, strict=True):
            x = attended + residual
            x = x + mlp(norm(x, w[p + "post_attention_layernorm.weight"], config), w, p + "mlp")
            normed = norm(x, w["norm.weight"], config)
            out.append((normed, normed if config.norm_output else x))
        return out
    if config.kind == "mtp":
        p = f"layers.{layer}."
        inputs = [
            w[p + "eh_proj.weight"]
            @ torch.cat([norm(e, w[p + "enorm.weight"], config), norm(h, w[p + "hnorm.weight"], config)])
            for e, h, _ in rows
        ]
        normed_inputs = [norm(x, w[p + "input_layernorm.weight"], config) for x in inputs]
        for x, attended in zip(inputs, attention(normed_inputs, positions, w, p + "self_attn", config), strict=True):
            x = x + attended
            x = x + mlp(norm(x, w[p + "post_attention_layernorm.weight"], config), w, p + "mlp")
            normed = norm(x, w[p + "norm.weight"], config)
            out.append((normed, normed if config.norm_output else x))
        return out
    inputs = []
    for e, h, _ in rows:
        f = "fc.fc" if config.kind == "griffin" else "fc"
        x = w[f + ".weight"] @ torch.cat([e, h])
        if config.bias:
            x = x + w[f + ".bias"]
        if config.kind == "griffin":
            y = norm(x, w["fc.post_attention_layernorm.weight"], config)
            shared = w["fc.mlp.input_layernorm.weight"]
            up = w["fc.mlp.up_proj.weight"] @ torch.cat([norm(y, shared, config), norm(e, shared, config)])
            x = x + w["fc.mlp.down_proj.weight"] @ (up * torch.sigmoid(up))
        inputs.append(x)
    for x, attended in zip(inputs, attention(inputs, positions, w, "layers.0.self_attn", config), strict=True):
        x = x + attended
        y = mlp(norm(x, w["layers.0.post_attention_layernorm.weight"], config), w, "layers.0.mlp")
        if config.kind == "griffin":
            out.append((x + y[: len(x)], x + y[len(x) :]))
        else:
            out.append((x + y, x + y))
    return out


def head_inputs_along(
    tokens: Sequence[int],
    features: Sequence[Sequence[torch.Tensor]],
    path: Sequence[int],
    *,
    embedding: torch.Tensor,
    w: Weights,
    config: CellConfig,
    final_norm: torch.Tensor,
) -> list[torch.Tensor]:
    """What the head multiplies after the root and after every token of a drafted path.

    Row i pairs the feature of token i with the embedding of token i + 1.

    Args:
        tokens: n + 1 committed tokens, the root last.
        features: per committed token but the root, [H] per tap.
        path: drafted tokens.
    """
    n = len(features)
    whole = [*tokens, *path]
    hidden = [fused(feature, w, config, final_norm) for feature in features]
    found: list[torch.Tensor] = []
    rows: list[Row] = []
    for step in range(len(path) + 1):
        if step < config.num_layers:  # all rows again, in the next layer, one token further on
            rows = [(embedding[whole[i + 1 + step]], hidden[i], i) for i in range(n)]
            outputs = cell_rows(rows, w, config, layer=step)
            hidden = [following for _, following in outputs]
        else:  # the last layer goes on with one more row, which reads what the row before it gave
            rows.append((embedding[whole[n + step]], outputs[-1][1], n + step - config.num_layers))
            outputs = cell_rows(rows, w, config, layer=config.num_layers - 1)
        found.append(outputs[-1][0])
    return found
