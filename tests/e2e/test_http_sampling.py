"""vLLM's sampling parameters over HTTP, through the OpenAI client where its types allow, with the default model."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.server_process import ServerProcess, events
from tests.matrix import SEED

RNG = random.Random(f"{SEED}/sampling")
NOTE = f"OCTAVO_SEED={SEED}"
VOCAB, EOS = 49152, 2
PROMPTS = ("The three primary colours are", "Once upon a time there was", "def add(a, b):", "In the year 2021,")


@pytest.fixture(scope="module")
def free(tmp_path_factory, smollm2_path) -> Iterator[ServerProcess]:
    """Allows what the default server does not: all logprobs, and priorities. Its loop may be either one."""
    log = tmp_path_factory.mktemp("sampling") / "log"
    loop = RNG.choice(["--async-scheduling", "--no-async-scheduling"])
    flags = [loop, "--max-logprobs", "-1", "--scheduling-policy", "priority", "--max-model-len", "512"]
    with ServerProcess(log, str(smollm2_path), "--served-model-name", "smollm2", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def openai_client(free) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{free.url}/v1", api_key="none", max_retries=0, timeout=120,
                       _strict_response_validation=True) as made:  # fmt: skip
        yield made


@pytest.fixture
def prompt() -> str:
    return RNG.choice(PROMPTS)


def complete(free, prompt, **more):
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    status, answer = free.post("/v1/completions", body | more)
    assert status == 200, answer
    return answer["choices"][0]


def test_a_bias_decides(free, openai_client, prompt):
    token = RNG.randrange(100, 40000)
    made = openai_client.completions.create(
        model="smollm2",
        prompt=prompt,
        max_tokens=5,
        logit_bias={str(token): 100},
        extra_body={"return_token_ids": True},
    )
    assert made.choices[0].model_extra["token_ids"] == [token] * 5, f"{token} {NOTE}"
    plain = complete(free, prompt, logprobs=2, max_tokens=1)
    best = plain["token_ids"][0]
    second = complete(free, prompt, max_tokens=1, logit_bias={str(best): -100}, logprobs=2)
    assert second["token_ids"] != [best]
    assert list(second["logprobs"]["top_logprobs"][0].items())[:1] != list(plain["logprobs"]["top_logprobs"][0])[:1]
    assert set(plain["logprobs"]["top_logprobs"][0]) <= set(second["logprobs"]["top_logprobs"][0]), "logprobs are raw"


def test_only_allowed_tokens_come(free, prompt):
    allowed = RNG.sample(range(VOCAB), RNG.choice([1, 40, 3000]))
    found = complete(free, prompt, temperature=1.5, allowed_token_ids=allowed)["token_ids"]
    assert set(found) <= set(allowed), NOTE


def test_bad_words_do_not_come(free, prompt):
    plain = complete(free, prompt, max_tokens=16)
    words = [word for word in plain["text"].split() if word.isalpha()]
    word = RNG.choice(words)
    banned = complete(free, prompt, max_tokens=16, bad_words=[word])
    spelled = {tuple(free.post("/tokenize", {"prompt": text})[1]["tokens"]) for text in (word, f" {word}")}
    ids = banned["token_ids"]
    for word_ids in spelled:
        windows = {tuple(ids[i : i + len(word_ids)]) for i in range(len(ids))}
        assert word_ids not in windows, f"{word} in {banned['text']!r} {NOTE}"
    assert ids != plain["token_ids"]


def test_nothing_ends_an_answer_before_min_tokens(free, prompt):
    first = complete(free, prompt, max_tokens=4)["token_ids"]
    stopped = complete(free, prompt, stop_token_ids=first, max_tokens=20)
    assert len(stopped["token_ids"]) == 1
    later = complete(free, prompt, stop_token_ids=first, max_tokens=20, min_tokens=6)
    assert len(later["token_ids"]) >= 6
    assert not set(later["token_ids"][:6]) & set(first)
    at_space = complete(free, prompt, stop=[" "], max_tokens=40, min_tokens=9)
    assert len(at_space["token_ids"]) > 9, "a stop string is not looked at before, either"
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "min_tokens": 8, "return_token_ids": True,
            "logit_bias": {str(EOS): 100}}  # fmt: skip
    assert EOS not in free.post("/v1/completions", body)[1]["choices"][0]["token_ids"]


def test_logprobs_of_listed_tokens_and_of_all(free, prompt):
    listed = RNG.sample(range(VOCAB), 5)
    named = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    few = complete(free, prompt, logprobs=1, logprob_token_ids=listed, **named)
    whole = complete(free, prompt, logprobs=-1, **named)
    assert few["token_ids"] == whole["token_ids"]
    for mine, every, token in zip(few["logprobs"]["top_logprobs"], whole["logprobs"]["top_logprobs"],
                                  few["token_ids"], strict=True):  # fmt: skip
        assert len(every) == VOCAB
        assert abs(math.fsum(map(math.exp, every.values())) - 1) < 1e-3
        assert set(mine) == {f"token_id:{t}" for t in [token, *listed]}
        assert all(every[name] == value for name, value in mine.items()), NOTE
        ordered = list(every.values())[1:]
        assert ordered == sorted(ordered, reverse=True)


def test_listed_tokens_in_a_chat(free):
    listed = RNG.sample(range(VOCAB), 3)
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "logprob_token_ids": listed,
            "max_tokens": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}  # fmt: skip
    choice = free.post("/v1/chat/completions", body)[1]["choices"][0]
    for entry, token in zip(choice["logprobs"]["content"], choice["token_ids"], strict=True):
        names = [top["token"] for top in entry["top_logprobs"]]
        assert names == [f"token_id:{t}" for t in dict.fromkeys([token, *listed])]
        assert entry["token"] == names[0] and entry["logprob"] == entry["top_logprobs"][0]["logprob"]


def test_prompt_logprobs_of_the_whole_vocabulary(free):
    ids = [RNG.randrange(100, VOCAB) for _ in range(3)]
    found = complete(free, ids, prompt_logprobs=-1, max_tokens=1)["prompt_logprobs"]
    assert found[0] is None
    for position, token in zip(found[1:], ids[1:], strict=True):
        assert len(position) == VOCAB
        ranks = sorted(position.items(), key=lambda entry: -entry[1]["logprob"])
        assert position[str(token)]["rank"] <= 1 + [name for name, _ in ranks].index(str(token)), NOTE


def repetitions(free) -> float:
    text = free.call("GET", "/metrics")[2].decode()
    (line,) = [line for line in text.splitlines() if 'finished_reason="repetition"' in line and "_total{" in line]
    return float(line.split()[-1])


def test_a_repetition_ends_the_answer(free, prompt):
    before = repetitions(free)
    token, count = RNG.randrange(100, 40000), RNG.randint(2, 6)
    detection = {"max_pattern_size": RNG.randint(1, 4), "min_count": count}
    choice = complete(free, prompt, logit_bias={str(token): 100}, repetition_detection=detection)
    assert choice["token_ids"] == [token] * count
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert repetitions(free) == before + 1


def test_the_best_of_several(free, prompt):
    shape = {"temperature": 1.0, "seed": RNG.randrange(1 << 40), "logprobs": 0, "max_tokens": 6, "ignore_eos": True}
    body = {"prompt": prompt, "return_token_ids": True} | shape
    every = free.post("/v1/completions", body | {"n": 5})[1]["choices"]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in every]
    order = sorted(range(5), key=lambda i: -sums[i])[:2]
    best = free.post("/v1/completions", body | {"n": 2, "best_of": 5})[1]
    assert [choice["token_ids"] for choice in best["choices"]] == [every[i]["token_ids"] for i in order], NOTE
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    del body["logprobs"]
    silent = free.post("/v1/completions", body | {"n": 2, "best_of": 5})[1]["choices"]
    assert [(c["token_ids"], c["logprobs"]) for c in silent] == [(every[i]["token_ids"], None) for i in order]


def test_a_prompt_is_cut(free):
    text = " ".join(RNG.choice(PROMPTS) for _ in range(300))
    ids = free.post("/tokenize", {"prompt": text[:3000]})[1]["tokens"]
    keep, side = RNG.randint(1, 60), RNG.choice(["left", "right"])
    shape = {"truncate_prompt_tokens": keep, "truncation_side": side, "prompt": text[:3000], "max_tokens": 1}
    answer = free.post("/v1/completions", shape | {"return_token_ids": True, "echo": True})[1]
    kept = ids[-keep:] if side == "left" else ids[:keep]
    assert answer["choices"][0]["prompt_token_ids"] == kept, NOTE
    assert answer["usage"]["prompt_tokens"] == keep
    shown = free.post("/detokenize", {"tokens": kept})[1]["prompt"]
    assert answer["choices"][0]["text"].startswith(shown)
    whole = free.post("/v1/completions", {"prompt": text, "max_tokens": 12, "truncate_prompt_tokens": -1})[1]
    assert whole["usage"]["prompt_tokens"] == 500
    listed = free.post("/v1/completions", shape | {"prompt": [ids, ids[:5]]})[1]
    assert listed["usage"]["prompt_tokens"] == keep + min(5, keep)
    long_chat = {"messages": [{"role": "user", "content": "word " * 50_000}], "max_tokens": 2}
    cut = free.post("/v1/chat/completions", long_chat | {"truncate_prompt_tokens": 100})[1]
    assert cut["usage"]["prompt_tokens"] == 100
    assert free.post("/v1/chat/completions", long_chat)[0] == 400


def test_a_stream_in_larger_chunks(free, prompt):
    interval = RNG.randint(2, 7)
    body = {"prompt": prompt, "stream": True, "stream_interval": interval, "max_tokens": 24, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    chunks = [c for c in events(free.call("POST", "/v1/completions", body)[2]) if c != "[DONE]"]
    counts = [len(c["choices"][0]["token_ids"]) for c in chunks if c["choices"][0]["token_ids"]]
    assert (counts[0], sum(counts)) == (1, 24)
    assert all(count == interval for count in counts[1:-1]), f"{counts} {NOTE}"


def test_priority_and_session_are_taken(openai_client, prompt):
    made = openai_client.completions.create(
        model="smollm2", prompt=prompt, max_tokens=2, extra_body={"priority": RNG.randint(-5, 5), "session_id": "a/b"}
    )
    assert made.usage.completion_tokens == 2


def test_no_token_left_is_the_requests_fault(free):
    text = RNG.choice("JQUV47")  # twice, it is two tokens
    (token,) = free.post("/tokenize", {"prompt": text})[1]["tokens"]
    body = {"prompt": "Hi", "allowed_token_ids": [token, EOS], "min_tokens": 3, "max_tokens": 9}
    status, answer = free.post("/v1/completions", body | {"bad_words": [text]})
    assert status == 400
    assert "after 0 tokens of the answer every next token is excluded" in answer["error"]["message"]
    twice = body | {"bad_words": [text + text], "stream": True}  # so it shows after the first token
    status, _, raw = free.call("POST", "/v1/completions", twice)
    assert b"after 1 tokens of the answer every next token is excluded" in raw
    assert status == 400 or (status == 200 and raw.rstrip().endswith(b"data: [DONE]")), (
        "200 once the first token is out"
    )


def test_many_at_once_through_the_openai_client(openai_client):
    """In a chat, streamed and whole: the same tokens, all of them allowed."""
    allowed = [EOS, *RNG.sample(range(100, 40000), 30)]
    extra = {
        "allowed_token_ids": allowed, "bad_words": ["the"], "min_tokens": 9, "repetition_penalty": 1.3, "top_k": 20,
        "repetition_detection": {"max_pattern_size": 3, "min_count": 21}, "min_p": 0.001, "return_token_ids": True,
        "truncate_prompt_tokens": 30, "stream_interval": 4, "session_id": "s", "spaces_between_special_tokens": False,
    }  # fmt: skip
    asked = {"model": "smollm2", "messages": [{"role": "user", "content": "Tell me a story. " * 20}], "max_tokens": 20,
             "temperature": 1.0, "seed": RNG.randrange(1 << 30), "logit_bias": {str(allowed[1]): 3}}  # fmt: skip
    whole = openai_client.chat.completions.create(**asked, extra_body=extra)
    assert whole.usage.prompt_tokens == 30
    ids = whole.choices[0].model_extra["token_ids"]
    assert len(ids) >= 9 and set(ids) <= set(allowed) and EOS not in ids[:9], NOTE
    streamed = list(openai_client.chat.completions.create(**asked, stream=True, extra_body=extra))
    assert [t for c in streamed for t in c.choices[0].model_extra.get("token_ids", ())] == ids, NOTE
    text = "".join(c.choices[0].delta.content or "" for c in streamed)
    assert text == whole.choices[0].message.content
