"""`LLM` and `AsyncLLM` with the default model, in this process and in scripts without a main guard."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from msgspec.structs import replace

from octavo import LLM, AsyncLLM, BeamSearchParams, LoRARequest, RequestOutput, RequestOutputKind, SamplingParams
from octavo.config import EngineArgs
from octavo.errors import InvalidRequest, ModelNotFound, UsageError
from tests.e2e.server_process import ROOT, wait_until
from tests.lora_fixtures import write_adapter
from tests.matrix import SEED

RNG = random.Random(f"{SEED}/python-api")
PROMPTS = ["The capital of France is", "Once upon a time", "def main():", "1, 2, 3,"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {"max_model_len": 512, "threads": 1}


@pytest.fixture(scope="module")
def llm(smollm2_path) -> Iterator[LLM]:
    with LLM(model=str(smollm2_path), **SMALL) as made:
        yield made


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = RNG.sample(PROMPTS, 4)
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == prompts
    assert all(isinstance(o, RequestOutput) and o.finished for o in outputs)
    assert all(len(o.outputs[0].token_ids) == 12 and o.outputs[0].finish_reason == "length" for o in outputs)
    alone = [llm.generate(p, GREEDY)[0].outputs[0].text for p in prompts]
    assert [o.outputs[0].text for o in outputs] == alone, f"OCTAVO_SEED={SEED}"
    ids = [{"prompt_token_ids": o.prompt_token_ids} for o in outputs]
    assert [o.outputs[0].text for o in llm.generate(ids, GREEDY)] == alone


def test_beam_search_gives_the_likeliest_the_best_first(llm):
    ids = llm.generate(PROMPTS[1], GREEDY)[0].prompt_token_ids
    outputs = llm.beam_search([PROMPTS[0], {"prompt_token_ids": ids}], BeamSearchParams(beam_width=3, max_tokens=7))
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        scores = [one.cum_logprob / len(one.tokens) for one in output.sequences]
        assert scores == sorted(scores, reverse=True)
        assert len({one.text for one in output.sequences}) == 3
        for one in output.sequences:
            assert one.text.startswith(prompt)
            chosen = [position[token].logprob for position, token in
                      zip(one.logprobs, one.tokens[-len(one.logprobs) :], strict=True)]  # fmt: skip
            assert one.finish_reason == "stop" or sum(chosen) == pytest.approx(one.cum_logprob)
    with pytest.raises(InvalidRequest, match="temperature"):
        llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=2, max_tokens=3, temperature=0.5))
    with pytest.raises(InvalidRequest, match="BeamSearchParams"):
        llm.beam_search(PROMPTS[0], GREEDY)


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 9)]
    outputs = llm.generate(PROMPTS[:3], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5, 9]
    with pytest.raises(InvalidRequest, match="3 prompts and 2 sampling_params"):
        llm.generate(PROMPTS[:3], params[:2])


def test_choices_and_logprobs_are_vllms(llm):
    params = SamplingParams(
        n=3, temperature=1, seed=RNG.randrange(1 << 30), max_tokens=6, logprobs=2, prompt_logprobs=1
    )
    (output,) = llm.generate(PROMPTS[0], params)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for choice in output.outputs:
        assert len(choice.logprobs) == len(choice.token_ids)
        chosen = [position[token].logprob for position, token in zip(choice.logprobs, choice.token_ids, strict=True)]
        assert choice.cumulative_logprob == pytest.approx(sum(chosen))
        assert all(2 <= len(position) <= 3 for position in choice.logprobs)
        assert [p[t].rank == 1 for p, t in zip(choice.logprobs, choice.token_ids, strict=True)] == [
            p[t].logprob == max(one.logprob for one in p.values())
            for p, t in zip(choice.logprobs, choice.token_ids, strict=True)
        ]


def test_chat_is_generate_over_the_template(llm):
    conversation = [{"role": "user", "content": "What is gravity?"}]
    (answer,) = llm.chat(conversation, GREEDY)
    assert answer.prompt.endswith("<|im_start|>assistant\n")
    assert llm.generate(answer.prompt, GREEDY)[0].outputs[0].text == answer.outputs[0].text
    several = llm.chat([conversation, [{"role": "user", "content": "Hi"}]], GREEDY)
    assert several[0].outputs[0].text == answer.outputs[0].text


@pytest.mark.parametrize(("prompt", "params", "named"), [
    ("", GREEDY, "prompt"), ([1, 1 << 20], GREEDY, "prompt"), ([5] * 600, GREEDY, "512"), (3.5, GREEDY, "prompt"),
    ("Hi", SamplingParams(max_tokens=1000), "max_tokens"), ("Hi", SamplingParams(temperature="hot"), "temperature"),
    ("Hi", SamplingParams(n=True), "n is True"), ("Hi", SamplingParams(top_p=float("nan")), "top_p"),
    ("Hi", SamplingParams(stop=5), "stop"), ("Hi", SamplingParams(stop=b"x"), "stop"), (b"a", GREEDY, "prompt"),
    ("Hi", SamplingParams(seed="x"), "seed"), ("Hi", SamplingParams(stop_token_ids=1.5), "stop_token_ids"),
    ("Hi", {"max_tokens": 3}, "sampling_params is dict"), ("Hi", 5, "sampling_params is int"), (5, GREEDY, "prompt"),
    ("Hi", [{"max_tokens": 3}], "sampling_params is a list with dict"), ({"prompt": 5}, GREEDY, "prompt"),
    ({"prompt_token_ids": b"a"}, GREEDY, "prompt"), ({"prompt": 5, "prompt_token_ids": [5]}, GREEDY, "prompt"),
    ("Hi", SamplingParams(stop=["a", 3]), "stop"), ("Hi", SamplingParams(logprobs=50), "logprobs"),
])  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(llm, prompt, params, named):
    with pytest.raises(InvalidRequest, match=named):
        llm.generate(prompt, params)


@pytest.mark.parametrize("messages", [
    None, 5, "Hi", {"role": "user"}, [{}], [[]], [5], [None], [{"role": "user", "content": 5}], [{"content": "Hi"}],
    [{"role": 5, "content": "Hi"}], [[{"role": "user", "content": b"x"}]],
], ids=repr)  # fmt: skip
def test_conversations_that_are_none(llm, messages):
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(messages, GREEDY)
    assert "messages" in str(caught.value) or "prompt" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [
    ("max_model_len", 1.5), ("max_num_seqs", "x"), ("tensor_parallel_size", "2"), ("model", 5), ("chat_template", 5),
    ("seed", "x"), ("tokenizer", 5), ("device", []), ("dtype", {}), ("served_model_name", 5),
    ("served_model_name", [5]), ("download_dir", b"x"), ("generation_config", False), ("max_logprobs", None),
])  # fmt: skip
def test_settings_of_another_type(smollm2_path, name, value):
    settings = {"model": str(smollm2_path), name: value}
    with pytest.raises(UsageError, match=f"^--{name.replace('_', '-')} ") as caught:
        LLM(**settings)
    assert caught.value.param == name


def test_settings_that_there_are_not(smollm2_path):
    with pytest.raises(UsageError, match="zork"):
        LLM(model=str(smollm2_path), zork=1)
    with pytest.raises(UsageError, match="max-model-len"):
        LLM(model=str(smollm2_path), max_model_len=1 << 30)
    with pytest.raises(ModelNotFound):
        LLM(model="/nowhere/at-all.gguf")


async def test_it_works_inside_a_running_loop(llm):
    assert llm.generate("Hi", GREEDY)[0].finished


def test_choices_of_vllms_parameters(llm):
    silent = replace(GREEDY, detokenize=False)
    (plain,), (mute,) = llm.generate(PROMPTS[0], GREEDY), llm.generate(PROMPTS[0], silent)
    assert (mute.outputs[0].text, mute.outputs[0].token_ids) == ("", plain.outputs[0].token_ids)
    with pytest.raises(InvalidRequest, match="stop is set with detokenize false"):
        llm.generate(PROMPTS[0], replace(silent, stop=("x",)))
    shape = SamplingParams(temperature=1, seed=RNG.randrange(1 << 30), max_tokens=5, logprobs=1, ignore_eos=True)
    every = llm.generate(PROMPTS[0], replace(shape, n=4))[0].outputs
    best = llm.generate(PROMPTS[0], replace(shape, n=2, best_of=4))[0].outputs
    wanted = sorted(every, key=lambda choice: -choice.cumulative_logprob)[:2]
    assert [choice.token_ids for choice in best] == [choice.token_ids for choice in wanted], f"OCTAVO_SEED={SEED}"
    cut = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, replace(GREEDY, truncate_prompt_tokens=3))[0]
    assert cut.prompt_token_ids == [6, 7, 8]
    listed = llm.generate(PROMPTS[0], replace(GREEDY, logprob_token_ids=(7, 9)))[0].outputs[0].logprobs[0]
    assert list(listed)[1:] == [7, 9] and [listed[7].rank, listed[9].rank] == [None, None]


async def _check_output_kinds(engine, expected: RequestOutput) -> None:
    async def outputs(kind: RequestOutputKind) -> list[RequestOutput]:
        params = replace(GREEDY, output_kind=kind, logprobs=0)
        return [output async for output in engine.generate(PROMPTS[0], params)]

    text = expected.outputs[0].text
    (only,) = await outputs(RequestOutputKind.FINAL_ONLY)
    assert (only.outputs[0].text, only.finished) == (text, True)
    deltas = [output.outputs[0] for output in await outputs(RequestOutputKind.DELTA)]
    assert len(deltas) > 3
    assert "".join(delta.text for delta in deltas) == text
    assert [t for delta in deltas for t in delta.token_ids] == expected.outputs[0].token_ids
    assert sum(len(delta.logprobs) for delta in deltas) == 12
    whole = [output.outputs[0].text for output in await outputs(RequestOutputKind.CUMULATIVE)]
    assert whole[-1] == text and all(text.startswith(part) for part in whole)


async def test_the_async_twin_says_the_same(llm, smollm2_path):
    expected = llm.generate(PROMPTS, GREEDY)
    engine = await AsyncLLM.create(EngineArgs(model=str(smollm2_path), **SMALL))
    try:

        async def last(prompt: str) -> RequestOutput:
            lengths, output = [], None
            async for output in engine.generate(prompt, GREEDY, request_id=f"id {prompt}"):
                lengths.append(len(output.outputs[0].token_ids))
            assert lengths == sorted(lengths)
            return output

        outputs = await asyncio.gather(*(last(prompt) for prompt in PROMPTS))
        assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in expected]
        assert [o.request_id for o in outputs] == [f"id {p}" for p in PROMPTS]
        await _check_output_kinds(engine, expected[0])
        long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        stream = engine.generate("Hi", long, request_id="long")
        await anext(stream)
        await engine.abort("long")
        output = [one async for one in stream][-1]
        assert output.outputs[0].finish_reason == "abort"
        assert len(output.outputs[0].token_ids) < 400
        await engine.check_health()
        assert engine.stats.blocks_used == 0
    finally:
        await engine.shutdown()
        await engine.shutdown()


SCRIPT = """
from octavo import LLM, SamplingParams
llm = LLM(model={model!r}, max_model_len=512, threads=1)
params = SamplingParams(temperature=0, max_tokens={tokens}, ignore_eos=True)
print("ready", flush=True)
try:
    llm.generate(["Hi"] * 8, params)
    print("done", flush=True)
except KeyboardInterrupt:
    print("interrupted", len(llm.generate("Hi", SamplingParams(max_tokens=3))), flush=True)
{end}
"""
ENDS = {"falls off": "", "exits": "raise SystemExit(3)", "raises": "raise ValueError('mine')", "deletes": "del llm",
        "closes": "llm.close()"}  # fmt: skip


def script(model: object, tokens: int, end: str) -> subprocess.Popen[bytes]:
    code = SCRIPT.format(model=str(model), tokens=tokens, end=end)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)


@pytest.mark.parametrize("how", [RNG.choice(list(ENDS))])
def test_a_script_without_a_guard_leaves_nothing_behind(smollm2_path, how):
    process = script(smollm2_path, 4, ENDS[how])
    assert process.stdout.readline() == b"ready\n"
    (engine,) = psutil.Process(process.pid).children()
    out, err = process.communicate(timeout=60)
    assert out == b"done\n", err
    assert process.returncode == {"exits": 3, "raises": 1}.get(how, 0), err
    assert (b"Traceback" in err) == (how == "raises"), err
    wait_until(lambda: not engine.is_running(), 5, "the engine has ended")


def test_ctrl_c_ends_the_answer_and_not_the_engine(smollm2_path):
    process = script(smollm2_path, 450, "")
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == b"interrupted 1\n", err
    assert process.returncode == 0
    assert b"Traceback" not in err


FORK = """
import os, sys
from octavo import LLM, SamplingParams
from octavo.errors import UsageError
llm = LLM(model={model!r}, max_model_len=512, threads=1)
params = SamplingParams(temperature=0, max_tokens=4)
child = os.fork()
if child == 0:
    for use in (lambda: llm.generate("Hi", params), lambda: llm.chat([{{"role": "user", "content": "Hi"}}], params)):
        try:
            use()
        except UsageError as err:
            print(err, flush=True)
    {end}
print(os.waitpid(child, 0)[1], len(llm.generate("Hi", params)), flush=True)
"""


@pytest.mark.parametrize("end", [RNG.choice(["os._exit(0)", "sys.exit(0)", "llm.close(); sys.exit(0)"])])
def test_a_forked_child_is_told_and_its_parent_goes_on(smollm2_path, end):
    code = FORK.format(model=str(smollm2_path), end=end)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    quiet = (sys.executable, "-W", "ignore::DeprecationWarning")  # Python 3.12 warns of any fork beside threads
    done = subprocess.run([*quiet, "-c", code], capture_output=True, env=env, text=True, timeout=60)
    *told, parent = done.stdout.splitlines()
    assert len(told) == 2, (end, done)
    assert all("this is a fork of it" in line for line in told), (end, done)
    assert (parent, done.returncode, done.stderr) == ("0 1", 0, ""), end


def test_lora_requests_choose_adapters(smollm2_path, tmp_path):
    one, two = (
        LoRARequest(name, number, str(write_adapter(tmp_path / name, smollm2_path, number, rank=8, strength=1.0)))
        for number, name in enumerate(("one", "two"), 1)
    )
    with LLM(model=str(smollm2_path), enable_lora=True, **SMALL) as llm:
        asked = [None, one, two, one]
        outputs = llm.generate([PROMPTS[0]] * 4, GREEDY, lora_request=asked)
        texts = [output.outputs[0].text for output in outputs]
        assert texts[1] == texts[3] and len(set(texts)) == 3
        assert [llm.generate(PROMPTS[0], GREEDY, lora_request=each)[0].outputs[0].text for each in asked] == texts
        hello = [{"role": "user", "content": "Hello!"}]
        assert (
            llm.chat(hello, GREEDY, lora_request=two)[0].outputs[0].text != llm.chat(hello, GREEDY)[0].outputs[0].text
        )
        with pytest.raises(InvalidRequest, match="4 prompts and 1 lora_requests"):
            llm.generate([PROMPTS[0]] * 4, GREEDY, lora_request=[one])
        with pytest.raises(InvalidRequest, match="'one' has already been loaded"):
            llm.generate(PROMPTS[0], GREEDY, lora_request=LoRARequest("one", 1, two.lora_path))
        with pytest.raises(ModelNotFound, match="no such folder"):
            llm.generate(PROMPTS[0], GREEDY, lora_request=LoRARequest("three", 3, str(tmp_path / "three")))
        llm.remove_lora("one")
        with pytest.raises(ModelNotFound, match="'one' cannot be found"):
            llm.remove_lora("one")


@pytest.mark.parametrize("given", [("a", 0, "x"), (3, 1, "x"), ("a", "1", "x"), ("a", 1, None)])
def test_a_lora_request_is_of_the_right_types(given):
    with pytest.raises(InvalidRequest, match=r"lora_(name|int_id|path) is "):
        LoRARequest(*given)
