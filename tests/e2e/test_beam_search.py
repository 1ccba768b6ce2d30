"""Beam search over HTTP, against one that asks for every beam's next token by itself: the same bits."""

from __future__ import annotations

import random

import pytest

from tests.matrix import SEED

RNG = random.Random(f"{SEED}/beam-search")
EOS = 2


def likeliest(server, prompt: list[int], count: int) -> list[tuple[int, float]]:
    """The `count` likeliest next tokens and their logprobs."""
    asked = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": count, "ignore_eos": True}
    status, answer = server.post("/v1/completions", {**asked, "return_tokens_as_token_ids": True})
    assert status == 200, answer
    (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    return [(int(token.removeprefix("token_id:")), logprob) for token, logprob in top.items()][:count]


def searched(server, prompt: list[int], width: int, most: int, penalty: float) -> list[tuple[list[int], float]]:
    """[(tokens, cumulative logprob)] of the `width` best, the best first."""

    def score(beam):
        tokens, logprob = beam
        return logprob / (len(prompt) + len(tokens) - (tokens[-1] == EOS)) ** penalty

    beams, ended = [([], 0.0)], []
    for _ in range(most):
        longer = []
        for tokens, logprob in beams:
            for token, more in likeliest(server, prompt + tokens, 2 * width):
                (ended if token == EOS else longer).append(([*tokens, token], logprob + more))
        beams = sorted(longer, key=score, reverse=True)[:width]
    return sorted(ended + beams, key=score, reverse=True)[:width]


@pytest.mark.parametrize("penalty", [1.0, 0.0])
def test_the_answer_is_that_of_a_search_by_hand(server, penalty):
    prompt, width, most = [RNG.randrange(1000, 40_000) for _ in range(RNG.randint(5, 60))], 3, 5
    body = {"prompt": prompt, "n": 2, "best_of": width, "use_beam_search": True, "max_tokens": most, "logprobs": 1,
            "length_penalty": penalty, "return_token_ids": True, "temperature": 0.7}  # fmt: skip
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    got = [(c["token_ids"], sum(c["logprobs"]["token_logprobs"])) for c in answer["choices"]]
    assert got == searched(server, prompt, width, most, penalty)[:2], f"OCTAVO_SEED={SEED}"
    assert answer["usage"]["completion_tokens"] == sum(len(tokens) for tokens, _ in got)


def test_a_conversation_is_searched_too(client):
    ask = {"model": "smollm2", "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8}
    answer = client.chat.completions.create(**ask, n=3, extra_body={"use_beam_search": True})
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3, texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_what_it_does_not_look_at_is_a_400(server):
    plain = {"prompt": "Hi", "use_beam_search": True, "n": 2}
    for wrong in ({"stream": True}, {"stop": ["x"]}, {"repetition_penalty": 1.2}, {"logit_bias": {"5": 1}},
                  {"min_tokens": 3}, {"guided_regex": "a+"}):  # fmt: skip
        status, answer = server.post("/v1/completions", plain | wrong)
        assert status == 400, (wrong, answer)
        assert "use_beam_search" in answer["error"]["message"]
    status, answer = server.post("/v1/completions", plain | {"echo": True, "logprobs": 1})
    assert (status, answer["error"]["param"]) == (400, "echo"), answer
    chat = {"messages": [{"role": "user", "content": "Hi"}], "use_beam_search": True, "n": 2}
    for name, value in (("guided_choice", ["yes"]), ("response_format", {"type": "json_object"}),
                        ("presence_penalty", 1), ("structured_outputs", {"regex": "a"})):  # fmt: skip
        status, answer = server.post("/v1/chat/completions", {**chat, name: value})
        assert status == 400 and answer["error"]["param"] == name
        assert answer["error"]["message"] == f"{name} does not go with use_beam_search; fix: leave it out"
