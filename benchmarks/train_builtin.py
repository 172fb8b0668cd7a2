"""Trains the built-in model: `python -m benchmarks.train_builtin --out DIR --minutes N`.

Data and licence: the sources of the standard library of the Python that runs this script (PSF
licence) and dialogues made from their docstrings; `builtin_corpus` says which. One file in twenty
is held out by the hash of its path. Model: `Dims` below, Qwen3-MoE's maths. AdamW (0.9, 0.97),
weight decay 0.1, gradient norm 1, warm-up, then a cosine over the minutes, which are those of the
processor, so that a busy or paused machine shortens nothing. 2048 to 4096 tokens a step in windows
of 256 to 1024; bf16 matrix products over float32 weights; one thread. DIR is a usable model from
the first checkpoint on; its `heldout.json` has the held-out loss. The steps and the loss of the
shipped model are in `ellm_serve/builtin/README.md`.
"""

import argparse
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from benchmarks.builtin_corpus import SEPARATOR, Corpus, heldout_sample, read_sources
from benchmarks.builtin_tokenizer import (
    generation_config_of,
    tokenizer_config_of,
    train_tokenizer,
)

TEMPLATE = Path(__file__).parents[1] / "ellm_serve" / "builtin" / "chat_template.jinja"
WINDOW = 512
PEAK_LR = 3e-3
FINAL_LR = 0.02  # share of the peak
WARMUP_STEPS = 200
WEIGHT_DECAY = 0.1
BALANCE = 0.01
# (share of the time after which it applies, sequences per step, their length)
PHASES = ((0.0, 8, 256), (0.4, 4, 512), (0.75, 4, 1024))
CHECKPOINT_S = 180.0


@dataclass(frozen=True, slots=True)
class Dims:
    """The sizes, under the names the published configurations use."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6


# ---- model


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Layer(torch.nn.Module):
    """One decoder layer; every expert computes every token, the router's weights pick the sum."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        hidden, head = dims.hidden_size, dims.head_dim
        num_q, num_kv = dims.num_attention_heads * head, dims.num_key_value_heads * head
        self.qkv_sizes = [num_q, num_kv, num_kv]
        inner = dims.num_experts * dims.moe_intermediate_size
        depth = 1 / math.sqrt(2 * dims.num_hidden_layers)

        def weight(rows: int, columns: int, scale: float = 1.0) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(rows, columns) * 0.03 * scale)

        self.attention_norm = torch.nn.Parameter(torch.ones(hidden))
        self.mlp_norm = torch.nn.Parameter(torch.ones(hidden))
        self.q_norm = torch.nn.Parameter(torch.ones(head))
        self.k_norm = torch.nn.Parameter(torch.ones(head))
        self.qkv = weight(num_q + 2 * num_kv, hidden)
        self.output = weight(hidden, num_q, depth)
        self.router = weight(dims.num_experts, hidden)
        self.gate_up = weight(2 * inner, hidden)
        self.down = weight(hidden, inner, depth)

    def attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        dims = self.dims
        q, k, v = (
            part.view(batch, length, -1, dims.head_dim).transpose(1, 2)
            for part in torch.split(F.linear(x, self.qkv), self.qkv_sizes, dim=-1)
        )
        q = rotate(rms_norm(q, self.q_norm, dims.rms_norm_eps), cos, sin).to(v.dtype)
        k = rotate(rms_norm(k, self.k_norm, dims.rms_norm_eps), cos, sin).to(v.dtype)
        group = dims.num_attention_heads // dims.num_key_value_heads
        k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), self.output)

    def experts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dims = self.dims
        probabilities = F.linear(x, self.router).float().softmax(-1)
        top, chosen = probabilities.topk(dims.num_experts_per_tok, dim=-1)
        picked = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
        shares = probabilities * picked / top.sum(-1, keepdim=True)
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        inner = (F.silu(gate) * up).view(*x.shape[:-1], dims.num_experts, -1)
        inner = (inner * shares.unsqueeze(-1)).to(gate.dtype).flatten(-2)
        load = picked.mean((0, 1)) / dims.num_experts_per_tok
        balance = dims.num_experts * (load * probabilities.mean((0, 1))).sum()
        return F.linear(inner, self.down), balance

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps = self.dims.rms_norm_eps
        x = x + self.attend(rms_norm(x, self.attention_norm, eps), cos, sin)
        mixed, balance = self.experts(rms_norm(x, self.mlp_norm, eps))
        return x + mixed, balance


class Model(torch.nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.embedding = torch.nn.Parameter(torch.randn(dims.vocab_size, dims.hidden_size) * 0.03)
        self.layers = torch.nn.ModuleList(Layer(dims) for _ in range(dims.num_hidden_layers))
        self.final_norm = torch.nn.Parameter(torch.ones(dims.hidden_size))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [sequence, position, vocab] and the balance loss."""
        steps = torch.arange(0, self.dims.head_dim, 2).float() / self.dims.head_dim
        angles = torch.outer(torch.arange(ids.shape[1]).float(), self.dims.rope_theta**-steps)
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(ids, self.embedding)
        balance = x.new_zeros(())
        for layer in self.layers:
            x, loss = layer(x, cos, sin)
            balance = balance + loss
        x = rms_norm(x, self.final_norm, self.dims.rms_norm_eps)
        return F.linear(x, self.embedding), balance / len(self.layers)

    def loss(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean cross-entropy of positions 1.. and the balance loss."""
        logits, balance = self(ids[:, :-1])
        targets = ids[:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1).float(), targets), balance


def checkpoint_views(model: Model) -> dict[str, torch.Tensor]:
    """The weights under the names of the published Qwen3-MoE checkpoints."""
    found: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.final_norm,
    }
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        prefix = f"model.layers.{index}"
        q, k, v = torch.split(layer.qkv, layer.qkv_sizes)
        attention = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": layer.output}
        attention |= {"q_norm": layer.q_norm, "k_norm": layer.k_norm}
        for name, tensor in attention.items():
            found[f"{prefix}.self_attn.{name}.weight"] = tensor
        found[f"{prefix}.input_layernorm.weight"] = layer.attention_norm
        found[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm
        found[f"{prefix}.mlp.gate.weight"] = layer.router
        gate, up = layer.gate_up.chunk(2)
        width = model.dims.moe_intermediate_size
        for expert in range(model.dims.num_experts):
            rows = slice(expert * width, (expert + 1) * width)
            parts = {"gate_proj": gate[rows], "up_proj": up[rows], "down_proj": layer.down[:, rows]}
            for name, tensor in parts.items():
                found[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = tensor
    return {name: tensor.detach() for name, tensor in found.items()}


def save_checkpoint(model: Model, path: Path) -> None:
    views = checkpoint_views(model)
    tensors = {name: view.to(torch.bfloat16).contiguous() for name, view in views.items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, {"format": "pt"})
    partial.chmod(0o644)
    partial.replace(path)


@torch.no_grad()
def load_checkpoint(model: Model, path: Path) -> None:
    found = load_file(path)
    for name, view in checkpoint_views(model).items():
        view.copy_(found[name])


@torch.no_grad()
def heldout_loss(model: Model, ids: list[int]) -> tuple[float, int]:
    """Mean cross-entropy per predicted token, in float32 with the weights rounded to bf16."""
    rounded = Model(model.dims)
    rounded.load_state_dict({k: v.to(torch.bfloat16) for k, v in model.state_dict().items()})
    total, count = 0.0, 0
    for start in range(0, len(ids), WINDOW):
        window = torch.tensor([ids[start : start + WINDOW]])
        if (predicted := window.shape[1] - 1) > 0:
            total += rounded.loss(window)[0].item() * predicted
            count += predicted
    return total / count, count


# ---- training


class Stream:
    """Endless shuffled windows of the tokenised epochs; the same order on every run."""

    def __init__(self, text: Corpus, tokenizer: Tokenizer, first_epoch: int) -> None:
        self.text = text
        self.tokenizer = tokenizer
        self.epoch = first_epoch
        self.encoded: dict[str, list[int]] = {}
        self.unused = np.empty(0, np.int64)  # tokens of this epoch not yet handed out

    def tokens(self, epoch: int) -> np.ndarray:
        texts = self.text.documents(epoch)
        unseen = [text for text in texts if text not in self.encoded]
        fresh = dict(zip(unseen, self.tokenizer.encode_batch(unseen), strict=True))
        if not self.encoded:  # the library's files come back every epoch, the dialogues differ
            kept = {source.text for source in self.text.training}
            self.encoded = {text: e.ids for text, e in fresh.items() if text in kept}
        end = [self.tokenizer.token_to_id(SEPARATOR)]
        ids = (fresh[text].ids if text in fresh else self.encoded[text] for text in texts)
        flat = np.concatenate([np.array(found + end, np.int64) for found in ids])
        # Windows of the longest length in random order, so that a step sees several files.
        longest = PHASES[-1][2]
        generator = np.random.default_rng(epoch)
        flat = np.roll(flat, int(generator.integers(len(flat))))
        rows = flat[: len(flat) // longest * longest].reshape(-1, longest)
        return generator.permutation(rows).reshape(-1)

    def batch(self, sequences: int, length: int) -> torch.Tensor:
        wanted = sequences * length
        while len(self.unused) < wanted:
            self.unused = np.concatenate((self.unused, self.tokens(self.epoch)))
            self.epoch += 1
        taken, self.unused = self.unused[:wanted], self.unused[wanted:]
        return torch.from_numpy(taken.reshape(sequences, length))


def optimizer_of(model: Model) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.97), fused=True)


def schedule(step: int, progress: float) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_LR + (1 - FINAL_LR) * cosine)


def train(
    model: Model,
    stream: Stream,
    heldout: list[int],
    out: Path,
    budget_s: float,
    peak_lr: float,
) -> None:
    optimizer = optimizer_of(model)
    compiled = torch.compile(model.loss, dynamic=False)
    start = time.process_time()
    step, num_tokens, smooth, next_checkpoint_s = 0, 0, 0.0, CHECKPOINT_S
    while (elapsed_s := time.process_time() - start) < budget_s:
        progress = elapsed_s / budget_s
        _, sequences, length = max(phase for phase in PHASES if phase[0] <= progress)
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * schedule(step, progress)
        ids = stream.batch(sequences, length)
        with torch.autocast("cpu", torch.bfloat16):
            loss, balance = compiled(ids)
        torch.autograd.backward(loss + BALANCE * balance)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, num_tokens = step + 1, num_tokens + ids.numel()
        smooth = loss.item() if step == 1 else 0.99 * smooth + 0.01 * loss.item()
        if step % 100 == 0:
            print(
                f"{elapsed_s:6.0f} s  step {step}  epoch {stream.epoch}  tokens {num_tokens}  "
                f"loss {smooth:.3f}  balance {balance.item():.3f}",
                flush=True,
            )
        if elapsed_s > next_checkpoint_s:
            next_checkpoint_s = elapsed_s + CHECKPOINT_S
            save(model, heldout, step, num_tokens, stream.epoch, out)
    save(model, heldout, step, num_tokens, stream.epoch, out)


# ---- files


def config_of(dims: Dims, tokenizer: Tokenizer) -> dict[str, object]:
    sizes = asdict(dims) | {"rope_theta": int(dims.rope_theta)}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **sizes,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "intermediate_size": 2 * dims.moe_intermediate_size,
        "max_position_embeddings": 8192,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "output_router_logits": False,
        "rope_scaling": None,
        "router_aux_loss_coef": BALANCE,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_static_files(dims: Dims, tokenizer: Tokenizer, heldout: str, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "config.json", config_of(dims, tokenizer))
    write_json(out / "generation_config.json", generation_config_of(tokenizer))
    write_json(out / "tokenizer_config.json", tokenizer_config_of(tokenizer))
    (out / "heldout.txt").write_text(heldout)
    if not (out / TEMPLATE.name).exists():
        shutil.copyfile(TEMPLATE, out / TEMPLATE.name)


def save(
    model: Model, heldout: list[int], step: int, num_tokens: int, epochs: int, out: Path
) -> None:
    save_checkpoint(model, out / "model.safetensors")
    loss, count = heldout_loss(model, heldout)
    write_json(out / "heldout.json", {"loss": loss, "num_tokens": count, "window": WINDOW})
    run = {"steps": step, "tokens": num_tokens, "epochs": epochs, "loss": loss}
    print(json.dumps(run), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=50.0)
    parser.add_argument("--peak-lr", type=float, default=PEAK_LR)
    parser.add_argument("--resume", type=Path, help="a model.safetensors of an earlier run")
    parser.add_argument("--first-epoch", type=int, default=0, help="where the data goes on")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    dims = Dims()
    sources = read_sources()
    text = Corpus(sources, TEMPLATE)
    if arguments.resume:
        tokenizer = Tokenizer.from_file(str(arguments.resume.parent / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(text.documents(0), dims.vocab_size)
    sample = heldout_sample(sources)
    write_static_files(dims, tokenizer, sample, out)
    heldout = tokenizer.encode(sample).ids
    model = Model(dims)
    if arguments.resume:
        load_checkpoint(model, arguments.resume)
    stream = Stream(text, tokenizer, arguments.first_epoch)
    budget_s = arguments.minutes * 60
    train(model, stream, heldout, out, budget_s, arguments.peak_lr)


if __name__ == "__main__":
    main()
