"""Every number that can be set, at its limits and beyond, however it is given."""

from __future__ import annotations

import math
import random
from dataclasses import fields

import pytest

from octavo.config import EngineArgs, ModelFacts, Range, ServerArgs, resolve
from octavo.engine.llm import LLM
from octavo.errors import UsageError
from octavo.server.args import FLAGS, size
from octavo.tools.run import SAMPLING
from tests.matrix import SEED
from tests.unit.test_cli import octavo, parse

RNG = random.Random(f"{SEED}/ranges")
NUMERIC = [flag for group in FLAGS.values() for flag in group if flag.type in (int, float, size)]
RANGES: dict[str, Range] = {
    f.name: f.metadata["range"] for owner in (EngineArgs, ServerArgs) for f in fields(owner) if "range" in f.metadata
}
ENGINE = {f.name for f in fields(EngineArgs)}
TEXTS = [flag for group in FLAGS.values() for flag in group if flag.type is str]


def within(limits: Range) -> list[float]:
    least = math.nextafter(0, 1) if limits.above else limits.least
    return [least, limits.most, RNG.randint(limits.least + limits.above, limits.most)]


def beyond(limits: Range) -> list[float]:
    far = 10 ** RNG.randint(20, 60)
    near = [limits.least if limits.above else limits.least - 1, limits.most + 1]
    floats = [math.nan, math.inf, -math.inf] if limits.kind is float else []
    return [*map(limits.kind, [*near, far, -far]), *floats]


def settings_of(engine: EngineArgs, server: ServerArgs) -> dict[str, object]:
    return {**vars(engine), **vars(server)}


def test_every_number_has_a_range():
    assert {flag.field for flag in NUMERIC} == set(RANGES)


@pytest.mark.parametrize("flag", NUMERIC, ids=lambda flag: flag.field)
def test_numbers_within_their_range_are_taken(flag, tmp_path):
    for value in within(RANGES[flag.field]):
        for name in flag.names.split():
            assert settings_of(*parse("m", name, str(value)))[flag.field] == value, f"OCTAVO_SEED={SEED}"
        (tmp_path / "c.yaml").write_text(
            f"{flag.field if flag.field in ENGINE else flag.names.split()[0][2:]}: {value}"
        )
        assert settings_of(*parse("m", "--config", str(tmp_path / "c.yaml")))[flag.field] == value


@pytest.mark.parametrize("flag", NUMERIC, ids=lambda flag: flag.field)
def test_numbers_beyond_their_range_are_refused(flag, tmp_path):
    name = flag.names.split()[-1]
    for value in beyond(RANGES[flag.field]):
        (tmp_path / "c.yaml").write_text(f"{name[2:]}: {value}")
        for words in ([f"{name}={value}"], ["--config", str(tmp_path / "c.yaml")]):
            with pytest.raises(UsageError) as caught:
                parse("m", *words)
            said = str(caught.value)
            assert f" {value!r} is out of range; limit: {RANGES[flag.field]}" in said, f"OCTAVO_SEED={SEED}"
            assert said.split()[0] in flag.names.split()
            assert caught.value.param == flag.field


@pytest.mark.parametrize("name", sorted(set(RANGES) & ENGINE))
def test_the_python_interface_refuses_the_same_and_what_is_no_number(name):
    facts = ModelFacts("m", 100, 10, ())
    fraction = [] if RANGES[name].kind is float and RANGES[name].holds(1.5) else [1.5]
    for value in [*beyond(RANGES[name]), True, "8", [8], *fraction]:
        with pytest.raises(UsageError, match="is out of range"):
            resolve(EngineArgs("m", **{name: value}), facts)
    with pytest.raises(UsageError, match="is out of range"):  # and before it looks for a model
        LLM("no-such-model", **{name: RANGES[name].most + 1})


@pytest.mark.parametrize("module", ["octavo.entrypoints.api_server", "octavo.entrypoints.openai.api_server"])
def test_the_old_entry_points_refuse_the_same(module):
    flag = RNG.choice(NUMERIC)
    value = RNG.choice(beyond(RANGES[flag.field]))
    result = octavo("--model", "m", f"{flag.names.split()[0]}={value}", module=module)
    assert result.returncode == 2, f"OCTAVO_SEED={SEED}"
    assert f"{value!r} is out of range" in result.stderr


@pytest.mark.parametrize("flag", TEXTS, ids=lambda flag: flag.field)
def test_no_text_is_empty(flag):
    with pytest.raises(UsageError, match="is empty"):
        parse("m", f"{flag.names.split()[0]}=")


@pytest.mark.parametrize("flag", [flag for flag in TEXTS if flag.many], ids=lambda flag: flag.field)
@pytest.mark.parametrize("text", [" ", " a", "a\n", "a\0", "\udcff", "a\rb"], ids=ascii)
def test_names_and_keys_that_no_client_could_send(flag, text):
    with pytest.raises(UsageError, match="cannot be used") as caught:
        parse("m", flag.names.split()[0], text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["1e3", "1.5e3k", "+7", "4" + "0" * 30, "0.001k", "4.000001m"])
def test_sizes_are_exact(text):
    factor = {"k": 10**3, "m": 10**6}.get(text[-1], 1)
    digits = text.rstrip("km").partition("e")
    places = len(digits[0].partition(".")[2])
    exact = int(digits[0].replace(".", "")) * 10 ** int(digits[2] or 0) * factor
    assert size(text) * 10**places == exact


def test_a_size_in_a_message_is_exact():
    value = RNG.randint(10**29, 10**30)
    with pytest.raises(UsageError, match=f"^--max-model-len {value} is out of range"):
        parse("m", f"--max-model-len={value}")


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_options_are_checked_before_a_model_is_looked_for(name):
    value = -RNG.randint(2, 1 << 40)
    result = octavo("run", "no-such-model", "hi", f"--{name.replace('_', '-')}={value}")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert f"{name} is {value}" in result.stderr, f"OCTAVO_SEED={SEED}"


@pytest.mark.parametrize(("given", "said"), [
    ("--kv-offloading-dir-size=4", "only with --kv-offloading-dir"),
    ("--max-loras=3", "only with --enable-lora"), ("--max-lora-rank=3", "only with --enable-lora"),
    ('--async-scheduling --speculative-config={"method":"ngram","num_speculative_tokens":3}', "leave one of them out"),
])  # fmt: skip
def test_a_setting_without_effect_is_refused(given, said):
    flags = given.split()
    with pytest.raises(UsageError, match=said):
        resolve(parse("m", *flags)[0], ModelFacts("m", 1024, 1000, ()))
    for alone in flags if len(flags) > 1 else ():
        resolve(parse("m", alone)[0], ModelFacts("m", 1024, 1000, ()))
