"""Chat templates: the right text (golden answers, transformers), and nothing that hangs, swells or reaches out."""

from __future__ import annotations

import copy
import json
import random
import resource
import threading
import time
from pathlib import Path

import pytest
import tokenizers
import transformers

from octavo.errors import InvalidRequest, NotSupported, OctavoError, TemplateError
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import load_tokenizer
from tests.matrix import SEED
from tests.real_models import REAL_MODELS, path_of
from tests.unit.chat_templates import FAMILIES, PARTS
from tests.unit.text_samples import random_text

GOLDEN = Path(__file__).parent.parent / "golden"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HI = [{"role": "user", "content": "Hi"}]


def render(source, messages=HI, **options):
    options.setdefault("add_generation_prompt", True)
    return ChatTemplate(source, TOKENS).render(messages, **options)


@pytest.mark.parametrize("name", REAL_MODELS)
def test_golden_conversations(name):
    tokenizer = load_tokenizer(path_of(name))
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    entries = [e for e in json.loads((GOLDEN / f"{name}.json").read_text("utf-8")) if "messages" in e]
    assert len(entries) >= 5
    for entry in entries:
        text = template.render(entry["messages"], tools=entry.get("tools"), add_generation_prompt=True)
        assert text == entry["text"], entry["id"]


@pytest.fixture(scope="module")
def theirs():
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE())
    return transformers.PreTrainedTokenizerFast(tokenizer_object=encoder, bos_token="<s>", eos_token="</s>")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a <city> & more, 天气",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]


def conversation(rng, with_tools):
    messages = [{"role": "system", "content": random_text(rng)}] if rng.random() < 0.5 else []
    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": random_text(rng) + " <b>&'\"</b>"})
        if with_tools and rng.random() < 0.4:
            call = {"name": "weather", "arguments": {"city": random_text(rng, longest=4), "n": [1, 2.5, None, True]}}
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
            )
            messages.append({"role": "tool", "content": random_text(rng)})
        messages.append({"role": "assistant", "content": random_text(rng)})
    return messages[: rng.choice([-1, len(messages)])]


@pytest.mark.parametrize("family", FAMILIES)
def test_as_transformers_renders(family, theirs):
    source, takes_tools = FAMILIES[family]
    rng = random.Random(f"{SEED}/{family}")
    ours = ChatTemplate(source, TOKENS)
    for _ in range(60):
        with_tools = takes_tools and rng.random() < 0.5
        messages, tools = conversation(rng, with_tools), TOOLS if with_tools else None
        options = {"add_generation_prompt": rng.random() < 0.5}
        before = copy.deepcopy(messages)
        text = ours.render(messages, tools=tools, **options)
        expected = theirs.apply_chat_template(messages, tools=tools, chat_template=source, tokenize=False, **options)
        assert text == expected, f"{messages} (OCTAVO_SEED={SEED})"
        assert messages == before, "the caller's messages stay as they are"


@pytest.mark.parametrize("family", ["chatml", "llama2", "qwen2.5", "parts"])
@pytest.mark.parametrize("answer", ["The answer is", "  The answer is \n", "1."])
def test_continuing_the_last_message(family, answer, theirs):
    messages = [*HI, {"role": "assistant", "content": answer}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    source = FAMILIES[family][0] if family != "parts" else PARTS.replace("| reverse", "")
    text = render(source, messages, **options)
    assert text == theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
    assert text.rstrip().endswith(answer.strip())


def test_continuing_needs_something_to_continue():
    for options in ({"add_generation_prompt": True}, {"messages": []}, {"messages": [{"role": "assistant"}]}):
        with pytest.raises(InvalidRequest, match="continue_final_message"):
            render(
                "{{ messages }}",
                **{"add_generation_prompt": False, "continue_final_message": True, "messages": HI, **options},
            )
    with pytest.raises(TemplateError, match="does not show the last message"):
        render("nothing", add_generation_prompt=False, continue_final_message=True)


def test_arguments_of_tool_calls_are_parsed():
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Łódź"}'}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '"arguments": {"city": "Łódź"}' in render(FAMILIES["qwen2.5"][0], messages)
    call["function"]["arguments"] = "{"
    with pytest.raises(InvalidRequest, match=r"messages\[1\].tool_calls\[0\].function.arguments is no JSON"):
        render(FAMILIES["qwen2.5"][0], messages)


def test_a_template_for_tools_of_its_own():
    template = ChatTemplate("plain", TOKENS, tool_source="tools")
    assert template.render(HI, add_generation_prompt=True) == "plain"
    assert template.render(HI, add_generation_prompt=True, tools=TOOLS) == "tools"


TEXT_PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
LOOPING = {
    "direct": "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}",
    "alias": "{% for m in messages[1:] + messages %}{% endfor %}{% for m in messages %}{% set c = m['content'] %}"
    "{% for p in c %}{{ p.text }}|{% endfor %}{% endfor %}",
    "macro": "{% macro f(x) %}{% for p in x %}{{ p.text }}|{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ f(m.content) }}{% endfor %}",
    "indexed": "{% for p in messages[0].content | selectattr('type', 'equalto', 'text') %}{{ p.text }}|{% endfor %}",
}


@pytest.mark.parametrize("source", LOOPING.values(), ids=LOOPING)
def test_parts_stay_parts_where_the_template_loops_over_them(source):
    assert render(source, [{"role": "user", "content": TEXT_PARTS}]) == "one|two|"
    assert render(source, [{"role": "user", "content": "one"}]) == "one|", "such a template knows no plain text"


def test_parts_become_text_where_it_does_not():
    assert render("{{ messages[0].content }}", [{"role": "user", "content": TEXT_PARTS}]) == "one\ntwo"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": []}]) == ""


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_parts_that_are_not_text(kind):
    messages = [*HI, {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind, kind: {}}]}]
    with pytest.raises(NotSupported, match=rf"messages\[1\]\.content holds a part of type '{kind}'"):
        render(PARTS, messages)


def test_values_that_are_no_json():
    with pytest.raises(InvalidRequest, match="takes no object"):
        render("x", thing=object())
    nested: list = []
    for _ in range(300):
        nested = [nested]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        render("x", thing=nested)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("a\n{% for x in %}", "at line 2"),
        ("\n\n{{ messages[0].content.nope() }}", "at line 3"),
        ("{{ 1 / 0 }}", "at line 1: division by zero"),
        ("{{ x | martian }}", "No filter named 'martian'"),
        ("{{ lipsum(1000000) }}", "'lipsum' is undefined"),
        ("{{ 'x' | (loop) }}", "expected token 'name'"),
        ("{% include 'other' %}", "fails"),
        ("{% extends 'other' %}", "fails"),
        ("{{ raise_exception('Only user\nand assistant!') }}", "refuses the conversation: Only user and assistant!"),
        ("{{ undefined_thing.field }}", "'undefined_thing' is undefined"),
        ("{{ messages | tojson(indent='x' * 5000) }}" * 40_000, "characters"),
    ],
)
def test_errors_name_the_place_in_one_line(source, says):
    with pytest.raises(TemplateError) as caught:
        render(source)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


BOMB = "{% set ns = namespace(x='a' * 1000) %}{% for i in range(99) %}"
LISTS = "{% set ns = namespace(x=[1], y=(1,)) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
TUPLES = "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
BIG = "{% set s = 'ab' * 500000 %}{% set t = 'ab' * 500000 %}{% set l = [s] * 50000 %}{% set r = [t] * 50000 %}"
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for a in [messages] recursive %}{{ loop([messages, messages]) }}{% endfor %}",
    "wide recursive loop": "{% for a in range(9) recursive %}{% if loop.depth < 60 %}{{ loop(range(9)) }}{% endif %}"
    "{% endfor %}",
    "macro": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "wide macro": "{% macro f(n) %}{% if n < 60 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
    "caller": "{% macro g() %}{{ caller() }}{{ caller() }}{% endmacro %}{% macro f(n) %}{% if n < 60 %}{% call g() %}"
    "{{ f(n + 1) }}{% endcall %}{% endif %}{% endmacro %}{{ f(0) }}",
    "range": "{{ range(10 ** 12) | list }}",
    "map": "{% for a in range(9999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "times": "{{ 'a' * 10 ** 9 }}",
    "times left": "{{ 10 ** 9 * 'a' }}",
    "list times": "{{ [0] * 10 ** 9 }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "big numbers": "{% set ns = namespace(x=10) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "plus": BOMB + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "tilde": BOMB + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "set block": BOMB + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "filter block": BOMB + "{% set y %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "join filter": BOMB + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "join method": BOMB + "{% set ns.x = ','.join([ns.x, ns.x]) %}{% endfor %}",
    "join of map": BIG + "{{ l | map('trim') | join }}",
    "join method of map": BIG + "{{ ''.join(l | map('string')) }}",
    "separator": "{{ range(9999) | join('x' * 100000) }}",
    "separator method": "{{ ('x' * 100000).join(['a'] * 9999) }}",
    "replace": BOMB + "{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    "replace empty": "{{ ('a' * 99999) | replace('', 'b' * 99999) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent many": "{{ ('%9999d' * 9999) % ((1,) * 9999) }}",
    "percent text": "{{ ('%s' * 9999) % (('x' * 99999,) * 9999) }}",
    "percent mapping": "{{ ('%(a)s' * 9999) % {'a': 'x' * 99999} }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format method": "{{ '{:1000000000d}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format many": "{{ ('{0}' * 9999).format('x' * 99999) }}",
    "format_map": "{{ '{a:1000000000d}'.format_map({'a': 1}) }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "center method": "{{ 'a'.center(10 ** 9) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "zfill": "{{ 'a'.zfill(10 ** 9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "indent": "{{ ('a\n' * 9999) | indent(99999) }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 9) | list }}",
    "round": "{{ 5 | round(-1000000000) }}",
    "int": "{{ ('9' * 1000000) | int }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 9) }}",
    "sum of lists": "{{ ([[1]] * 99999) | sum(start=[]) | length }}",
    "tojson": "{{ messages | tojson(indent=10 ** 9) }}",
    "strftime": "{{ strftime_now('%1000000000d') }}",
    "print shared lists": LISTS + "{% endfor %}{{ ns.x }}",
    "json of shared lists": LISTS + "{% endfor %}{{ ns.x | tojson }}",
    "text of shared lists": LISTS + "{% endfor %}{{ ns.x | string | length }}",
    "tilde of shared lists": LISTS + "{% endfor %}{{ ns.x ~ '' }}",
    "compare shared lists": LISTS + "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "find in shared lists": LISTS + "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x in [ns.y] }}",
    "test shared lists": LISTS + "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x is eq(ns.y) }}",
    "count shared lists": LISTS + "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ [ns.x].count(ns.y) }}",
    "loop.changed": LISTS + "{% set ns.y = [ns.y, ns.y] %}{{ loop.changed(ns.x) }}{{ loop.changed(ns.y) }}{% endfor %}",
    "call shared lists": LISTS + "{% endfor %}{{ ns.x() }}",
    "item of shared lists": LISTS + "{% endfor %}{{ {}[ns.x].y }}",
    "raise shared lists": LISTS + "{% endfor %}{{ raise_exception(ns.x) }}",
    "hash tuples": TUPLES + "{{ {}[ns.x] }}",
    "hash tuples in a literal": TUPLES + "{{ {ns.x: 1} }}",
    "hash tuples in get": TUPLES + "{{ {}.get(ns.x) }}",
    "hash tuples in unique": TUPLES + "{{ [ns.x] | unique | list }}",
    "hash tuples in dict": TUPLES + "{{ dict([(ns.x, 1)]) }}",
    "shared namespaces": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set n = namespace(x=ns.x, y=ns.x) %}"
    "{% set ns.x = n %}{% endfor %}{{ [ns.x, ns.x] * 10 ** 6 }}",
    "sort": BIG + "{{ (l + r) | sort | length }}",
    "sort of map": BIG + "{{ (l + r) | map('string') | sort | length }}",
    "compare": BIG + "{{ l == r }}",
    "find": BIG + "{{ t in l }}",
    "find in values": BIG + "{% set d = dict(a=l) %}{{ [r] in d.values() }}",
    "unique": BIG + "{{ (l + r) | unique | list | length }}",
    "slices": "{% set s = 'ab' * 500000 %}{% set ns = namespace(x=[]) %}{% for i in range(9999) %}"
    "{% set ns.x = [ns.x, s[i:]] %}{% endfor %}",
    "split": "{% for i in range(999) %}{% set x = ('a,' * 500000).split(',') %}{% endfor %}",
    "class": "{{ ''.__class__ }}",
    "class by item": "{{ ''['__class__'] }}",
    "class by filter": "{{ '' | attr('__class__') }}",
    "class by map": "{{ [''] | map(attribute='__class__') | list }}",
    "mro": "{{ ''.__class__.mro() }}",
    "subclasses": "{{ ''.__class__.__base__.__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "format attribute": "{{ '{0.__class__}'.format('') }}",
    "format global": "{{ '{0.__globals__}'.format(strftime_now) }}",
    "format_map attribute": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "cycler class": "{{ cycler.__init__ }}",
    "self": "{{ self._TemplateReference__context }}",
    "change a message": "{{ messages.append(1) }}",
    "clear a message": "{{ messages[0].clear() }}",
    "private namespace": "{% set ns = namespace() %}{% set ns._Namespace__attrs = 1 %}{{ namespace(_x=1) }}",
    "autoescape": "{% autoescape true %}{{ '<' ~ '>' }}{% endautoescape %}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_end_soon_and_small(source):
    threads, before = threading.active_count(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    with pytest.raises(TemplateError) as caught:
        render(source)
    assert any(words in str(caught.value) for words in ("does too much", "reaches too far", "nests too deeply"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert time.process_time() - started < 2
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 300 << 10, f"memory grew by {grown_kib >> 10} MiB"
    assert threading.active_count() == threads


def test_limits_grow_with_the_conversation():
    """A template that costs a few operations a message serves the longest conversations that a server takes in."""
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 200} for i in range(5000)]
    for family in ("chatml", "llama2", "llama3", "qwen2.5"):
        assert len(render(FAMILIES[family][0], messages)) > 5_000_000
    big = [{"role": "user", "content": "x" * (16 << 20)}]
    assert len(render(FAMILIES["qwen2.5"][0], big)) > 16 << 20


def test_what_templates_may_use():
    source = (
        "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }} {{ strftime_now('%Y') | length }} "
        "{{ [3, 1, 2] | sort | join(',') }} {{ 'a,b'.split(',') | last }} {{ {'b': 1, 'a': 2} | dictsort }} "
        "{{ '%05.1f|%s' % (3.14159, 'x') }} {{ '{:>4}'.format('y') }} {{ 'ab' | upper | replace('A', '<') | safe }} "
        "{{ [1, 2, 3] | batch(2) | list }} {{ messages | map(attribute='role') | list }} {{ 'a' in 'cat' }} "
        "{{ (1, 2) + (3,) }} {{ 'ab'[::-1] }} {{ {'k': '<é>'} | tojson }} {{ dict(a=1).items() | list }} {{ 7 // 2 }} "
        "{% for m in messages %}{% set x = m.content.replace('H', 'h') %}{{ x.split('i', 1)[0] }}{% endfor %}"
    )
    assert render(source) == (
        "2 4 1,2,3 b [('a', 2), ('b', 1)] 003.1|x    y <B [[1, 2], [3]] ['user'] True (1, 2, 3) ba "
        '{"k": "<é>"} [(\'a\', 1)] 3 h'
    )


def test_rendering_in_threads_at_once():
    template = ChatTemplate(FAMILIES["chatml"][0], TOKENS)
    failures = []

    def work(number):
        for _ in range(50):
            text = template.render([{"role": "user", "content": str(number)}], add_generation_prompt=False)
            if text != f"<|im_start|>user\n{number}<|im_end|>\n":
                failures.append(text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_every_failure_is_typed():
    with pytest.raises(OctavoError) as caught:
        render("{{ messages[0].content.x.y }}")
    assert caught.value.status == 400
