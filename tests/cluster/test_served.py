"""What a call means in tokens, and how one that means nothing is refused."""

import asyncio
import threading
from dataclasses import replace

import pytest

from sluice.cluster.served import _TRIALS_MAX, ServedModel
from sluice.core.errors import ContextExceeded, InvalidRequest, Overloaded
from sluice.core.events import ReplicaLimits
from sluice.core.sampling import Sampling
from sluice.runtime.generation import Call, ChatPrompt, Delta, OutputFormat, TextPrompt, TokenPrompt
from sluice.runtime.grammar_trial import GrammarTrial
from sluice.runtime.messages import Submit
from tests.cluster.rig import Rig, S, in_virtual_time, served_model

TOOLS_TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.content }}<|im_end|>{% endfor %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


THREE = TokenPrompt((1, 2, 3))


def call(prompt=THREE, **more) -> Call:
    return Call(id="c", model="tiny", arrived_ns=5 * S, prompt=prompt, **more)


def submitted(served: ServedModel, one: Call) -> Submit:
    return asyncio.run(served.submit(one))


def test_a_prompt_becomes_tokens_by_its_kind():
    served = served_model()
    assert submitted(served, call()).request.prompt == (1, 2, 3)
    assert submitted(served, call(TextPrompt("hello"))).request.prompt == (259,)
    chat = ChatPrompt([{"role": "user", "content": "hello"}])
    assert submitted(served, call(chat)).request.prompt == (263, 259, 264)


def test_without_a_limit_the_rest_of_the_context_is_the_limit():
    served = served_model()
    prompt = TokenPrompt(tuple(range(200)))
    assert submitted(served, call(prompt)).request.output_tokens_max == 512 - 200
    # A pool smaller than the context is what a request can really get.
    served.limits = ReplicaLimits(512, 32, 10, 4)
    assert submitted(served, call(prompt)).request.output_tokens_max == 320 - 200
    assert served.card.context_tokens_max == 320


def test_the_targets_of_a_request_are_those_of_its_class():
    served = served_model()
    plain = submitted(served, call(deadline_ns=9 * S)).request
    assert (plain.ttft_due_ns, plain.tpot_ns, plain.deadline_ns) == (None, None, 9 * S)
    quick = submitted(served, call(slo_class="quick")).request
    assert quick.ttft_due_ns == quick.arrived_ns + S // 2
    assert (quick.tpot_ns, quick.slo_class) == (S // 20, "quick")


def test_a_class_that_is_not_configured_is_refused_with_those_that_are():
    with pytest.raises(InvalidRequest, match=r"'quik' is not configured; configured: quick") as no:
        submitted(served_model(), call(slo_class="quik"))
    assert no.value.param == "x-sluice-slo"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": TokenPrompt((1, 267))}, "prompt"),
        ({"prompt": TokenPrompt((-1,))}, "prompt"),
        ({"prompt": TokenPrompt(())}, "prompt"),
        ({"prompt": TextPrompt("")}, "prompt"),
        ({"sampling": Sampling(logit_bias={267: 1.0})}, "logit_bias"),
        ({"stop_tokens": (5, 267)}, "stop_token_ids"),
        (
            {"output_format": OutputFormat("json_schema", {"type": "nothing"})},
            "response_format",
        ),
        (
            {"prompt": ChatPrompt([{"role": "user", "content": "x"}], [TOOL], "nobody")},
            "tool_choice",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_parameter(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        submitted(served_model(), call(**{"prompt": TokenPrompt((1,)), **fields}))
    assert caught.value.param == param


def test_a_text_that_is_too_long_is_refused_before_it_is_tokenised():
    served = served_model()
    served._tokenizer.encode_text = None  # type: ignore[assignment,method-assign]
    with pytest.raises(ContextExceeded, match=r"at least \d+ tokens; tiny holds 512"):
        submitted(served, call(TextPrompt("wonder " * 100_000)))


def test_token_ids_that_are_too_many_are_refused_before_they_are_looked_at():
    with pytest.raises(ContextExceeded, match="at least 600 tokens; tiny holds 512"):
        submitted(served_model(), call(TokenPrompt((-1,) * 600)))


@pytest.mark.parametrize(
    ("prompt", "output", "numbers", "param"),
    [
        (600, None, ("600", "400"), "prompt"),
        (390, 20, ("390", "20", "400"), "max_tokens"),
        (399, 1, (), None),
        (400, 1, ("400",), "prompt"),
    ],
)
def test_d03_the_message_has_what_was_asked_and_what_there_is(prompt, output, numbers, param):
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        one = rig.call("c", prompt=prompt, output=output)
        if param is None:
            await rig.gateway.generate(one)
            return
        with pytest.raises(ContextExceeded) as caught:
            await rig.gateway.generate(one)
        assert all(number in caught.value.message for number in numbers)
        assert caught.value.param == param
        rig.check_empty()

    in_virtual_time(work)


def test_more_choices_than_ever_run_together_are_refused():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        with pytest.raises(InvalidRequest, match="n is 5; tiny generates at most 4") as caught:
            await rig.generate(choices=5)
        assert caught.value.param == "n"
        rig.check_empty()

    in_virtual_time(work)


# ----------------------------------------------------------------------------------------- tools


def tool_call(choice: str = "auto") -> Call:
    return call(ChatPrompt([{"role": "user", "content": "x"}], [TOOL], choice))


def test_tool_markers_stay_visible_only_where_tools_were_offered():
    served = served_model(values={"tokenizer.chat_template": TOOLS_TEMPLATE})
    assert submitted(served, call()).rules.visible_tokens == ()
    assert served.tool_calls(call()) is None
    assert served.tool_calls(tool_call("none")) is None
    assert served.tool_calls(tool_call()) is not None


def test_a_required_tool_holds_the_output_to_a_grammar():
    served = served_model(values={"tokenizer.chat_template": TOOLS_TEMPLATE})
    assert submitted(served, tool_call()).grammar is None
    grammar = submitted(served, tool_call("required")).grammar
    assert grammar is not None
    assert '"look"' in grammar


def test_tool_calls_are_taken_out_of_the_text_of_their_choice():
    served = served_model(values={"tokenizer.chat_template": TOOLS_TEMPLATE})
    tools = served.tool_calls(tool_call())
    assert tools is not None
    pieces = ['Well<tool_call>\n{"name": "look", ', '"arguments": {}}\n</tool_call>']
    deltas = [tools.read(Delta(1, piece, 2)) for piece in pieces]
    rest, called = tools.finish(1)
    everything = [*deltas, *([rest] if rest else [])]
    assert "".join(delta.text for delta in everything) == "Well"
    assert sum(delta.tokens for delta in everything) == 4
    calls = [piece for delta in everything for piece in delta.tool_calls]
    assert [piece.name for piece in calls if piece.name] == ["look"]
    assert called
    assert tools.finish(0) == (None, False)


def test_a_long_prompt_is_tokenised_beside_the_event_loop():
    served = replace_limits(served_model(values={"llama.context_length": 100_000}))

    long = call(TextPrompt("hello " * 8000), body_bytes=50_000)

    async def work() -> tuple[Submit, int]:
        turns = 0
        submitting = asyncio.create_task(served.submit(long))
        while not submitting.done():
            turns += 1
            await asyncio.sleep(0)
        return submitting.result(), turns

    result, turns = asyncio.run(work())
    assert len(result.request.prompt) > 8000
    assert turns > 3


def replace_limits(served: ServedModel) -> ServedModel:
    served._card = replace(served._card, context_tokens_max=100_000)
    return served


@pytest.mark.parametrize("left", [(), (264, 265)])
def test_a_minimum_with_every_token_as_its_end_is_refused(left):
    served = served_model()
    every = tuple(i for i in range(served._tokenizer.facts.vocab_size) if i not in left)
    with pytest.raises(InvalidRequest, match="every token") as refused:
        submitted(served, call(output_tokens_min=1, stop_tokens=every))
    assert refused.value.param == "stop_token_ids"
    submitted(served, call(output_tokens_min=1, stop_tokens=every[1:]))
    submitted(served, call(stop_tokens=every))


def schema_call(**schema) -> Call:
    return call(output_format=OutputFormat("json_schema", schema))


class Trial(GrammarTrial):
    """Refuses what holds a word, and may be held up."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.asked = 0

    def knows(self, grammar: str) -> bool:
        return "known" in grammar

    def check(self, grammar: str, param: str) -> None:
        self.asked += 1
        assert self.knows(grammar) or self.go.wait(10)
        if "poison" in grammar:
            raise InvalidRequest("too much", param=param)


def test_a_schema_that_fails_its_trial_is_refused_at_the_door():
    served = served_model(trial=Trial())
    assert submitted(served, schema_call(const="fine")).grammar
    with pytest.raises(InvalidRequest, match="too much") as refused:
        submitted(served, schema_call(const="poison"))
    assert refused.value.param == "response_format"
    tool = {"type": "function", "function": {"name": "poison"}}
    with pytest.raises(InvalidRequest, match="too much") as refused:
        submitted(served, call(ChatPrompt([{"role": "user", "content": "x"}], (tool,), "required")))
    assert refused.value.param == "tools"


def test_the_format_that_is_always_the_same_is_not_tried():
    trial = Trial()
    one = call(output_format=OutputFormat("json_object"))
    assert submitted(served_model(trial=trial), one).grammar
    assert not trial.asked


def test_the_number_of_schemas_that_wait_to_be_tried_is_bounded_and_known_ones_do_not_wait():
    trial = Trial()
    served = served_model(trial=trial)

    async def scene() -> None:
        trial.go.clear()
        waiting = [
            asyncio.create_task(served.submit(schema_call(const=i))) for i in range(_TRIALS_MAX)
        ]
        async with asyncio.timeout(10):
            while served._trials < _TRIALS_MAX:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await served.submit(schema_call(const="more"))
        assert refused.value.status == 429
        assert (await served.submit(schema_call(const="known"))).grammar
        trial.go.set()
        await asyncio.gather(*waiting)
        assert (await served.submit(schema_call(const="later"))).grammar

    asyncio.run(scene())
