"""Adapters in a running engine: many in one batch, changed while requests run, on several ranks."""

from __future__ import annotations

import asyncio
import shutil

import msgspec
import pytest

from octavo.config import Speculation
from octavo.dist.group import SINGLE
from octavo.engine.adapters import AdapterFacts, Adapters
from octavo.engine.client import EngineClient
from octavo.errors import InvalidRequest, ModelNotFound, NotSupported, OctavoError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.lora import open_adapter
from octavo.models.lora_loader import AdapterLoader
from tests.engine.test_executor import collect
from tests.engine.tiny import VOCAB, LocalEngine, config_for, request, tokens_of
from tests.lora_fixtures import MLP, damage, write_adapter
from tests.matrix import SEED, sample

SAY_SEED = f"OCTAVO_SEED={SEED}"


class AdaptedEngine(LocalEngine):
    """A `LocalEngine` that hosts adapters."""

    def __init__(self, folder, **settings):
        super().__init__(folder, **settings)
        model = self.runner._model
        parameters = open_checkpoint(folder).parameters
        self.loader = AdapterLoader(model, parameters, self.runner._device, model.norm.dtype, SINGLE)
        self.adapters = Adapters(self, enabled=True, limit=4)
        self.scheduler.adapters = self.adapters.loaded

    def load_adapter(self, number, path):
        file = open_adapter(path, self.loader.parameters, 64)
        self.loader.load(number, file)
        return AdapterFacts(file.rank, file.digest)

    def unload_adapter(self, number):
        self.loader.unload(number)


def with_adapter(asked, name):
    return msgspec.structs.replace(asked, adapter=name)


def logprobs_of(events):
    return [entry for event in events for entry in event.logprobs]


def prompt_of(rng, longest=60):
    return [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))]


@pytest.fixture(scope="module")
def adapters(llama, tmp_path_factory):
    """Paths by name: all modules, the MLP alone, one rank."""
    folder = tmp_path_factory.mktemp("adapters")
    made = {
        "all": {"rank": 8},
        "mlp": {"targets": MLP, "rank": 64},
        "one": {"targets": ("q_proj", "o_proj"), "rank": 1},
    }
    return {
        name: str(write_adapter(folder / name, llama, SEED + i, strength=1.0, **settings))
        for i, (name, settings) in enumerate(made.items())
    }


GUESSES = {
    "plain": None, "ngram": Speculation("ngram", 4, prompt_lookup_min=1, prompt_lookup_max=3),
}  # fmt: skip


@pytest.mark.parametrize("settings", sample([
    {"device_name": device, "page_size": 16, "budget": budget, "enable_prefix_caching": caching, "blocks": blocks,
     "host_slots": slots, "guesses": guesses}
    for device in ("cpu", "cpu", "reference") for budget in (16, 64, 256) for caching in (False, True)
    for blocks, slots in ((100, 0), (17, 0), (17, 40)) for guesses in GUESSES
], 6), ids=str)  # fmt: skip
def test_adapters_in_one_batch_answer_as_alone(llama, adapters, rng, settings):
    settings = dict(settings, speculation=GUESSES[settings["guesses"]])
    del settings["guesses"]
    names = [None, *adapters, None, *adapters]
    shared = prompt_of(rng)
    asked = [
        with_adapter(request(str(i), rng.choice((shared, prompt_of(rng))), temperature=0.9, seed=i, logprobs=3), name)
        for i, name in enumerate(names)
    ]
    together = AdaptedEngine(llama, **settings)
    for name, path in adapters.items():
        together.adapters.load(name, path)
    answers = together.run(*asked)
    exact = settings["device_name"] == "cpu"
    for one in asked:
        alone = AdaptedEngine(llama, device_name=settings["device_name"], page_size=16)
        if one.adapter is not None:
            alone.adapters.load(one.adapter, adapters[one.adapter])
        expected = alone.run(one)[one.request_id]
        mine = answers[one.request_id]
        if exact:
            assert logprobs_of(mine[0]) == logprobs_of(expected[0]), f"{SAY_SEED} {one}"
        assert tokens_of(mine[0]) == tokens_of(expected[0]), f"{SAY_SEED} {one}"


def test_other_weights_under_an_old_name_never_meet_old_keys(llama, adapters, rng):
    engine = AdaptedEngine(llama, device_name="cpu", page_size=16, enable_prefix_caching=True)
    asked = with_adapter(request("first", [rng.randrange(3, VOCAB) for _ in range(70)], logprobs=2), "a")

    def answer(path, asked):
        engine.adapters.load("a", path, in_place=True)
        engine.adapters.sweep(engine.scheduler.adapters_in_use)
        return engine.run(asked)[asked.request_id]

    def anew(path):
        fresh = AdaptedEngine(llama, device_name="cpu", page_size=16)
        fresh.adapters.load("a", path)
        return fresh.run(asked)[asked.request_id]

    hits = []
    for number, name in enumerate(("all", "mlp", "all", "all")):
        one = msgspec.structs.replace(asked, request_id=f"{number}")
        assert logprobs_of(answer(adapters[name], one)[0]) == logprobs_of(anew(adapters[name])[0]), SAY_SEED
        hits.append(engine.scheduler.stats.prefix_hits)
    assert hits[0] == hits[1] == 0 < hits[2] < hits[3], "the same content hits again, another never"


def test_a_running_sequence_keeps_the_weights_it_began_with(llama, adapters, rng):
    engine, plain = (
        AdaptedEngine(llama, device_name="cpu", page_size=16),
        AdaptedEngine(llama, device_name="cpu", page_size=16),
    )
    first = with_adapter(request("first", prompt_of(rng), count=20), "a")
    second = with_adapter(request("second", prompt_of(rng), count=20), "a")
    for one, path in ((engine, adapters["all"]), (plain, adapters["all"])):
        one.adapters.load("a", path)
    expected = plain.run(first)["first"]
    plain.adapters.load("a", adapters["mlp"], in_place=True)
    expected_second = plain.run(second)["second"]
    engine.scheduler.add(first, 0.0)
    events = []
    for step in range(60):
        if step == 3:
            engine.adapters.load("a", adapters["mlp"], in_place=True)
            engine.scheduler.add(second, 0.0)
        if step == 6:
            engine.adapters.unload("a")
            with pytest.raises(ModelNotFound, match="The model `a` does not exist"):
                engine.scheduler.add(msgspec.structs.replace(first, request_id="third"), 0.0)
            assert engine.adapters.leaving == {1, 2}
        plan = engine.scheduler.plan(0.0)
        if plan.chunks:
            events += [event for _, event in engine.scheduler.commit(plan, engine.runner.run(plan))]
        engine.adapters.sweep(engine.scheduler.adapters_in_use)
    assert tokens_of([e for e in events if e.request_id == "first"]) == tokens_of(expected[0]), SAY_SEED
    assert tokens_of([e for e in events if e.request_id == "second"]) == tokens_of(expected_second[0]), SAY_SEED
    assert not engine.adapters.leaving and not any(linear.loaded for linear in engine.loader.linears.values())


class Host:
    """Remembers what is in memory."""

    def __init__(self):
        self.held = set()

    def load_adapter(self, number, path):
        if path == "bad":
            raise InvalidRequest("bad")
        self.held.add(number)
        return AdapterFacts(4, path.encode())

    def unload_adapter(self, number):
        self.held.remove(number)


def test_limits_and_names():
    host = Host()
    table = Adapters(host, enabled=True, limit=2)
    table.load("a", "1")
    with pytest.raises(InvalidRequest, match=r"'a' has already been loaded.*'load_inplace' to True"):
        table.load("a", "1")
    with pytest.raises(InvalidRequest, match="bad"):
        table.load("b", "bad")
    table.load("b", "2")
    with pytest.raises(InvalidRequest, match="2 adapters are loaded; limit: --max-loras 2; fix: unload one"):
        table.load("c", "3")
    for name in ("", "x" * 257, "a\nb"):
        with pytest.raises(InvalidRequest, match="lora_name is"):
            table.load(name, "3")
    table.load("a", "4", in_place=True)
    table.load("a", "5", in_place=True)
    with pytest.raises(InvalidRequest, match="requests still run with 2 adapters"):
        table.load("a", "6", in_place=True)
    numbers = {adapter.number for adapter in table.loaded.values()}
    assert len(host.held) == 4 and numbers < host.held
    table.sweep(set(host.held))
    assert len(host.held) == 4, "in use"
    table.sweep(set())
    assert host.held == numbers
    table.unload("a")
    with pytest.raises(ModelNotFound, match="The lora adapter 'a' cannot be found"):
        table.unload("a")
    table.sweep(set())
    assert host.held == {table.loaded["b"].number}
    with pytest.raises(NotSupported, match="--enable-lora"):
        Adapters(host, enabled=False, limit=2).load("a", "1")


async def test_ranks_load_adapters_together(llama, adapters, rng, tmp_path):
    engine = AdaptedEngine(llama)
    modules = {"lora_modules": (f"all={adapters['all']}",), "max_loras": 2, "async_scheduling": True}
    client = await EngineClient.start(config_for(llama, tensor_parallel_size=2, threads=1, **modules))
    bad = write_adapter(tmp_path / "bad", llama, SEED)
    damage(bad, rng, "nan")
    try:
        assert list(client.adapters) == ["all"]
        await client.load_adapter("mlp", adapters["mlp"])
        for name, path, says in (("mlp", "x", "already"), ("new", adapters["one"], "--max-loras 2")):
            with pytest.raises(InvalidRequest, match=says):
                await client.load_adapter(name, path)
        for path, says in ((str(bad), "holds NaN"), (str(tmp_path / "gone"), "no such folder")):
            with pytest.raises(OctavoError, match=says) as refused:
                await client.load_adapter("mlp", path, in_place=True)
            assert 400 <= refused.value.status < 500
        asked = [
            with_adapter(request(str(i), prompt_of(rng), logprobs=1), name)
            for i, name in enumerate((None, "all", "mlp", "all"))
        ]
        for name in ("all", "mlp"):
            engine.adapters.load(name, adapters[name])
        expected = engine.run(*asked)
        answers = await asyncio.gather(*(collect(client, one) for one in asked))
        for one, events in zip(asked, answers, strict=True):
            assert tokens_of(events) == tokens_of(expected[one.request_id][0]), SAY_SEED
        running = asyncio.create_task(collect(client, with_adapter(request("long", [5], count=100), "mlp")))
        await asyncio.sleep(0.1)
        await client.unload_adapter("mlp")
        [error] = await collect(client, with_adapter(request("late", [5]), "mlp"))
        assert error.finish_reason == "error" and "`mlp` does not exist" in error.error["cause"]
        assert len(tokens_of(await running)) == 100
    finally:
        await client.shutdown()


async def test_a_bad_adapter_at_start_is_a_typed_error(llama, tmp_path):
    shutil.rmtree(tmp_path)
    with pytest.raises(ModelNotFound, match="no adapter is at"):
        await EngineClient.start(config_for(llama, lora_modules=(f"a={tmp_path}",)))


@pytest.mark.parametrize(("given", "says"), [
    ("nothing", "names no adapter"), ("=path", "names no adapter"), ("a=", "names no adapter"),
    ('{"name": "a"}', "names no adapter"), ('{"name": 3, "path": "x"}', "names no adapter"), ("{", "is no JSON"),
    ('{"name": "a", "path": "x", "more": 1}', "holds 'more'"), ("tiny=x", "name of another model"),
    ('{"name": "a", "path": "x", "base_model_name": "other"}', "is for another model"),
])  # fmt: skip
def test_modules_that_name_none_are_refused(llama, given, says):
    with pytest.raises(OctavoError, match=f"--lora-modules: .*{says}"):
        config_for(llama, lora_modules=(given,))


def test_modules_are_read_as_vllm_writes_them(llama):
    texts = ("a=x/y=z", '{"name": "b", "path": "/x", "base_model_name": "tiny"}')
    config = config_for(llama, lora_modules=texts)
    assert config.enable_lora and [name for name, _ in config.lora_modules] == ["a", "b"]
    assert config.lora_modules[0][1].endswith("/x/y=z") and config.lora_modules[1][1] == "/x"
    assert type(config).from_dict(msgspec.json.decode(msgspec.json.encode(config.to_dict()))) == config
    with pytest.raises(OctavoError, match="2 adapters; limit: --max-loras 1"):
        config_for(llama, lora_modules=texts, max_loras=1)
