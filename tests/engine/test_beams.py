"""Beam search on real tiny models, against a search over transformers' full logits."""

from __future__ import annotations

import pytest

from octavo.config import Speculation
from tests.engine.tiny import VOCAB, LocalEngine, request, true_logits
from tests.matrix import SEED


def searched(folder, prompt: list[int], width: int, most: int, eos: int) -> list[list[int]]:
    """Tokens of the `width` best, from the logits of every token after every beam."""

    def score(beam):
        tokens, logprob = beam
        return logprob / (len(prompt) + len(tokens) - (tokens[-1] == eos))

    beams, ended = [([], 0.0)], []
    for _ in range(most):
        longer = []
        for tokens, logprob in beams:
            scores = true_logits(folder, prompt + tokens)[-1].log_softmax(-1)
            every = [([*tokens, token], logprob + more) for token, more in enumerate(scores.tolist())]
            best = sorted(every, key=lambda beam: beam[1], reverse=True)[: 2 * width]
            ended += [beam for beam in best if beam[0][-1] == eos]
            longer += [beam for beam in best if beam[0][-1] != eos]
        beams = sorted(longer, key=score, reverse=True)[:width]
    return [tokens for tokens, _ in sorted(ended + beams, key=score, reverse=True)[:width]]


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_the_answer_is_that_of_a_search_over_full_logits(model, tight, request_of, rng):
    folder = request_of(model)
    prompt, width, page_size = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 20))], 4, rng.choice([1, 3, 4])
    room = {"blocks": -(-26 // page_size) + 2, "seqs": 3, "host_slots": rng.choice([0, 100])} if tight else {}
    engine = LocalEngine(folder, page_size=page_size, enable_prefix_caching=rng.random() < 0.5, **room)
    asked = request("r", prompt, count=6, n=width, use_beam_search=True, ignore_eos=False)
    choices = engine.run(asked)["r"]
    assert [events[0].token_ids for events in choices] == searched(folder, prompt, width, 6, eos=2), f"{SEED=}"
    assert not tight or engine.scheduler.stats.preemptions > 0


@pytest.fixture
def request_of(request):
    """A model's folder by its fixture's name."""
    return request.getfixturevalue


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_beams_are_not_guessed_ahead_of(method, llama, rng):
    settings = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        settings["model"] = str(llama)
    engine = LocalEngine(llama, speculation=Speculation(**settings))
    prompt = 6 * [rng.randrange(3, VOCAB), 9]
    asked = request("r", prompt, count=8, n=3, use_beam_search=True), request("s", prompt, count=8)
    answers, plain = engine.run(*asked), LocalEngine(llama).run(*asked)
    for name in ("r", "s"):
        tokens, wanted = ([[t for e in c for t in e.token_ids] for c in found[name]] for found in (answers, plain))
        assert tokens == wanted, f"{SEED=}"
