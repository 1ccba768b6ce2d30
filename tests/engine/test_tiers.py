"""Blocks that went to the host or to disk and came back give the same bits, tokens and logprobs, on a tiny model."""

from __future__ import annotations

import time

import pytest

from octavo.backends.cpu import lib
from octavo.backends.reference import ReferenceDevice
from octavo.engine.block_folder import FOLDER, BlockFolder
from octavo.engine.disk_tier import DiskTier
from octavo.engine.plan import COPY, LOAD, SAVE, Move
from tests.engine.tiny import VOCAB, LocalEngine, request
from tests.matrix import SEED

PAGE = 16
SAY_SEED = f"OCTAVO_SEED={SEED}"
assert lib.available(), "that numbers do not depend on the batch is the kernels', which are not built here"


def prompts(rng, count, low=40, high=120):
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(low, high))] for _ in range(count)]


def asked(prompts, count=24, **fields):
    return [
        request(str(i), p, count, **{"temperature": 0.9, "seed": i, "logprobs": 2, **fields})
        for i, p in enumerate(prompts)
    ]


def bits(answers):
    return {
        name: [[(e.token_ids, [(p.token_ids, p.logprobs, p.rank) for p in e.logprobs]) for e in c] for c in choices]
        for name, choices in answers.items()
    }


def engine(folder, **settings):
    return LocalEngine(folder, device_name="cpu", page_size=PAGE, **settings)


def open_disk(path, fingerprint="f"):
    return DiskTier(BlockFolder(str(path), 1 << 28, fingerprint), lambda: None)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_swapped_sequences_go_on_as_if_nothing_had_been(model, caching, request, rng):
    folder, wanted = request.getfixturevalue(model), asked(prompts(rng, 8), count=40)
    truth = bits(engine(folder).run(*wanted))
    tight = engine(folder, blocks=13, host_slots=200, enable_prefix_caching=caching, budget=rng.choice([100, 200]))
    assert bits(tight.run(*wanted)) == truth, SAY_SEED
    stats = tight.scheduler.snapshot()
    assert stats.preemptions_swapped > 0 or model == "mistral", f"windows may give back enough, {SAY_SEED}"
    assert stats.blocks_used == 0
    if not caching:
        assert stats.host_blocks_used == 0, "a swapped sequence's slots are free once it ends"


def test_preemption_in_every_step_changes_nothing(llama, rng):
    wanted = asked(prompts(rng, 4, low=5, high=60), count=12)
    truth = bits(engine(llama).run(*wanted))
    for slots in (0, 12, 200):
        restless = engine(llama, blocks=40, host_slots=slots)
        plan = restless.scheduler.plan

        def disturbed(now, scheduler=restless.scheduler, plan=plan):
            for sequence in scheduler.running[1:]:
                if rng.random() < 0.5:
                    scheduler.preempt(sequence)
            return plan(now)

        restless.scheduler.plan = disturbed
        assert bits(restless.run(*wanted)) == truth, SAY_SEED
        assert (restless.scheduler.stats.preemptions_swapped > 0) == (slots > 0)


def test_prompt_logprobs_are_kept_over_a_swap(llama, rng):
    wanted = asked(prompts(rng, 4), prompt_logprobs=1)
    truth = {n: c[0][0].prompt_logprobs for n, c in engine(llama).run(*wanted).items()}
    tight = engine(llama, blocks=14, host_slots=100, budget=20)
    got = {n: c[0][0].prompt_logprobs for n, c in tight.run(*wanted).items()}
    assert got == truth, SAY_SEED


@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_what_the_device_gave_up_is_found_on_the_host(model, request, rng):
    folder, wanted = request.getfixturevalue(model), asked(prompts(rng, 6))
    truth = bits(engine(folder).run(*wanted))
    small = engine(folder, blocks=16, host_slots=200)
    for _ in range(2):
        for one in wanted:
            assert bits(small.run(one))[one.request_id] == truth[one.request_id], SAY_SEED
    stats = small.scheduler.snapshot()
    assert stats.cached_by_source["host"] > 0 and stats.offload.load_bytes > 0
    assert stats.prefix_hits == sum(stats.cached_by_source.values())


@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_what_was_written_is_found_after_a_restart(model, request, tmp_path, rng):
    folder, wanted = request.getfixturevalue(model), asked(prompts(rng, 5))
    truth = bits(engine(folder).run(*wanted))
    disk = open_disk(tmp_path)
    first = engine(folder, blocks=14, host_slots=40, disk=disk)
    assert bits(first.run(*wanted)) == truth, SAY_SEED
    disk.close(drain_s=10)
    again = engine(folder, blocks=14, host_slots=40, disk=open_disk(tmp_path))
    assert bits(again.run(*wanted)) == truth, SAY_SEED
    assert again.scheduler.snapshot().cached_by_source["disk"] > 0
    again.scheduler.tiers.disk.close(drain_s=10)
    for file in (tmp_path / FOLDER).iterdir():
        raw = bytearray(file.read_bytes())
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        file.write_bytes(raw)
    damaged = engine(folder, blocks=14, host_slots=40, disk=open_disk(tmp_path))
    assert bits(damaged.run(*wanted)) == truth, SAY_SEED
    stats = damaged.scheduler.snapshot()
    assert stats.offload.disk_read_failures > 0 and "disk" not in stats.cached_by_source
    damaged.scheduler.tiers.disk.close()


def test_what_the_device_remembers_at_the_end_is_kept_for_the_next_start(llama, tmp_path, rng):
    wanted = asked(prompts(rng, 2), count=4)
    first = engine(llama, blocks=60, host_slots=60, disk=open_disk(tmp_path))
    truth = bits(first.run(*wanted))
    assert first.scheduler.snapshot().offload.store_bytes == 0, "nothing was given up"
    plan = first.scheduler.last_plan()
    first.scheduler.tiers.done(plan.moves, first.runner.run(plan).move_seconds)
    first.scheduler.tiers.disk.close(drain_s=10)
    again = engine(llama, blocks=60, host_slots=60, disk=open_disk(tmp_path))
    assert bits(again.run(*wanted)) == truth, SAY_SEED
    assert again.scheduler.stats.cached_by_source == {"disk": sum((len(r.prompt_token_ids) - 1) // PAGE * PAGE
                                                                  for r in wanted)}, SAY_SEED  # fmt: skip
    again.scheduler.tiers.disk.close()


def test_an_aborted_request_leaves_nothing_behind(llama, tmp_path, rng):
    wanted = asked(prompts(rng, 5, low=100))
    disk = open_disk(tmp_path)
    engine(llama, blocks=14, host_slots=40, disk=disk).run(*wanted)
    disk.close(drain_s=10)
    waiting = engine(llama, blocks=14, host_slots=40, disk=open_disk(tmp_path))
    scheduler = waiting.scheduler
    for one in wanted:
        scheduler.add(one, 0.0)
    plan = scheduler.plan(0.0)
    assert any(s.fetch for s in scheduler.waiting), SAY_SEED
    if plan.chunks:
        scheduler.commit(plan, waiting.runner.run(plan))
    for one in wanted:
        scheduler.abort("", one.request_id)
        scheduler.check_integrity()
    give_up = time.monotonic() + 10
    while scheduler.tiers._transfers and time.monotonic() < give_up:
        scheduler.tiers.poll()
    scheduler.check_integrity()
    assert not scheduler.tiers._transfers
    scheduler.tiers.disk.close()


@pytest.mark.parametrize("kind", ["host", "device"])
def test_moves_carry_every_byte(kind, monkeypatch, llama, rng):
    """On memory that the host shares, and by the device's own transfers."""
    monkeypatch.setattr(ReferenceDevice, "shares_host_memory", kind == "host")
    one = LocalEngine(llama, blocks=4, host_slots=3)
    store, caches = one.runner.store, one.runner._kv
    for cache in caches:
        for pages in (cache.k, cache.v):
            pages.copy_(pages.new_empty(pages.shape).uniform_())
    before = [(cache.k.clone(), cache.v.clone()) for cache in caches]
    store.do([Move(SAVE, 0, 1, 2), Move(COPY, 0, 2, 1), Move(LOAD, 0, 2, 3)])
    for cache, old in zip(caches, before, strict=True):
        for pages, was in zip((cache.k, cache.v), old, strict=True):
            assert (pages[[0, 1, 2, 3]] == was[[0, 2, 2, 1]]).all()
    assert bytes(store.view(0, 2)) != bytes(len(store.view(0, 2))) and store.seconds > 0
