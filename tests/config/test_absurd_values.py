"""Values that no setting can have are told in words, whatever they are."""

import pytest

from sluice.config.load import load_settings
from sluice.config.sources import Override, parse_override
from sluice.config.units import parse_size_bytes
from sluice.core.errors import ConfigError

HUGE = "9" * 400


def problems(tmp_path, text, **environment):
    file = tmp_path / "sluice.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file, (), environment)
    return [one.removeprefix(f"{tmp_path}/") for one in caught.value.problems]


def test_a_size_without_end_is_refused_with_the_largest():
    with pytest.raises(ValueError, match="the largest size is"):
        parse_size_bytes(HUGE)
    with pytest.raises(ValueError, match="the largest size is"):
        parse_size_bytes(f"{HUGE}TiB")


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        (f"[autoscale]\nhold_requests_max = {HUGE}", "autoscale.hold_requests_max", "64 bits"),
        (f"[autoscale]\nutilisation = {HUGE}", "autoscale.utilisation", "a number from 0.1 to 1"),
        ("[autoscale]\nutilisation = nan", "autoscale.utilisation", "a number from 0.1 to 1"),
        ("[autoscale]\nquantile = inf", "autoscale.quantile", "a number from 0 to 0.99"),
        ('[autoscale]\ndrain = "0s"', "autoscale.drain", "above zero"),
        ("[autoscale]\ndrain = nan", "autoscale.drain", "a duration"),
        ("[autoscale]\nschedules = 3", "autoscale.schedules", "a list"),
        ('[autoscale]\nschedules = ["08:30"]', "autoscale.schedules", "ends is missing"),
        ("[routes.auto]\nshare = 30", "routes.auto.simple", "is missing; it must be text"),
        (
            '[[autoscale.schedules]]\nbegins = "1:00"\nends = "2:00"\nreplicas = -1',
            "autoscale.schedules",
            "at least 0",
        ),
        ("[routes]\nauto = 1", "routes.auto", "a table"),
        ("[routes.auto]\nshare = nan", "routes.auto.share", "from 0 to 100"),
        (f"[routes.auto]\nshare = {HUGE}", "routes.auto.share", "64 bits"),
        ("[routes.auto]\nthreshold = true", "routes.auto.threshold", "a number"),
        ('[routes.auto]\nrules = ["tool"]', "routes.auto.rules", '"tools", "images"'),
        (f'[routes.auto]\noutcomes_bytes_max = "{HUGE}"', "outcomes_bytes_max", "largest size"),
        ('[pipelines.docs]\nretriever = "elastic"', "pipelines.docs.retriever", '"qdrant"'),
        (f"[pipelines.docs]\npassages = {HUGE}", "pipelines.docs.passages", "64 bits"),
        ("[pipelines.docs]\npassages = 1.5", "pipelines.docs.passages", "a whole number"),
        ('[pipelines.docs]\ncollection = "../../etc/x"', "pipelines.docs.collection", "letters"),
        ('[pipelines.docs]\ncollection = ".."', "pipelines.docs.collection", "letters"),
        (
            '[models.m]\nsource = "x"\nreplicas = { max = 99999999 }',
            "models.m.replicas.max",
            "a whole number from 1 to 10000, not",
        ),
        ("[tracing]\nshare = -inf", "tracing.share", "a number from 0 to 1"),
        ('[tracing]\nendpoint = "collector:4317"', "tracing.endpoint", "http://HOST:PORT"),
        (f"[tracing]\nqueue_spans_max = {HUGE}", "tracing.queue_spans_max", "64 bits"),
        ("[metrics.buckets]\nttft = [1.0, nan]", "metrics.buckets", "positive and rising"),
        (f"[metrics.buckets]\nttft = [{HUGE}]", "metrics.buckets.ttft", "64 bits"),
    ],
)
def test_the_setting_and_what_it_takes_are_told(tmp_path, text, key, words):
    found = problems(tmp_path, text)
    assert any(key in one and words in one for one in found), found


@pytest.mark.parametrize("key", ["key_env", "embeddings_key_env", "rerank_key_env"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(tmp_path, key):
    text = f'[pipelines.docs]\n{key} = "THE_KEY"\n'
    (found,) = problems(tmp_path, text, THE_KEY="secret\r\nx-injected: 1")
    assert f"pipelines.docs.{key}: there is a character" in found
    assert "secret" not in found


@pytest.mark.parametrize("text", [HUGE, f"{HUGE}GiB", "nan", "-1", "1e400"])
def test_absurd_text_on_the_command_line_is_told_too(text):
    override: Override = parse_override(f"journal.bytes_max={text}")
    with pytest.raises(ConfigError, match=r"journal\.bytes_max"):
        load_settings(None, [override], {})
