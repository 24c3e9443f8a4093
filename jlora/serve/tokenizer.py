"""Text to token ids and back: `tokenizer.json`, its configuration, and the chat template.

    tokenizer = Tokenizer.from_dir("path/to/model")     # None: the model serves token ids only
    ids = tokenizer.encode("Hello")                     # with BOS and the like, as transformers adds them
    ids = tokenizer.chat([{"role": "user", "content": "Hello"}])

The post-processor of `tokenizer.json` decides which special tokens a text gets. A Llama tokenizer's
explicit `add_bos_token` and `add_eos_token` override it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from jlora.errors import DataLoss, FailedPrecondition, InvalidArgument
from jlora.model import token_names
from jlora.model.token_names import Added
from jlora.serve.template import Template
from jlora.serve.token_chars import chars_per_token

LONG = 256  # ids

_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")


class Tokenizer:
    """A `tokenizers.Tokenizer` with its chat template. Thread-safe."""

    def __init__(self, core: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | None = None) -> None:
        """`config` is the content of `tokenizer_config.json`, `template` the default chat template."""
        core.no_truncation()
        core.no_padding()
        core.encode_special_tokens = bool(config.get("split_special_tokens"))  # their names in a text are text
        self._core = core
        self._specials = token_names.specials(config)
        self._set_post_processor(config)
        self._special_ids = frozenset(i for i, t in core.get_added_tokens_decoder().items() if t.special)
        self._byte_level, self._byte_fallback = _byte_scheme(core)
        self._bytes: dict[int, bytes | None] = {}
        self._template = None if template is None else Template(template)

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer | None:
        """Reads a model directory; None if it has no `tokenizer.json`. Raises DataLoss for a damaged file."""
        directory = Path(path)
        file = directory / token_names.CORE
        if not file.is_file():
            return None
        try:
            core = tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises plain Exception
            raise DataLoss(f"tokenizer.json: cannot be read: {e}") from e
        config = token_names.config(directory)
        _add_tokens(core, token_names.added(directory, config), config)
        _add_specials(core, config, token_names.vocabulary(directory))
        return cls(core, config, token_names.chat_template(_read(directory / token_names.TEMPLATE), config))

    @property
    def has_chat(self) -> bool:
        return self._template is not None

    @functools.cached_property
    def chars_per_token(self) -> int:
        """Characters of text that one token stands for at most; see `jlora.serve.token_chars`."""
        return chars_per_token(self._core)

    def encode(self, text: str, check: Callable[[int], None] | None = None, special: bool = True) -> list[int]:
        """The ids of `text`, without special tokens around it unless `special`. Other threads run meanwhile.

        `check` gets their number before they become Python's, and may raise.
        """
        try:
            encoding = self._core.encode_batch_fast([text], add_special_tokens=special)[0]
        except (TypeError, UnicodeError) as e:  # not a string, or a lone surrogate
            raise InvalidArgument(f"text: must be a string of Unicode characters, got {type(text).__name__}") from e
        if check is not None:
            check(len(encoding))
        return encoding.ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; an id without a token has none. Raises InvalidArgument for one beyond 32 bits."""
        try:
            if len(ids) > LONG:  # a batch releases Python's lock
                return self._core.decode_batch([ids], skip_special_tokens=skip_special)[0]
            return self._core.decode(ids, skip_special_tokens=skip_special)
        except (OverflowError, TypeError) as e:
            at, bad = next((i, x) for i, x in enumerate(ids) if not (isinstance(x, int) and 0 <= x < 2**32))
            raise InvalidArgument(f"token_ids[{at}] = {bad!r}: must be an integer in [0, {2**32})") from e

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation through the chat template, ending with the prompt for an answer.

        Raises FailedPrecondition without a chat template, InvalidArgument if it refuses the messages.
        """
        return self.encode(self.render(messages), special=False)

    def render(self, messages: Sequence[Mapping[str, str]], ask: bool = True) -> str:
        """The conversation as the model's text, with the prompt for an answer if `ask`; errors as in `chat`."""
        if self._template is None:
            raise FailedPrecondition("chat: the model has no chat template; send text or token ids")
        return self._template.render(messages, ask, self._specials)

    def is_silent(self, token_id: int) -> bool:
        """Whether the token has no text: it is special, or not in the tokenizer."""
        return token_id in self._special_ids or self._core.id_to_token(token_id) is None

    def token_text(self, token_id: int) -> str:
        """The text of one token as it stands inside a text, with its space; a special token's name."""
        if self.is_silent(token_id):
            return self._core.id_to_token(token_id) or ""
        if (raw := self.token_bytes(token_id)) is not None:
            return raw.decode("utf-8", "replace")
        return self.decode([token_id, token_id])[len(self.decode([token_id])) :]

    def token_bytes(self, token_id: int) -> bytes | None:
        """The raw bytes a token stands for; None if it stands for text, which `decode` gives."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def _find_bytes(self, token_id: int) -> bytes | None:
        token = self._core.id_to_token(token_id)
        if token is None:
            return None
        if self._byte_level:
            # An added token with a character outside the table is plain text, as in the library.
            known = all(c in _BYTE_OF_CHAR for c in token)
            return bytes(_BYTE_OF_CHAR[c] for c in token) if known else token.encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return None

    def _set_post_processor(self, config: Mapping[str, Any]) -> None:
        asked = {side: config.get(f"add_{side}_token") for side in ("bos", "eos")}
        if config.get("tokenizer_class") not in _LLAMA_CLASSES or all(x is None for x in asked.values()):
            return
        # Llama's own default if only one of the two is set.
        wanted = {"bos": asked["bos"] is not False, "eos": asked["eos"] is True}
        tokens = {side: self._specials.get(f"{side}_token") for side in wanted if wanted[side]}
        tokens = {side: t for side, t in tokens.items() if t is not None and self._core.token_to_id(t) is not None}
        single = [tokens["bos"]] if "bos" in tokens else []
        single += ["$A", *([tokens["eos"]] if "eos" in tokens else [])]
        pairs = [(t, self._core.token_to_id(t)) for t in tokens.values()]
        self._core.post_processor = TemplateProcessing(single=single, special_tokens=pairs)  # type: ignore[misc]


def _byte_table() -> dict[str, int]:
    """GPT-2's table: every byte has a printable character; the printable bytes are their own."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


_BYTE_OF_CHAR = _byte_table()


def _byte_scheme(core: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether every token is bytes (byte-level), or tokens like `<0x0A>` are (byte fallback)."""
    decoder = json.loads(core.to_str())["decoder"] or {}
    steps = [d["type"] for d in decoder.get("decoders", [decoder]) if d]
    if "ByteLevel" in steps and set(steps) - {"ByteLevel", "Fuse"}:
        raise FailedPrecondition(f"tokenizer.json: a decoder of {' + '.join(steps)} is not served")
    return "ByteLevel" in steps, "ByteFallback" in steps


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8") if file.is_file() else None
    except (OSError, UnicodeDecodeError) as e:
        raise DataLoss(f"{file.name}: cannot be read: {e}") from e


def _add_tokens(core: tokenizers.Tokenizer, added: Sequence[Added], config: Mapping[str, Any]) -> None:
    """Adds what `tokenizer.json` lacks, as transformers does.

    Raises FailedPrecondition if a token would get another id than the one that the model was trained with.
    """
    known = _known(core)
    special = frozenset(token_names.specials(config).values())
    for token in added:
        before = core.token_to_id(token.content)
        # The flags of an older file are worth less than those of tokenizer.json.
        flags = token if config.get(token_names.BY_ID) else known.get(token.content, token)
        _add(core, known, flags, special=flags.special or token.content in special)
        if before is None and (found := core.token_to_id(token.content)) != token.id:
            raise FailedPrecondition(
                f"added token {token.content!r}: its id is {token.id} by the tokenizer's configuration, and would be "
                f"{found} behind those of {token_names.CORE}; save the tokenizer again"
            )


def _add_specials(core: tokenizers.Tokenizer, config: Mapping[str, Any], vocabulary: int | None) -> None:
    """Makes special what the configuration names or lists, and gives what has no id the next one, as transformers does.

    A listed token that is an added one keeps its flags. Raises FailedPrecondition if a listed one gets an id that the
    model lacks. A named one, such as a `pad_token`, is left out then: nobody writes it.
    """
    known = _known(core)
    for token in token_names.named(config).values():
        room = vocabulary is None or core.get_vocab_size() < vocabulary
        if room or core.token_to_id(token.content) is not None:
            _add(core, known, known.get(token.content, token), special=True)
    for token in token_names.unnamed(config):
        if token.content in known:
            continue
        _add(core, known, token, special=token.special)
        found = core.token_to_id(token.content)
        if vocabulary is not None and (found is None or found >= vocabulary):
            raise FailedPrecondition(
                f"{token_names.CONFIG}: special token {token.content!r} gets id {found} behind those of "
                f"{token_names.CORE}: must be below the model's vocab_size = {vocabulary}; save the tokenizer again"
            )


def _known(core: tokenizers.Tokenizer) -> dict[str, tokenizers.AddedToken]:
    return {token.content: token for token in core.get_added_tokens_decoder().values()}


def _add(core: tokenizers.Tokenizer, known: Mapping[str, tokenizers.AddedToken], token: Any, special: bool) -> None:
    """Adds a token, or gives one that is there these flags. `token` is an `Added`, or of the library."""
    flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "normalized")}
    wanted = tokenizers.AddedToken(token.content, special=special, **flags)
    if known.get(token.content) != wanted:  # each one makes the library build its search anew
        (core.add_special_tokens if special else core.add_tokens)([wanted])
