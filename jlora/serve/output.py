"""One completion's text, token by token: characters, spacing and stop strings.

Three things make this more than `decode(token)`:

* A character may need several tokens. Tokens that are raw bytes go through an incremental UTF-8
  decoder: nothing shows until a character is complete, and only bytes that can never become
  one are shown as U+FFFD.
* A token's spacing depends on the one before it ("▁Hello" is "Hello" only at the start), so
  the others are decoded together with their predecessor, of which the text is then cut off.
  Both are constant work per token, and neither reads the whole output again.
* A stop string may end in the middle of a token and begin several tokens earlier. Text that
  may yet turn out to be one is held back until that is settled, and nothing more than that.

The texts of a completion put together are `decode` of all its tokens, up to the stop. They differ
only where a byte-fallback tokenizer's bytes are broken: `decode` gives up the whole run of byte
tokens then, also the good characters that were shown before.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection
from dataclasses import dataclass

from jlora.serve.tokenizer import Tokenizer
from jlora.types import FinishReason, SamplingParams, TokenEvent


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a completion.

    Attributes:
        text: what to show now; may be empty.
        stopped: a stop string matched while the engine still runs this completion, so the
            front must call `service.stop_completion`. True at most once.
        finish_reason: set on the completion's last event; the event's own, but "stop" if a stop
            string matched, also when that was in the last token that max_tokens allowed.
    """

    text: str
    stopped: bool = False
    finish_reason: FinishReason | None = None


class Detokenizer:
    """Turns token ids into text as they come; constant work per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._last: int | None = None  # the last token that was not silent

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        if self._tokenizer.is_silent(token_id):
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        last, self._last = self._last, token_id
        if last is None and (raw is None or raw.isascii()):
            return self._tokenizer.decode([token_id])  # only the decoder knows what it strips at the start
        if raw is not None:
            return self._utf8.decode(raw)
        known = [] if last is None else [last]
        return self.flush() + self._tokenizer.decode([*known, token_id])[len(self._tokenizer.decode(known)) :]

    def flush(self) -> str:
        """What an unfinished character leaves: U+FFFD, or nothing. More tokens may follow."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class StopFinder:
    """Finds the first of some strings in text that comes in pieces.

    First means: ends earliest; of those, the longest. So the result does not depend on where
    the pieces were cut. Holds back at most the longest string but one character.
    """

    def __init__(self, stops: Collection[str]) -> None:
        self._stops = tuple(stops)
        self._firsts = frozenset(s[0] for s in self._stops)
        self._held = ""

    def push(self, text: str, matching: bool = True) -> tuple[str, str | None]:
        """Adds text. Returns what can be shown, and the stop string that follows it, if any.

        With `matching` False whole stop strings are shown like any text, but the beginning of
        one is still held back: it may be completed when matching is on.
        """
        if not self._stops:
            return text, None
        text = self._held + text
        if matching:
            found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
            if found:
                end, start = min(found)
                self._held = ""
                return text[:start], text[start:end]
        keep = self._begins_at(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """The text held back, when nothing more will come."""
        held, self._held = self._held, ""
        return held

    def _begins_at(self, text: str) -> int:
        """Where the longest ending of `text` starts that is the beginning of a stop string."""
        longest = max(map(len, self._stops)) - 1
        for at in range(max(0, len(text) - longest), len(text)):
            if text[at] in self._firsts:
                tail = text[at:]
                if any(len(tail) < len(s) and s.startswith(tail) for s in self._stops):
                    return at
        return len(text)


class TextStream:
    """The text of one completion of a request. Not thread-safe; one per completion index."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, eos_ids: Collection[int]) -> None:
        """`sampling` as validated; `eos_ids` are the model's own end tokens."""
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._eos = frozenset(eos_ids)
        self._detokenizer = Detokenizer(tokenizer)
        self._finder = StopFinder(sampling.stop)
        self._tokens = 0
        self._stopped = False

    @property
    def completion_tokens(self) -> int:
        """Output tokens so far, up to and with the one that completed a stop string."""
        return self._tokens

    @property
    def stopped(self) -> bool:
        """A stop string has matched: tokens that were already on their way are not part of the output."""
        return self._stopped

    def push(self, event: TokenEvent) -> TextDelta:
        """The text that `event` adds. After a stop string has matched there is none."""
        if self._stopped:
            return TextDelta("", finish_reason="stop" if event.finish_reason else None)
        text = ""
        if event.token_id is not None:
            self._tokens += 1
            text = self._token_text(event.token_id, event.finish_reason)
        final = event.finish_reason is not None
        if final:
            text += self._detokenizer.flush()
        shown, stop = self._finder.push(text, matching=self._tokens >= self._sampling.min_tokens)
        if stop is not None:
            self._stopped = True
            shown += stop if self._sampling.include_stop else ""
            return TextDelta(shown, stopped=not final, finish_reason="stop" if final else None)
        if final:
            shown += self._finder.flush()
        return TextDelta(shown, finish_reason=event.finish_reason)

    def _token_text(self, token_id: int, finish_reason: FinishReason | None) -> str:
        """The token's text, but an end token's only if it was asked for."""
        if finish_reason == "stop":
            if token_id in self._sampling.stop_token_ids:
                return self._end_text(token_id) if self._sampling.include_stop else ""
            if token_id in self._eos:
                return ""
        return self._detokenizer.push(token_id)

    def _end_text(self, token_id: int) -> str:
        """The text of a stop token that the caller wants to see, also if it is a special token."""
        if self._tokenizer.is_silent(token_id):
            return self._detokenizer.flush() + self._tokenizer.decode([token_id], skip_special=False)
        return self._detokenizer.push(token_id)
