"""Record the routing of a model while it answers prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError
from .trace import DECODE, PREFILL, Trace

if TYPE_CHECKING:
    from ..llama import Llama

Conversation = Sequence[str]
"""What the user says, turn by turn; a plain prompt has one turn."""

SPLITS = ("line", "blank", "none")


def record(
    llm: Llama,
    conversations: Sequence[str | Conversation],
    *,
    n_tokens: int = 128,
    chat: bool | None = None,
    temp: float = 0.0,
    seed: int | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> Trace:
    """Let a model answer prompts, and return the routing of all tokens.

    Every conversation begins with an empty context. The tokens of what the user says are prefill, those that the model
    generates are decode; of a turn after the first, only what is new is evaluated, as a chat would do it.

    Args:
        llm: A model with an `ExpertCache(record=True)`, of any size, `slots=0` included. What it has recorded before is
            forgotten.
        conversations: Prompts, or lists of what the user says in each turn.
        n_tokens: Tokens to generate in each turn; fewer if the model ends its answer or the context is full.
        chat: Write what the user says as the model's chat template has it. None: conversations (lists) yes, if the model has
            a template, prompts no. Without, turns follow one another as they stand.
        temp: Temperature; 0 = most likely token.
        seed: Of the sampler; None = random.
        progress: Called with (turns done, turns in all).

    Raises:
        ArgumentError: If a prompt is empty or does not fit into the context, if `chat` is asked of a model without a
            template, or if the model's cache does not record.
    """
    cache = llm.expert_cache
    if cache is None or not cache.records:
        raise ArgumentError("the model records nothing: load it with expert_cache=ExpertCache(slots=0, record=True)")
    if not conversations:
        raise ArgumentError("there is no prompt to record")
    has_template = "tokenizer.chat_template" in llm.metadata
    if chat and not has_template:
        raise ArgumentError(f"{llm.model_path} has no chat template: record its prompts as they stand")
    if seed is not None:
        llm.set_seed(seed)

    many = [([c], bool(chat)) if isinstance(c, str) else (list(c), chat is not False and has_template) for c in conversations]
    n_turns = sum(len(turns) for turns, _ in many)
    cache.take_trace()
    parts: list[Trace] = []
    n_done = 0
    for prompt, (turns, through_template) in enumerate(many):
        llm.reset()
        said = _Chat(llm) if through_template else _Text(llm)
        for turn, text in enumerate(turns):
            tokens = said.ask(text)
            what = f"turn {turn + 1} of conversation {prompt + 1}" if len(turns) > 1 else f"prompt {prompt + 1}"
            if not tokens or not text.strip():
                raise ArgumentError(f"{what} is empty")
            if len(tokens) >= llm.n_ctx():
                raise ArgumentError(
                    f"{what} has {len(tokens)} tokens with all before it, the context has room for {llm.n_ctx()}: shorten it or "
                    f"load the model with a larger context (-c)"
                )
            answer: list[int] = []
            stream = llm.generate(tokens, temp=temp)
            for token in stream:
                if not answer:
                    parts.append(_part(llm, PREFILL, prompt, turn))
                answer.append(token)
                if len(answer) == n_tokens or said.is_end(token) or llm.n_tokens >= llm.n_ctx():
                    break
            stream.close()
            if not said.is_end(answer[-1]):
                if llm.n_tokens < llm.n_ctx():
                    llm.eval(answer[-1:])  # so that every generated token has rows
            else:
                answer.pop()
            parts.append(_part(llm, DECODE, prompt, turn))
            said.answered(answer)
            n_done += 1
            if progress:
                progress(n_done, n_turns)
    trace = Trace.concat(parts)
    trace.model = trace.name = Path(llm.model_path).stem
    return trace


def _part(llm: Llama, phase: int, prompt: int, turn: int) -> Trace:
    """Take what was recorded since the last time, which ends with the last token in the context."""
    assert llm.expert_cache is not None
    part = llm.expert_cache.take_trace()
    n_new = int(part.token.max(initial=-1)) + 1
    part.token += np.int32(llm.n_tokens - n_new)
    part.phase[:] = phase
    part.prompt[:] = prompt
    part.turn[:] = turn
    return part


class _Text:
    """A conversation in which texts follow one another as they stand."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._tokens: list[int] = []

    def ask(self, text: str) -> list[int]:
        """Return all tokens up to where the model goes on."""
        self._tokens += self._llm.tokenize(text.encode(), add_bos=not self._tokens, special=True)
        return self._tokens

    def answered(self, tokens: list[int]) -> None:
        """Add an answer."""
        self._tokens += tokens

    def is_end(self, token: int) -> bool:
        """Whether a token ends an answer."""
        from .._vendor.llama_cpp import llama_cpp

        return bool(llama_cpp.llama_vocab_is_eog(self._llm._model.vocab, token))


class _Chat(_Text):
    """A conversation in the format of the model's chat template."""

    def __init__(self, llm: Llama) -> None:
        from .._vendor.llama_cpp import llama_chat_format

        super().__init__(llm)
        self._messages: list[dict[str, str]] = []
        formatter: Any = llama_chat_format.Jinja2ChatFormatter  # not typed
        self._format: Any = formatter(
            template=llm.metadata["tokenizer.chat_template"],
            eos_token=self._piece(llm.token_eos()),
            bos_token=self._piece(llm.token_bos()),
        )

    def ask(self, text: str) -> list[int]:
        """Return all tokens up to where the model goes on."""
        from jinja2 import TemplateError

        self._messages.append({"role": "user", "content": text})
        try:
            prompt = self._format(messages=self._messages)
        except (TemplateError, ValueError) as error:
            raise ArgumentError(f"the model's chat template refuses the conversation: {error}") from error
        tokens: list[int] = self._llm.tokenize(prompt.prompt.encode(), add_bos=not prompt.added_special, special=True)
        return tokens

    def answered(self, tokens: list[int]) -> None:
        """Add an answer."""
        content = self._llm.detokenize(tokens).decode(errors="replace")
        self._messages.append({"role": "assistant", "content": content})

    def _piece(self, token: int) -> str:
        return self._llm._model.token_get_text(token) if token >= 0 else ""


def read_prompts(path: Path, split: str = "line", *, multi_turn: bool = False) -> list[str | list[str]]:
    """Read prompts.

    Args:
        path: A file in UTF-8. If its name ends in .jsonl, each line is a JSON text: a string is a prompt, a list of strings a
            conversation, what the user says in each turn. Any other file is text.
        split: How a text is cut into prompts: each line is one ("line"), blank lines lie between them ("blank"), or the whole
            is one ("none").
        multi_turn: The prompts of a text are the turns of one conversation.

    Raises:
        ArgumentError: If the file cannot be read, or has no prompts; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read prompts from {path}: {error}") from error
    if path.suffix.lower() == ".jsonl":
        prompts = [_from_json(line, f"{path}, line {i}") for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        lines = [line.rstrip() for line in text.splitlines()]
        pieces = {"line": lines, "blank": "\n".join(lines).split("\n\n"), "none": [text]}
        texts = [piece.strip("\n") for piece in pieces[split] if piece.strip()]
        prompts = [texts] if multi_turn and texts else list(texts)
    if not prompts:
        raise ArgumentError(f"{path} has no prompts")
    return prompts


def _from_json(line: str, where: str) -> str | list[str]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ArgumentError(f"{where}: no JSON: {error}") from error
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(turn, str) for turn in value)):
        return value
    raise ArgumentError(f"{where}: expected a string (a prompt) or a list of strings (what the user says in each turn)")
