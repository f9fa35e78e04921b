"""`hotmoe chat`."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..errors import ArgumentError, HotmoeError
from .options import LoadOptions
from .run import report
from .tables import stats_table

if TYPE_CHECKING:
    from ..llama import Llama

PROMPT = "> "
HELP = "/exit leaves, /stats shows what the cache did, /clear forgets the conversation; Ctrl-C stops an answer"


def chat_with_model(
    load: LoadOptions, *, system: str | None, n_predict: int | None, chat_format: str | None, temp: float, seed: int | None
) -> None:
    """Answer messages until there are no more.

    Args:
        load: The model and how to load it.
        system: Instructions that stand before the conversation.
        n_predict: Most tokens of one answer; None = as many as fit.
        chat_format: Name of a chat format of llama-cpp-python; None = the chat template of the model's file.
        temp: Temperature; 0 = most likely token.
        seed: Seed of the sampler; None = random.

    Raises:
        HotmoeError: If the model does not load, has no chat template, or, without a terminal, a message does not fit.
        KeyboardInterrupt: After Ctrl-C while no answer is under way, or if stdin is no terminal.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() history and editing
    with load.load() as llm:
        chat = Chat(llm, system=system, n_predict=n_predict, chat_format=chat_format, temp=temp, seed=seed)
        notes = Console(stderr=True, highlight=False)
        if interactive:
            notes.print(HELP, style="dim", markup=False, soft_wrap=True)
        try:
            for line in _lines(interactive):
                text = line.strip()
                if text.startswith("/"):
                    if text == "/exit":
                        break
                    _command(text, chat, notes)
                elif text:
                    _answer(chat, text, notes, interactive=interactive)
        finally:  # also after Ctrl-C
            summary = report(chat.n_tokens, chat.tokens_per_second, llm.expert_cache, simulated=load.sim is not None)
            notes.print(summary, markup=False, soft_wrap=True)


class Chat:
    """A conversation.

    Attributes:
        messages: What was said so far, as llama-cpp-python takes it.
        n_tokens: Tokens generated, in all answers.
        decode_s: Seconds that their evaluation took, the prompts' left out.
    """

    def __init__(
        self, llm: Llama, *, system: str | None, n_predict: int | None, chat_format: str | None, temp: float, seed: int | None
    ) -> None:
        """Begin; nothing is evaluated yet. The arguments are those of `chat_with_model`.

        Raises:
            ArgumentError: If neither the file nor the caller says how messages are written, or the format is unknown.
        """
        self._llm = llm
        _choose_format(llm, chat_format)
        self._options = {"temperature": temp, "max_tokens": n_predict}
        self._seeds = random.Random(seed)
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._system)
        self.n_tokens = 0
        self.decode_s = 0.0
        self._n_timed = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of decoding; None if there was nothing to time."""
        return self._n_timed / self.decode_s if self.decode_s > 0 else None

    def clear(self) -> None:
        """Forget the conversation, and keep the instructions."""
        self.messages = list(self._system)

    def forget_oldest(self) -> bool:
        """Forget the oldest message and its answer, if the last message is another one; whether there was one."""
        start = len(self._system)
        if len(self.messages) - start < 3:
            return False
        del self.messages[start : start + 2]
        return True

    def say(self, text: str) -> Generator[str, None, None]:
        """Send a message; yields the answer in pieces.

        Whatever ends the answer, also an exception, leaves the conversation with the message and the part of the answer
        that there is; with neither, if there is none.

        Raises:
            ArgumentError: If the conversation does not fit in the context, or the template refuses it.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._stream():
                answer += piece
                yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        from jinja2 import TemplateError

        self._llm._ctx.reset_timings()
        began = False
        try:
            while not began:
                try:
                    chunks: Iterator[Any] = self._llm.create_chat_completion(
                        self.messages, stream=True, seed=self._seeds.randrange(2**32), **self._options
                    )
                    for chunk in chunks:
                        began = True
                        if piece := chunk["choices"][0]["delta"].get("content"):
                            yield piece
                    began = True
                except ValueError as error:  # before the first piece: what was said so far may be too much
                    if began or "context" not in str(error):
                        raise
                    if not self.forget_oldest():
                        raise ArgumentError(f"the message does not fit: {error}; shorten it or raise -c") from error
        except TemplateError as error:
            raise ArgumentError(f"the model's chat template refuses the conversation: {error}") from error
        finally:
            if began:
                self._count()

    def _count(self) -> None:
        """Add what llama.cpp counted since the timings were reset."""
        from .._vendor.llama_cpp import llama_cpp

        timings = llama_cpp.llama_perf_context(self._llm.ctx)
        self.n_tokens += timings.n_eval + 1  # the last one was not evaluated
        self._n_timed += timings.n_eval
        self.decode_s += timings.t_eval_ms / 1000


def _choose_format(llm: Llama, chat_format: str | None) -> None:
    """Use a named format, or make sure that the file has one of its own: the fallback would be a guess.

    Raises:
        ArgumentError: If there is none.
    """
    if chat_format is not None:
        from .._vendor.llama_cpp import llama_chat_format

        try:
            llama_chat_format.get_chat_completion_handler(chat_format)
        except llama_chat_format.LlamaChatCompletionHandlerNotFoundException:
            registry = llama_chat_format.LlamaChatCompletionHandlerRegistry()
            known = ", ".join(sorted(registry._chat_handlers))
            raise ArgumentError(f"unknown chat format {chat_format!r}; known: {known}") from None
        llm.chat_format = chat_format
    elif "tokenizer.chat_template" not in llm.metadata:
        raise ArgumentError(
            f"{llm.model_path} has no chat template: name a format with --chat-format (such as chatml), or use `hotmoe run`"
        )


def _lines(interactive: bool) -> Iterator[str]:
    """Yield what the user types, or the lines of stdin."""
    if not interactive:
        yield from sys.stdin
        return
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print()
            return


def _answer(chat: Chat, text: str, notes: Console, *, interactive: bool) -> None:
    """Print the answer to a message as it comes; in a terminal, Ctrl-C ends the answer only."""
    try:
        with contextlib.closing(chat.say(text)) as answer:  # whatever ends it, the conversation is in order then
            for piece in answer:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        if not interactive:
            raise
        notes.print(" [stopped; Ctrl-C again leaves]", style="dim", markup=False, end="")
    except HotmoeError as error:
        if not interactive:
            raise
        notes.print(f"hotmoe: {error}", markup=False, soft_wrap=True, end="")
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def _command(text: str, chat: Chat, notes: Console) -> None:
    """Do what a line that begins with a slash says."""
    if text == "/clear":
        chat.clear()
    elif text == "/stats":
        cache = chat._llm.expert_cache
        if cache is None or not cache.enabled:
            notes.print("no expert cache: give -mec")
        else:
            notes.print(stats_table(cache.stats()))
    else:
        notes.print("" if text == "/help" else f"unknown command {text}; ", HELP, sep="", markup=False, soft_wrap=True)
