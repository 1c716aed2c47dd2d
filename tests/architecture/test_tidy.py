"""Budgets and names, so that style is not a matter of review.

Budgets and the reasons for them are in docs/ARCHITECTURE.md. A split should follow meaning: the
longest functions are printed (``pytest -rP``) before they become too long.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

FUNCTION_LINES_WARN = 40
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600
PARAMETERS_MAX = 6
CORE_CODE_LINES_MAX = {"replica": 2400, "fleet": 3000, "scaling": 420}
SCALING = {"core/forecast.py", "core/scaling.py", "core/supply.py"}

# Where `except Exception` is right: each answers the waiter, lets the request go on without what
# failed, or raises again. The third place of the style guide, loading one plugin, does not exist.
BROAD_EXCEPT_ALLOWED = {
    "cluster/auto_route.py": "one score of a classifier",
    "cluster/fleet_driver.py": "one request on its way to a replica",
    "runtime/sequence_texts.py": "one request in one driver step",
    "server/app.py": "one request",
}

BANNED_WORDS = {
    "manager",
    "handler",
    "helper",
    "helpers",
    "util",
    "utils",
    "common",
    "misc",
    "info",
    "data",
    "impl",
}
# Names that a library asks for.
BANNED_WORDS_EXCEPT = {
    "data_received", "handle_data", "add_signal_handler", "remove_signal_handler",
}  # fmt: skip

TIME_WORDS = {"duration", "timeout", "elapsed", "latency", "deadline", "interval"}
QUALIFIER_FIRST = re.compile(r"^(max|min|num|n)_")
# Fields of formats that others define keep their names.
FOREIGN_NAMES = {
    "max_completion_tokens",
    "max_position_embeddings",
    "max_tokens",
    "min_p",
    "min_tokens",
}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def line_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its decorators and its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        doc = function.body[0]
        lines -= (doc.end_lineno or doc.lineno) - doc.lineno + 1
    return lines


def code_lines(text: str, tree: ast.AST) -> int:
    """Lines that are neither blank nor comment nor docstring: explaining costs no budget."""
    explaining: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                explaining.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in explaining
        for number, line in enumerate(text.splitlines(), 1)
    )


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    args = function.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return sum(1 for arg in named if arg.arg not in {"self", "cls"})


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that the file itself names."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def words(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word.lower() for word in spaced.split("_") if word]


def broad_excepts(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            for kind in caught:
                if kind is None or (
                    isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"}
                ):
                    yield node.lineno


def name_problem(name: str) -> str | None:
    if name in BANNED_WORDS_EXCEPT:
        return None
    found = words(name)
    banned = BANNED_WORDS.intersection(found)
    if banned:
        return f"{name}: say what it is instead of {', '.join(sorted(banned))}"
    if found and found[0] == "base" and len(found) > 1:
        return f"{name}: `base` says nothing as a prefix"
    return None


def time_unit_problem(name: str) -> str | None:
    """A time that is a number ends with its unit, or with unit and qualifier (``wait_s_max``)."""
    if name.islower() and words(name)[-1] in TIME_WORDS:
        return f"{name}: end it with its unit (_ns, _s)"
    return None


def annotated_numbers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Fields and parameters whose annotation is a plain number, possibly optional."""
    for node in ast.walk(tree):
        target: Any = None
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            target, name = node.annotation, node.target.id
        elif isinstance(node, ast.arg) and node.annotation is not None:
            target, name = node.annotation, node.arg
        else:
            continue
        if re.fullmatch(r"(int|float)( \| None)?", ast.unparse(target)):
            yield node.lineno, name


def test_functions_and_files_stay_within_their_budgets(modules):
    problems, long = [], []
    for module in modules:
        lines = module.text.count("\n")
        if lines > FILE_LINES_MAX:
            problems.append(f"{module.name}: {lines} lines, at most {FILE_LINES_MAX}")
        for function in functions(module.tree):
            where = f"{module.name}:{function.lineno} {function.name}"
            length, parameters = line_count(function), parameter_count(function)
            if length > FUNCTION_LINES_WARN:
                long.append((length, where))
            if length > FUNCTION_LINES_MAX:
                problems.append(f"{where}: {length} lines, at most {FUNCTION_LINES_MAX}")
            if parameters > PARAMETERS_MAX:
                problems.append(f"{where}: {parameters} parameters, at most {PARAMETERS_MAX}")
    for length, where in sorted(long, reverse=True):
        print(f"{length:4d} lines  {where}")
    assert not problems, "\n".join(problems)


def reached_from(module: str, modules) -> set[str]:
    """The modules of ``core`` that one of them needs, itself included."""
    trees = {m.name: m.tree for m in modules if m.name.startswith("core/")}
    found, new = set[str](), {f"core/{module}.py"}
    while new:
        found |= new
        imports = [
            node.module
            for name in new
            for node in ast.walk(trees[name])
            if isinstance(node, ast.ImportFrom) and node.module
        ]
        wanted = {f"{each.removeprefix('sluice.').replace('.', '/')}.py" for each in imports}
        new = (wanted & trees.keys()) - found
    return found


def test_each_side_of_core_stays_small(modules):
    """What one reads for the replica, what is added to that for the fleet, and for its size."""
    replica = reached_from("replica", modules)
    fleet = reached_from("fleet", modules) - replica
    sides = {"replica": replica, "fleet": fleet - SCALING, "scaling": fleet & SCALING}
    for side, names in sides.items():
        lines = sum(code_lines(m.text, m.tree) for m in modules if m.name in names)
        print(f"core, {side}: {lines} lines of code of {CORE_CODE_LINES_MAX[side]}")
        assert lines <= CORE_CODE_LINES_MAX[side]
    left_out = {m.name for m in modules if m.name.startswith("core/")} - replica - fleet
    assert left_out == {"core/__init__.py", "core/sampling.py"}, "sampling goes through unread"


def test_no_global_statement(modules):
    problems = [
        f"{module.name}:{node.lineno}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Global)
    ]
    assert not problems, problems


def test_broad_excepts_stay_at_their_named_places(modules):
    problems = [
        f"{module.name}:{line}"
        for module in modules
        for line in broad_excepts(module.tree)
        if module.name not in BROAD_EXCEPT_ALLOWED
    ]
    assert not problems, problems


def test_names_say_what_things_are(modules):
    problems = []
    for module in modules:
        stem = module.path.stem
        named = [(1, stem), *defined_names(module.tree)]
        for line, name in named:
            problem = name_problem(name) if name != "base" else None
            if problem:
                problems.append(f"{module.name}:{line} {problem}")
    assert not problems, "\n".join(sorted(set(problems)))


def test_times_carry_their_unit_and_qualifiers_come_last(modules):
    problems = []
    for module in modules:
        for line, name in annotated_numbers(module.tree):
            problem = time_unit_problem(name)
            if QUALIFIER_FIRST.match(name):
                problem = f"{name}: qualifiers come last (`{QUALIFIER_FIRST.sub('', name)}_max`)"
            if problem and name not in FOREIGN_NAMES:
                problems.append(f"{module.name}:{line} {problem}")
    assert not problems, "\n".join(problems)


CORE_MAY_IMPORT = {
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "random",  # for the type of an injected generator; ruff bans the module's functions
    "types",
    "typing",
}


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of every imported module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""


def test_core_imports_itself_and_pure_standard_modules_only(modules):
    problems = [
        f"{module.name}:{line} {name}"
        for module in modules
        if module.name.startswith("core/")
        for line, name in imports(module.tree)
        if name not in CORE_MAY_IMPORT and not name.startswith("sluice.core")
    ]
    assert not problems, problems


# Who may import which library, so that its types and its quirks stay in one place.
IMPORTERS = {
    "click": ("cli/",),
    "google": ("cluster/placement/keda.py",),
    "grpc": ("cluster/placement/keda.py",),
    "httptools": (
        "executors/http_connection.py",
        "loadtest/connection.py",
        "server/serve.py",
    ),
    "jinja2": ("runtime/quoting.py", "runtime/sandbox.py", "runtime/templates.py"),
    "llguidance": ("runtime/grammar",),
    "msgspec": (
        "cli/",
        "cluster/",
        "complexity/",
        "doctor/",
        "executors/",
        "loadtest/",
        "retrieval/",
        "runtime/",
        "server/",
        "telemetry/",
        "testing/",
        "wiring/",
    ),
    "numpy": (
        "cli/doctor_page.py",
        "cli/route.py",
        "complexity/",
        "doctor/",
        "executors/",
        "loadtest/",
        "planner/residual.py",
    ),
    "opentelemetry": ("telemetry/otlp.py",),
    "openvino": ("executors/openvino",),
    "openvino_genai": ("executors/openvino",),
    "prometheus_client": ("loadtest/signals.py", "telemetry/metrics.py"),
    "pyarrow": ("loadtest/rows.py",),
    "qdrant_client": ("retrieval/qdrant.py",),
    "ray": ("cluster/placement/ray_cluster.py",),
    "rich": ("cli/",),
    "starlette": ("server/",),
    "tokenizers": ("runtime/tokenizing.py",),
    "uvicorn": ("server/",),
    "uvloop": ("loadtest/crew.py", "loadtest/null_server.py", "server/"),
    "yaml": ("cli/deploy.py",),
    "zstandard": ("telemetry/segments.py",),
}
# Dependencies that another one loads.
LOADED_BY = {"openvino_tokenizers": "openvino_genai"}
# What packages are imported as that have another name.
IMPORTED_AS = {
    "grpcio": "grpc",
    "protobuf": "google",
    "pyyaml": "yaml",
    "opentelemetry_sdk": "opentelemetry",
    "opentelemetry_exporter_otlp_proto_grpc": "opentelemetry",
    "opentelemetry_exporter_otlp_proto_http": "opentelemetry",
}


def test_each_library_is_imported_where_it_belongs(modules):
    problems = []
    for module in modules:
        for line, name in imports(module.tree):
            library = name.split(".", maxsplit=1)[0]
            if library in sys.stdlib_module_names or library == "sluice":
                continue
            allowed = IMPORTERS.get(library, ())
            if not module.name.startswith(allowed):
                problems.append(f"{module.name}:{line} {name}: allowed in {allowed or 'no module'}")
    assert not problems, "\n".join(problems)


def test_each_dependency_is_used_and_has_its_reason(root, modules):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    optional = [text for extra, names in extras.items() if extra != "dev" for text in names]
    names = [re.split(r"[<>=~]", text)[0] for text in [*project["dependencies"], *optional]]
    reasons = (root / "docs/decisions/0001-dependencies.md").read_text()
    assert [
        name for name in names if not re.search(rf"^\|[^|]*\b{name}\b", reasons, re.MULTILINE)
    ] == []
    used = {name.split(".")[0] for module in modules for _, name in imports(module.tree)}
    packages = (name.replace("-", "_") for name in names)
    libraries = {IMPORTED_AS.get(name, name) for name in packages}
    assert libraries - used == set(LOADED_BY)
    assert set(IMPORTERS) | set(LOADED_BY) == libraries


# What they decode comes from our own processes, or is encoded.
DECODES_ITS_OWN = {"cluster/channel.py", "telemetry/segments.py"}


def test_what_cannot_be_decoded_may_be_nested_too_deeply(modules):
    """The library msgspec raises ``RecursionError`` for that, which is none of its own errors."""
    found = [
        f"{module.name}:{line}"
        for module in modules
        if module.name not in DECODES_ITS_OWN
        for line in shallow_excepts(module.tree)
    ]
    assert found == []


def shallow_excepts(tree: ast.AST) -> Iterator[int]:
    """Lines of ``try`` that are ready for msgspec's errors in decoding and for no recursion."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = {
                part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
                for one in node.handlers
                if one.type is not None
                for part in ast.walk(one.type)
            }
            if caught & {"DecodeError", "MsgspecError"} and "RecursionError" not in caught:
                yield node.lineno


# The checks themselves, on small sources that break each rule.


@pytest.mark.parametrize(
    ("caught", "lines"),
    [
        ("msgspec.DecodeError", [1]),
        ("(OSError, msgspec.MsgspecError)", [1]),
        ("(msgspec.DecodeError, RecursionError)", []),
        ("OSError", []),
    ],
)
def test_excepts_without_recursion_are_found(caught, lines):
    assert list(shallow_excepts(ast.parse(f"try: ...\nexcept {caught}: ..."))) == lines


@pytest.mark.parametrize(
    "name",
    ["ReplicaManager", "error_handler", "data", "request_info", "base_url_utils", "base_executor"],
)
def test_banned_names_are_found(name):
    assert name_problem(name)


@pytest.mark.parametrize("name", ["database", "informed", "replica", "data_received", "basement"])
def test_ordinary_names_pass(name):
    assert name_problem(name) is None


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("try: ...\nexcept: ...", [2]),
        ("try: ...\nexcept Exception: ...", [2]),
        ("try: ...\nexcept (ValueError, BaseException): ...", [2]),
        ("try: ...\nexcept OSError: ...", []),
    ],
)
def test_broad_excepts_are_found(source, lines):
    assert list(broad_excepts(ast.parse(source))) == lines


def test_a_docstring_does_not_count_towards_the_length_of_its_function():
    function = next(
        functions(ast.parse('def f(self, a, *, b):\n    """One.\n\n    Two."""\n    x\n'))
    )
    assert (line_count(function), parameter_count(function)) == (2, 2)


@pytest.mark.parametrize("name", ["timeout", "step_duration", "queue_deadline"])
def test_times_without_unit_are_found(name):
    assert time_unit_problem(name)


@pytest.mark.parametrize("name", ["timeout_s", "duration_ns", "deadline_ns", "queue_wait_s_max"])
def test_times_with_unit_pass(name):
    assert time_unit_problem(name) is None
