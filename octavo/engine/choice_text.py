"""One choice's token events as text: detokenization and stop strings, which the engine knows nothing of."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.outputs import ChoiceDelta
from octavo.engine.types import SamplingParams, TokenEvent
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer


class ChoiceText:
    """Turns each event into the delta that callers see. `open` until a delta with a `finish_reason` was given."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, stop=params.stop,
            include_stop=params.include_stop_str_in_output, prompt_token_ids=prompt_token_ids,
            stop_after=params.min_tokens,
        )  # fmt: skip
        self._with_text = params.detokenize
        self._shows_stop_token = params.include_stop_str_in_output
        self.open = True

    def take(self, event: TokenEvent) -> ChoiceDelta:
        """A stop string that is found ends the choice here, whatever the engine goes on to say."""
        ids = event.token_ids
        hidden = 1 if event.finish_reason == "stop" and not self._shows_stop_token and ids else 0
        text = self._detokenizer.push(ids[: len(ids) - hidden]) if self._with_text else ""
        delta = ChoiceDelta(
            event.choice, text, ids, event.logprobs, event.finish_reason, event.stop_reason, event.prompt_logprobs,
            event.cached_tokens,
        )  # fmt: skip
        if self._detokenizer.stopped is not None:
            used = self._detokenizer.used
            delta.token_ids, delta.logprobs = ids[:used], event.logprobs and event.logprobs[:used]
            delta.finish_reason, delta.stop_reason = "stop", self._detokenizer.stopped
        elif event.finish_reason is not None:
            delta.text += self._detokenizer.flush()
        self.open = delta.finish_reason is None
        return delta
