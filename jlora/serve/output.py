"""Text token by token: characters, spacing and stop strings.

`decode(token)` alone is wrong for three reasons:

* A character may need several tokens. Byte tokens go through an incremental UTF-8 decoder: a
  character shows when it is complete, and only bytes that can never become one show as U+FFFD.
* A token's spacing depends on the token before it ("▁Hello" is "Hello" only at the start). So a text
  token is decoded together with its predecessor, whose text is then cut off.
* A stop string may begin several tokens before it ends, and end inside a token. Text that may
  become a stop string is held back until that is decided; no other text is.

The texts of a completion concatenate to what its tokens add to `decode` of the prompt, without a character that the
prompt only begins, or in a chat to `decode` of all its tokens, up to the stop. They differ only for broken bytes of a
byte-fallback tokenizer: `decode` then drops the whole run of byte tokens, including its complete characters.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from jlora.serve.tokenizer import Tokenizer

MOST_BEFORE = 3  # tokens that may begin a character before the one that completes it


class Detokenizer:
    """Turns token ids into text one by one."""

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()) -> None:
        """`before`: the last tokens with text, `MOST_BEFORE` or all, that the first one follows; none: a text begins.

        They may end within a character: its text comes whole, with the token that completes it.
        """
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._last: int | None = None  # the last token with text
        for token in before:
            self.push(token)

    def push(self, token_id: int, special: bool = False) -> str:
        """The text that `token_id` completes. A special token has one only with `special`: its name."""
        if self._tokenizer.is_silent(token_id):
            return self.flush() + self._tokenizer.decode([token_id], skip_special=False) if special else ""
        raw = self._tokenizer.token_bytes(token_id)
        last, self._last = self._last, token_id
        if last is None and (raw is None or raw.isascii()):
            return self._tokenizer.decode([token_id])  # the decoder strips spaces at the start
        if raw is not None:
            return self._utf8.decode(raw)
        known = [] if last is None else [last]
        return self.flush() + self._tokenizer.decode([*known, token_id])[len(self._tokenizer.decode(known)) :]

    def flush(self) -> str:
        """U+FFFD for an unfinished character, or nothing. More tokens may follow."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class StopFinder:
    """Finds the first of several strings in text that arrives in pieces.

    The first is the one that ends earliest, and of those the longest: it does not depend on the pieces.
    """

    def __init__(self, stops: Collection[str]) -> None:
        self._stops = tuple(stops)
        self._firsts = frozenset(s[0] for s in self._stops)
        self._held = ""

    def push(self, text: str, matching: bool = True) -> tuple[str, str | None]:
        """Adds text. Returns the text to show, and the stop string that follows it, if any.

        With `matching` False whole stop strings are shown like other text. The beginning of one is still
        held back: it may be completed once matching is on.
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
        held, self._held = self._held, ""
        return held

    def _begins_at(self, text: str) -> int:
        """Where the longest suffix of `text` starts that begins a stop string; its length if there is none."""
        longest = max(map(len, self._stops)) - 1
        for at in range(max(0, len(text) - longest), len(text)):
            if text[at] in self._firsts:
                tail = text[at:]
                if any(len(tail) < len(s) and s.startswith(tail) for s in self._stops):
                    return at
        return len(text)
