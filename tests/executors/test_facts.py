"""What engines tell of themselves, in the shapes that they use."""

import pytest

from sluice.executors.facts import read_facts
from sluice.executors.stream import EngineFacts

VLLM = b'{"object":"list","data":[{"id":"m","max_model_len":4096,"permission":[]}]}'
LLAMA_MODELS = b'{"models":[],"object":"list","data":[{"id":"m.gguf","meta":{"n_ctx":2048}}]}'
LLAMA_PROPS = b'{"default_generation_settings":{"n_ctx":1024,"params":{}},"total_slots":4}'
TGI_INFO = b'{"model_id":"m","max_total_tokens":8192,"max_concurrent_requests":128}'
TGI_MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'


@pytest.mark.parametrize(
    ("bodies", "facts"),
    [
        ((VLLM,), EngineFacts(("m",), 4096)),
        ((LLAMA_MODELS, LLAMA_PROPS), EngineFacts(("m.gguf",), 1024, 4)),
        ((TGI_MODELS, TGI_INFO), EngineFacts(("m",), 8192, 128)),
        ((b'{"data":[{"id":"a"},{"id":"b"}]}',), EngineFacts(("a", "b"))),
        ((b"{}",), EngineFacts()),
    ],
    ids=["vllm", "llama-server", "tgi", "vendor", "nothing"],
)
def test_facts_are_found(bodies, facts):
    assert read_facts(bodies) == facts


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[1]", b'{"data":5}', b"\xff", b'{"data":[{"id":1}]}']
)
def test_what_is_no_such_answer_tells_nothing(body):
    assert read_facts((body, LLAMA_PROPS)) == EngineFacts((), 1024, 4)


@pytest.mark.parametrize("count", [-5, 0, 10**12])
def test_what_cannot_be_a_count_is_unknown(count):
    models = b'{"data":[{"id":"m","max_model_len":%d}]}' % count
    slots = b'{"total_slots":%d}' % count
    assert read_facts((models, slots)) == EngineFacts(("m",))
    assert read_facts((VLLM, LLAMA_PROPS, models, slots)) == EngineFacts(("m", "m"), 1024, 4)
