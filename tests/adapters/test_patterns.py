"""Regular expressions: what PEFT's `re` says, in linear time, or a refusal."""

from __future__ import annotations

import json
import random
import re

import pytest

from jlora.adapters import patterns
from jlora.adapters.patterns import MAX_CHARS, compile_pattern
from jlora.adapters.peft_config import parse
from jlora.errors import InvalidArgument
from jlora.model.hf_names import other_modules, projections
from tests import _make
from tests.adapters._peft import SPEC, read, refused

NAMES = [*projections(SPEC), *other_modules(SPEC)]
PIECES = r"""
    q_proj v_proj proj layers model self_attn mlp 0 1 2 . \. _ [qv] [^q] [a-z_]+ [0-9] [\d] \d+ \w+ \W \b \B .* .+? .*?
    ^ $ \A | | (?:q|k) (q|v) (?i:Q) (?s:.) {2} {1,3} {2,} ? * + *? ?? () (|q) (?P<n>q) [^] []a] \- \x71 \_ \Z \z
    (?=q) (?!k) (?<=_) \1 \11 [[:alpha:]] a{,3} a{03} (?>q) q++ (?#x) (?x) (?m) (?i) \pL \Qq\E \u0071 é
""".split()


@pytest.mark.filterwarnings("ignore:Possible")  # by re, of [[
def test_every_accepted_pattern_means_what_it_means_to_peft():
    """Patterns of random pieces: accepted only if `re` accepts them, and then they match the same names."""
    draw, accepted, refused_by_us = random.Random(0), 0, 0
    for _ in range(4000):
        pattern = "".join(draw.choices(PIECES, k=draw.randint(1, 6)))
        for whole in (pattern, rf"(.*\.)?({pattern})$", rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\."):
            try:
                theirs = re.compile(whole)
            except re.error:
                with pytest.raises(ValueError):
                    compile_pattern(whole)
                continue
            try:
                ours = compile_pattern(whole)
            except ValueError:
                refused_by_us += 1
                continue
            accepted += 1
            for name in NAMES:
                assert bool(ours.fullmatch(name)) == bool(theirs.fullmatch(name)), (whole, name)
                mine, their = ours.match(name), theirs.match(name)
                assert bool(mine) == bool(their), (whole, name)
                if mine and their and "idx" in whole:
                    assert mine[b"idx"] == their["idx"], (whole, name)
    assert accepted > 2000 and refused_by_us > 200


@pytest.mark.parametrize(
    "pattern",
    [r"(?=q).*", r".*(?!k)", r"(?<=_)proj", r"(q)\1", r"(?P<a>q)(?P=a)", r"q\Z", r"(?>q)", r"q*+", r"[[:alpha:]]+",
     r"q{,3}", r"q{03}", "q_proj|é", "q" * (MAX_CHARS + 1), r"((\w{30}){30}){30}", "(" * 600 + ")" * 600],
)  # fmt: skip
@pytest.mark.parametrize(
    "option", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern"]
)
def test_a_pattern_that_has_no_linear_match_or_another_meaning_is_refused_by_option(
    tmp_path, option: str, pattern: str
):
    value = {pattern: 4} if option.endswith("_pattern") and option != "layers_pattern" else pattern
    path = _make.make_adapter(tmp_path / "a", SPEC)
    config = {option: value, "layers_to_transform": [0] if option == "layers_pattern" else None}
    _make.edit_json(path / "adapter_config.json", **config)
    refused(path, InvalidArgument, option, "regular expression")


@pytest.mark.parametrize(
    "option", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern"]
)
def test_a_pattern_that_takes_exponential_time_with_backtracking_is_matched_at_once(tmp_path, option: str):
    """With `re` this test would not end."""
    pattern = r"((\w|\.)+)+!"
    changes = {
        "target_modules": {"target_modules": pattern + r"|.*(q|v)_proj"},
        "exclude_modules": {"exclude_modules": pattern},
        "rank_pattern": {"rank_pattern": {pattern: 2}},
        "alpha_pattern": {"alpha_pattern": {pattern: 2}},
        "layers_pattern": {"layers_pattern": [pattern, "layers"], "layers_to_transform": [0, 1, 2]},
    }
    path = _make.make_adapter(tmp_path / "a", SPEC)
    _make.edit_json(path / "adapter_config.json", **changes[option])
    assert len(read(path).weights) == 6


@pytest.mark.parametrize(
    "option", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern"]
)
def test_too_many_entries_are_refused_with_their_number(tmp_path, option: str):
    names = [f"m{i}" for i in range(1025)]
    path = _make.make_adapter(tmp_path / "a", SPEC)
    value = dict.fromkeys(names, 4) if option in ("rank_pattern", "alpha_pattern") else names
    _make.edit_json(path / "adapter_config.json", **{option: value, "layers_to_transform": [0]})
    refused(path, InvalidArgument, option, "at most 1024", "1025")


def test_patterns_that_compile_to_too_much_together_are_refused(tmp_path):
    path = _make.make_adapter(tmp_path / "a", SPEC)
    _make.edit_json(path / "adapter_config.json", rank_pattern={rf"x{i}\w{{900}}": 4 for i in range(400)})
    refused(path, InvalidArgument, "rank_pattern", "instructions")


def test_a_rank_for_each_module_is_read():
    """As PEFT's EVA writes it: both patterns, with full names."""
    spec = _make.tiny_spec(layers=32)
    names = {name: 1 + i % 8 for i, name in enumerate(projections(spec))}
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(names)}
    data = json.dumps({**config, "rank_pattern": names, "alpha_pattern": names}).encode()
    assert {name: t.rank for name, t in parse(data, spec, 64, "a").targets.items()} == names


def test_a_layers_pattern_that_matches_without_an_index_selects_nothing_as_in_peft(tmp_path):
    path = _make.make_adapter(tmp_path / "a", SPEC)
    _make.edit_json(path / "adapter_config.json", layers_pattern="m|x", layers_to_transform=[0])
    refused(path, InvalidArgument, "target_modules", "matches no projection")


@pytest.mark.parametrize(
    "pattern", ["(?i)" + r"[\0-\uffff]" * 90, "[" + r"\U0001ffff-\U0010ffff" * 40 + "]", r"((\w{30}){30}){30}"]
)
def test_what_re2_refuses_never_reaches_re(pattern: str, monkeypatch: pytest.MonkeyPatch):
    """`re` expands the first range for each of its repetitions, while it holds Python's lock."""
    seen: list[str] = []
    monkeypatch.setattr(patterns.re, "compile", seen.append)
    with pytest.raises(ValueError):
        compile_pattern(pattern)
    assert not seen
