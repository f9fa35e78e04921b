"""Streamed experts change nothing but where experts lie: bit-equality with the resident run, whatever the sizes.

A ubatch may need more experts than there are slots: here the CPU is fed with them, each in its turn. Each cell is one (model,
slots, ubatch, prompt) and decodes some tokens after the prompt; tests/streams.py says what else it asserts. CASES 2, 9, 10, 11.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from hotmoe._native import lib
from hotmoe._vendor.llama_cpp import llama_cpp as ll
from tests.gates.test_exactness import LAYOUTS
from tests.gates.test_runs import CASES
from tests.harness import Pool, Runner, equal_bits, tokens_for
from tests.models import cached_model
from tests.streams import BIG, Streamed, counters_add_up, pieces, run_pieces, touched

N_EXPERT, N_USED = 40, 4
UBATCHES = (1, 8, 32, BIG)


@pytest.fixture(scope="module")
def olmoe(sim: Any) -> Iterator[Streamed]:
    with Streamed.load(cached_model(arch="olmoe", quant="Q4_K", n_expert=N_EXPERT, n_expert_used=N_USED)) as found:
        yield found


@pytest.mark.parametrize("ubatch", UBATCHES)
def test_every_number_of_slots(ubatch: int, olmoe: Streamed, cell_count: list[int]) -> None:
    failed = {}
    for slots in range(N_USED, N_EXPERT + 1):
        with olmoe.pool(slots) as pool:
            failed[slots] = olmoe.check(pool, pieces(48, ubatch))
        cell_count[0] += 1
    assert not {slots: wrong for slots, wrong in failed.items() if wrong}


@pytest.mark.parametrize("slots", [4, 5, 8, 13, 21, 39])
@pytest.mark.parametrize("ubatch", UBATCHES)
def test_prompts(slots: int, ubatch: int, olmoe: Streamed, cell_count: list[int]) -> None:
    """Prompts that just fit, fit in part, and do not."""
    for n_prompt in {1, slots // N_USED, slots // N_USED + 1, 3 * slots}:
        with olmoe.pool(slots) as pool:
            assert not olmoe.check(pool, pieces(n_prompt, ubatch)), f"prompt of {n_prompt}"
        cell_count[0] += 1


@pytest.mark.parametrize(("ubatch", "all_slots"), [(4096, (4, 13)), (BIG, (5, 39)), (32, (4,))])
def test_prompt_of_4096_tokens(ubatch: int, all_slots: tuple[int, ...], sim: Any, cell_count: list[int]) -> None:
    """Far more than there are slots (CASE 11), in one ubatch and in many."""
    path = cached_model(arch="qwen3moe", quant="Q4_K", n_expert=N_EXPERT, n_expert_used=N_USED, n_ctx=8192)
    with Streamed.load(path, n_ctx=4352, n_ubatch=ubatch) as model:
        for slots in all_slots:
            with model.pool(slots) as pool:
                assert not model.check(pool, pieces(4096, ubatch, 3))
                assert pool.stats().waves > pool.n_banks
            cell_count[0] += 1


@pytest.mark.parametrize("case", CASES)
def test_architectures(case: str, sim: Any, cell_count: list[int]) -> None:
    """Biases, scales, shared experts, two banks in a layer, fused tensors, mixed types, shards (CASE 10), on the CPU."""
    with Streamed.load(cached_model(**CASES[case]), n_ctx=256, n_ubatch=64) as model:
        for slots in (4, 5, 7, 16, 39):
            for ubatch in (1, 8, 64):
                with model.pool(slots) as pool:
                    assert not model.check(pool, pieces(40, ubatch)), f"{slots} slots, ubatch {ubatch}"
                cell_count[0] += 1


@pytest.mark.parametrize("arch", ["olmoe", "grovemoe"])
@pytest.mark.parametrize(("threads", "batch_threads"), [(2, 2), (1, 4), (3, 2)])
def test_threads(arch: str, threads: int, batch_threads: int, sim: Any, cell_count: list[int]) -> None:
    """Each of them takes an expert when it has come, and its slot is used again when the last has left it."""
    with Streamed.load(cached_model(arch=arch), n_ctx=256, n_ubatch=64) as model:
        for runner in (model.resident, model.streamed):
            ll.llama_set_n_threads(runner.ctx, threads, batch_threads)
        for slots in (4, 5, 9):
            for ubatch in (1, 64):
                with model.pool(slots) as pool:
                    assert not model.check(pool, pieces(60, ubatch)), f"{slots} slots, ubatch {ubatch}"
                cell_count[0] += 1


def test_contexts_of_several_threads(sim: Any) -> None:
    """Two contexts over one model, each computed by two threads, wait for the same readers."""
    sizes = pieces(30, 30, 40)
    with Streamed.load(cached_model(arch="olmoe"), n_ctx=256, n_ubatch=64) as model, Runner.sharing(model.streamed) as other:
        for runner in (model.resident, model.streamed, other):
            ll.llama_set_n_threads(runner.ctx, 2, 2)
        expected = [model.expect(sizes, seed) for seed in (1, 2)]
        with Pool(model.streamed, 5, host_slots="5s"), Pool(other, 4, host_slots="4s"), ThreadPoolExecutor() as executor:
            runs = [
                executor.submit(lambda r, s: [run_pieces(r, sizes, s) for _ in range(3)], runner, seed)
                for runner, seed in ((model.streamed, 1), (other, 2))
            ]
            for run, right in zip(runs, expected, strict=True):
                assert all(equal_bits(logits, right) for logits in run.result())


def test_warmup_computes_zeros(olmoe: Streamed) -> None:
    """Nothing is read for a warm-up. What experts give is 0 then, not what was in the memory before."""
    logits = []
    with olmoe.pool(4) as pool:
        for seed in (1, 2):
            run_pieces(olmoe.streamed, [100, 1, 1], seed)
            read = pool.store().bytes
            for n in (1, 50):
                olmoe.streamed.reset()
                ll.llama_set_warmup(olmoe.streamed.ctx, True)
                logits.append(olmoe.streamed.decode(tokens_for(n, olmoe.streamed.n_vocab)))
                ll.llama_set_warmup(olmoe.streamed.ctx, False)
            assert pool.store().bytes == read
    assert all(equal_bits(first, second) for first, second in zip(logits[:2], logits[2:], strict=True))


QUANTS = ("Q2_K", "Q3_K", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4", "F16")


@pytest.mark.parametrize(
    ("layout", "quant"),
    [("separate", q) for q in QUANTS]
    + [(layout, q) for layout in ("fused", "biases", "scales") for q in ("Q2_K", "Q6_K", "MXFP4")],
)
def test_quantisations(layout: str, quant: str, sim: Any, cell_count: list[int]) -> None:
    """More than 8 rows of an expert are another kernel, and fewer are, too: no wave may change how many there are."""
    with Streamed.load(cached_model(quant=quant, **LAYOUTS[layout]), n_ctx=256, n_ubatch=128) as model:
        for slots in (4, 9, 30):
            for ubatch in (3, 128):
                with model.pool(slots) as pool:
                    assert not model.check(pool, pieces(100, ubatch)), f"{slots} slots, ubatch {ubatch}"
                cell_count[0] += 1


@pytest.mark.parametrize("ubatch", [1, 8, 100])
def test_an_expert_is_read_once_per_ubatch(ubatch: int, olmoe: Streamed) -> None:
    """The first ubatch reads what it touches, and no expert twice; of later ones, what is still there is not read again."""
    for slots in (4, 5, 13, 39):
        with olmoe.pool(slots, record=True) as pool:
            expected = {i: [0, 0] for i in range(pool.n_banks)}
            tokens = tokens_for(200, olmoe.streamed.n_vocab)
            for start in range(0, len(tokens), ubatch):
                pool.clear()
                before = pool.store().bytes
                olmoe.streamed.decode(tokens[start : start + ubatch]) if start else olmoe.streamed.run(tokens[:ubatch], ubatch)
                events = touched(pool)
                assert len(events) == pool.n_banks
                distinct = [len(experts) for _, experts in events]
                read = pool.store().bytes - before
                assert read == sum(n * pool.bank(i).expert_bytes for i, n in enumerate(distinct)), f"{slots} slots"
                for i, n in enumerate(distinct):
                    expected[i][0] += n
            for i in range(pool.n_banks):
                got = pool.stats(i)
                assert [got.misses, got.hits] == expected[i], f"{slots} slots, bank {i}"


def test_resident_experts_are_used_before_they_must_go(olmoe: Streamed) -> None:
    """A second ubatch finds what the first left behind, though it needs more than there are slots."""
    with olmoe.pool(20, record=True) as pool:
        run_pieces(olmoe.streamed, [100])
        left = [set(pool.slot_map(i)) - {-1} for i in range(pool.n_banks)]
        touched(pool)
        before = [pool.stats(i) for i in range(pool.n_banks)]
        olmoe.streamed.decode(tokens_for(100, olmoe.streamed.n_vocab, seed=1))
        for i, (_, experts) in enumerate(touched(pool)):
            assert len(experts) > 20
            got = pool.stats(i)
            assert got.hits - before[i].hits == len(experts & left[i]) > 0
            assert got.misses - before[i].misses == len(experts - left[i]) > 0


def test_graphs_rebuilt_between_ubatches(olmoe: Streamed) -> None:
    """Residency outlives the scheduler's buffers (CASE 2)."""

    def rebuilt(runner: Runner, sizes: list[int], seed: int) -> Any:
        return runner.run(tokens_for(sum(sizes), runner.n_vocab, seed), sizes[0], rebuild=True)

    for ubatch, slots in ((1, 4), (8, 4), (32, 13)):
        with olmoe.pool(slots) as pool:
            assert not olmoe.check(pool, [ubatch] * 6, run=rebuilt)
            steps = pool.steps()
            assert steps.graphs_built == steps.steps == 6


@pytest.mark.parametrize("arch", ["olmoe", "grovemoe", "gpt-oss"])
def test_prompt_of_one_token(arch: str, sim: Any, cell_count: list[int]) -> None:
    """Again and again: its experts get all pairs, and, where two of a token's experts share one, even more than tokens."""
    with Streamed.load(cached_model(arch=arch), n_ctx=256, n_ubatch=64) as model:
        for token in range(300, 324):

            def same(runner: Runner, sizes: list[int], seed: int) -> Any:
                return runner.run([seed] * sum(sizes), 64)

            model.expected[(60,), token] = same(model.resident, [60], token)
            for slots in (4, 9):
                with model.pool(slots) as pool:
                    assert not model.check(pool, [60], seed=token, run=same), f"token {token}, {slots} slots"
                cell_count[0] += 1


def test_ubatches_of_changing_sizes(olmoe: Streamed) -> None:
    """With waves and without, in turns: what waves loaded is in the table when it is asked for."""
    sizes = [100, 1, 1, 2, 64, 1, 3, 100, 1, 40, 1, 1]
    for slots in (4, 8, 13, 39):
        with olmoe.pool(slots) as pool:
            assert not olmoe.check(pool, sizes)
            assert pool.stats().hits > 0


def test_fewest_slots_is_said(olmoe: Streamed) -> None:
    """CASE 9."""
    for size in ("3s", "3", "300KiB"):
        pool = Pool(olmoe.streamed, "auto", host_slots=size)
        assert pool.status == lib.HOTMOE_ERR_PLAN
        assert "the minimum is 4 slots" in pool.error
        assert f'"{size}"' in pool.error


def test_every_policy(olmoe: Streamed) -> None:
    """Whoever ranks, and whoever is admitted: waves are exact, and nothing is read twice."""
    for policy in ("lru", "slru", "lfu", "fifo", "lfru", "lrfu", "s3fifo", "random"):
        for admission in ("always", "second-miss", "ghost"):
            with olmoe.pool(9, policy=policy, admission=admission) as pool:
                assert not olmoe.check(pool, [60, 1, 1, 1, 60, 1]), f"{policy}, {admission}"


def test_decode_recovers_after_a_long_prompt(olmoe: Streamed) -> None:
    """CASE 19: within 8 steps after a prompt that went through all experts, decode hits as often as before it."""
    slots, n = 20, 32
    tokens = [int(t) for t in tokens_for(4, olmoe.streamed.n_vocab)] * n  # a few tokens, again and again: a small working set
    with olmoe.pool(slots) as pool:

        def hit_rate(count: int) -> float:
            pool.reset_stats()
            for token in tokens[:count]:
                olmoe.streamed.decode([token])
            got = pool.stats(phase=lib.HOTMOE_PHASE_DECODE)
            return got.hits / (got.hits + got.misses)

        olmoe.streamed.reset()
        hit_rate(n)
        before = hit_rate(n)
        olmoe.streamed.decode(tokens_for(400, olmoe.streamed.n_vocab, seed=9))
        assert pool.stats().waves > 0
        during = hit_rate(8)
        after = hit_rate(n)
        assert before > 0.9
        assert during < before
        assert after >= before - 0.02


def test_two_numbers_of_slots_in_sequence_share_nothing(olmoe: Streamed) -> None:
    """A cache that is closed leaves nothing behind: the next one reads its experts itself."""
    read = []
    for slots in (40, 4, 40):
        with olmoe.pool(slots) as pool:
            assert not olmoe.check(pool, pieces(40, 8))
            assert not counters_add_up(pool)
            read.append(pool.store().bytes)
    assert read[0] == read[2] < read[1]
    assert all(a != b for a, b in pairwise(read))
