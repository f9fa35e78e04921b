r"""Train the small mixture-of-experts model that the package ships, on a CPU.

The model reads and writes the Python documentation and the sources of the
Python standard library. It has the Qwen3-MoE architecture (grouped-query
attention with QK norm and NEOX rotary embeddings; every feed-forward layer is
a softmax top-k mixture with renormalised weights and no shared expert), so an
unmodified llama.cpp loads the result.

Set up (none of these packages is needed to *use* the model)::

    pip install torch==2.13.0 tokenizers numpy gguf
    apt-get download python3.11-doc && dpkg-deb -x python3.11-doc_*.deb pydoc

Run::

    python train.py run --docs pydoc/usr/share/doc/python3.11/html/_sources \
        --work ~/pydoc-moe-work --minutes 40

``run`` goes through all stages; each can be called alone:

``corpus``   collect the text, split it into training and held-out *files*,
             train the byte-level BPE vocabulary and tokenise;
``train``    train until the planned minutes are spent. It writes a checkpoint
             to the work directory now and then and resumes from it, so it may
             be stopped at any time;
``export``   try several quantisation mixes, print each one's size and
             perplexity on the held-out files, and write the best one that fits
             into ``--max-bytes`` as a GGUF file. Works on any checkpoint.

The schedule follows the time spent training and not the step number, so the
plan holds on a slow or shared machine; two runs therefore agree in quality,
not bit for bit.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import sys
import sysconfig
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

END_OF_TEXT = "<|endoftext|>"
NAME = "pydoc-moe-8x32"


@dataclass(frozen=True)
class Config:
    """The shape of the model."""

    n_vocab: int = 4096
    n_ctx: int = 512
    n_layer: int = 8
    n_embd: int = 192
    n_head: int = 3
    n_head_kv: int = 1
    head_dim: int = 64
    n_expert: int = 32
    n_expert_used: int = 4
    n_ff_exp: int = 64
    rope_base: float = 10000.0
    rms_eps: float = 1e-6


# --------------------------------------------------------------------------
# Corpus and vocabulary
# --------------------------------------------------------------------------

# Parts of the standard library that are tests, tables, duplicates of the
# documentation, or too unlike the rest to be worth the model's few parameters.
SKIPPED_DIRS = {
    "__pycache__", "encodings", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo", "ensurepip",
}  # fmt: skip


def find_sources(docs: Path | None, stdlib: Path) -> list[tuple[str, Path]]:
    """Return (name, path) of every text, the documentation first."""
    found: list[tuple[str, Path]] = []
    if docs is not None:
        found += [(f"doc/{p.relative_to(docs).as_posix().removesuffix('.txt')}", p) for p in docs.rglob("*.rst.txt")]
    for path in stdlib.rglob("*.py"):
        parts = path.relative_to(stdlib).parts
        hidden = parts[0].startswith(("_sysconfigdata", "config-"))
        if not hidden and not SKIPPED_DIRS.intersection(parts):
            found.append((f"lib/{'/'.join(parts)}", path))
    return sorted(found)


def is_held_out(name: str, percent: float) -> bool:
    """Decide by the file's name alone, so that the split never changes."""
    digest = hashlib.sha256(f"held-out:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < percent / 100 * 2**32


def build_corpus(args: argparse.Namespace) -> None:
    """Write the vocabulary, the token streams and a list of the files."""
    work: Path = args.work
    work.mkdir(parents=True, exist_ok=True)
    texts: dict[str, dict[str, str]] = {"doc": {}, "lib": {}, "heldout": {}}
    stdlib = Path(args.stdlib or sysconfig.get_paths()["stdlib"])
    for name, path in find_sources(args.docs, stdlib):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) < 200 or END_OF_TEXT in text:
            continue
        kind = "heldout" if is_held_out(name, args.held_out) else name[:3]
        texts[kind][name] = text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=Config.n_vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=32,  # some readers of GGUF files expect no longer ones
        show_progress=False,
    )
    training_texts = [*texts["doc"].values(), *texts["lib"].values()]
    tokenizer.train_from_iterator(training_texts, trainer)
    assert tokenizer.get_vocab_size() == Config.n_vocab
    tokenizer.save(str(work / "tokenizer.json"))

    end = tokenizer.token_to_id(END_OF_TEXT)
    rng = np.random.default_rng(args.seed)
    for kind, files in texts.items():
        names = list(files)
        rng.shuffle(names)
        stream: list[int] = []
        for encoding in tokenizer.encode_batch([files[n] for n in names]):
            stream += [end, *encoding.ids]
        np.save(work / f"{kind}.npy", np.asarray(stream, dtype=np.uint16))
        size = sum(len(t.encode()) for t in files.values())
        print(f"{kind:8} {len(files):5} files {size:9} bytes {len(stream):8} tokens")
    (work / "heldout.json").write_text(json.dumps(texts["heldout"]), "utf-8")


class Batches:
    """Random windows, a share of them from the documentation.

    Each part is passed over in a shuffled order, with a fresh offset for every
    pass, so that no window comes again before all others were seen.
    """

    def __init__(self, work: Path, n_ctx: int, doc_share: float, seed: int) -> None:
        """Read the token streams of the two parts."""
        self.rng = np.random.default_rng(seed)
        self.n_ctx = n_ctx
        self.doc_share = doc_share
        self.parts = {k: np.load(work / f"{k}.npy") for k in ("doc", "lib")}
        self.queues: dict[str, list[int]] = {k: [] for k in self.parts}
        if len(self.parts["doc"]) <= 2 * n_ctx:
            self.doc_share = 0.0

    def window(self) -> np.ndarray:
        """Return the next window and the token after it."""
        kind = "doc" if self.rng.random() < self.doc_share else "lib"
        data, queue = self.parts[kind], self.queues[kind]
        if not queue:
            first = int(self.rng.integers(self.n_ctx))
            starts = np.arange(first, len(data) - self.n_ctx - 1, self.n_ctx)
            self.rng.shuffle(starts)
            queue.extend(starts.tolist())
        start = queue.pop()
        return data[start : start + self.n_ctx + 1].astype(np.int64)

    def batch(self, n: int, halve: bool) -> Tensor:
        """Return n windows, or twice as many of half the length."""
        windows = np.stack([self.window() for _ in range(n)])
        if halve:
            middle = self.n_ctx // 2
            windows = np.concatenate([windows[:, : middle + 1], windows[:, middle:]])
        return torch.from_numpy(windows)


# --------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------


class GroupedExperts(torch.autograd.Function):
    """A weighted sum of SwiGLU experts for every token.

    The (token, expert) pairs are sorted by expert, so that each expert needs
    one matmul over consecutive rows and no capacity limit or padding.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        """Return the weighted sum for every row of ``x``."""
        n_ff, used = down.shape[2], chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        token = order // used
        counts = torch.bincount(chosen.flatten(), minlength=len(down)).tolist()
        rows = x.index_select(0, token)
        scale = weights.flatten()[order, None]
        hidden = x.new_empty(len(rows), 2 * n_ff)
        for part, out, w in zip(rows.split(counts), hidden.split(counts), gate_up, strict=True):
            torch.mm(part, w.t(), out=out)
        act = functional.silu(hidden[:, :n_ff]).mul_(hidden[:, n_ff:])
        scaled = act * scale
        result = torch.empty_like(rows)
        for part, out, w in zip(scaled.split(counts), result.split(counts), down, strict=True):
            torch.mm(part, w.t(), out=out)
        ctx.save_for_backward(rows, scale, gate_up, down, hidden, act, scaled, token, back)
        ctx.counts, ctx.used = counts, used
        return result.index_select(0, back).view(-1, used, x.shape[1]).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of all inputs but the choice."""
        rows, scale, gate_up, down, hidden, act, scaled, token, back = ctx.saved_tensors
        n_ff, counts = down.shape[2], ctx.counts
        d_result = grad.index_select(0, token)
        d_scaled, d_down = torch.empty_like(act), torch.empty_like(down)
        for g, part, out, w, dw in zip(
            d_result.split(counts), scaled.split(counts), d_scaled.split(counts), down, d_down,
            strict=True,
        ):  # fmt: skip
            torch.mm(g, w, out=out)
            torch.mm(g.t(), part, out=dw)
        d_weights = (d_scaled * act).sum(1).index_select(0, back).view(-1, ctx.used)
        d_act = d_scaled.mul_(scale)
        gate, up = hidden[:, :n_ff], hidden[:, n_ff:]
        d_hidden = torch.empty_like(hidden)
        torch.mul(d_act, functional.silu(gate), out=d_hidden[:, n_ff:])
        d_hidden[:, :n_ff] = torch.ops.aten.silu_backward(d_act.mul_(up), gate)
        d_rows, d_gate_up = d_result, torch.empty_like(gate_up)
        for g, part, out, w, dw in zip(
            d_hidden.split(counts), rows.split(counts), d_rows.split(counts), gate_up, d_gate_up,
            strict=True,
        ):  # fmt: skip
            torch.mm(g, w, out=out)
            torch.mm(g.t(), part, out=dw)
        d_x = d_rows.index_select(0, back).view(-1, ctx.used, rows.shape[1]).sum(1)
        return d_x, d_weights, None, d_gate_up, d_down


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of an output matrix, with the gradient found in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """Return the loss; the logits turn into their own gradient."""
        logits = x @ weight.t()
        log_sum = logits.logsumexp(1, keepdim=True)
        picked = logits.gather(1, target[:, None])
        if x.requires_grad or weight.requires_grad:
            grad = logits.sub_(log_sum).exp_()
            grad.scatter_add_(1, target[:, None], torch.full_like(picked, -1.0))
            ctx.save_for_backward(x, weight, grad)
        return (log_sum - picked).mean()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of the rows and of the matrix."""
        x, weight, grad = ctx.saved_tensors
        scale = scale / len(x)
        return (grad @ weight).mul_(scale), (grad.t() @ x).mul_(scale), None


class Layer(nn.Module):
    """Attention and a mixture of experts, each added to what came in."""

    def __init__(self, c: Config) -> None:
        """Draw the initial weights."""
        super().__init__()
        self.c = c
        q, kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        self.attn_norm = nn.Parameter(torch.ones(c.n_embd))
        self.ffn_norm = nn.Parameter(torch.ones(c.n_embd))
        self.q_norm = nn.Parameter(torch.ones(c.head_dim))
        self.k_norm = nn.Parameter(torch.ones(c.head_dim))

        def weight(*shape: int, gain: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape) * gain * shape[-1] ** -0.5)

        small = 0.5 * (2 * c.n_layer) ** -0.5
        self.wq = weight(q, c.n_embd)
        self.wk = weight(kv, c.n_embd)
        self.wv = weight(kv, c.n_embd)
        self.wo = weight(c.n_embd, q, gain=small)
        self.router = weight(c.n_expert, c.n_embd, gain=0.5)
        # Gate and up share one matrix per expert: the first n_ff_exp rows gate.
        self.gate_up = weight(c.n_expert, 2 * c.n_ff_exp, c.n_embd)
        self.down = weight(c.n_expert, c.n_embd, c.n_ff_exp, gain=small)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return causal attention over normalised rows."""
        c = self.c
        b, t, _ = x.shape

        def rope(y: Tensor) -> Tensor:
            # NEOX style: value i is rotated together with value i + head_dim/2.
            y1, y2 = y.chunk(2, dim=-1)
            return torch.cat((y1 * cos - y2 * sin, y2 * cos + y1 * sin), dim=-1)

        q = functional.linear(x, self.wq).view(b, t, c.n_head, c.head_dim)
        k = functional.linear(x, self.wk).view(b, t, c.n_head_kv, c.head_dim)
        v = functional.linear(x, self.wv).view(b, t, c.n_head_kv, c.head_dim).transpose(1, 2)
        q = rope(functional.rms_norm(q, (c.head_dim,), self.q_norm, c.rms_eps).transpose(1, 2))
        k = rope(functional.rms_norm(k, (c.head_dim,), self.k_norm, c.rms_eps).transpose(1, 2))
        groups = c.n_head // c.n_head_kv
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return functional.linear(y.transpose(1, 2).reshape(b, t, -1), self.wo)

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mixture's output, the router's probabilities and choices."""
        c = self.c
        flat = x.reshape(-1, c.n_embd)
        probs = functional.linear(flat, self.router).softmax(-1)
        weights, chosen = probs.topk(c.n_expert_used, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = GroupedExperts.apply(flat, weights, chosen, self.gate_up, self.down)
        return mixed.view_as(x), probs, chosen

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows, the router's probabilities and its choices."""
        c = self.c
        x = x + self.attention(functional.rms_norm(x, (c.n_embd,), self.attn_norm, c.rms_eps), cos, sin)
        mixed, probs, chosen = self.experts(functional.rms_norm(x, (c.n_embd,), self.ffn_norm, c.rms_eps))
        return x + mixed, probs, chosen


class MoeModel(nn.Module):
    """The whole model, from token numbers to logits."""

    def __init__(self, c: Config) -> None:
        """Draw the initial weights."""
        super().__init__()
        self.c = c
        self.tok_embd = nn.Parameter(torch.randn(c.n_vocab, c.n_embd) * 0.2)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.n_layer))
        self.output_norm = nn.Parameter(torch.ones(c.n_embd))
        self.output = nn.Parameter(torch.randn(c.n_vocab, c.n_embd) * 0.01)

    def forward(self, tokens: Tensor, target: Tensor | None = None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the logits and every layer's router probabilities and choices.

        With a target, return the mean loss in place of the logits.
        """
        c = self.c
        half = torch.arange(0, c.head_dim, 2, dtype=torch.float32)
        angle = torch.arange(tokens.shape[1])[:, None] * c.rope_base ** (-half / c.head_dim)
        cos, sin = angle.cos(), angle.sin()
        x = functional.embedding(tokens, self.tok_embd)
        all_probs, all_chosen = [], []
        for layer in self.layers:
            x, probs, chosen = layer(x, cos, sin)
            all_probs.append(probs)
            all_chosen.append(chosen)
        x = functional.rms_norm(x, (c.n_embd,), self.output_norm, c.rms_eps)
        if target is None:
            return functional.linear(x, self.output), all_probs, all_chosen
        loss = HeadLoss.apply(x.flatten(0, 1), self.output, target.flatten())
        return loss, all_probs, all_chosen

    def counts(self) -> tuple[int, int]:
        """Return the number of parameters, and of those one token makes use of."""
        c = self.c
        total = sum(p.numel() for p in self.parameters())
        experts = c.n_layer * c.n_expert * 3 * c.n_embd * c.n_ff_exp
        idle = experts * (c.n_expert - c.n_expert_used) // c.n_expert
        return total, total - idle - (c.n_vocab - 1) * c.n_embd


# --------------------------------------------------------------------------
# Optimiser
# --------------------------------------------------------------------------


def orthogonalise(g: Tensor, steps: int = 4) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrices."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        xx = x @ x.mT
        x = a * x + (b * xx + c * (xx @ xx)) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates, for the attention and the experts.

    Every expert's gate, up and down matrix is treated as a matrix of its own.
    The update is scaled to the size an AdamW update would have.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, decay: float, pool: Executor) -> None:
        """Take the matrices, and the pool of threads to share them out to."""
        super().__init__(params, {"lr": lr, "decay": decay, "momentum": 0.95})
        self.pool = pool

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices."""
        for group in self.param_groups:
            list(self.pool.map(lambda p, g=group: self.update(p, g), group["params"]))

    @torch.no_grad()
    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        """Update one parameter."""
        if p.grad is None:
            return
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        m = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
        g = p.grad.lerp(m, group["momentum"])
        if p.ndim == 3 and p.shape[1] < p.shape[2]:  # gate_up: two matrices
            g = g.view(-1, p.shape[1] // 2, p.shape[2])
        update = orthogonalise(g)
        size = 0.2 * max(update.shape[-2:]) ** 0.5
        p.mul_(1 - group["lr"] * group["decay"])
        p.add_(update.reshape(p.shape), alpha=-group["lr"] * size)


# --------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------


def held_out_windows(work: Path, n_ctx: int) -> Tensor:
    """Return the held-out files' text as windows of ``n_ctx`` + 1 tokens."""
    data = np.load(work / "heldout.npy").astype(np.int64)
    n = (len(data) - 1) // n_ctx
    rows = [data[i * n_ctx : (i + 1) * n_ctx + 1] for i in range(n)]
    return torch.from_numpy(np.stack(rows))


def evaluate(model: MoeModel, windows: Tensor, batch: int = 4, pool: Executor | None = None) -> tuple[float, np.ndarray]:
    """Return the mean loss and the experts chosen: [layer, window, token, k]."""

    @torch.no_grad()
    def one(rows: Tensor) -> tuple[float, Tensor]:
        loss, _, picks = model(rows[:, :-1], rows[:, 1:])
        shape = (rows.shape[0], rows.shape[1] - 1, model.c.n_expert_used)
        return loss.item() * rows[:, 1:].numel(), torch.stack([p.view(shape) for p in picks])

    results = list((pool.map if pool else map)(one, windows.split(batch)))
    total = sum(r[0] for r in results)
    return total / windows[:, 1:].numel(), torch.cat([r[1] for r in results], dim=1).numpy()


def balance(chosen: np.ndarray, n_expert: int) -> dict[str, np.ndarray]:
    """Describe the experts' use, layer by layer.

    ``entropy`` is 1 for an even load. ``min`` and ``max`` are loads relative to
    the even one. ``again`` is the share of a token's experts that the token
    before it used as well, and ``lru8`` the share found in a cache of the eight
    most recently used experts.
    """
    used = chosen.shape[-1]
    rows: dict[str, list[float]] = {k: [] for k in ("entropy", "min", "max", "again", "lru8")}
    for layer in chosen:
        load = np.bincount(layer.ravel(), minlength=n_expert) / layer.size
        seen = load[load > 0]
        rows["entropy"].append(float(-(seen * np.log(seen)).sum() / math.log(n_expert)))
        rows["min"].append(float(load.min() * n_expert))
        rows["max"].append(float(load.max() * n_expert))
        same = (layer[:, 1:, :, None] == layer[:, :-1, None, :]).any(-1)
        rows["again"].append(float(same.mean()))
        cache: list[int] = []
        hits = 0
        for token in layer[:16].reshape(-1, used).tolist():
            hits += sum(e in cache for e in token)
            cache = [e for e in cache if e not in token][-(8 - used) :] + token
        rows["lru8"].append(hits / layer[:16].size)
    return {k: np.asarray(v) for k, v in rows.items()}


def learning_rate(progress: float) -> float:
    """Warm up over 2 % of the time, hold, then fall to zero from 40 % on."""
    if progress < 0.02:
        return max(progress / 0.02, 0.02)
    if progress < 0.4:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min((progress - 0.4) / 0.6, 1.0)))


def save(path: Path, **state: Any) -> None:
    """Write a checkpoint; an interruption leaves the previous one intact."""
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def gradients(
    model: MoeModel, windows: Tensor, load: Tensor, balance_weight: float
) -> tuple[float, float, tuple[Tensor, ...], Tensor]:
    """Return the loss, the balance loss, the gradients and the experts' counts."""
    c = model.c
    loss, all_probs, all_chosen = model(windows[:, :-1], windows[:, 1:])
    counts = torch.stack([torch.bincount(x.flatten(), minlength=c.n_expert) for x in all_chosen])
    means = torch.stack([probs.mean(0) for probs in all_probs])
    uneven = c.n_expert * (load * means).sum() / c.n_layer
    whole = loss + balance_weight * c.n_layer * uneven
    grads = torch.autograd.grad(whole, list(model.parameters()))
    return loss.item(), uneven.item(), grads, counts


def train(args: argparse.Namespace) -> None:
    """Train for the planned time, from the last checkpoint if there is one."""
    torch.manual_seed(args.seed)
    # Every thread works on its own part of the batch: they meet once a step and
    # not in every operation, which matters on a machine that does other work.
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(args.threads, initializer=lambda: torch.set_num_threads(1))
    work: Path = args.work
    config = Config()
    model = MoeModel(config)
    matrices, routers, others = [], [], []
    for name, p in model.named_parameters():
        if "router" in name:
            routers.append(p)
        elif "layers." in name and p.ndim > 1:
            matrices.append(p)
        else:
            others.append(p)
    muon = Muon(matrices, lr=args.lr, decay=0.05, pool=pool)
    # Routers that learn as fast as the rest would settle on few experts.
    groups = [{"params": others, "share": 1.0}, {"params": routers, "share": 0.15}]
    adam = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    load = torch.full((config.n_layer, config.n_expert), 1 / config.n_expert)
    step, seconds, tokens = 0, 0.0, 0

    checkpoint = work / "checkpoint.pt"
    log_path = work / "training_log.csv"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        muon.load_state_dict(saved["muon"])
        adam.load_state_dict(saved["adam"])
        load = saved["load"]
        step, seconds, tokens = saved["step"], saved["seconds"], saved["tokens"]
        print(f"resumed at step {step}, {seconds:.0f} s")
    else:
        header = "step,seconds,tokens,lr,train_loss,balance_loss,heldout_loss,heldout_ppl,"
        header += "load_entropy_mean,load_entropy_min,load_min,load_max\n"
        log_path.write_text(header)
    total, active = model.counts()
    print(f"{total} parameters, {active} used by a token")

    batches = Batches(work, config.n_ctx, args.doc_share, args.seed + step)
    windows = held_out_windows(work, config.n_ctx)
    few = windows[:: max(1, len(windows) // 32)][:32]
    losses: list[float] = []
    balances: list[float] = []
    last_log, last_save = seconds, seconds
    limit = args.minutes * 60
    torch.manual_seed(args.seed + step)
    while True:
        tick = time.monotonic()
        factor = learning_rate(seconds / limit)
        for optimiser in (muon, adam):
            for group in optimiser.param_groups:
                group["lr"] = args.lr * factor * group.get("share", 1.0)
        # Early on many small steps teach more than few large ones, and attention
        # costs less over short windows; the long ones come later.
        size = args.batch // 2 if seconds < 0.25 * limit else args.batch
        batch = batches.batch(size, halve=seconds < 0.6 * limit)
        parts = list(
            pool.map(
                lambda part, load=load: gradients(model, part, load, args.balance),
                batch.chunk(args.threads),
            )
        )
        for p, *grads in zip(model.parameters(), *(part[2] for part in parts), strict=True):
            p.grad = torch.stack(grads).mean(0) if len(grads) > 1 else grads[0]
        loss, uneven = (float(np.mean([part[i] for part in parts])) for i in (0, 1))
        # Balance the load over the last dozen batches and not within each text,
        # so that experts are free to specialise by subject.
        counts = torch.stack([part[3] for part in parts]).sum(0)
        load = load.lerp(counts / counts.sum(1, keepdim=True), 0.1)
        nn.utils.clip_grad_norm_([*others, *routers], 1.0)
        muon.step()
        adam.step()
        step += 1
        tokens += batch[:, 1:].numel()
        losses.append(loss)
        balances.append(uneven)
        seconds += time.monotonic() - tick

        done = seconds >= limit or step >= args.steps
        if done or step == 20 or seconds - last_log >= args.log_seconds:
            last_log = seconds
            held, picks = evaluate(model, windows if done else few, pool=pool)
            b = balance(picks, config.n_expert)
            row = [
                step, f"{seconds:.0f}", tokens, f"{args.lr * factor:.5f}",
                f"{np.mean(losses):.4f}", f"{np.mean(balances):.4f}",
                f"{held:.4f}", f"{math.exp(held):.3f}",
                f"{b['entropy'].mean():.4f}", f"{b['entropy'].min():.4f}",
                f"{b['min'].min():.3f}", f"{b['max'].max():.3f}",
            ]  # fmt: skip
            with log_path.open("a", newline="") as f:
                csv.writer(f, lineterminator="\n").writerow(row)
            print(
                *row,
                f"again={b['again'].mean():.3f} lru8={b['lru8'].mean():.3f}",
                flush=True,
            )
            losses, balances = [], []
        if done or seconds - last_save >= args.save_seconds:
            last_save = seconds
            save(
                checkpoint, config=asdict(config), model=model.state_dict(),
                muon=muon.state_dict(), adam=adam.state_dict(), load=load,
                step=step, seconds=seconds, tokens=tokens,
            )  # fmt: skip
        if done:
            print(f"held-out perplexity {math.exp(held):.3f} after {tokens} tokens")
            return


# --------------------------------------------------------------------------
# Quantisation and GGUF
# --------------------------------------------------------------------------

Q = gguf.GGMLQuantizationType

# Types of the experts' gate, up and down matrices. All other matrices are
# Q8_0; norms and routers are F32.
MIXES: dict[str, tuple[Q, Q, Q]] = {
    "Q8_0": (Q.Q8_0, Q.Q8_0, Q.Q8_0),
    "Q5_1": (Q.Q5_1, Q.Q5_1, Q.Q5_1),
    "Q5_0": (Q.Q5_0, Q.Q5_0, Q.Q5_0),
    "Q4_0": (Q.Q4_0, Q.Q4_0, Q.Q4_0),
}
FILE_TYPES = {
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q5_1": gguf.LlamaFileType.MOSTLY_Q5_1,
    "Q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}


def gguf_tensors(model: MoeModel, mix: str) -> dict[str, tuple[np.ndarray, Q]]:
    """Return name -> (values, type), as llama.cpp names and lays them out.

    The mix F32 leaves all tensors as they are; it serves to check the others.
    """
    gate_type, up_type, down_type = MIXES.get(mix, (Q.F32, Q.F32, Q.F32))
    out: dict[str, tuple[Tensor, Q]] = {
        "token_embd.weight": (model.tok_embd, Q.Q8_0),
        "output_norm.weight": (model.output_norm, Q.F32),
        "output.weight": (model.output, Q.Q8_0),
    }
    n_ff = model.c.n_ff_exp
    for i, layer in enumerate(model.layers):
        for name, weight, kind in (
            ("attn_norm", layer.attn_norm, Q.F32),
            ("attn_q", layer.wq, Q.Q8_0),
            ("attn_k", layer.wk, Q.Q8_0),
            ("attn_v", layer.wv, Q.Q8_0),
            ("attn_output", layer.wo, Q.Q8_0),
            ("attn_q_norm", layer.q_norm, Q.F32),
            ("attn_k_norm", layer.k_norm, Q.F32),
            ("ffn_norm", layer.ffn_norm, Q.F32),
            ("ffn_gate_inp", layer.router, Q.F32),
            ("ffn_gate_exps", layer.gate_up[:, :n_ff], gate_type),
            ("ffn_up_exps", layer.gate_up[:, n_ff:], up_type),
            ("ffn_down_exps", layer.down, down_type),
        ):
            out[f"blk.{i}.{name}.weight"] = (weight, kind)
    return {
        name: (
            np.ascontiguousarray(weight.detach().numpy()),
            Q.F32 if mix == "F32" else kind,
        )
        for name, (weight, kind) in out.items()
    }


@torch.no_grad()
def load_gguf_tensors(model: MoeModel, values: dict[str, np.ndarray]) -> None:
    """Set a model's parameters from the (dequantised) tensors of a GGUF file."""
    targets = gguf_tensors_targets(model)
    for name, value in values.items():
        targets[name].copy_(torch.from_numpy(np.array(value, dtype=np.float32)))


def gguf_tensors_targets(model: MoeModel) -> dict[str, Tensor]:
    """Return name -> the view of the parameter that a tensor is stored in."""
    n_ff = model.c.n_ff_exp
    out = {
        "token_embd.weight": model.tok_embd.data,
        "output_norm.weight": model.output_norm.data,
        "output.weight": model.output.data,
    }
    for i, layer in enumerate(model.layers):
        for name, weight in (
            ("attn_norm", layer.attn_norm), ("attn_q", layer.wq), ("attn_k", layer.wk),
            ("attn_v", layer.wv), ("attn_output", layer.wo), ("attn_q_norm", layer.q_norm),
            ("attn_k_norm", layer.k_norm), ("ffn_norm", layer.ffn_norm),
            ("ffn_gate_inp", layer.router), ("ffn_gate_exps", layer.gate_up[:, :n_ff]),
            ("ffn_up_exps", layer.gate_up[:, n_ff:]), ("ffn_down_exps", layer.down),
        ):  # fmt: skip
            out[f"blk.{i}.{name}.weight"] = weight.data
    return out


def write_gguf(path: Path, model: MoeModel, tokenizer: Tokenizer, mix: str) -> None:
    """Write the model and its vocabulary as llama.cpp reads them."""
    c = model.c
    w = gguf.GGUFWriter(path, "qwen3moe")
    w.add_name(NAME)
    w.add_description("A small mixture of experts over the Python documentation")
    w.add_license("mit")
    w.add_file_type(FILE_TYPES.get(mix, gguf.LlamaFileType.ALL_F32))
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_vocab_size(c.n_vocab)
    w.add_context_length(c.n_ctx)
    w.add_embedding_length(c.n_embd)
    w.add_block_count(c.n_layer)
    w.add_feed_forward_length(c.n_ff_exp * c.n_expert_used)
    w.add_expert_feed_forward_length(c.n_ff_exp)
    w.add_expert_count(c.n_expert)
    w.add_expert_used_count(c.n_expert_used)
    w.add_head_count(c.n_head)
    w.add_head_count_kv(c.n_head_kv)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_rope_dimension_count(c.head_dim)
    w.add_rope_freq_base(c.rope_base)
    w.add_layer_norm_rms_eps(c.rms_eps)

    bpe = json.loads(tokenizer.to_str())["model"]
    by_id = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    end = tokenizer.token_to_id(END_OF_TEXT)
    types = [gguf.TokenType.NORMAL] * len(by_id)
    types[end] = gguf.TokenType.CONTROL
    for i, token in enumerate(by_id):
        if token.startswith("<|unused"):  # an entry taken out after the fact
            types[i] = gguf.TokenType.UNUSED
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(by_id)
    w.add_token_types(types)
    w.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    w.add_bos_token_id(end)
    w.add_eos_token_id(end)
    w.add_add_bos_token(False)
    for name, (value, kind) in gguf_tensors(model, mix).items():
        w.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def load_gguf(path: Path) -> MoeModel:
    """Read a file that :func:`write_gguf` wrote; its weights are dequantised."""
    model = MoeModel(Config())
    tensors = gguf.GGUFReader(path).tensors
    load_gguf_tensors(model, {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors})
    return model


@torch.no_grad()
def sample(model: MoeModel, tokenizer: Tokenizer, prompt: str, n: int, seed: int) -> str:
    """Sample at temperature 0.7 from the 40 likeliest tokens."""
    rng = torch.Generator().manual_seed(seed)
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = [end, *tokenizer.encode(prompt).ids]
    for _ in range(n):
        logits, _, _ = model(torch.tensor([ids[-model.c.n_ctx :]]))
        top, index = (logits[0, -1] / 0.7).topk(40)
        token = int(index[torch.multinomial(top.softmax(-1), 1, generator=rng)])
        if token == end:
            break
        ids.append(token)
    return tokenizer.decode(ids[1:])


def export(args: argparse.Namespace) -> None:
    """Choose a quantisation, write the GGUF file and describe it."""
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(args.threads, initializer=lambda: torch.set_num_threads(1))
    work: Path = args.work
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    saved = torch.load(work / "checkpoint.pt", weights_only=True)
    model = MoeModel(Config(**saved["config"]))
    model.load_state_dict(saved["model"])
    windows = held_out_windows(work, model.c.n_ctx)
    step = max(1, len(windows) // args.mix_windows)
    few = windows[::step]
    total, active = model.counts()
    print(f"{total} parameters, {active} used by a token")
    print(
        f"step {saved['step']}, {saved['tokens']} tokens, {saved['seconds']:.0f} s",
        flush=True,
    )

    loss = evaluate(model, few, pool=pool)[0]
    tokens = few[:, 1:].numel()
    print(f"F32: perplexity {math.exp(loss):.4f} on {tokens} held-out tokens")
    best: tuple[float, Path] | None = None
    for mix in MIXES:
        path = work / f"{NAME}.{mix}.gguf"
        write_gguf(path, model, tokenizer, mix)
        size = path.stat().st_size
        loss = evaluate(load_gguf(path), few, pool=pool)[0]
        print(
            f"experts {mix:9} {size:9} bytes: perplexity {math.exp(loss):.4f}",
            flush=True,
        )
        if size <= args.max_bytes and (best is None or loss < best[0]):
            best = (loss, path)
    if best is None:
        sys.exit(f"no mix fits into {args.max_bytes} bytes")
    args.out.write_bytes(best[1].read_bytes())
    print(f"wrote {args.out.name} from {best[1].name}")
    quantised = load_gguf(args.out)
    loss, picks = evaluate(quantised, windows, pool=pool)
    print(
        f"held-out perplexity, {args.out.name}: {math.exp(loss):.4f} ({windows[:, 1:].numel()} tokens)",
        flush=True,
    )

    rows = balance(picks, model.c.n_expert)
    print("layer", *(f"{k:>8}" for k in rows))
    for i in range(model.c.n_layer):
        print(f"{i:5}", *(f"{v[i]:8.3f}" for v in rows.values()))
    for prompt in (
        "The :mod:`json` module",
        'def read_file(path):\n    """',
        "To open a file",
    ):
        print("-" * 72)
        print(sample(quantised, tokenizer, prompt, 120, args.seed))


def main() -> None:
    """Run the stage that the command line names."""
    parser = argparse.ArgumentParser(description="Train the package's small MoE model.")
    parser.add_argument("stage", choices=("run", "corpus", "train", "export"))
    parser.add_argument("--work", type=Path, required=True, help="directory for corpus and checkpoint")
    parser.add_argument("--docs", type=Path, help="the documentation's _sources directory")
    parser.add_argument("--stdlib", type=Path, help="standard library (default: the running Python's)")
    parser.add_argument("--held-out", type=float, default=2.5, help="percent of the files held out")
    parser.add_argument("--doc-share", type=float, default=0.7, help="share of windows from the docs")
    parser.add_argument("--minutes", type=float, default=40, help="planned training time")
    parser.add_argument("--steps", type=int, default=10**9, help="stop after so many steps")
    parser.add_argument("--batch", type=int, default=8, help="windows of 512 tokens per step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balance loss")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--log-seconds", type=float, default=60)
    parser.add_argument("--save-seconds", type=float, default=120)
    parser.add_argument("--mix-windows", type=int, default=64, help="windows to compare mixes on")
    parser.add_argument("--max-bytes", type=int, default=16_000_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name(f"{NAME}.gguf"))
    args = parser.parse_args()
    if args.stage in ("run", "corpus"):
        build_corpus(args)
    if args.stage in ("run", "train"):
        train(args)
    if args.stage in ("run", "export"):
        export(args)


if __name__ == "__main__":
    main()
