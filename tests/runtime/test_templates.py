"""Chat templates: known renderings, refused messages, hostile templates."""

import itertools
from dataclasses import replace

import pytest
from jinja2.exceptions import SecurityError

from sluice.core.errors import InvalidRequest, ModelLoadError
from sluice.runtime.generation import ChatPrompt
from sluice.runtime.sandbox import BoundedEnvironment
from sluice.runtime.templates import ChatTemplate
from tests.runtime.clocks import new_year
from tests.runtime.gguf_files import byte_level_values, facts_of

FACTS = replace(facts_of(byte_level_values()), bos_text="<s>", eos_text="</s>")
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "dé <b>", "parameters": {}}}


def template(source, **more):
    return ChatTemplate(replace(FACTS, chat_template=source, **more), new_year)


def render(source, *messages, tools=(), tool_choice="auto", **options):
    prompt = ChatPrompt(messages or (USER,), tools, tool_choice, options)
    return template(source).render(prompt)


CHATML = """{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA2 = """{{ bos_token }}{% for m in messages %}
{%- if m['role'] == 'user' %}{{ '[INST] ' + m['content'].strip() + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

QWEN = """{%- if tools %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last='') %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- for call in m.tool_calls %}
            {{- call.function.name + '(' + (call.function.arguments | tojson) + ')' }}
        {%- endfor %}
    {%- elif loop.first and m.role == 'system' %}{% continue %}
    {%- else %}
        {{- m.role ~ ':' ~ m.content ~ ';' }}
    {%- endif %}
    {%- set ns.last = m.role %}
{%- endfor %}
{{- ns.last }}"""


def test_chatml_renders_as_known():
    assert render(CHATML, {"role": "system", "content": "S"}, USER) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_with_token_texts_and_trimming_renders_as_known():
    messages = ({"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Yo"}, USER)
    assert render(LLAMA2, *messages) == "<s>[INST] Hi [/INST] Yo </s>[INST] Hi [/INST]"


def test_tools_loops_and_namespaces_render_as_known():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    messages = (
        {"role": "system", "content": "S"},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    )
    assert render(QWEN, *messages, tools=(TOOL,)) == (
        '# Tools\n{"type": "function", "function": {"name": "f", "description": "dé <b>",'
        ' "parameters": {}}}\nuser:Hi;f({"a": "é"})tool:4;tool'
    )
    assert not render(QWEN, *messages, tools=(TOOL,), tool_choice="none").startswith("# Tools")


def test_blocks_are_trimmed_as_chat_templates_expect():
    assert render("{% if true %}\nx\n{% endif %}\ny") == "x\ny"


def test_the_injected_time_is_what_templates_print():
    assert render("{{ strftime_now('%d %b %Y') }}") == "01 Jan 2031"


def test_generation_marks_are_their_content():
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHib"


def test_options_of_the_caller_are_variables():
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    with pytest.raises(InvalidRequest, match="bos_token") as refused:
        render("x", bos_token="y")
    assert refused.value.param == "chat_template_kwargs"


def test_text_parts_become_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", {"role": "user", "content": parts}) == "a\nb"


def test_a_developer_is_a_system_where_the_template_knows_none():
    message = {"role": "developer", "content": "x"}
    assert render("{{ messages[0].role }}", message) == "system"
    assert render("{{ messages[0].role }}{# developer #}", message) == "developer"


def test_a_second_template_serves_calls_with_tools():
    both = template("plain", chat_template_tools="tools {{ tools | length }}")
    assert both.render(ChatPrompt([USER])) == "plain"
    assert both.render(ChatPrompt([USER], [TOOL])) == "tools 1"


def test_a_template_that_knows_no_tools_is_told_in_the_system_message():
    assert not template(CHATML).takes_tools
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = (USER, {"role": "assistant", "content": None, "tool_calls": [call]})
    rendered = render(CHATML, *messages, tools=(TOOL,))
    assert rendered.startswith("<|im_start|>system\nYou can call functions.")
    assert '"name": "f", "description": "dé <b>"' in rendered
    assert '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>' in rendered
    system = {"role": "system", "content": "Be brief."}
    assert "system\nBe brief.\n\nYou can call" in render(CHATML, system, USER, tools=(TOOL,))


# ------------------------------------------------------------------------------ refused messages


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([{"role": "wizard", "content": "x"}], r"messages\[0\] has the role 'wizard'"),
        ([{"content": "x"}], "role None"),
        ([USER, {"role": "user", "content": 5}], r"messages\[1\].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], "part of type 'str'"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "without a function name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments of f are not JSON",
        ),
    ],
)
def test_d05_messages_of_the_wrong_shape_are_refused(messages, message):
    with pytest.raises(InvalidRequest, match=message) as refused:
        template(CHATML).render(ChatPrompt(messages))
    assert refused.value.param == "messages"


def test_a_refusal_of_the_template_is_given_in_its_words():
    with pytest.raises(InvalidRequest, match="Only user and assistant roles are supported!"):
        render(LLAMA2, {"role": "system", "content": "x"})


@pytest.mark.parametrize(
    "source",
    ["{{ messages[7].content }}", "{{ 'a' + 1 }}", "{{ 1 / 0 }}", "{{ messages.x.y }}",
     "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages | sum }}"],
)  # fmt: skip
def test_a_template_that_trips_over_messages_refuses_them(source):
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        render(source)


def test_a_model_without_template_says_where_to_send_text():
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        render(None)


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{", "{% include 'x' %}", "{% block b %}{% endblock %}"]
)
def test_a_template_that_does_not_compile_is_a_load_error(source):
    with pytest.raises(ModelLoadError, match="does not compile"):
        template(source)


# ---------------------------------------------------------------------------- hostile templates


def doubling(expression, start="'aaaaaaaaaa'", before=""):
    return (
        f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{before}"
        f"{{% set ns.x = {expression} %}}{{% endfor %}}"
    )


HOSTILE = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for x in [[[1]]] recursive %}{{ loop([x, x, x, x]) }}{% endfor %}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ ('a' * 9999) * 9999 * 9999 }}",
    "{{ [1] * 999999999 }}",
    "{{ 9 ** 99999999 }}",
    "{{ 'x' | center(999999999) }}",
    "{{ 'x\ny' | indent(999999999) }}",
    "{{ 'x'.ljust(999999999) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:>999999999}'.format('x') }}",
    "{{ '%999999999d' | format(1) }}",
    doubling("ns.x + ns.x"),
    doubling("ns.x ~ ns.x"),
    doubling("ns.x.replace('a', ns.x)"),
    doubling("ns.x | replace('a', ns.x)"),
    doubling("ns.x.join([ns.x, ns.x])"),
    doubling("ns.x + ns.x", start="[1]"),
    doubling("[ns.x, ns.x]"),
    doubling("{'a': ns.x, 'b': ns.x}"),
    doubling("dict(a=ns.x, b=ns.x)"),
    doubling("y", before="{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "{% for i in range(999999999) %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "{{ lipsum(999999999) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
]  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE)
def test_a_template_that_runs_away_or_reaches_out_is_stopped(source):
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        render(source)


def test_long_conversations_and_long_texts_stay_within_the_limits():
    messages = [{"role": "user", "content": "x" * 1000}] * 1000
    assert len(render(QWEN, *messages, tools=(TOOL,) * 100)) > 1_000_000
    long = {"role": "user", "content": "x" * (10 * 1024 * 1024)}
    assert len(render(CHATML, long)) > 10 * 1024 * 1024


def test_each_rendering_has_its_own_limits():
    compiled = template("{% for i in range(90000) %}{% endfor %}ok")
    assert [compiled.render(ChatPrompt([USER])) for _ in range(3)] == ["ok"] * 3


def test_the_inside_of_functions_is_not_there_for_templates():
    assert render("[{{ raise_exception.__globals__ }}]") == "[]"


def test_a_rendering_that_takes_too_long_is_stopped():
    time_s = itertools.count()
    environment = BoundedEnvironment({}, clock_s=lambda: next(time_s))
    assert environment.from_string("{% for i in range(5) %}{{ i }}{% endfor %}").render() == "01234"
    slow = environment.from_string("{% for i in range(50) %}{{ i }}{% endfor %}")
    with pytest.raises(SecurityError, match="more than 5 s"):
        slow.render()


def test_values_nested_beyond_what_can_be_written_are_refused():
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    for source in (CHATML, QWEN):
        with pytest.raises(InvalidRequest, match="refuses these messages"):
            render(source, USER, tools=(tool,))
