"""A chat template is somebody's program: what it may do is bounded, and what templates do is not disturbed."""

from __future__ import annotations

import time

import pytest

from jlora.errors import InvalidArgument
from jlora.serve import template as module
from jlora.serve.template import MOST_SOURCE, Template
from tests.fuzz._text import LLAMA

CHAT = [{"role": "user", "content": "Hello"}]


def rendered(source: str, chat: list[dict[str, str]] = CHAT) -> str:
    return Template(source).render(chat, True, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(9) recursive %}{{ loop(range(9)) if loop.depth < 40 }}{% endfor %}",
    ],
)
def test_a_template_that_runs_for_hours_ends_by_its_bound(source: str, monkeypatch: pytest.MonkeyPatch):
    now = 0.0

    def ticking() -> float:
        nonlocal now
        now += 1e-4
        return now

    monkeypatch.setattr(time, "thread_time", ticking)  # a look is 0.1 ms, whatever the machine
    with pytest.raises(InvalidArgument, match=r"^chat: .* takes more than 2 s"):
        rendered(source)
    assert now < 4 * module.RENDER_S


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 10 }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 9999999999) }}",
        "{{ 'x'.center(9999999999) }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ ['x'] | map('center', 9999999999) | list }}",
        "{{ 'x\ny' | indent(9999999999) }}",
        "{{ [1] | tojson(indent=9999999999) }}",
        "{{ 'x'.zfill(9999999999) }}",
        "{{ '\t'.expandtabs(9999999999) }}",
        "{{ ('x' * 100000).replace('', 'x' * 100000) }}",
        "{{ range(100000) | join('x' * 100000) }}",
        "{{ ('x' * 100000).join(range(100000) | map('string') | list) }}",
        "{% set x = 'xxxxxxxx' %}" + "{% set x = x ~ x %}" * 40 + "{{ x }}",
        "{% set x = 'xxxxxxxx' %}" + "{% set x = x + x %}" * 40 + "{{ x }}",
        "{% set x = 'xxxxxxxx' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40 + "{{ x }}",
        "{% set x = [1] %}" + "{% set x = [x, x] %}" * 40 + "{{ x }}",
        "{% set x = [1] %}" + "{% set x = [x, x] %}" * 40 + "{{ x | tojson }}",
        "{% set x = [1] %}" + "{% set x = [x, x] %}" * 40 + "{{ '' ~ x }}",
        "{% set x = [1] %}" + "{% set x = [x, x] %}" * 40 + "{{ x | string }}",
        "{% set x = [1] %}" + "{% set x = [x, x] %}" * 40 + "{{ [x, x] | sort }}",
        "{% set x = [1] %}{% set y = [1] %}" + "{% set x = [x, x] %}{% set y = [y, y] %}" * 40 + "{{ x == y }}",
        "{% set x = [1] %}{% set y = [1] %}" + "{% set x = [x, x] %}{% set y = [y, y] %}" * 40 + "{{ x is eq(y) }}",
        "{% set x = [1] %}{% set y = [1] %}"
        + "{% set x = [x, x] %}{% set y = [y, y] %}" * 40
        + "{{ [x]|select('eq', y)|list }}",
        "{% set x = (1,) %}" + "{% set x = (x, x) %}" * 40 + "{{ {x: 1} }}",
        "{% set x = (1,) %}" + "{% set x = (x, x) %}" * 40 + "{{ {}[x] }}",
        "{{ 1 | round(9999999999, 'ceil') }}",
        "{{ 1 | round(method='floor', precision=9999999999) }}",
        "{{ 1 | round(-9999999999) }}",
        "{{ [[0], [1]] | sum(start=[]) }}",
        "{{ ('x' * 1000000).strip('y' * 1000000 ~ 'x') }}",
        "{{ ('x' * 1000000) | trim('y' * 1000000 ~ 'x') }}",
        "{{ ('x' * 1000000).rfind('xy' ~ 'x' * 500000) }}",
    ],
)
def test_a_text_that_would_take_all_memory_is_refused_before_it_is_made(source: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_CHARS", 1 << 20)
    with pytest.raises(InvalidArgument, match=r"more than 1048576 characters|more than 1024 bits"):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    ["{{ 'x'.encode() }}", "{{ (5).to_bytes(9999999999) }}", "{{ 'x'.translate({120: 'xx'}) }}", "{{ 1.5.hex() }}"],
)
def test_methods_whose_results_have_no_bound_are_refused(source: str):
    with pytest.raises(InvalidArgument, match=r"access to attribute .* is unsafe"):
        rendered(source)


@pytest.mark.parametrize("each", ["{% if x == 0 %}{% endif %}", "{{ x | first }}", "{% set y = x[:] %}", "{{ 0 }}"])
def test_a_template_without_a_loop_has_its_bound_too(each: str, monkeypatch: pytest.MonkeyPatch):
    now = 0.0

    def ticking() -> float:
        nonlocal now
        now += 1e-2
        return now

    monkeypatch.setattr(time, "thread_time", ticking)
    with pytest.raises(InvalidArgument, match=r"^chat: .* takes more than 2 s"):
        rendered("{% set x = messages %}" + each * 1000)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages | attr('__class__') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{{ lipsum(5) }}",
    ],
)
def test_a_template_reaches_nothing_of_the_process(source: str):
    try:
        said = rendered(source)
    except InvalidArgument:
        return
    assert "class" not in said and "root:" not in said


def test_a_template_has_a_greatest_length():
    assert rendered("x" * MOST_SOURCE) == "x" * MOST_SOURCE
    with pytest.raises(InvalidArgument, match=f"^chat_template: has {MOST_SOURCE + 1} characters, .* at most"):
        Template("x" * (MOST_SOURCE + 1))


@pytest.mark.parametrize(
    "source", ["{{ 1e999 }}", "{% set x = 1 %}{{ x.y.z }}", "{{ 1 / 0 }}", "{{ [] | first | upper }}"]
)
def test_what_a_template_fails_with_is_the_templates_fault(source: str):
    try:
        rendered(source)
    except InvalidArgument as e:
        assert str(e).startswith("chat: the model's chat template")


def test_what_published_templates_do_still_works():
    chat = [
        {"role": r, "content": f"{r} <think>a</think> {i}\n"} for i, r in enumerate(("system", "user", "assistant"))
    ]
    said = rendered(LLAMA, chat)
    assert said.startswith('<s><|user|>1{\n  "role": "user"') and said.endswith("2<|assistant|>")
    assert "000   00001   10002   21SYSTEM <THINK>b</THINK> 0" in said
    long = [{"role": ("user", "assistant")[i % 2], "content": "x" * 100} for i in range(4096)]
    each = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content | trim }}{{ eos_token }}{% endfor %}"
    assert len(rendered(each, long)) > 400_000
