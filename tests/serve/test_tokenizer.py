"""Token ids as transformers would make them, and chat templates as it would render them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken

from jlora.errors import DataLoss, FailedPrecondition, InvalidArgument
from jlora.serve.tokenizer import Tokenizer
from tests.serve import _tokenizers

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hello world? "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "The \n€ <b>"},
]


def load(directory: Path, core=None, **kwargs) -> Tokenizer:
    tokenizer = Tokenizer.from_dir(_tokenizers.write(directory, core or _tokenizers.byte_level(), **kwargs))
    assert tokenizer is not None
    return tokenizer


def test_a_directory_without_a_tokenizer_gives_none(tmp_path: Path):
    assert Tokenizer.from_dir(tmp_path) is None


def test_text_goes_to_ids_and_back_with_the_post_processors_special_tokens(tmp_path: Path):
    tokenizer = load(tmp_path)
    ids = tokenizer.encode("Hello €")
    assert ids[0] == 1 and 2 not in ids
    assert tokenizer.decode(ids) == "Hello €"
    assert tokenizer.decode(ids, skip_special=False) == "<s>Hello €"


def pace_beside(work: Callable[[], object]) -> float:
    """Rounds per second of a loop on another thread, while `work` runs on this one."""
    rounds, ended = 0, False

    def count() -> None:
        nonlocal rounds
        while not ended:
            rounds += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before, began = rounds, time.perf_counter()
        work()
        return (rounds - before) / (time.perf_counter() - began)
    finally:
        ended = True
        thread.join()


def test_other_threads_run_while_a_text_is_tokenized(tmp_path: Path):
    """Some try shows it: a machine with much else to do may give the loop no core during another."""
    tokenizer, text = load(tmp_path), "Hello world, " * 50_000

    def share() -> float:
        """The loop's pace during a text, in parts of its pace beside a thread that only waits."""
        return pace_beside(lambda: tokenizer.encode(text)) / pace_beside(lambda: time.sleep(0.1))

    assert any(share() > 0.25 for _ in range(10))


@pytest.mark.parametrize(
    "config, first, last",
    [
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, False, False),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True}, True, True),
        ({"tokenizer_class": "LlamaTokenizer", "add_eos_token": True}, True, True),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": None}, True, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, "add_eos_token": True}, True, False),
    ],
)
def test_a_llama_tokenizers_own_switches_win_over_the_post_processor(tmp_path: Path, config, first, last):
    ids = load(tmp_path, _tokenizers.byte_fallback(), **config).encode("Hello world")
    assert (ids[0] == 1, ids[-1] == 2) == (first, last)


def test_padding_and_truncation_stored_in_the_file_are_not_applied(tmp_path: Path):
    core = _tokenizers.byte_level()
    core.enable_truncation(4)
    core.enable_padding(length=64)
    tokenizer = load(tmp_path, core)
    assert len(tokenizer.encode("Hello")) < 10
    assert tokenizer.decode(tokenizer.encode("Hello world, hello there!")) == "Hello world, hello there!"


@pytest.mark.parametrize("where", ["file", "string", "list"])
def test_the_chat_template_is_found_in_every_place_it_may_stand(tmp_path: Path, where: str):
    template, decoy = _tokenizers.CHAT_TEMPLATE, "decoy"
    config = {
        "file": {"chat_template": decoy},
        "string": {"chat_template": template},
        "list": {"chat_template": [{"name": "rag", "template": decoy}, {"name": "default", "template": template}]},
    }[where]
    tokenizer = load(tmp_path, template=template if where == "file" else None, **config)
    text = "<s><|system|>Be brief.<|user|>Hello world?<|assistant|>Hello.</s><|user|>The \n€ <b><|assistant|>"
    assert tokenizer.render(MESSAGES) == text
    ids = tokenizer.chat(MESSAGES)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert ids.count(1) == 1, "BOS comes from the template and is not added again"


def test_special_tokens_may_stand_in_their_own_file(tmp_path: Path):
    directory = _tokenizers.write(tmp_path, _tokenizers.byte_level(), "{{ bos_token }}|{{ eos_token }}")
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "X"}))
    assert Tokenizer.from_dir(directory).render(MESSAGES) == "<s>|X"


@pytest.mark.parametrize("config", [{}, {"added_tokens_decoder": {"2": {"content": "</s>", "special": True}}}])
def test_that_file_wins_over_a_configuration_without_added_tokens(tmp_path: Path, config: dict[str, object]):
    directory = _tokenizers.write(tmp_path, _tokenizers.byte_level(), "{{ eos_token }}", **config)
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|user|>"}))
    tokenizer = Tokenizer.from_dir(directory)
    assert tokenizer is not None and tokenizer.render(MESSAGES) == ("</s>" if config else "<|user|>")


def test_a_models_own_special_tokens_reach_its_template(tmp_path: Path):
    named = {"content": "<|b|>", "__type": "AddedToken", "lstrip": True}
    config = {"extra_special_tokens": {"eot_token": "<|a|>", "tools": "x", "messages": "y"}, "eom_token": named}
    tokenizer = load(tmp_path, template="{{ messages | length }}{{ tools }}{{ eot_token }}{{ eom_token }}", **config)
    assert tokenizer.render(MESSAGES) == "4None<|a|><|b|>"
    assert all(tokenizer.is_silent(i) for i in tokenizer.encode("<|a|><|b|>", special=False))


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("vocabulary", [400, 401, 402])
def test_listed_tokens_get_ids_that_the_model_has_or_are_refused(tmp_path: Path, vocabulary: int, converted: bool):
    if converted:
        (tmp_path / "jlora_model.json").write_text(json.dumps({"spec": {"vocab": vocabulary}}))
    else:
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
    config = {"pad_token": "<pad>", "additional_special_tokens": ["</s>", "<|end|>"]}
    if vocabulary < 402:
        gets = f"'<|end|>' gets id {vocabulary}.*vocab_size = {vocabulary}"
        with pytest.raises(FailedPrecondition, match=gets):
            load(tmp_path, **config)
    else:
        assert load(tmp_path, **config).encode("<pad><|end|>", special=False) == [400, 401]


def test_a_named_token_that_the_model_has_no_place_for_is_text(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 400}))
    assert len(load(tmp_path, pad_token="<pad>").encode("<pad>", special=False)) > 1


def test_a_special_token_with_flags_that_are_none_is_refused(tmp_path: Path):
    with pytest.raises(DataLoss, match="tokenizer_config.json: eot_token = .*lstrip"):
        load(tmp_path, eot_token={"content": "<|a|>", "lstrip": 3})


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Be brief."),
        ("{% if tools is none and add_generation_prompt %}\n  ok\n{% endif %}", "  ok\n"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "4"),
    ],
)
def test_templates_have_what_transformers_gives_them(tmp_path: Path, template: str, expected: str):
    assert load(tmp_path, template=template).render(MESSAGES) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ messages + 1 }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_a_template_refuses_or_cannot_do_is_the_callers_argument(tmp_path: Path, template: str):
    said = "roles must alternate" if "alternate" in template else "chat template"
    with pytest.raises(InvalidArgument, match=said):
        load(tmp_path, template=template).chat(MESSAGES)


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "messages: .*length >= 1"),
        ("hello", "messages: .*array"),
        ([None], r"messages\[0\]"),
        ([{"role": "user"}], r"messages\[0\]: .*content"),
        ([*MESSAGES, {"role": "user", "content": 3}], r"messages\[4\].content"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role"),
    ],
)
def test_bad_messages_are_refused_by_name(tmp_path: Path, messages, message: str):
    with pytest.raises(InvalidArgument, match=message):
        load(tmp_path).chat(messages)


def test_without_a_template_chat_is_a_failed_precondition(tmp_path: Path):
    tokenizer = load(tmp_path, template=None)
    assert not tokenizer.has_chat
    with pytest.raises(FailedPrecondition, match="chat template"):
        tokenizer.chat(MESSAGES)


@pytest.mark.parametrize("ids", [[-1], [2**32], [1, "x"]])
def test_ids_that_cannot_be_tokens_are_refused(tmp_path: Path, ids):
    with pytest.raises(InvalidArgument, match="token_ids"):
        load(tmp_path).decode(ids)


@pytest.mark.parametrize("text", ["\ud800", None, 3])
def test_what_is_not_unicode_text_is_refused(tmp_path: Path, text):
    with pytest.raises(InvalidArgument, match="text"):
        load(tmp_path).encode(text)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_damaged_files_are_named(tmp_path: Path, name: str):
    directory = _tokenizers.write(tmp_path, _tokenizers.byte_level())
    (directory / name).write_bytes(b'{"\xff')
    with pytest.raises(DataLoss, match=name):
        Tokenizer.from_dir(directory)


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path):
    from tokenizers import decoders

    core = _tokenizers.byte_level()
    core.decoder = decoders.Sequence([decoders.Replace("x", "y"), decoders.ByteLevel()])
    with pytest.raises(FailedPrecondition, match="Replace"):
        load(tmp_path, core)


def test_ids_and_chats_equal_those_of_transformers(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    directory = _tokenizers.write(tmp_path, _tokenizers.byte_level(), tokenizer_class="PreTrainedTokenizerFast")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    ours = Tokenizer.from_dir(directory)
    assert ours is not None
    for text in (*_tokenizers.TEXTS, "", " x ", "<s>a</s>"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
    chat = theirs.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ours.chat(MESSAGES) == list(chat)


def _added(content: str, **flags: object) -> dict[str, object]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content, **plain, **flags}


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"400": _added("<|end|>")}, "eos_token": "<|end|>"},
        {"added_tokens_decoder": {"401": _added("<|b|>", special=False), "400": _added("<|end|>", lstrip=True)}},
        {"added_tokens_decoder": {"4": _added("<|assistant|>", rstrip=True)}},  # other flags than tokenizer.json's
        {"eos_token": "er"},  # a token of the vocabulary
        {"additional_special_tokens": ["er", "<|end|>", "<|user|>", "<|b|>"]},
        {"extra_special_tokens": ["<|end|>"], "pad_token": "<|b|>", "eot_token": "er"},
        {"extra_special_tokens": {"eot_token": "<|end|>", "end": "er"}},
        {"split_special_tokens": True},
    ],
)
def test_added_tokens_are_those_of_transformers(tmp_path: Path, config: dict[str, object]):
    transformers = pytest.importorskip("transformers")
    core = _tokenizers.byte_level()
    directory = _tokenizers.write(tmp_path, core, tokenizer_class="PreTrainedTokenizerFast", **config)
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(directory), Tokenizer.from_dir(directory)
    assert ours is not None
    for text in ("a<|end|>", "a <|end|> b", "<|b|><|end|>x", "<|assistant|>  a", "over ether", "</s>"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_an_older_tokenizer_is_that_of_transformers(tmp_path: Path):
    """`added_tokens.json` and `special_tokens_map.json`, which disagree with the rest."""
    transformers = pytest.importorskip("transformers")
    core = _tokenizers.byte_level()
    core.add_tokens([AddedToken("<|tool|>", rstrip=True)])
    directory = _tokenizers.write(tmp_path, core, tokenizer_class="PreTrainedTokenizerFast")
    (directory / "added_tokens.json").write_text(json.dumps({"<|tool|>": 400, "<|im_start|>": 401, "<|im_end|>": 402}))
    older = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", "<|last|>"]}
    (directory / "special_tokens_map.json").write_text(json.dumps(older))
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(directory), Tokenizer.from_dir(directory)
    assert ours is not None and ours.chat(MESSAGES) == list(
        theirs.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False)
    )
    for text in ("<|tool|>  a<|im_start|>x<|im_end|></s>", "<|last|> <|im_end|>"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_tokens_that_only_the_configuration_adds_are_tokens(tmp_path: Path):
    core = _tokenizers.byte_level()
    size = core.get_vocab_size()
    tokenizer = load(tmp_path / "a", core, added_tokens_decoder={str(size): _added("<|end|>")})
    assert tokenizer.encode("<|end|>", special=False) == [size]
    assert tokenizer.is_silent(size) and tokenizer.decode([size]) == ""
    with pytest.raises(FailedPrecondition, match=f"'<|end|>'.* {size + 1} .*{size}"):
        load(tmp_path / "b", core, added_tokens_decoder={str(size + 1): _added("<|end|>")})
    _tokenizers.write(tmp_path / "c", core)
    (tmp_path / "c" / "added_tokens.json").write_text(json.dumps({"<|b|>": size + 1, "<|a|>": size}))
    older = Tokenizer.from_dir(tmp_path / "c")
    assert older is not None and older.encode("<|a|><|b|>", special=False) == [size, size + 1]
    with pytest.raises(DataLoss, match="tokenizer_config.json: its added tokens"):
        load(tmp_path / "d", core, added_tokens_decoder={"x": 3})


def test_a_token_that_the_configuration_names_as_special_is_silent(tmp_path: Path):
    core = _tokenizers.byte_level()
    core.add_tokens(["<|end|>"])
    end = core.token_to_id("<|end|>")
    assert load(tmp_path / "a", core).decode([end]) == "<|end|>"
    assert load(tmp_path / "b", core, eos_token="<|end|>").decode([end]) == ""
