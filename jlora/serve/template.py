"""The chat template: a program of the model's author, run for every chat, in bounded time and memory.

    template = Template(source)                     # raises InvalidArgument if it does not compile
    text = template.render(messages, ask=True, specials={"bos_token": "<s>"})

jinja2's sandbox keeps a template from the process's objects, and not from its time: two nested loops run for hours, and
`'x' * 10**10` takes all memory. So every turn of a loop and every call looks at the clock, and whatever makes a text or
a list longer is asked first how long it will be.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from itertools import chain
from typing import Annotated, Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.visitor
import msgspec

from jlora.errors import InvalidArgument

MOST_SOURCE = 1 << 18  # characters of a template; the longest published ones have 30,000
MOST_CHARS = 1 << 26  # of a text, and of all that a template prints: 16 times a request's largest chat
MOST_BITS = 1 << 10  # of a number
RENDER_S = 2.0  # of the processor's time; a chat of 4,096 messages takes up to 0.4 with published templates


class _Message(msgspec.Struct):
    role: Annotated[str, msgspec.Meta(min_length=1)]
    content: str


_Messages = Annotated[list[_Message], msgspec.Meta(min_length=1)]


class Template:
    """A compiled template. Thread-safe."""

    def __init__(self, source: str):
        """Raises InvalidArgument if it is too long, or does not compile."""
        if len(source) > MOST_SOURCE:
            raise InvalidArgument(f"chat_template: has {len(source)} characters, must have at most {MOST_SOURCE}")
        self._environment = _Environment()
        try:
            with self._environment.bounded():  # constants are computed now
                self._template = self._environment.from_string(source)
        except jinja2.TemplateError as e:
            raise InvalidArgument(f"chat_template: does not compile: {e}") from e
        except (*_FAULTS, SyntaxError) as e:  # SyntaxError: Python refuses what jinja2 makes of it
            raise InvalidArgument(f"chat_template: does not compile: {type(e).__name__}") from e

    def render(self, messages: Sequence[Mapping[str, str]], ask: bool, specials: Mapping[str, str]) -> str:
        """The conversation as text, with the prompt for an answer if `ask`; `specials` are the special tokens by name.

        Raises InvalidArgument if the messages are none, the template refuses them, or it passes its bounds.
        """
        try:
            msgspec.convert(messages, _Messages)
        except msgspec.ValidationError as e:
            problem, _, where = str(e).partition(" - at `$")
            raise InvalidArgument(f"messages{where.rstrip('`')}: {problem[0].lower()}{problem[1:]}") from e
        chat = {"messages": [dict(m) for m in messages], "tools": None, "documents": None, "add_generation_prompt": ask}
        try:
            with self._environment.bounded():
                return self._template.render({**specials, **chat})
        except jinja2.TemplateError as e:
            raise InvalidArgument(f"chat: the model's chat template refuses the messages: {e}") from e
        except _FAULTS as e:  # these errors may quote a message's text
            raise InvalidArgument(f"chat: the model's chat template fails on the messages: {type(e).__name__}") from e


_FAULTS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    NameError,
    ArithmeticError,
    RecursionError,
    AssertionError,
)  # fmt: skip; NameError: jinja2 writes 1e999 as inf


Size = Callable[..., int]  # of a result, from a filter's or method's arguments


class _Bound(threading.local):
    """What is left to the template that runs on this thread."""

    until = 0.0
    chars = 0

    def __enter__(self) -> None:
        self.until, self.chars = time.thread_time() + RENDER_S, MOST_CHARS

    def __exit__(self, *_: object) -> None:
        self.until = 0.0


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox with bounds; see the module."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        self._bound = _Bound()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=self._printed,
        )
        for name in ("striptags", "urlize"):  # they search a long text again and again, and chats have no HTML
            del self.filters[name]
        self.filters["tojson"] = _to_json
        self.filters |= {name: self._checked(inner, _SIZES.get(name)) for name, inner in self.filters.items()}
        self.filters |= {_TURNS: self._turns, _JOINED: self._joined, _COMPARED: self._compared, _SLICED: self._looked}
        self.tests |= {name: self._checked(self.tests[name], _plain) for name in _COMPARISONS}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)

    def bounded(self) -> _Bound:
        """A context: a template runs."""
        return self._bound

    def look(self) -> None:
        """Raises TemplateRuntimeError if the template has had its time."""
        if time.thread_time() > self._bound.until:
            raise jinja2.TemplateRuntimeError(f"it takes more than {RENDER_S:g} s")

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _Watched().visit(super()._parse(source, name, filename))

    def call(self, __context: Any, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.look()
        of = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # jinja2 wraps a text's `format`
        if isinstance(of, str | bytes) and (size := _SIZES.get(__obj.__name__)) is not None:
            _check_size(size(of, *args, *kwargs.values()))
        for argument in chain(args, kwargs.values()):
            if not isinstance(argument, str | bytes):
                _weight(argument)  # a loop that calls itself takes its turns without another look
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.look()
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            if (operator == "**" and bits * abs(right) > MOST_BITS) or bits + right.bit_length() > 2 * MOST_BITS:
                raise jinja2.TemplateRuntimeError(f"a number has more than {MOST_BITS} bits")
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(times, int):
                    _check_size(len(text) * max(0, times))
        elif operator == "%" and isinstance(left, str):
            _check_size(_formatted(left, right))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, type(left)):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Methods of numbers and bytes, and those that make bytes, have results of any size."""
        bytes_like = isinstance(obj, int | float | bytes) or (isinstance(obj, str) and attr in ("encode", "translate"))
        return not bytes_like and super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):  # its hash walks through it
            _weight(argument)
        return super().getitem(obj, argument)

    def _checked(self, inner: Callable[..., Any], size: Size | None) -> Callable[..., Any]:
        """The filter or test, asked first for the time and how long its result is."""
        first = int(hasattr(inner, "jinja_pass_arg"))  # after the environment, if it takes that

        @wraps(inner)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.look()
            if size is not None:
                _check_size(size(*args[first:], *kwargs.values()))
            return inner(*args, **kwargs)

        return checked

    def _printed(self, value: Any) -> Any:
        """`value`, which the template prints."""
        self.look()
        self._bound.chars -= _weight(value)
        if self._bound.chars < 0:
            raise jinja2.TemplateRuntimeError(f"it prints more than {MOST_CHARS} characters")
        return value

    def _turns(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.look()
            yield value

    def _joined(self, values: Sequence[Any]) -> str:
        self.look()
        _check_size(sum(map(_weight, values)))
        return "".join(map(str, values))

    def _compared(self, value: Any) -> Any:
        self.look()
        _weight(value)
        return value

    def _looked(self, value: Any) -> Any:
        self.look()
        return value


# Filters that templates cannot name.
_TURNS, _JOINED, _COMPARED, _SLICED = "turns of a loop", "joined texts", "compared values", "sliced values"
_COMPARISONS = "eq == equalto ne != gt > greaterthan ge >= lt < lessthan le <= in".split()  # tests by name


class _Watched(jinja2.visitor.NodeTransformer):
    """Wraps iterables of loops, and operands of `~`, comparisons, hashes and slices, in filters that check them."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _TURNS)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(jinja2.nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _COMPARED)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, _COMPARED)
        return node

    def visit_Pair(self, node: jinja2.nodes.Pair) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.key = _filtered(node.key, _COMPARED)
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, jinja2.nodes.Slice):
            node.node = _filtered(node.node, _SLICED)
        return node


def _filtered(node: Any, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _weight(value: Any) -> int:
    """About how many characters a value prints. Raises TemplateRuntimeError as soon as they are too many.

    A list that has the same list twice, and so on, is short in memory and endless in print.
    """
    if isinstance(value, str):
        return len(value)
    if value is None or isinstance(value, int | float):
        return 16
    total, left = 0, [value]
    while left:
        one = left.pop()
        total += 16  # to walk through a value takes time, too
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, Mapping):
            left += chain.from_iterable(one.items())
        elif isinstance(one, range):
            total += 6 * len(one)
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
        _check_size(8 * total)
    return total


def _check_size(size: int) -> None:
    if size > MOST_CHARS:
        raise jinja2.TemplateRuntimeError(f"a text or list has more than {MOST_CHARS} characters or entries")


def _plain(*values: Any) -> int:
    return sum(map(_weight, values))


def _wide(value: Any, *widths: Any) -> int:
    """Each line, and each tab, grows by the largest width."""
    places = 1 + value.count("\n") + value.count("\t") if isinstance(value, str) else _weight(value)
    return _weight(value) + places * max(map(_width, widths), default=8)


def _width(value: Any) -> int:
    return abs(value) if isinstance(value, int) else _weight(value)


def _replaced(text: Any, old: Any, new: Any, *count: Any) -> int:
    places = (_weight(text) + 1) // max(1, _weight(old))
    return _weight(text) + places * _weight(new)


def _joined(value: Any, other: Any = "", *attribute: Any) -> int:
    """The filter has the list first, and the method the separator."""
    values, separator = (other, value) if isinstance(value, str) else (value, other)
    return _weight(values) + _weight(values) * _weight(separator)


def _formatted(text: Any, *values: Any) -> int:
    """With every value in every place, and every number of the text, and with `*` or `{}` of the values, as a width."""
    text = str(text)
    places, numbers = text.count("%") + text.count("{"), re.findall(r"\d+", text)
    if any(len(number) > 9 for number in numbers):
        return MOST_CHARS + 1
    nested = "*" in text or "{" in text.replace("{", "", 1)
    widths = sum(map(int, numbers)) + sum(map(_width, _flat(values)) if nested else ())
    return len(text) + places * (_plain(*values) + widths)


def _searched(text: Any, *others: Any) -> int:
    """Every place of the text may be compared with all of the others."""
    return _weight(text) * max(1, _plain(*others)) // 16


def _rounded(value: Any, *options: Any) -> int:
    if any(isinstance(digits, int) and abs(digits) > MOST_BITS // 4 for digits in options):
        raise jinja2.TemplateRuntimeError(f"a number has more than {MOST_BITS} bits")
    return _weight(value)


def _summed(values: Any, *options: Any) -> int:
    """Of numbers; a sum of lists copies what it has for each of them."""
    return MOST_CHARS + 1 if any(isinstance(start, list | tuple) for start in options) else _weight(values)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


# What makes more of what it is given, or walks through it: filters, and methods of texts.
_SIZES: Mapping[str, Size] = {
    **dict.fromkeys(("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "wordwrap", "zfill"), _wide),
    **dict.fromkeys(
        "capitalize dictsort e escape filesizeformat forceescape groupby lower max min pprint sort string title "
        "truncate unique upper urlencode wordcount xmlattr".split(),
        _plain,
    ),
    **dict.fromkeys("lstrip rfind rindex rpartition rsplit rstrip strip trim".split(), _searched),
    "format": _formatted,
    "format_map": _formatted,
    "join": _joined,
    "replace": _replaced,
    "round": _rounded,
    "sum": _summed,
    "tojson": _wide,
}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; serving shows them as they are."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike jinja's own filter this does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
