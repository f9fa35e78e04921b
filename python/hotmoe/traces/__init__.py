"""Recorded routing: which experts each token used in each layer.

A trace has one row per (token, layer), in the order in which they were computed. It can be recorded from any model with
experts (`hotmoe trace record`, or `ExpertCache(record=True)`), kept in a file, and replayed without the model (`hotmoe.replay`).

    >>> from hotmoe.traces import Trace
    >>> trace = Trace.load("routing.npz")  # doctest: +SKIP
    >>> trace.experts[trace.layer == 3]  # doctest: +SKIP
    >>> trace.save("routing.csv")  # doctest: +SKIP

The columns:

    phase    prefill for the tokens of a prompt, decode for generated ones; 1 and 0 in arrays, the words in CSV files
    prompt   number of the prompt, or conversation, from 0
    turn     number of the turn in it, from 0: what the user said, and the answer
    token    position in the conversation, from 0
    layer    number of the layer in the model
    bank     0, or 1 for the second bank of experts of a layer that has two
    step     (optional) number of the ubatch that computed the token
    experts  ids of the experts used, in the model's order (as a rule the largest weight first)
    weights  (optional) the router's weights of these experts

In the last layer a prompt has fewer rows than tokens: llama.cpp computes only those there whose output is wanted.

Three kinds of files, by the ending of the name:

.csv      Lines that begin with `#` are `key=value` pairs about the whole trace. Then a line with the names of the columns, of
          which phase, token, layer and experts must be there, and a line for each row. Experts, and weights, are separated by
          spaces. What is missing is 0, or not there. Keys that mean something:

              model=NAME
              meta=n_expert=128 n_expert_used=8           any number of pairs, separated by spaces; n_expert is what counts
              n_expert_per_layer=64 128 ...               where layers differ
              expert_bytes_per_layer=3059712 2654208 ...  of one expert of each layer, or one number for all
              source=..., licence=..., ...                kept as they are

.npz      `numpy.load(path)` gives the columns as arrays of those names: phase uint8 [n], experts int32 [n, k] with -1 where a row
          has fewer than k, weights float32 [n, k] with NaN there, step int64 [n], the others int32 [n]. Besides, `banks` int64
          [n_banks, 4] holds layer, bank, number of experts and bytes of one expert (-1 if unknown), and `about` a JSON text
          with the model and the other keys.

.parquet  The same columns, experts and weights as lists, phase as a word; what is about the whole trace is in the file's
          metadata under `hotmoe`. Needs pyarrow: `pip install hotmoe[parquet]`.
"""

from __future__ import annotations

from .events import Events
from .trace import DECODE, PREFILL, Trace, TraceBank

__all__ = ["DECODE", "PREFILL", "Events", "Trace", "TraceBank"]
