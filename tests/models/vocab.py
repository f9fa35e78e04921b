"""A small SentencePiece-style vocabulary: special tokens, all bytes, letters, then syllables up to the size."""

from __future__ import annotations

from itertools import count, islice, product
from string import ascii_letters, digits, punctuation

from gguf import GGUFWriter, TokenType

SPACE = "\u2581"
_LETTERS = SPACE + ascii_letters + digits + punctuation
_SPECIAL = ("<unk>", "<s>", "</s>")
MIN_VOCAB = 3 + 256 + 29

CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def _fillers(n: int) -> list[str]:
    syllables = (SPACE + "".join(p) for k in count(1) for p in product("bdfgklmnprst", "aeiou", repeat=k))
    return (list(_LETTERS) + list(islice(syllables, max(0, n - len(_LETTERS)))))[:n]


def add_vocab(writer: GGUFWriter, n_vocab: int) -> None:
    """Write `n_vocab` tokens: 0 unknown, 1 begin, 2 end, 3 to 258 the bytes, then text."""
    text = _fillers(n_vocab - len(_SPECIAL) - 256)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*_SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *text])
    # longer pieces merge first
    writer.add_token_scores([0.0] * 259 + [float(len(t)) - 1000.0 - 0.01 * i for i, t in enumerate(text)])
    writer.add_token_types(
        [
            TokenType.UNKNOWN,
            TokenType.CONTROL,
            TokenType.CONTROL,
            *[TokenType.BYTE] * 256,
            *[TokenType.NORMAL] * len(text),
        ]
    )
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(value=True)
    writer.add_chat_template(CHAT_TEMPLATE)
