"""Compare the GGUF file under llama.cpp with the PyTorch model of ``train.py``.

Needs what ``train.py`` needs and, in addition, ``llama-cpp-python``::

    python verify.py --work ~/pydoc-moe-work

The PyTorch side uses the dequantised weights of the same GGUF file. Checked are
the tokenisation of all held-out files, the logits of a held-out passage, the
perplexity on held-out text, and what llama.cpp writes at temperature 0.7.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from llama_cpp import Llama
from tokenizers import Tokenizer
from torch.nn import functional
from train import NAME, MoeModel, held_out_windows, load_gguf, write_gguf

PROMPTS = (
    "The :mod:`json` module",
    "To open a file, use",
    ".. function:: copy(",
    'def read_file(path):\n    """',
    "import os\n\nclass",
)


def check_tokens(llama: Llama, tokenizer: Tokenizer, texts: dict[str, str]) -> bool:
    """Return whether all texts have the same tokens, and come back from them."""
    same = whole = total = 0
    for name, text in texts.items():
        expected = tokenizer.encode(text).ids
        got = llama.tokenize(text.encode(), add_bos=False, special=False)
        same += got == expected
        whole += llama.detokenize(got).decode() == text
        total += len(expected)
        if got != expected:
            first = next(i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b)
            print(f"{name}: tokens differ from {first}: {got[first:][:5]} {expected[first:][:5]}")
    print(f"tokens: {same}/{len(texts)} texts alike, {whole} round trips, {total} tokens")
    return same == whole == len(texts)


def open_llama(path: Path, n_ctx: int, threads: int) -> Llama:
    """Load a file with a full-precision cache of keys and values."""
    return Llama(
        str(path), n_ctx=n_ctx, n_batch=n_ctx, logits_all=True, verbose=False,
        n_threads=threads, n_threads_batch=threads, type_k=0, type_v=0,
    )  # fmt: skip


def check_logits(title: str, llama: Llama, model: MoeModel, windows: torch.Tensor) -> tuple[float, float]:
    """Return the share of equal first choices and the ratio of perplexities."""
    losses = np.zeros(2)
    square, alike, n = 0.0, 0, 0
    worst = []
    for rows in windows:
        llama.reset()
        llama.eval(rows[:-1].tolist())
        theirs = torch.from_numpy(np.array(llama.scores[: len(rows) - 1]))
        with torch.no_grad():
            ours = model(rows[None, :-1])[0][0]
        worst.append((theirs - ours).abs().amax(1))
        square += float((theirs - ours).square().mean())
        alike += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
        for i, logits in enumerate((theirs, ours)):
            losses[i] += float(functional.cross_entropy(logits, rows[1:], reduction="sum"))
        n += len(theirs)
    theirs_ppl, ours_ppl = np.exp(losses / n)
    differences = torch.cat(worst)
    print(
        f"{title}: {n} tokens; difference of the logits: root mean square "
        f"{math.sqrt(square / len(windows)):.2g}, a position's greatest "
        f"{float(differences.median()):.2g} (median) to {float(differences.max()):.2g}; "
        f"the logits' own deviation {float(ours.std()):.2f}; "
        f"same first choice {alike / n:.2%}; "
        f"perplexity llama.cpp {theirs_ppl:.4f}, PyTorch {ours_ppl:.4f}",
        flush=True,
    )
    return alike / n, float(theirs_ppl / ours_ppl)


def main() -> None:
    """Run all checks; the exit status tells whether they passed."""
    parser = argparse.ArgumentParser(description="Compare llama.cpp with PyTorch.")
    parser.add_argument("--work", type=Path, required=True, help="train.py's work directory")
    parser.add_argument("--model", type=Path, default=Path(__file__).with_name(f"{NAME}.gguf"))
    parser.add_argument("--windows", type=int, default=32, help="windows of 512 tokens")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    model = load_gguf(args.model)
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    n_ctx = model.c.n_ctx
    windows = held_out_windows(args.work, n_ctx)
    windows = windows[:: max(1, len(windows) // args.windows)][: args.windows]

    llama = open_llama(args.model, n_ctx, args.threads)
    texts = json.loads((args.work / "heldout.json").read_text("utf-8"))
    good = check_tokens(llama, tokenizer, texts)
    # llama.cpp rounds the activations to eight bits where the weights are
    # quantised. A copy in F32 shows that nothing else differs.
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder) / "exact.gguf"
        write_gguf(exact, model, tokenizer, "F32")
        plain = open_llama(exact, n_ctx, args.threads)
        same, ratio = check_logits("dequantised to F32", plain, model, windows[::8])
        good = good and same > 0.999 and abs(ratio - 1) < 1e-3
    same, ratio = check_logits(args.model.name, llama, model, windows)
    good = good and same > 0.97 and abs(ratio - 1) < 0.01

    for prompt in PROMPTS:
        made = llama.create_completion(
            prompt, max_tokens=120, temperature=0.7, top_k=40, top_p=1.0, min_p=0.0,
            repeat_penalty=1.0, seed=1,
        )  # fmt: skip
        print("-" * 72)
        print(prompt + made["choices"][0]["text"], flush=True)  # type: ignore[index]
    sys.exit(0 if good else "verification failed")


if __name__ == "__main__":
    main()
