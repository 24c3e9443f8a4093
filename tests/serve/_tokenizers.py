"""Real tokenizers of the two Llama kinds, trained in a moment: byte-level (Llama 3) and byte fallback (Llama 2)."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIALS = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello there!",
    "It was the best of times, it was the worst of times: 1234567890 (or so).",
    "Größe, naïve, café, señor und über: the euro is €, the yen is ¥.",
    "for i in range(10):\n    print(i)\n\nHELLO WORLD THE END",
]

CHAT_TEMPLATE = """{{ bos_token }}{% for m in messages %}
{% if m['role'] not in ['system', 'user', 'assistant'] %}
    {{ raise_exception('unknown role ' + m['role']) }}
{% endif %}
<|{{ m['role'] }}|>{{ m['content'] | trim }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def byte_level(vocab: int = 400) -> Tokenizer:
    """Byte-level BPE as in Llama 3: every token is a string of bytes; BOS from the post-processor."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(TEXTS, trainer)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return core


def byte_fallback(vocab: int = 500) -> Tokenizer:
    """SentencePiece-like BPE as in Llama 2: `▁` for spaces, tokens `<0x00>` to `<0xFF>` for unknown characters."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 256, special_tokens=SPECIALS, limit_alphabet=60, show_progress=False
    )
    core.train_from_iterator([t for t in TEXTS if t.isascii()], trainer)
    tree = json.loads(core.to_str())
    learned = list(tree["model"]["vocab"])
    names = learned[: len(SPECIALS)] + [f"<0x{b:02X}>" for b in range(256)] + learned[len(SPECIALS) :]
    tree["model"] |= {"vocab": {t: i for i, t in enumerate(names)}, "byte_fallback": True, "fuse_unk": True}
    tree["model"]["unk_token"] = "<unk>"
    core = Tokenizer.from_str(json.dumps(tree))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return core


def write(directory: Path, core: Tokenizer, template: str | None = CHAT_TEMPLATE, **config: object) -> Path:
    """Puts the tokenizer into a model directory as transformers would; `config` goes to tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    core.save(str(directory / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "rstrip": False}
    settings = {"bos_token": "<s>", "eos_token": {**eos, "single_word": False, "special": True}, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory
