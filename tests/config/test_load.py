"""Sources, their order, and the mistakes that users make in them."""

import hashlib
import os
import textwrap
from pathlib import Path

import pytest

from sluice.config.load import digest, load_settings
from sluice.config.sections import ModelSection
from sluice.config.settings import is_loopback
from sluice.config.sources import Override, key_lines, parse_override
from sluice.config.units import listen_address
from sluice.core.errors import ConfigError


@pytest.fixture
def load(tmp_path):
    """Load settings from the text of a file, variables and ``--set`` options."""

    def run(text="", *overrides, **environment):
        file = tmp_path / "sluice.toml"
        file.write_text(textwrap.dedent(text))
        return load_settings(file, [parse_override(text) for text in overrides], environment)

    return run


@pytest.fixture
def problems(load):
    """The problems that loading reports, without the folder of the file."""

    def run(*args, **environment):
        with pytest.raises(ConfigError) as caught:
            load(*args, **environment)
        return [text.rpartition("/")[2] for text in caught.value.problems]

    return run


def test_nothing_set_gives_safe_defaults():
    settings = load_settings(environment={}).settings
    assert settings.server.listen == "127.0.0.1:8000"
    assert settings.models == {}
    assert settings.journal.record_text is False


def test_the_file_sets_values_with_units(load):
    settings = load(
        """
        [models.small]
        source = "smollm2-135m-instruct"
        kv_bytes = "1GiB"
        queue_wait_max = "1.5m"
        replicas = { min = 3, max = 3 }
        [slo.interactive]
        ttft = "500ms"
        [journal]
        keep = "24h"
        dir = "~/journal"
        """
    ).settings
    model = settings.models["small"]
    assert (model.kv_bytes, model.queue_wait_s_max, model.replicas.max) == (1 << 30, 90.0, 3)
    assert settings.slo["interactive"].ttft_s == 0.5
    assert settings.journal.dir == Path.home() / "journal"


def test_the_environment_beats_the_file_and_set_beats_both(load):
    file = '[server]\nlisten = "127.0.0.1:1"\ngrace = "1s"\nrequest_max = "1s"'
    loaded = load(
        file,
        "server.request_max=3s",
        SLUICE_SERVER__GRACE="2s",
        SLUICE_SERVER__REQUEST_MAX="2s",
    )
    server = loaded.settings.server
    assert (server.listen, server.grace_s, server.request_s_max) == ("127.0.0.1:1", 2.0, 3.0)
    places = [str(loaded.origin(("server", key))) for key in ("listen", "grace", "request_max")]
    assert places[0].endswith("sluice.toml:2")
    assert places[1:] == ["$SLUICE_SERVER__GRACE", "--set"]


def test_the_environment_finds_names_whatever_their_spelling(load):
    settings = load(
        '[models."Qwen2.5-Coder"]\nsource = "a"',
        SLUICE_MODELS__QWEN2_5_CODER__SEQUENCES_MAX="4",
        SLUICE_MODELS__TINY__SOURCE="b",
        SLUICE_MODELS__TINY__REPLICAS__MIN="2",
    ).settings
    assert settings.models["Qwen2.5-Coder"].sequences_max == 4
    assert settings.models["tiny"].source == "b"
    assert settings.models["tiny"].replicas.min == 2


def test_set_takes_quoted_names_tables_lists_and_plain_words(load):
    settings = load(
        "",
        'models."a.b".source=/m/x.gguf',
        'models."a.b".replicas={min = 2, max = 2}',
        'server.cors_origins=["http://a"]',
        "catalogue.mirrors=http://a, http://b",
        "metrics.vllm_aliases=true",
        "metrics.buckets.sluice_ttft_seconds=[0.1, 1]",
    ).settings
    assert settings.models["a.b"].source == "/m/x.gguf"
    assert settings.models["a.b"].replicas.min == 2
    assert settings.server.cors_origins == ("http://a",)
    assert settings.catalogue.mirrors == ("http://a", "http://b")
    assert settings.metrics.vllm_aliases is True
    assert settings.metrics.buckets == {"sluice_ttft_seconds": (0.1, 1.0)}


def test_text_that_looks_like_a_number_stays_text_where_text_is_wanted(load):
    assert load("", "models.x.source=123").settings.models["x"].source == "123"


def test_the_last_of_two_set_options_wins(load):
    assert load("", "server.grace=1s", "server.grace=2s").settings.server.grace_s == 2.0


def test_a_flag_is_named_as_the_origin_of_its_value():
    override = Override(("server", "listen"), "127.0.0.1:9", "--listen")
    assert str(load_settings(None, [override], {}).origin(("server", "listen"))) == "--listen"


def test_the_file_can_be_named_by_a_variable(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[server]\ngrace = "1s"')
    assert load_settings(environment={"SLUICE_CONFIG": str(file)}).settings.server.grace_s == 1.0


def test_a_model_without_a_source_is_the_catalogue_model_of_that_name(load):
    settings = load("[models.tiny]\nthreads = 2", "models.other.threads=1").settings
    assert [settings.models[name].source for name in ("tiny", "other")] == ["tiny", "other"]


# ------------------------------------------------------------------------------ D-15: mistakes


@pytest.mark.parametrize(
    ("line", "nearest"),
    [('listen = "x:1"', "server.listen"), ('kv_bytes = "1GiB"', "models.NAME.kv_bytes")],
)
def test_d15_a_setting_outside_its_section_is_told_where_it_belongs(problems, line, nearest):
    (found,) = problems(line)
    assert found.endswith(f": unknown setting; nearest: {nearest}")


@pytest.mark.parametrize(
    ("text", "place"),
    [("[server]\nlisten = \n", "sluice.toml:2: "), ('[server]\nlisten = """', "sluice.toml:2: ")],
)
def test_d15_a_file_that_is_no_toml_is_told_with_its_line(problems, text, place):
    (found,) = problems(text)
    assert found.startswith(place)
    assert "(at " not in found


def test_the_usual_name_of_a_secret_may_be_written_out(load):
    load('[server]\napi_keys_env = "SLUICE_API_KEYS"')


def test_d15_a_misspelt_key_is_refused_with_the_nearest_one(problems):
    found = problems('[models.a]\nsource = "a"\nmax_queu = 5')
    assert found == [
        "sluice.toml:3: models.a.max_queu: unknown setting; nearest: models.a.queue_wait_max"
    ]


def test_d15_unknown_sections_are_refused(problems):
    assert problems("[sever]\nlisten = 'x'") == [
        "sluice.toml:1: sever: unknown setting; nearest: server"
    ]
    accepted = (
        "server, models, routes, slo, tenants, pipelines, documents, placement, autoscale, journal"
    )
    accepted += ", metrics, tracing, catalogue"
    assert problems("[zzz]\na = 1") == [
        f"sluice.toml:1: zzz: unknown setting; accepted: {accepted}"
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('sequences_max = "many"', 'must be a whole number, at least 1, not "many"'),
        ("sequences_max = 0", "must be a whole number, at least 1, not 0"),
        ("sequences_max = 2.5", "must be a whole number, at least 1, not 2.5"),
        ("sequences_max = true", "must be a whole number, at least 1, not true"),
        ("queue_requests_max = -1", "must be a whole number, at least 0, not -1"),
        ('prefix_cache = "yes"', 'must be true or false, not "yes"'),
        ('numerics = "turbo"', 'must be one of "fast", "exact", not "turbo"'),
        ("queue_wait_max = 60", 'has no unit; write for example "60s" or "60ms"'),
        ('queue_wait_max = "0s"', 'must be a duration such as "500ms", "30s" or "24h", above zero'),
        ('queue_wait_max = "soon"', '\'soon\' is not a duration such as "500ms", "30s" or "24h"'),
        ('kv_bytes = "4 gigs"', "unknown unit 'gigs'; use B, kB, MB, GB, TB, KiB, MiB, GiB or TiB"),
        ('replicas = "two"', "must be a table"),
        ("threads = [1]", "must be a whole number, at least 1, not a list"),
    ],
)
def test_d15_a_value_of_the_wrong_kind_is_refused_with_what_is_accepted(problems, line, message):
    found = problems(f'[models.m]\nsource = "a"\n{line}')
    assert found == [f"sluice.toml:3: models.m.{line.split(' =')[0]}: {message}"]


def test_d15_a_table_where_a_value_belongs_is_refused(problems):
    assert problems("[server.listen]\nhost = 'x'") == [
        "sluice.toml:1: server.listen: must be text, not a table"
    ]


def test_d15_min_replicas_above_max_is_refused_where_it_is_written(problems):
    found = problems('[models.m]\nsource = "a"\n[models.m.replicas]\nmax = 1\nmin = 2')
    assert found == ["sluice.toml:5: models.m.replicas.min: min = 2 is above max = 1"]


def test_d15_all_problems_of_all_sources_come_at_once(problems):
    found = problems(
        """\
        [models.small]
        source = "a"
        max_queu = 1
        sequences_max = "x"
        replicas = { min = 3, max = 2 }
        [models.large]
        threads = 0
        [slo.fast]
        percentil = 99
        """,
        "server.listn=x",
        "journal.keep=24",
        SLUICE_JOURNAL__RECORD_TEXT="maybe",
        SLUICE_SERVER_LISTEN="0.0.0.0:1",
    )
    assert len(found) == 9, found
    text = "\n".join(found)
    for fragment in (
        "sluice.toml:3: models.small.max_queu: unknown",
        "sluice.toml:4: models.small.sequences_max: must",
        "sluice.toml:5: models.small.replicas.min: min = 3 is above",
        "sluice.toml:7: models.large.threads: must",
        "sluice.toml:9: slo.fast.percentil: unknown setting; nearest: slo.fast.percentile",
        "--set: server.listn: unknown setting; nearest: server.listen",
        "--set: journal.keep: '24' has no unit",
        "$SLUICE_JOURNAL__RECORD_TEXT: journal.record_text: must be true or false",
        "$SLUICE_SERVER_LISTEN: not a setting (SLUICE_SECTION__KEY); nearest: SLUICE_SERVER__L",
    ):
        assert fragment in text


def test_d15_a_variable_for_an_unknown_setting_is_refused(problems):
    assert problems(SLUICE_SERVER__LISTN="x") == [
        "$SLUICE_SERVER__LISTN: server.listn: unknown setting; nearest: server.listen"
    ]


def test_variables_that_kubernetes_sets_for_a_service_are_left_alone(load):
    load(
        SLUICE_PORT="tcp://10.0.0.1:8000",
        SLUICE_PORT_8000_TCP_ADDR="10.0.0.1",
        SLUICE_SERVICE_HOST="10.0.0.1",
    )


def test_a_file_that_is_no_toml_is_refused_with_the_line(problems):
    (found,) = problems("[server\nlisten = 1")
    assert found == "sluice.toml:1: Expected ']' at the end of a table declaration (column 8)"


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        load_settings(tmp_path / "none.toml", (), {})


@pytest.mark.parametrize("text", ["server.listen", "=x", ""])
def test_set_without_key_or_value_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="KEY=VALUE"):
        parse_override(text)


def test_a_value_and_a_table_under_one_key_clash(problems):
    assert problems("", "models.m=x", "models.m.source=y") == [
        "--set: models.m.source is set both as a table and as a value",
        "--set: models.m: must be a table",
    ]


# -------------------------------------------------------------------------- rules between values


def test_an_open_address_without_keys_is_refused_unless_said(load, problems):
    (found,) = problems('[server]\nlisten = "0.0.0.0:8000"')
    assert found.startswith("sluice.toml:2: server.listen: 0.0.0.0:8000 can be reached from other")
    assert "allow_unauthenticated = true" in found
    load('[server]\nlisten = "0.0.0.0:8000"\nallow_unauthenticated = true')
    load('[server]\nlisten = "0.0.0.0:8000"', SLUICE_API_KEYS="k")


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ('[models.m]\nsource = "a"\nreplicas = { warm = 1 }', "warm = 1 needs max"),
        ('[models.m]\nsource = "a"\nreplicas = { min = 0 }', "min = 0 needs max"),
        ('[models.m]\nsource = "a"\npolicy = "static"\nstatic_batch = 33', "can never be reached"),
        ('[models.m]\nsource = "a"\nengine = "simulated"', 'must be one of "openvino"'),
        ("[slo.auto]", "means the default class in service_tier"),
        ('[slo.x]\noverload = ["queue", "queue"]', "each rung may stand once"),
        ('[slo.x]\noverload = ["refuse", "queue"]', "nothing can come after refuse"),
        ("[slo.x]\ntier = 10", "must be a whole number from 0 to 9, not 10"),
        ("[slo.x]\npercentile = 100", "must be a number from 50 to 99.9, not 100"),
        ("[slo.'a b']", "has at most 64 characters"),
        ('[models.m]\nsource = "a"\nslo = "x"', 'there is no class "x"; configured: none'),
        ('[models.m]\nsource = "a"\nsmaller = "m"', 'there is no other model "m"'),
        ('[models.m]\nsource = "a"\naging = "strickt"', 'or "strict", not "strickt"'),
        ('[models.m]\nsource = "a"\naging = "30"', "has no unit"),
        ('[slo.x]\ntpot = "9999999h"', "is too long; the longest duration is 3650d"),
        ('[journal]\nkeep = "3651d"', "is too long; the longest duration is 3650d"),
        ('[slo.x]\nttft = "2s"\ne2e = "1500ms"', "e2e = 1500ms is below ttft = 2s"),
        ('[slo]\nttft = "2s"', "slo.ttft: belongs to one of the tables: write it under [slo.NAME]"),
        ('[tenants.t]\nslo = "x"\n[slo.y]', 'there is no class "x"; configured: y'),
        ("[tenants.t]\nweight = 0", "must be a number from 0.01 to 1000, not 0"),
        ("[metrics.buckets]\na = [2, 1]", "positive and rising"),
        ("[metrics.buckets]\na = []", "positive and rising"),
        ('[server]\nlisten = "8000"', "is not HOST:PORT"),
    ],
)
def test_values_that_do_not_go_together_are_refused(problems, text, fragment):
    (found,) = problems(text)
    assert fragment in found


@pytest.mark.parametrize(
    ("listen", "address"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), ("host:65535", ("host", 65535))],
)
def test_listen_addresses_are_taken_apart(listen, address):
    assert listen_address(listen) == address


@pytest.mark.parametrize("listen", ["host", ":80", "::1:80", "a:b", "a:65536", "a:-1", "a:"])
def test_addresses_without_host_or_port_are_refused(listen):
    with pytest.raises(ValueError, match=r"HOST:PORT|brackets|port must"):
        listen_address(listen)


def test_loopback_is_what_only_this_machine_reaches():
    assert [is_loopback(h) for h in ("localhost", "127.0.0.9", "::1")] == [True] * 3
    assert [is_loopback(h) for h in ("0.0.0.0", "::", "10.0.0.1", "host")] == [False] * 4


# -------------------------------------------------------------------------------------- secrets


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_keys_are_kept_as_digests_only(load, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nkey-c\n\nkey-a\n")
    settings = load(
        "",
        f"server.api_key_file={file}",
        SLUICE_API_KEYS="key-a, key-b",
        SLUICE_ADMIN_KEY="root",
        HF_TOKEN="hf",
    ).settings
    assert settings.server.api_key_digests == (sha256("key-a"), sha256("key-b"), sha256("key-c"))
    assert settings.server.admin_key_digests == (sha256("root"),)
    assert settings.catalogue.hf_token == "hf"
    assert "key-a" not in repr(settings)
    assert "'hf'" not in repr(settings)


def test_a_named_variable_that_is_missing_is_refused(problems):
    assert problems('[server]\napi_keys_env = "MY_KEYS"') == [
        "sluice.toml:2: server.api_keys_env: $MY_KEYS is not set or empty"
    ]


def test_a_key_in_place_of_a_variable_name_is_not_echoed(problems):
    (found,) = problems("", "server.admin_key_env=sk-secret-1")
    assert "sk-secret-1" not in found
    assert "name of an environment variable" in found


def test_a_variable_with_our_prefix_may_hold_keys(load):
    settings = load("", SLUICE_SERVER__API_KEYS_ENV="SLUICE_TEAM_KEYS", SLUICE_TEAM_KEYS="k")
    assert settings.settings.server.api_key_digests == (sha256("k"),)


def test_a_key_file_without_keys_is_refused(problems, tmp_path):
    (tmp_path / "keys").write_text("# none yet\n")
    assert "holds no key" in problems("", f"server.api_key_file={tmp_path / 'keys'}")[0]
    assert "No such file" in problems("", f"server.api_key_file={tmp_path / 'none'}")[0]


def test_settings_cannot_give_digests_directly(problems):
    assert "unknown setting" in problems("[server]\napi_key_digests = ['x']")[0]


def test_hf_endpoint_beats_the_file_and_yields_to_our_own_name(load):
    file = '[catalogue]\nhf_endpoint = "http://file"'
    assert load(file, HF_ENDPOINT="http://hf").settings.catalogue.hf_endpoint == "http://hf"
    both = load(file, HF_ENDPOINT="http://hf", SLUICE_CATALOGUE__HF_ENDPOINT="http://ours")
    assert both.settings.catalogue.hf_endpoint == "http://ours"


def test_folders_follow_the_users_base_folders_unless_said(load):
    ambient = {"XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "/s"}
    settings = load('[journal]\ndir = "/mine"', **ambient).settings
    assert settings.catalogue.cache_dir == Path("/c/sluice")
    assert settings.journal.dir == Path("/mine")
    assert load(**ambient).settings.journal.dir == Path("/s/sluice/journal")
    assert load().settings.catalogue.prepared_dir == Path.home() / ".cache/sluice/prepared"


# ---------------------------------------------------------------------------------------- lines


def test_lines_of_keys_are_found_past_comments_long_text_and_quotes():
    text = textwrap.dedent(
        '''\
        top = 1
        [a."b.c"]  # heading
        text = """
        [not.a.heading]
        neither = 1
        """
        list = [
          1,
        ]
        d.e = 2
        [[f]]
        g = { h = 1 }
        '''
    )
    assert key_lines(text) == {
        ("top",): 1,
        ("a", "b.c"): 2,
        ("a", "b.c", "text"): 3,
        ("a", "b.c", "list"): 7,
        ("a", "b.c", "d", "e"): 10,
        ("f",): 11,
        ("f", "g"): 12,
    }


def test_components_can_be_built_without_a_loader():
    assert ModelSection("x").queue_requests_max == 64


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = " + "[" * 100_000, "sluice.toml: is nested too deeply"),
        (f"\n[{'.'.join('a' * 20_000)}]\n", "sluice.toml:2: is nested too deeply"),
        (f"{'.'.join('a' * 20_000)} = 1", "sluice.toml:1: is nested too deeply"),
        (f"\n\nx = {'1' * 5000}", "sluice.toml:3: a number has too many digits"),
        (f"\nx = {'1_' * 4999}1", "sluice.toml:2: a number has too many digits"),
        ("[slo.a]\nttft = nan", 'slo.a.ttft: must be a duration such as "500ms"'),
        ("[slo.a]\nttft = true", 'slo.a.ttft: must be a duration such as "500ms"'),
    ],
    ids=range(7),
)
def test_text_that_asks_too_much_of_the_parser_is_refused_with_its_place(problems, text, problem):
    assert any(problem in told for told in problems(text))


@pytest.mark.parametrize(
    "override",
    [
        "server.cors_origins=" + "[" * 100_000,
        "models.m.threads=" + "1" * 5000,
        "models.m=" + "[" * 100_000,
        ".".join("a" * 20_000) + "=1",
        "a" + "[" * 100_000 + "=1",
    ],
    ids=range(5),
)
def test_options_that_ask_too_much_of_the_parser_are_refused(problems, override):
    assert problems("", override)


def test_a_variable_that_is_nested_too_deeply_is_refused(problems):
    assert "too deeply" in problems(**{"SLUICE_" + "__".join("A" * 2000): "1"})[0]


@pytest.mark.parametrize("name", ["../../x", "a..b", "a b", "a\\n\\u001b[31m", "a" * 129, "", "é"])
def test_a_model_name_that_cannot_stand_in_an_address_is_refused(problems, name):
    (told,) = problems(f'[models."{name}"]\nsource = "a"')
    assert "a model's name has at most 128" in told


def test_a_key_is_shown_without_its_control_characters(problems):
    (told,) = problems('[models."\\u001b[31m\\n"]\nsource = "a"')
    assert told.partition(" ")[2].startswith('models."\\u001b[31m\\n": ')


def test_a_model_name_may_be_that_of_a_repository(load):
    names = ["org/Qwen2.5-Coder_3B:Q4_K_M", "a" * 128]
    text = "".join(f'[models."{name}"]\nsource = "a"\n' for name in names)
    assert list(load(text).settings.models) == names


def test_what_is_no_regular_file_of_moderate_size_is_not_read(tmp_path, problems):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_text("#" * 1024**2 + "#")
    for file, words in (
        (tmp_path / "pipe", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "long", "longer than 1048576 bytes"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_settings(file, environment={})
    told = problems(f'[server]\napi_key_file = "{tmp_path / "pipe"}"')
    assert "not a regular file" in told[0]


# --------------------------------------------------------------------------------------- tenants


TENANTS = """\
[slo.gold]
ttft = "500ms"
[tenants.acme]
key_sha256_env = "SLUICE_ACME"
slo = "gold"
weight = 2
[tenants.other]
key_sha256_env = "OTHER_DIGESTS"
"""


def test_keys_of_tenants_are_read_as_digests(load):
    one, two, three = (digest(key) for key in ("a", "b", "c"))
    settings = load(
        TENANTS, SLUICE_ACME=f"{one}, {two.upper()}", OTHER_DIGESTS=three, SLUICE_API_KEYS="d"
    ).settings
    assert settings.server.tenant_key_digests == ((one, "acme"), (two, "acme"), (three, "other"))
    assert settings.server.api_key_digests == (digest("d"),)
    assert settings.tenants["acme"].weight == 2.0
    assert settings.tenants["other"].slo is None


def test_a_key_of_a_tenant_lets_the_server_be_reached_from_elsewhere(load):
    listen = '[server]\nlisten = "0.0.0.0:8000"\n'
    load(listen + TENANTS, SLUICE_ACME=digest("a"), OTHER_DIGESTS=digest("b"))


def test_keys_of_tenants_that_cannot_be_used_are_refused(problems):
    taken = digest("a")
    no_digest, twice = problems(
        TENANTS, SLUICE_ACME="sk-plain", SLUICE_API_KEYS="a", OTHER_DIGESTS=taken
    )
    assert no_digest.startswith("sluice.toml:4: tenants.acme.key_sha256_env: $SLUICE_ACME holds")
    assert "no SHA-256 digest" in no_digest
    assert "sk-plain" not in no_digest
    assert twice.startswith("sluice.toml:8: tenants.other.key_sha256_env: $OTHER_DIGESTS holds a")
    assert twice.endswith("that server.api_keys_env or server.api_key_file has too")
    assert problems(TENANTS, SLUICE_ACME=taken) == [
        "sluice.toml:8: tenants.other.key_sha256_env: $OTHER_DIGESTS is not set or empty"
    ]
    (found,) = problems(f'[tenants.t]\nkey_sha256_env = "{taken}-"')
    assert "must be the name of an environment variable, not a digest" in found
    assert taken not in found


def test_a_key_of_a_tenant_that_opens_admin_is_refused(problems):
    (found,) = problems(
        TENANTS, SLUICE_ACME=digest("a"), OTHER_DIGESTS=digest("b"), SLUICE_ADMIN_KEY="a"
    )
    assert found.endswith("$SLUICE_ACME holds a key that server.admin_key_env has too")


def test_the_longest_duration_fits_into_messages_in_nanoseconds(load):
    slo = load('[slo.x]\ntpot = "3650d"').settings.slo["x"]
    assert slo.tpot_s is not None
    assert 10 * slo.tpot_s * 1e9 < 2**63


def test_models_that_stand_in_for_one_another_are_refused_once(load, problems):
    def models(*pairs):
        return "\n".join(f"[models.{a}]\nsource = 'a'\n{b}" for a, b in pairs)

    circle = ("a", "smaller = 'b'"), ("b", "smaller = 'c'"), ("c", "smaller = 'b'")
    (found,) = problems(models(*circle))
    assert found == (
        "sluice.toml:6: models.b.smaller: goes in a circle: b -> c -> b; leave one of them out"
    )
    load(models(("a", "smaller = 'b'"), ("b", "smaller = 'c'"), ("c", "")))


def test_aging_can_be_switched_off_by_a_word(load):
    file = '[models.m]\nsource = "a"\naging = "strict"\n[models.n]\nsource = "a"'
    models = load(file).settings.models
    assert (models["m"].aging_s, models["n"].aging_s) == (None, 30.0)
    assert load("", "models.m.aging=strict").settings.models["m"].aging_s is None
    assert load("", "models.m.aging=5s").settings.models["m"].aging_s == 5.0


# ------------------------------------------------------------------------------------- key files


def test_keys_of_tenants_and_of_the_operator_come_from_files_too(load, tmp_path):
    (tmp_path / "acme").write_text(f"# two\n{digest('a').upper()}\n\n{digest('b')}\n")
    (tmp_path / "boss").write_text("boss\nother boss\n")
    server = load(
        f"[tenants.acme]\nkey_sha256_file = '{tmp_path / 'acme'}'\nkey_sha256_env = 'ACME'",
        f"server.admin_key_file={tmp_path / 'boss'}",
        ACME=digest("c"),
    ).settings.server
    assert server.tenant_key_digests == tuple((digest(key), "acme") for key in "abc")
    assert server.admin_key_digests == (digest("boss"), digest("other boss"))


def test_a_key_in_a_file_of_digests_is_not_echoed(problems, tmp_path):
    (tmp_path / "acme").write_text("sk-secret-1\n")
    (found,) = problems(f"[tenants.acme]\nkey_sha256_file = '{tmp_path / 'acme'}'")
    assert found.endswith("acme holds something that is no SHA-256 digest of 64 hexadecimal digits")
    assert "sk-secret" not in found


def test_a_key_of_two_tenants_is_refused_whatever_place_it_comes_from(problems, tmp_path):
    (tmp_path / "keys").write_text(digest("a"))
    (found,) = problems(
        f"[tenants.a]\nkey_sha256_file = '{tmp_path / 'keys'}'\n[tenants.b]\nkey_sha256_env = 'B'",
        B=digest("a"),
    )
    assert found.endswith("$B holds a key that tenants.a has too")


def test_an_api_key_that_opens_admin_is_refused(problems):
    (found,) = problems("", SLUICE_API_KEYS="same", SLUICE_ADMIN_KEY="same")
    assert found.startswith("server.admin_key_env: must be no API key")
