"""Chat templates: programs that a model's author writes and every request runs."""

from __future__ import annotations

from unittest import mock

from jlora.serve import template as product
from tests.fuzz._engine import Target, status
from tests.serve import _tokenizers

LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{% else %}{% set system_message = '' %}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- macro turn(m, i=0) -%}
{{ '<|' ~ m.role ~ '|>' }}{{ m['content'].strip().split('</think>')[-1] | trim }}{%- endmacro -%}
{%- for message in messages if message.content %}{{ turn(message, loop.index) }}{{ message | tojson(indent=2) }}
{%- endfor %}
{%- for i in range(3) %}{{ '%03d' % i }}{{ '{:>4}'.format(i) }}{{ (i * 2 + 1) // 2 ** 2 }}
{%- if i > 1 %}{% break %}{% endif %}{% endfor %}
{%- set cut %}{{ system_message | upper | replace('A', 'b') | indent(2) }}{% endset %}{{ cut }}
{%- if add_generation_prompt %}{{ strftime_now('%d') | length }}
{%- generation %}<|assistant|>{% endgeneration %}{% endif %}"""
MESSAGES = (
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Be\nshort."},
        *({"role": r, "content": "x" * 50} for r in ("user", "assistant") * 20),
    ],
)
WORDS = """{{|}}|{%|%}|{% for x in range(100000) %}|{% for m in messages %}|{% endfor %}|{% if %}|{% set x = 
{% endset %}
{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}| * 10 ** 9| ** 99999| ~ | % (1,)|range(100000)|'x'
[1]|{'a': 1}|'%999999999d'|'{:999999999}'.format(1)|.format(|.center(999999999)|.replace('', cut)
.join(messages)|.split()|.__class__|.__init__.__globals__|.__subclasses__()|.mro()|_self|self|super()|cycler(1)
joiner()|lipsum(99999)|namespace(a=1)| | tojson| | indent(99999999)| | center(999999999)| | list| | join(', ')| 
 batch(2)| | map('upper')| | format(1)| | sort| | wordwrap(1)| | attr('__class__')| | xmlattr| | pprint| 
 select| | groupby('role')| | sum| | dictsort| | urlize| | slice(3)|{% include 'x' %}|{% import 'x' as y %}
{% extends 'x' %}|{% call f() %}|{% block a %}|{% filter upper %}|{% raw %}|loop.index
{% for x in cut recursive %}{{ loop(x) }}{% endfor %}| is defined| not | and | in | if | else |99999999999|1e308
{# #}"""


def template() -> Target:
    """A template, compiled and rendered over two conversations."""
    specials = {"bos_token": "<s>", "eos_token": "</s>"}

    def render(data: bytes) -> None:
        made = product.Template(data.decode("utf-8", "replace"))
        for messages in MESSAGES:
            made.render(messages, True, specials)

    def short(data: bytes) -> None:
        with mock.patch.object(product, "RENDER_S", 0.5):  # its own bound is no hang
            render(data)

    words = [word.encode() for word in WORDS.replace("\n", "|").split("|") if word]
    return Target(
        "template",
        lambda data: status(lambda: short(data)),
        [LLAMA.encode(), _tokenizers.CHAT_TEMPLATE.encode()],
        words,
    )
