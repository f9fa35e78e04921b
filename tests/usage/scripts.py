"""What people do with llama-cpp-python, each in one function.

A script gets the package (`llama_cpp`, or `hotmoe.llama_cpp` in its place) and a function that loads the model with more
arguments for `Llama`; it returns what it has got, for JSON.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

Load = Callable[..., contextlib.AbstractContextManager[Any]]
Script = Callable[[ModuleType, Load], Any]

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen."
GRAMMAR = r"""
root ::= answer (", " answer)*
answer ::= ("yes" | "no" | "maybe") [0-9]
"""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"enum": [36, 45]}},
    "required": ["name", "age"],
}
MESSAGES = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a town.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"enum": ["Paris", "Rome"]}},
                "required": ["town"],
            },
        },
    }
]


def completion(api: ModuleType, load: Load) -> Any:
    with load() as llm:
        greedy = llm(PROMPT, max_tokens=24, temperature=0)
        sampled = llm.create_completion(PROMPT, max_tokens=24, temperature=0.9, top_k=20, seed=7, echo=True)
        return [greedy, sampled, llm("hello", max_tokens=16, temperature=0, stop=["a"])]


def streaming(api: ModuleType, load: Load) -> Any:
    with load() as llm:
        text, reasons = "", []
        for chunk in llm(PROMPT, max_tokens=24, temperature=0.9, seed=11, stream=True):
            text += chunk["choices"][0]["text"]
            reasons.append(chunk["choices"][0]["finish_reason"])
        # text: what is joined here differs by whole characters that llama-cpp-python drops; see test_python_streaming.py
        return [reasons[-1], llm.n_tokens, list(llm.eval_tokens)]


def chat(api: ModuleType, load: Load) -> Any:
    with load() as llm:  # by the Jinja template in the file
        whole = llm.create_chat_completion(messages=MESSAGES, max_tokens=16, temperature=0)
        roles = [
            chunk["choices"][0]["delta"].get("role")
            for chunk in llm.create_chat_completion(messages=MESSAGES, max_tokens=16, temperature=0, stream=True)
        ]
        return [llm.chat_format, whole, roles[0]]


def own_template(api: ModuleType, load: Load) -> Any:
    formats = importlib.import_module(api.__name__ + ".llama_chat_format")
    formatter = formats.Jinja2ChatFormatter(
        template="{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>",
        eos_token="</s>",
        bos_token="<s>",
    )
    with load(chat_handler=formatter.to_chat_handler()) as llm:
        return llm.create_chat_completion(messages=MESSAGES, max_tokens=16, temperature=0)


def json_schema(api: ModuleType, load: Load) -> Any:
    with load() as llm:
        return llm.create_chat_completion(
            messages=MESSAGES,
            response_format={"type": "json_object", "schema": SCHEMA},
            max_tokens=64,
            temperature=0,
        )


def grammar(api: ModuleType, load: Load) -> Any:
    rules = api.LlamaGrammar.from_string(GRAMMAR, verbose=False)
    with load() as llm:
        return llm("Is it? ", grammar=rules, max_tokens=24, temperature=0)


def tools(api: ModuleType, load: Load) -> Any:
    with load(chat_format="chatml-function-calling", n_ctx=1024) as llm:
        return llm.create_chat_completion(
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            max_tokens=48,
            temperature=0,
        )


def logprobs(api: ModuleType, load: Load) -> Any:
    with load(logits_all=True) as llm:
        return llm(PROMPT, max_tokens=8, temperature=0, logprobs=3, echo=True)


def embeddings(api: ModuleType, load: Load) -> Any:
    with load(embedding=True, pooling_type=api.LLAMA_POOLING_TYPE_MEAN, n_batch=64, n_ubatch=64) as llm:
        return [llm.create_embedding(["hello", "good day"]), llm.embed("hello", normalize=True)]


def state(api: ModuleType, load: Load) -> Any:
    with load() as llm:
        llm.eval(llm.tokenize(PROMPT.encode()))
        saved = llm.save_state()
        first = llm("hello", max_tokens=8, temperature=0)
        llm.reset()
        llm.load_state(saved)
        restored = llm.n_tokens
        again = llm(PROMPT + " So", max_tokens=8, temperature=0)
    with load() as fresh:
        assert again["choices"] == fresh(PROMPT + " So", max_tokens=8, temperature=0)["choices"]
    return [first, restored, again]


def lora(api: ModuleType, load: Load) -> Any:
    with load() as llm:
        without = llm(PROMPT, max_tokens=16, temperature=0)
    with load(adapter=True) as llm:
        adapted = llm(PROMPT, max_tokens=16, temperature=0)
    assert adapted["choices"] != without["choices"], "the adapter has no effect"
    return adapted


def draft_model(api: ModuleType, load: Load) -> Any:
    speculative = importlib.import_module(api.__name__ + ".llama_speculative")
    prompt = "one two three one two three one two"
    with load() as llm:
        plain = llm(prompt, max_tokens=24, temperature=0)
    with load(draft_model=speculative.LlamaPromptLookupDecoding(num_pred_tokens=2)) as llm:
        drafted = llm(prompt, max_tokens=24, temperature=0)
    return [plain, drafted]


SCRIPTS: dict[str, Script] = {
    script.__name__: script
    for script in (
        completion,
        streaming,
        chat,
        own_template,
        json_schema,
        grammar,
        tools,
        logprobs,
        embeddings,
        state,
        lora,
        draft_model,
    )
}
