"""Published EAGLE, GRIFFIN, Medusa and Hydra checkpoints, against a few lines of arithmetic each; and saving them."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaptspec import AdaptiveSpec
from adaptspec.drafters import make_drafter
from adaptspec.drafters.cells import Cell, CellConfig, make_cell
from adaptspec.drafters.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from adaptspec.drafters.hydra_heads import HydraConfig, HydraHeads
from adaptspec.drafters.medusa_heads import MedusaConfig, MedusaHeads
from adaptspec.target.hf import HFTarget
from tests import tiny_models

HIDDEN, VOCAB, INNER, LENGTH, EPS = 32, 64, 40, 7, 1e-5
HEADS, GROUPS, DIM = 4, 2, 8
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return HFTarget(tiny_models.make_llama(layers=6))


def random(*size: int, seed: int) -> torch.Tensor:
    return 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def config(**values: Any) -> dict[str, Any]:
    """As uploaded beside an EAGLE checkpoint for a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": 500_000.0,
        "rope_scaling": None,
        "vocab_size": VOCAB,
        **values,
    }


def layer_tensors(prefix: str, *, reads: int = HIDDEN, gives: int = HIDDEN, seed: int = 0) -> Tensors:
    sizes = {
        "self_attn.q_proj": (HEADS * DIM, reads),
        "self_attn.k_proj": (GROUPS * DIM, reads),
        "self_attn.v_proj": (GROUPS * DIM, reads),
        "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (gives, INNER),
    }
    tensors = {f"{prefix}{name}.weight": random(*size, seed=seed + i) for i, (name, size) in enumerate(sizes.items())}
    tensors[f"{prefix}post_attention_layernorm.weight"] = 1.0 + random(HIDDEN, seed=seed + 20)
    return tensors


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def attention(x: torch.Tensor, w: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Causal grouped attention of x [T, *] with Llama's rotary embedding, head by head."""
    turns = torch.arange(len(x))[:, None] * 500_000.0 ** -(torch.arange(0, DIM, 2) / DIM)

    def turned(v: torch.Tensor) -> torch.Tensor:
        a, b = v[:, : DIM // 2], v[:, DIM // 2 :]
        return torch.cat([a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()], dim=1)

    outputs = []
    for head in range(HEADS):
        rows, group = slice(head * DIM, (head + 1) * DIM), head // (HEADS // GROUPS)
        shared = slice(group * DIM, (group + 1) * DIM)
        q, k = turned(x @ w("q")[rows].T), turned(x @ w("k")[shared].T)
        scores = (q @ k.T / DIM**0.5).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        outputs.append(scores.softmax(-1) @ (x @ w("v")[shared].T))
    return torch.cat(outputs, dim=1) @ w("o").T


def mlp(x: torch.Tensor, t: Tensors, prefix: str) -> torch.Tensor:
    gate, up = x @ t[f"{prefix}mlp.gate_proj.weight"].T, x @ t[f"{prefix}mlp.up_proj.weight"].T
    return (gate * gate.sigmoid() * up) @ t[f"{prefix}mlp.down_proj.weight"].T


def eagle1() -> tuple[dict[str, Any], Tensors]:
    tensors = {**layer_tensors("layers.0."), "fc.weight": random(HIDDEN, 2 * HIDDEN, seed=30)}
    return config(), tensors | {
        "fc.bias": random(HIDDEN, seed=31),
        "embed_tokens.weight": random(VOCAB, HIDDEN, seed=9),
    }


def griffin() -> tuple[dict[str, Any], Tensors]:
    tensors = layer_tensors("layers.0.", gives=2 * HIDDEN)
    tensors |= {"fc.fc.weight": random(HIDDEN, 2 * HIDDEN, seed=30), "fc.fc.bias": random(HIDDEN, seed=31)}
    tensors |= {"fc.mlp.up_proj.weight": random(INNER, 2 * HIDDEN, seed=32)}
    tensors |= {"fc.mlp.down_proj.weight": random(HIDDEN, INNER, seed=33)}
    tensors |= {"fc.mlp.input_layernorm.weight": 1.0 + random(HIDDEN, seed=34)}
    tensors |= {"fc.post_attention_layernorm.weight": 1.0 + random(HIDDEN, seed=35)}
    return config(), tensors


ROWS = torch.tensor([0, 1, 5, 6, 20, 40, 63])


def eagle3(layer: str = "midlayer.") -> tuple[dict[str, Any], Tensors]:
    tensors = {**layer_tensors(layer, reads=2 * HIDDEN), "fc.weight": random(HIDDEN, 3 * HIDDEN, seed=30)}
    for seed, name in enumerate((f"{layer}hidden_norm", f"{layer}input_layernorm", "norm"), start=40):
        tensors[f"{name}.weight"] = 1.0 + random(HIDDEN, seed=seed)
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ROWS] = True
    tensors |= {
        "lm_head.weight": random(len(ROWS), HIDDEN, seed=50),
        "d2t": ROWS - torch.arange(len(ROWS)),
        "t2d": mask,
    }
    return config(draft_vocab_size=len(ROWS), head_dim=DIM), tensors


def write(folder: Path, settings: dict[str, Any], tensors: Tensors, *, name: str = "model.safetensors") -> Path:
    for old in folder.iterdir():
        old.unlink()
    (folder / "config.json").write_text(json.dumps(settings))
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


def run(cell: torch.nn.Module, embeddings: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        head, onward = cell(embeddings[None], hidden[None], positions=torch.arange(LENGTH)[None])
    return head[0], onward[0]


EMBEDDINGS, FEATURES = random(LENGTH, HIDDEN, seed=60) * 3, random(3, LENGTH, HIDDEN, seed=61) * 3


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_eagle1(name: str, target: HFTarget, tmp_path: Path) -> None:
    settings, t = eagle1()
    cell, extras = load_checkpoint(write(tmp_path, settings, t, name=name), kind="eagle1", target=target)
    x = torch.cat([EMBEDDINGS, FEATURES[0]], dim=1) @ t["fc.weight"].T + t["fc.bias"]
    x = x + attention(x, lambda part: t[f"layers.0.self_attn.{part}_proj.weight"])
    x = x + mlp(norm(x, t["layers.0.post_attention_layernorm.weight"]), t, "layers.0.")
    for got in run(cell, EMBEDDINGS, FEATURES[0]):
        assert torch.allclose(got, x, atol=1e-5)
    assert cell.config.taps == (6,) and cell.config.final_norm
    assert extras.head is None and torch.equal(extras.embeddings, t["embed_tokens.weight"])
    del t["fc.bias"]
    cell, _ = load_checkpoint(write(tmp_path, settings, t), kind="eagle1", target=target)
    assert cell.fc.bias is None


def test_griffin(target: HFTarget, tmp_path: Path) -> None:
    settings, t = griffin()
    cell, _ = load_checkpoint(write(tmp_path, settings, t, name="pytorch_model.bin"), kind="griffin", target=target)
    z = torch.cat([EMBEDDINGS, FEATURES[0]], dim=1) @ t["fc.fc.weight"].T + t["fc.fc.bias"]
    inner = t["fc.mlp.input_layernorm.weight"]
    both = [norm(norm(z, t["fc.post_attention_layernorm.weight"]), inner), norm(EMBEDDINGS, inner)]
    up = torch.cat(both, dim=1) @ t["fc.mlp.up_proj.weight"].T
    x = z + (up * up.sigmoid()) @ t["fc.mlp.down_proj.weight"].T
    x = x + attention(x, lambda part: t[f"layers.0.self_attn.{part}_proj.weight"])
    out = mlp(norm(x, t["layers.0.post_attention_layernorm.weight"]), t, "layers.0.")
    head, onward = run(cell, EMBEDDINGS, FEATURES[0])
    assert torch.allclose(head, x + out[:, :HIDDEN], atol=1e-4)
    assert torch.allclose(onward, x + out[:, HIDDEN:], atol=1e-4)


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0.", "model.layers.0."])
@pytest.mark.parametrize("before_residual", [False, True])
def test_eagle3(layer: str, before_residual: bool, target: HFTarget, tmp_path: Path) -> None:
    settings, t = eagle3(layer)
    settings["norm_before_residual"] = before_residual
    if layer.startswith("model."):  # as a trainer nests it
        settings = {"transformer_layer_config": settings, "draft_vocab_size": len(ROWS)} | {
            "norm_before_residual": before_residual
        }
    cell, extras = load_checkpoint(write(tmp_path, settings, t), kind="eagle3", target=target)
    assert isinstance(cell, Cell)
    fused = torch.cat(list(FEATURES), dim=1) @ t["fc.weight"].T
    with torch.no_grad():
        assert torch.allclose(cell.fuse(list(FEATURES)), fused, atol=1e-5)
    normed = norm(fused, t[f"{layer}hidden_norm.weight"])
    joined = torch.cat([norm(EMBEDDINGS, t[f"{layer}input_layernorm.weight"]), normed], dim=1)
    x = attention(joined, lambda part: t[f"{layer}self_attn.{part}_proj.weight"])
    x = x + (normed if before_residual else fused)
    x = x + mlp(norm(x, t[f"{layer}post_attention_layernorm.weight"]), t, layer)
    head, onward = run(cell, EMBEDDINGS, fused)
    assert torch.allclose(onward, x, atol=1e-5)
    assert torch.allclose(head, norm(x, t["norm.weight"]), atol=1e-5)
    assert torch.equal(extras.head, t["lm_head.weight"])
    assert torch.equal(extras.token_ids, ROWS)
    assert cell.config.taps == (2, 3, 3)  # 2, L // 2 and L - 3 of 6 layers


def test_eagle3_layers_of_the_target(target: HFTarget, tmp_path: Path) -> None:
    """Lists count the layers before the state, unless they begin with 1: then they name the layer that gives it."""
    settings, t = eagle3()

    def taps(ids: Any, **options: Any) -> tuple[int, ...]:
        settings["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
        return load_checkpoint(write(tmp_path, settings, t), kind="eagle3", target=target, **options)[0].config.taps

    assert taps([1, 3, 5]) == (2, 4, 6)
    assert taps([2, 4, 5]) == (2, 4, 5)
    assert taps([2, 4, 5], taps=(1, 2, 3)) == (1, 2, 3)
    with pytest.raises(ValueError, match=r"layer_ids \[0, 2, 4\] do not fit a target of 6 layers"):
        taps([0, 2, 4])
    with pytest.raises(ValueError, match="fc reads 3 target layers, taps are"):
        taps([2, 4])
    with pytest.raises(ValueError, match="taps are an option of eagle3"):
        load_checkpoint(tmp_path, kind="eagle1", target=target, taps=(1,))


def test_eagle3_norms_before_fc(target: HFTarget, tmp_path: Path) -> None:
    settings, t = eagle3()
    t["input_norm.weight"] = 1.0 + random(3 * HIDDEN, seed=70)
    settings["eagle_config"] = {"norm_before_fc": True}
    cell, _ = load_checkpoint(write(tmp_path, settings, t), kind="eagle3", target=target)
    joined = torch.cat(list(FEATURES), dim=1)
    expected = norm(joined, t["input_norm.weight"]) @ t["fc.weight"].T
    assert torch.allclose(cell.fuse(list(FEATURES)), expected, atol=1e-5)
    settings["eagle_config"] = {}
    with pytest.raises(ValueError, match="tensors that the eagle3 cell does not know: input_norm.weight"):
        load_checkpoint(write(tmp_path, settings, t), kind="eagle3", target=target)


def test_draft_vocabularies_that_contradict_themselves(target: HFTarget, tmp_path: Path) -> None:
    def refused(change: Callable[[Tensors], None], message: str) -> None:
        settings, t = eagle3()
        change(t)
        with pytest.raises(ValueError, match=message):
            load_checkpoint(write(tmp_path, settings, t), kind="eagle3", target=target)

    refused(lambda t: t.update(d2t=ROWS), "leads to tokens .* the target's vocabulary has 64")  # ids, not offsets
    refused(lambda t: t.update(d2t=-torch.arange(7)), "one token from two rows; it must hold offsets")
    refused(lambda t: t.update(t2d=~t["t2d"]), "t2d marks other tokens than d2t leads to")
    refused(lambda t: t.update(d2t=t["d2t"].float()), "d2t must be whole numbers, got torch.float32")
    refused(lambda t: t.pop("d2t"), r"lm_head \(without d2t\) has 7 rows, the target's vocabulary 64")
    refused(lambda t: t.pop("lm_head.weight"), "lacks the tensors lm_head.weight")
    refused(lambda t: t.update({"lm_head.weight": torch.zeros(9, HIDDEN)}), r"lm_head.weight \[9, 32\] instead of")


def test_a_full_vocabulary_has_no_map(target: HFTarget, tmp_path: Path) -> None:
    settings, t = eagle3()
    del t["d2t"], t["t2d"], settings["draft_vocab_size"]
    t["lm_head.weight"] = random(VOCAB, HIDDEN, seed=50)
    cell, extras = load_checkpoint(write(tmp_path, settings, t), kind="eagle3", target=target)
    assert extras.token_ids is None and len(extras.head) == cell.config.draft_vocab_size == VOCAB


def medusa(heads: int = 3, layers: int = 1) -> Tensors:
    t: Tensors = {}
    for i in range(heads):
        for k in range(layers):
            t[f"{i}.{k}.linear.weight"] = random(HIDDEN, HIDDEN, seed=100 + 10 * i + k)
            t[f"{i}.{k}.linear.bias"] = random(HIDDEN, seed=200 + 10 * i + k)
        t[f"{i}.{layers}.weight"] = random(VOCAB, HIDDEN, seed=300 + i)
    return t


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa(layers: int, target: HFTarget, tmp_path: Path) -> None:
    """The uploaded config says two heads; the file has three."""
    t = medusa(layers=layers)
    settings = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "somewhere"}
    folder = write(tmp_path, settings, t, name="medusa_lm_head.pt")
    for source in (folder, folder / "medusa_lm_head.pt"):
        module, _ = load_checkpoint(source, kind="medusa", target=target)
        assert isinstance(module, MedusaHeads)
        weights = module.output_weights()
        assert module.config == MedusaConfig(HIDDEN, heads=3, layers=layers, vocab_size=VOCAB) and weights is not None
        for i, got in enumerate(module(FEATURES[0])):
            x = FEATURES[0]
            for k in range(layers):
                y = x @ t[f"{i}.{k}.linear.weight"].T + t[f"{i}.{k}.linear.bias"]
                x = x + y * y.sigmoid()
            assert torch.allclose(got, x, atol=1e-5)
            assert torch.equal(weights[i], t[f"{i}.{layers}.weight"])


def hydra(heads: int = 3, *, prefix: bool) -> Tensors:
    t: Tensors = {}
    block, output = ("1", ".1") if prefix else ("0", "")
    for i in range(heads):
        for seed, part in enumerate(("linear", "res_connection")):
            t[f"hydra_mlp.{i}.{block}.{part}.weight"] = random(HIDDEN, (i + 2) * HIDDEN, seed=100 + 10 * i + seed)
            t[f"hydra_mlp.{i}.{block}.{part}.bias"] = random(HIDDEN, seed=200 + 10 * i + seed)
        t[f"hydra_lm_head.{i}{output}.weight"] = random(VOCAB, HIDDEN, seed=300 + i)
        t[f"hydra_lm_head.{i}{output}.bias"] = random(VOCAB, seed=310 + i)
    if prefix:
        below = "prefix_embeding_layer."
        for name, value in layer_tensors(f"{below}layers.0.").items():
            t[name] = value
        t[f"{below}layers.0.input_layernorm.weight"] = 1.0 + random(HIDDEN, seed=320)
        t[f"{below}norm.weight"] = 1.0 + random(HIDDEN, seed=321)
        t[f"{below}embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    return t


@pytest.mark.parametrize("prefix", [False, True])
def test_hydra(prefix: bool, target: HFTarget, tmp_path: Path) -> None:
    t = hydra(prefix=prefix)
    settings = {"hydra_num_heads": 4, "hydra_head_arch": "prefix-mlp" if prefix else "mlp", "grounded_heads": True}
    settings |= {"rope_theta": 500_000.0, "rms_norm_eps": EPS, "intermediate_size": INNER} if prefix else {}
    module, extras = load_checkpoint(write(tmp_path, settings, t, name="hydra_lm_head.pt"), kind="hydra", target=target)
    assert isinstance(module, HydraHeads)
    assert extras.layout == f"hydra {settings['hydra_head_arch']}" and module.config.heads == 3
    x = FEATURES[0]
    if prefix:
        below = "prefix_embeding_layer.layers.0."
        y = norm(x, t[f"{below}input_layernorm.weight"])
        x = x + attention(y, lambda part: t[f"{below}self_attn.{part}_proj.weight"])
        x = x + mlp(norm(x, t[f"{below}post_attention_layernorm.weight"]), t, below)
        x = norm(x, t["prefix_embeding_layer.norm.weight"])
    with torch.no_grad():
        got = module(FEATURES[0][None], EMBEDDINGS[None])
    for i, mine in enumerate(got):
        rows = LENGTH - 1 - i
        joined = torch.cat([x[:rows], *(EMBEDDINGS[k + 1 : k + 1 + rows] for k in range(i + 1))], dim=1)
        number = "1" if prefix else "0"
        y, z = (
            joined @ t[f"hydra_mlp.{i}.{number}.{part}.weight"].T + t[f"hydra_mlp.{i}.{number}.{part}.bias"]
            for part in ("linear", "res_connection")
        )
        assert torch.allclose(mine[0], z + y * y.sigmoid(), atol=1e-5)
        bias = t[f"hydra_lm_head.{i}{'.1' if prefix else ''}.bias"]
        assert torch.equal(module.output_weights()[i][:, -1], bias)


@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_published_heads_draft(name: str, target: HFTarget, tmp_path: Path) -> None:
    t = medusa() if name == "medusa" else hydra(prefix=False)
    write(tmp_path, {}, t, name=f"{name}_lm_head.pt")
    spec = AdaptiveSpec([make_drafter(f"{name}:{tmp_path}")], f"fixed:{name}@8")
    result = spec.generate(target.model, torch.tensor([[3, 9, 4]]), max_new_tokens=12)
    assert result.stats.set_aside == {}


def test_hydra_heads_of_other_kinds_are_refused(target: HFTarget, tmp_path: Path) -> None:
    t = {name: value for name, value in hydra(prefix=False).items() if "res_connection" not in name}
    with pytest.raises(ValueError, match="do not see drafted tokens"):
        load_checkpoint(write(tmp_path, {}, t, name="hydra_lm_head.pt"), kind="hydra", target=target)
    t = {"decoder.q_proj.weight": torch.zeros(2)}
    with pytest.raises(ValueError, match="supported are Hydra heads of the kinds mlp and prefix-mlp"):
        load_checkpoint(write(tmp_path, {}, t, name="hydra_lm_head.pt"), kind="hydra", target=target)
    settings = {"hidden_state_offset": 2}
    with pytest.raises(ValueError, match="hidden_state_offset must be 0"):
        load_checkpoint(
            write(tmp_path, settings, hydra(prefix=False), name="hydra_lm_head.pt"), kind="hydra", target=target
        )


class Bomb:
    """Runs code when it is unpickled by a careless reader."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_code_is_never_run(zipped: bool, target: HFTarget, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    file = tmp_path / "medusa_lm_head.pt"
    if zipped:
        torch.save({"0.0.linear.weight": Bomb(trace)}, file)
    else:
        file.write_bytes(pickle.dumps(Bomb(trace), protocol=2))
    with pytest.raises(ValueError, match="holds more than tensors, or is damaged; it is not loaded"):
        load_checkpoint(tmp_path, kind="medusa", target=target)
    assert not trace.exists()
    pickle.load(io.BytesIO(pickle.dumps(Bomb(trace), protocol=2)))
    assert trace.exists(), "the file was harmless, so nothing was tested"


def test_what_is_no_checkpoint(target: HFTarget, tmp_path: Path) -> None:
    def refused(path: Any, message: str, kind: str = "eagle1") -> None:
        with pytest.raises(ValueError, match=message):
            load_checkpoint(path, kind=kind, target=target)

    refused(tmp_path, "holds no weights; looked for model.safetensors.index.json")
    refused(
        "no/such-hub-id", "no local path, and config.json cannot be had from the hub|neither a local path nor a hub"
    )
    refused("no such id at all", "neither a local path nor a hub id")
    refused(tmp_path, "eagle1", kind="eagle")
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    refused(tmp_path, "is no safetensors file")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, r"config\.json is no JSON")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, "must hold an object, got list")
    torch.save([torch.zeros(2)], tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "must hold tensors by name, got list")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}}))
    refused(tmp_path, "points outside the checkpoint: ../elsewhere.safetensors")
    index.write_text(json.dumps({"weight_map": {"fc.weight": "gone.safetensors"}}))
    (tmp_path / "config.json").write_text(json.dumps(config()))
    with pytest.raises(ValueError, match="lacks the file gone.safetensors"):
        Checkpoint(tmp_path).read("fc.weight")


def test_tensors_and_configs_that_do_not_fit(target: HFTarget, tmp_path: Path) -> None:
    def refused(settings: dict[str, Any], t: Tensors, message: str, kind: str = "eagle1") -> None:
        with pytest.raises(ValueError, match=message):
            load_checkpoint(write(tmp_path, settings, t), kind=kind, target=target)

    settings, t = eagle1()
    refused({**settings, "hidden_size": 64}, t, "was made for hidden size 64, the target has 32: another model")
    refused({**settings, "num_hidden_layers": 2}, t, "has 2 draft layers; supported are checkpoints with one")
    refused({**settings, "hidden_act": "gelu"}, t, "hidden_act must be silu, got 'gelu'")
    refused({k: v for k, v in settings.items() if k != "num_attention_heads"}, t, "lacks num_attention_heads")
    refused({**settings, "intermediate_size": "big"}, t, "must be a whole number >= 1, got 'big'")
    refused(settings, {k: v for k, v in t.items() if "k_proj" not in k}, r"lacks the tensors layers\.0\.self_attn\.k_p")
    refused(settings, {**t, "layers.0.input_layernorm.weight": torch.ones(HIDDEN)}, "does not know: layers.0.input_lay")
    refused(settings, {**t, "embed_tokens.weight": torch.zeros(65, HIDDEN)}, "has 65 rows, the target's vocabulary 64")
    refused({}, medusa(), "hold no|lacks", kind="eagle3")
    wide = {name: torch.zeros(2 * HIDDEN, 2 * HIDDEN) if v.dim() == 2 else v for name, v in medusa().items()}
    refused({}, wide, "was made for hidden size 64", kind="medusa")
    refused({}, {**medusa(), "0.1.weight": torch.zeros(65, HIDDEN)}, "has 65 rows, the target's vocab", kind="medusa")
    refused({}, {**medusa(), "9.9.strange": torch.zeros(2)}, "tensors that Medusa heads does not know", kind="medusa")


CELL = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": DIM}
CELL |= {"intermediate_size": INNER, "rms_norm_eps": EPS, "rope_theta": 500_000.0}


def filled(module: Any) -> Any:
    for seed, parameter in enumerate(module.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=400 + seed) + (1.0 if parameter.dim() == 1 else 0.0))
    return module


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "griffin"])
def test_cells_that_are_saved_come_back(kind: str, target: HFTarget, tmp_path: Path) -> None:
    three = kind == "eagle3"
    options: dict[str, Any] = {"taps": (2, 3, 5), "draft_vocab_size": 7, "norm_before_residual": True} if three else {}
    options = options or {"taps": (6,), "final_norm": True, "bias": kind == "griffin"}
    cell = filled(make_cell(CellConfig(kind=kind, **CELL, **options)))
    head = {"head": random(7, HIDDEN, seed=1), "token_ids": ROWS} if three else {}
    embeddings = target.model.get_input_embeddings().weight
    files = save_checkpoint(cell, tmp_path, vocab_size=VOCAB, embeddings=embeddings, **head)
    assert [file.name for file in files] == ["model.safetensors", "config.json"]
    names = load_file(files[0]).keys()
    assert ("d2t" in names) is ("midlayer.mlp.up_proj.weight" in names) is three and "embed_tokens.weight" in names
    again, extras = load_checkpoint(tmp_path, kind=kind, target=target)
    assert again.config == cell.config
    assert all(torch.equal(value, cell.state_dict()[name]) for name, value in again.state_dict().items())
    assert extras.embeddings is None
    if three:
        assert torch.equal(extras.head, head["head"]) and torch.equal(extras.token_ids, ROWS)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", ["medusa", "hydra", "hydra prefix"])
def test_heads_that_are_saved_come_back(name: str, own: bool, target: HFTarget, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"heads": 2, "layers": 2, "vocab_size": VOCAB if own else None}
    if name == "medusa":
        module: Any = filled(MedusaHeads(MedusaConfig(HIDDEN, **sizes)))
    else:
        if "prefix" in name:
            sizes |= {"prefix": True, "attention_heads": HEADS, "key_value_heads": GROUPS, "head_dim": DIM}
            sizes |= {"intermediate_size": INNER, "rope_theta": 500_000.0, "eps": EPS}
        module = filled(HydraHeads(HydraConfig(HIDDEN, **sizes)))
    head = None if own else target.model.get_output_embeddings().weight.detach()
    kind = name.split()[0]
    files = save_checkpoint(module, tmp_path, vocab_size=VOCAB, head=head)
    assert files[0].name == f"{kind}_lm_head.pt"
    again, _ = load_checkpoint(tmp_path, kind=kind, target=target)
    state = module.state_dict()
    for part, value in again.state_dict().items():
        if part in state:
            assert torch.equal(value, state[part])
        else:
            assert part.startswith("outputs.")
    if not own:
        assert all(torch.equal(weight[:, :HIDDEN], head) for weight in again.output_weights())


def test_what_the_formats_cannot_hold(target: HFTarget, tmp_path: Path) -> None:
    def refused(module: Any, message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            save_checkpoint(module, tmp_path, vocab_size=VOCAB, **options)

    def three(**options: Any) -> Cell:
        return make_cell(CellConfig(kind="eagle3", **CELL, **{"taps": (2, 3, 5), "draft_vocab_size": 7, **options}))

    head = random(7, HIDDEN, seed=1)
    refused(three(embedding_skip=True), "embedding_skip has no place", head=head, token_ids=ROWS)
    refused(three(), "head must be given")
    refused(three(), "token_ids must be given for a head of 7 rows", head=head)
    refused(three(), "token_ids must be 7 ascending tokens", head=head, token_ids=ROWS.flip(0))
    refused(three(), r"token_ids must be in \[0, 64\), got 0 to 64", head=head, token_ids=ROWS + (ROWS == 63))
    refused(three(taps=(1, 3, 5)), "taps must not begin with 1", head=head, token_ids=ROWS)
    refused(three(), r"head must have shape \[R, 32\]", head=random(7, 8, seed=1), token_ids=ROWS)
    one = make_cell(CellConfig(kind="eagle1", taps=(6,), **CELL))
    refused(one, "uses the target's head and stores none", head=head)
    refused(
        make_cell(CellConfig(kind="mtp", taps=(6,), **CELL)), "EAGLE or GRIFFIN cell or Medusa or Hydra heads, got mtp"
    )
    refused(torch.nn.Linear(2, 2), "got Linear")
    refused(MedusaHeads(MedusaConfig(HIDDEN)), "head must be given")
    refused(
        MedusaHeads(MedusaConfig(HIDDEN, vocab_size=VOCAB)), "head must be None", head=random(VOCAB, HIDDEN, seed=1)
    )
    refused(MedusaHeads(MedusaConfig(HIDDEN)), r"head must have shape \[64, 32\], got \[7, 32\]", head=head)
