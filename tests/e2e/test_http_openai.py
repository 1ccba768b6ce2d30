"""The OpenAI client against the default model, with every answer validated strictly."""

from __future__ import annotations

import json
import random
from typing import Any

import openai
import pytest
from openai.types import Completion

from tests.e2e.server_process import events
from tests.matrix import SEED, sample

MODEL = "smollm2"
QUESTIONS = ("What is gravity?", "Name three colours.", "Write a haiku about pages.", "What is 2 + 2? Explain.",
             "你好，请介绍一下自己。", "Reply with an emoji 😀 and a word.")  # fmt: skip
RNG = random.Random(f"{SEED}/openai")
NOTE = f"OCTAVO_SEED={SEED}"


@pytest.fixture
def messages() -> list[dict[str, str]]:
    return [{"role": "user", "content": RNG.choice(QUESTIONS)}]


def chat(client, messages, **more: Any):
    return client.chat.completions.create(model=MODEL, messages=messages, **{"temperature": 0, "max_tokens": 24} | more)


def complete(client, prompt: Any, **more: Any):
    return client.completions.create(model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 24} | more)


def test_models_lists_the_served_name(client):
    (card,) = client.models.list().data
    assert (card.id, card.owned_by, card.max_model_len) == (MODEL, "octavo", 2048)
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_stream_says_what_the_whole_answer_says(client, messages):
    whole = chat(client, messages)
    chunks = list(chat(client, messages, stream=True, stream_options={"include_usage": True}))
    first, *middle, last, tail = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert first.choices[0].finish_reason is None
    assert "".join(c.choices[0].delta.content or "" for c in [*middle, last]) == whole.choices[0].message.content, NOTE
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(c.usage is None for c in [first, *middle, last])
    assert (tail.choices, tail.usage) == ([], whole.usage)
    assert whole.usage.completion_tokens <= 24
    assert {c.id for c in chunks} == {first.id}
    assert first.id.startswith("chatcmpl-")


def test_a_completion_stream_says_what_the_whole_answer_says(server, client, messages):
    """Chunks carry a null finish_reason, as OpenAI's own do, which OpenAI's type for them does not allow."""
    prompt = messages[0]["content"]
    whole = complete(client, prompt)
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 24, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # fmt: skip
    *parts, tail, done = list(events(server.call("POST", "/v1/completions", body)[2]))
    assert done == "[DONE]"
    assert all("usage" in part for part in parts)
    for part in [*parts, tail]:
        for choice in part["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(part, strict=True)
    assert "".join(p["choices"][0]["text"] for p in parts) == whole.choices[0].text, NOTE
    assert tail["usage"]["completion_tokens"] == whole.usage.completion_tokens
    lenient = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with lenient, complete(lenient, prompt, stream=True) as stream:
        assert "".join(c.choices[0].text for c in stream) == whole.choices[0].text, NOTE


def test_chat_logprobs(client, messages):
    answer = chat(client, messages, logprobs=True, top_logprobs=3, max_tokens=12)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    shown = b"".join(bytes(t.bytes) for t in content).decode("utf-8", "ignore")
    assert shown.startswith(answer.choices[0].message.content.rstrip("\ufffd")), NOTE
    for token in content:
        best = [top.logprob for top in token.top_logprobs]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert token.logprob == best[0] <= 0, "greedy takes the best"
    streamed = list(chat(client, messages, logprobs=True, top_logprobs=3, max_tokens=12, stream=True))
    parts = [t for c in streamed for choice in c.choices if choice.logprobs for t in choice.logprobs.content]
    assert [t.token for t in parts] == [t.token for t in content], NOTE


def test_completion_logprobs_and_echo(client, server):
    prompt = RNG.choice(QUESTIONS)
    ids = server.post("/tokenize", {"prompt": prompt})[1]["tokens"]
    on = {"ignore_eos": True}
    plain = complete(client, prompt, logprobs=2, max_tokens=6, extra_body=on).choices[0]
    assert len(plain.logprobs.tokens) == 6
    assert plain.logprobs.text_offset[0] == 0
    with pytest.raises(openai.APIResponseValidationError):
        complete(
            client, prompt, logprobs=2, max_tokens=6, echo=True, extra_body=on
        )  # the first logprob is null, as in vLLM
    body = {"prompt": prompt, "temperature": 0, "logprobs": 2, "max_tokens": 6, "echo": True} | on
    status, answer = server.post("/v1/completions", body)
    echoed = answer["choices"][0]
    assert status == 200
    assert echoed["text"] == prompt + plain.text
    assert echoed["logprobs"]["token_logprobs"][0] is None
    assert echoed["logprobs"]["top_logprobs"][0] is None
    assert len(echoed["logprobs"]["tokens"]) == len(ids) + 6
    assert echoed["logprobs"]["tokens"][len(ids) :] == plain.logprobs.tokens
    status, only = server.post("/v1/completions", body | {"max_tokens": 0})
    assert only["choices"][0]["text"] == prompt
    assert only["choices"][0]["logprobs"]["token_logprobs"] == echoed["logprobs"]["token_logprobs"][: len(ids)]
    assert only["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(client, include):
    question = [{"role": "user", "content": "What is gravity?"}]
    text = chat(client, question).choices[0].message.content
    start = RNG.randrange(5, len(text) - 8)
    stop = text[start : start + RNG.randint(1, 6)]
    at = text.index(stop)
    expected = text[: at + len(stop) if include else at]
    more = {"stop": ["never this", stop], "extra_body": {"include_stop_str_in_output": include}}
    answer = chat(client, question, **more)
    assert answer.choices[0].message.content == expected, f"{stop!r} {NOTE}"
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", stop)
    chunks = list(chat(client, question, stream=True, **more))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected, f"{stop!r} {NOTE}"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_stop_token_ids_and_ignore_eos(client, server):
    whole = server.post("/v1/completions", {"prompt": "One two three", "temperature": 0, "return_token_ids": True})[1]
    ids = whole["choices"][0]["token_ids"]
    token = ids[5]
    first = ids.index(token)
    body = {"prompt": "One two three", "temperature": 0, "return_token_ids": True, "stop_token_ids": [token]}
    choice = server.post("/v1/completions", body)[1]["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    assert choice["token_ids"] == ids[: first + 1]
    long = complete(client, "<|im_end|>", max_tokens=40, extra_body={"ignore_eos": True})
    assert (long.usage.completion_tokens, long.choices[0].finish_reason) == (40, "length")


def test_n_choices_differ_and_a_seed_repeats_them(client, messages):
    seed = RNG.randrange(1 << 40)
    first, again = (chat(client, messages, n=3, seed=seed, temperature=1.2) for _ in range(2))
    texts = [c.message.content for c in first.choices]
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1, NOTE
    assert texts == [c.message.content for c in again.choices], f"seed {seed} {NOTE}"
    streamed = {0: "", 1: "", 2: ""}
    for chunk in chat(client, messages, n=3, seed=seed, temperature=1.2, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == texts, f"seed {seed} {NOTE}"


def test_several_prompts_in_one_request(client, server):
    prompts = RNG.sample(QUESTIONS, 3)
    ids = [server.post("/tokenize", {"prompt": p})[1]["tokens"] for p in prompts]
    alone = [complete(client, p, max_tokens=8).choices[0].text for p in prompts]
    together = complete(client, prompts, max_tokens=8)
    assert [c.text for c in together.choices] == alone, NOTE
    assert together.usage.prompt_tokens == sum(map(len, ids))
    assert [c.text for c in complete(client, ids, max_tokens=8).choices] == alone, NOTE
    seeded = complete(client, prompts, max_tokens=8, n=2, seed=5, temperature=1)
    assert [c.index for c in seeded.choices] == list(range(6))


def test_prompt_logprobs(server):
    body = {"prompt": "The sky is blue", "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}
    choice = server.post("/v1/completions", body)[1]["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert all(2 <= len(position) <= 3 for position in others)
    assert all(entry["logprob"] <= 0 and entry["rank"] >= 1 for p in others for entry in p.values())


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"prompt": "Hi"}
BAD = [
    ("temperature", -1, "0 to 100"), ("temperature", "hot", "number"), ("top_p", 0, "above 0"), ("top_p", 1.5, "1"),
    ("top_k", -2, "0 to"), ("min_p", 2, "0 to 1"), ("presence_penalty", 3, "-2 to 2"), ("n", 129, "1 to 128"),
    ("frequency_penalty", -3, "-2 to 2"), ("repetition_penalty", 0, "above 0"), ("n", 0, "1 to 128"),
    ("max_tokens", -1, "1"), ("max_tokens", 3000, "2048"), ("stop", [""], "empty"), ("seed", 1 << 70, "to"),
    ("stop", ["a"] * 65, "limit: 64"), ("stop_token_ids", [1 << 20], "0 to 49151"), ("tools", [], "tools"),
    ("response_format", {"type": "xml"}, "response_format"), ("use_beam_search", "yes", "boolean"),
    ("length_penalty", 2, "use_beam_search"), ("length_penalty", -11, "-10"),
    ("stream_options", {"include_usage": True}, "stream"), ("model", 3, "string"), ("guided_json", 5, "guided_json"),
    ("prompt_logprobs", 21, "0 to 20"), ("prompt_logprobs", -1, "0 to 20"), ("best_of", 129, "1 to 128"),
    ("best_of", 0, "1 to 128"), ("logit_bias", {"5": 101}, "-100 to 100"), ("logit_bias", {"49152": 1}, "49151"),
    ("logit_bias", {"a": 1}, "int"), ("logit_bias", {str(i): 1 for i in range(1025)}, "1024"),
    ("allowed_token_ids", [], "1 to 49152"), ("allowed_token_ids", [-1], "0 to 49151"), ("min_tokens", -1, "0 to"),
    ("min_tokens", 4000, "0 to"), ("bad_words", [""], "empty"), ("bad_words", ["a"] * 129, "128"),
    ("bad_words", ["a" * 5000], "4096"), ("bad_words", ["x y " * 1000], "1024"), ("bad_words", [3], "string"),
    ("stop_token_ids", [1] * 129, "128"), ("thinking_token_budget", 5, "<think>"),
    ("thinking_token_budget", -2, "0 to"),
    ("repetition_detection", {"max_pattern_size": 2000}, "0 to 1024"),
    ("repetition_detection", {"max_pattern_size": 5, "min_count": 1}, "2 to"),
    ("repetition_detection", {"max_pattern_size": 5, "min_pattern_size": 6, "min_count": 2}, "0 to 5"),
    ("repetition_detection", {"zork": 5}, "not permitted"), ("stream_interval", 0, "1 to"),
    ("priority", 1 << 63, "less"),
    ("truncate_prompt_tokens", 0, "1 to"), ("truncate_prompt_tokens", -2, "1 to"), ("truncation_side", "up", "left"),
    ("truncate_prompt_tokens", 3000, "1 to 2048"), ("logprob_token_ids", [5], "logprobs"), ("priority", 1, "policy"),
]  # fmt: skip
BAD_ONE = [
    ("/v1/chat/completions", CHAT | {"messages": []}, "messages", "at least 1"),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ("/v1/chat/completions", CHAT | {"max_completion_tokens": 0}, "max_completion_tokens", "1"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "long " * 2100}]}, "messages", "2048"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "image_url"),
    ("/v1/chat/completions", {"prompt": "Hi"}, "messages", "missing"),
    ("/v1/completions", COMPLETION | {"logprobs": 21}, "logprobs", "0 to 20"),
    ("/v1/completions", COMPLETION | {"suffix": "x"}, "suffix", "suffix"),
    ("/v1/completions", COMPLETION | {"logprobs": 1, "logprob_token_ids": []}, "logprob_token_ids", "1 to 128"),
    ("/v1/completions", COMPLETION | {"logprobs": 1, "logprob_token_ids": [1] * 129}, "logprob_token_ids", "1 to 128"),
    ("/v1/completions", COMPLETION | {"logprobs": 1, "logprob_token_ids": [49152]}, "logprob_token_ids", "49151"),
    ("/v1/completions", COMPLETION | {"logprobs": 1, "logprob_token_ids": [1], "echo": True}, "logprob_token_ids",
     "one of the two"),
    ("/v1/completions", COMPLETION | {"stream": True, "best_of": 2}, "best_of", "only without stream"),
    ("/v1/completions", COMPLETION | {"n": 3, "best_of": 2}, "best_of", "3 to 128"),
    ("/v1/completions", COMPLETION | {"best_of": 2, "temperature": 0}, "best_of", "greedy"),
    ("/v1/completions", {"prompt": ""}, "prompt", "at least 1"),
    ("/v1/completions", {"prompt": []}, "prompt", "at least 1"),
    ("/v1/completions", {"prompt": [49152]}, "prompt", "0 to 49151"),
    ("/v1/completions", {"prompt": [-1]}, "prompt", "0 to 49151"),
    ("/v1/completions", {"prompt": [5] * 2048}, "prompt", "2048"),
    ("/v1/completions", COMPLETION | {"max_tokens": 0}, "max_tokens", "at least 1"),
    ("/v1/completions", COMPLETION | {"temperature": 0, "n": 2}, "n", "n=1"),
    ("/v1/completions", COMPLETION | {"echo": "yes"}, "echo", "boolean"),
]  # fmt: skip
EVERY_BAD = [
    (path, base | {name: value}, name, limit)
    for path, base in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION))
    for name, value, limit in BAD
    if (name, path) != ("tools", "/v1/completions")
] + BAD_ONE


@pytest.mark.parametrize(("path", "body", "param", "limit"), sample(EVERY_BAD, 40),
                         ids=lambda v: json.dumps(v)[:60] if isinstance(v, dict) else "")  # fmt: skip
def test_bad_requests_name_parameter_and_limit(server, path, body, param, limit):
    status, answer = server.post(path, body)
    error = answer["error"]
    assert (status, error["code"], error["type"]) == (400, 400, "BadRequestError"), answer
    assert param is None or error["param"] == param, answer
    assert limit in error["message"], answer
    assert "\n" not in error["message"]


def test_typed_client_errors(client, messages):
    with pytest.raises(openai.NotFoundError, match=r"The model `x` does not exist\. Served: smollm2") as missing:
        client.chat.completions.create(model="x", messages=messages)
    assert (missing.value.param, missing.value.code) == ("model", "404")
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat(client, messages, tools=[{"type": "function", "function": {"name": "f"}}])


def test_unknown_fields_are_ignored_logged_once_and_counted(server):
    name = f"zork_{RNG.randrange(1 << 30)}"
    for _ in range(3):
        assert server.post("/v1/completions", COMPLETION | {"max_tokens": 1, name: 1})[0] == 200
    assert server.log.read_text().count(name) == 1
    assert f'octavo:unknown_request_fields_total{{field="{name}"}} 3.0' in server.call("GET", "/metrics")[2].decode()


def test_tokenize_and_detokenize(server):
    text = " ".join(RNG.choice(["naïve", "日本語", "x=1;", "\n\n", "😀", "the", "Page"]) for _ in range(20))
    status, answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert server.post("/detokenize", {"tokens": answer["tokens"]})[1]["prompt"] == text, NOTE
    assert server.post("/detokenize", {"tokens": [5, 49152]})[0] == 400
    as_chat = server.post("/tokenize", CHAT)[1]
    used = server.post("/v1/chat/completions", CHAT | {"max_tokens": 1})[1]["usage"]
    assert as_chat["count"] == used["prompt_tokens"]
