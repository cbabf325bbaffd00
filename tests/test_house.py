"""The rules of the house, read from the source: layers, names, and who may name what."""

import ast
import collections
import graphlib
import os
import re
import subprocess
import sys

import pytest

import distloop
from tests.imports import MODULES, PACKAGE, ROOT, imports_of, modules_imported, names_of, tree_of

EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.py"))

# Imports point down this list, which is the map in WORKSPACE.md; within a folder they run in no circle.
ORDER = [
    ["__init__", "smoke", "launch", "report"],
    ["launcher"],
    # parts, which can be taken away: tests/test_without_parts.py
    [*"audit bucket mixtures records recompute replay reports pipeline sharding tables trackers".split()]
    + ["exports", "examples", "processes", "sidecar", "schedule_free", "distillation", "multi_optimizer", "testing"]
    + ["histograms", "keras_callbacks", "xla", "warm_start", "step_fn"],
    ["trainer"],
    ["run"],
    ["checkpoints"],
    ["keras_models"],
    ["evaluation"],
    ["actions"],
    ["training"],
    ["model"],
    ["data"],
    ["monitoring"],
    ["workdir"],
    ["distributed"],
    ["workers"],
    ["optimizers"],
    ["settings"],
    [
        "variables",
        "errors",
        "graph_functions",
        "log",
        "atomic_files",
        "urls",
        "threads",
        "installed",
    ],
]
RANKS = {name: rank for rank, names in enumerate(reversed(ORDER)) for name in names}


WITHOUT_TENSORFLOW = {
    "__init__",
    "launch",
    "smoke",
    "report",
    "log",
    "atomic_files",
    "installed",
    "threads",
}
WITHOUT_TENSORFLOW |= {f"settings.{name}" for name in ("config", "config_file", "contradictions", "durations", "flags")}
WITHOUT_TENSORFLOW |= {f"monitoring.{name}" for name in "deliveries writers console text_tables curves timing".split()}
WITHOUT_TENSORFLOW |= {name for name in MODULES if name.startswith(("workers.", "workdir.", "reports.", "launcher."))}
WITHOUT_TENSORFLOW |= {"urls", *(f"bucket.{name}" for name in "remote_directory tree upload".split())}
JUNK_DRAWERS = {"utils", "util", "common", "base", "core", "helpers", "helper", "manager", "handler", "wrapper", "misc"}

# Words for which the field has others: a virtual replica, send and report, inspect, a fraction or a worker's rows, a
# device or a slot, to fast forward, a lost position, to commit, to check and clip, replaced, failed, leaving, complete,
# metadata and messages, a microbatch, a shard or an entry. `written`, `row`, `phase` and `counts` have a right meaning
# beside the wrong ones: of files, of tables, of a run's time, and numbers.
RETIRED = set("turn turns tell tells told look looks share shares behind astray settle settled judge".split())
RETIRED |= set("judged overwritten fell fallen leaver leavers note notes noted place places whole part parts".split())
NOT_RETIRED = {
    "public: an argument of autotune_batch, an attribute of MemoryEstimate": {"memory_share", "parts"},
    "public: a setting": {"device_shares"},
    "a folder of the package that can be taken away": {"import_part"},
    "a key in the file of a lock": {"place"},
    "TensorFlow's verb for devices": {"_place_variables", "place_slots"},
    "an integer": {"whole_number"},
}

each_module = pytest.mark.parametrize("module", MODULES)


@pytest.mark.slow
@each_module
def test_imports_point_down(module):
    def rank(name):
        return RANKS[name.partition(".")[0]]

    for imported in modules_imported(module):
        assert rank(imported) <= rank(module), f"{module} imports {imported}"


@pytest.mark.parametrize(("folder", "other"), [("distributed", "optimizers"), ("training", "actions")])
def test_a_folder_imports_nothing_of_another(folder, other):
    modules = [module for module in MODULES if module.startswith(f"{folder}.")]
    imported = {(module, name) for module in modules for name in modules_imported(module)}
    assert [pair for pair in sorted(imported) if pair[1].startswith(f"{other}.")] == []


def test_names_of_modules_are_unique():
    names = collections.Counter(path.stem for path in MODULES.values() if path.stem != "__init__")
    assert [name for name, count in names.items() if count > 1] == []


def test_imports_run_in_no_circle():
    graph = {module: set(modules_imported(module)) for module in MODULES}
    list(graphlib.TopologicalSorter(graph).static_order())


@each_module
def test_the_package_does_not_know_the_experiments(module):
    assert not [name for name in imports_of(MODULES[module]) if name.partition(".")[0] in ("experiments", "tests")]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_experiments_import_the_package_from_the_top_only(path):
    for name in imports_of(path):
        package, _, rest = name.partition(".")
        if package == "distloop" and rest:
            assert rest in distloop.__all__, f"{path.name} imports {name}: use what distloop/__init__.py offers"


def test_whatever_the_package_offers_is_there():
    assert distloop.__all__ == sorted(distloop.__all__)
    assert all(hasattr(distloop, name) for name in distloop.__all__)


def test_type_checkers_see_the_names_that_are_there():
    imported = {}  # under TYPE_CHECKING
    for node in ast.walk(tree_of(MODULES["__init__"])):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("distloop."):
            imported.update({alias.asname: node.module.partition(".")[2] for alias in node.names})
    assert imported == distloop._MODULES and set(distloop.__all__) <= set(dir(distloop))


def test_no_module_or_folder_bears_a_public_name():
    assert not set(distloop.__all__) & {path.stem for path in PACKAGE.iterdir()}


def test_submodules_are_there_without_being_imported():
    program = "import distloop; assert distloop.report.main; from distloop import launch; print(launch.main)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0 and result.stdout.startswith("<function main"), result.stderr


def test_names_that_are_not_there_are_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'distloop' has no attribute 'Trainr'"):
        distloop.Trainr  # noqa: B018


def test_a_name_of_a_class_has_one_home():
    homes = {}
    for path in MODULES.values():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_no_module_is_a_junk_drawer():
    files = [*MODULES.values(), *EXPERIMENTS, *(ROOT / "tests").rglob("*.py")]
    assert not [path.name for path in files if JUNK_DRAWERS & set(path.stem.split("_"))]
    for package in ("distloop", "experiments"):
        assert not JUNK_DRAWERS & {path.name for path in (ROOT / package).rglob("*") if path.is_dir()}


def retired_words_of(name):
    """Returns the words of a name that have an English meaning here, and none in the field."""
    return RETIRED & set(re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower().split("_"))


@each_module
def test_names_are_in_the_words_of_the_field(module):
    named = set()
    for node in ast.walk(tree_of(MODULES[module])):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                named.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                named.add(name)
    allowed = {name for names in NOT_RETIRED.values() for name in names}
    assert not {name: words for name in sorted(named - allowed) if (words := retired_words_of(name))}


def test_a_name_of_a_test_has_70_letters_at_most():
    nodes = [node for path in (ROOT / "tests").rglob("*.py") for node in ast.walk(tree_of(path))]
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert not [name for name in names if len(name) > 70]


@each_module
def test_no_function_reads_the_privates_of_a_class_beside_it(module):
    body = tree_of(MODULES[module]).body
    classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
    for function in [node for node in body if isinstance(node, ast.FunctionDef)]:
        own = {a.arg for a in function.args.args if isinstance(a.annotation, ast.Name) and a.annotation.id in classes}
        read = [node for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
        privates = [node for node in read if isinstance(node.value, ast.Name) and node.value.id in own]
        assert not [node.attr for node in privates if node.attr != "_replace"], f"{function.name}: make it a method"


@each_module
def test_a_module_begins_with_a_line_of_what_it_holds(module):
    first_line = (ast.get_docstring(tree_of(MODULES[module])) or "").partition("\n")[0]
    assert first_line.endswith((".", ":"))


@pytest.mark.slow
@each_module
def test_only_one_module_names_strategy_classes(module):
    of_tensorflow = re.compile(r"\w+(?<!Scheduling)Strategy(V1|V2)?")  # Ray has scheduling strategies
    named = sorted(name for name in names_of(MODULES[module]) if of_tensorflow.fullmatch(name))
    assert not named or module == "distributed.strategies", f"{module} names {named}"


@each_module
def test_only_two_modules_have_a_tape(module):
    has_tape = "GradientTape" in names_of(MODULES[module])
    assert not has_tape or module in ("training.differentiation", "recompute.recomputed_call")


def test_settings_are_written_where_secrets_are_hidden():
    whole = re.compile(r"\basdict\(|\bvars\(([\w.]*\.)?_?(config|settings)\)")
    found = [name for name, path in MODULES.items() if whole.search(path.read_text(encoding="utf-8"))]
    assert found == ["settings.flags"]


@pytest.mark.parametrize("module", sorted(WITHOUT_TENSORFLOW & set(MODULES)))
def test_what_starts_at_once_needs_no_tensorflow(module):
    packages = {name.partition(".")[0] for name in imports_of(MODULES[module])}
    assert not packages & {"tensorflow", "keras", "numpy", "tf_keras"}
    assert not names_of(MODULES[module]) & {"tf", "keras"}


def docstrings_of(tree):
    """Returns the ids of the nodes that are docstrings."""
    bodies = [node.body for node in ast.walk(tree) if hasattr(node, "body") and isinstance(node.body, list)]
    return {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}


def words_of(path):
    """Yields what code says: names, attributes, arguments, keywords and texts; no imports, docstrings and comments."""
    left_out = docstrings_of(tree_of(path))
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in left_out:
                yield from re.findall(r"\w+", text)
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=name):
                yield name
            case ast.FunctionDef(name=name):
                yield name


@pytest.mark.parametrize(
    ("idea", "limit"),
    [
        ({"virtual_replicas"}, 8),  # others ask `Replicas`, which is made of the setting
        ({"is_split", "is_sharded", "is_padded"}, 4),  # others ask `BatchLayout`
        ({"placement", "slot_placement"}, 6),  # others ask `TrainState`
    ],
)
def test_an_idea_is_known_to_few_files(idea, limit):
    knowing = [name for name, path in MODULES.items() if not idea.isdisjoint(words_of(path))]
    assert len(knowing) <= limit, f"{sorted(idea)}: {', '.join(knowing)}"


def test_the_report_starts_without_tensorflow_and_tensorboard():
    program = "import sys, distloop.report; print(sorted({'tensorflow', 'keras', 'tensorboard'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.stdout == "[]\n", result.stdout + result.stderr


@pytest.mark.parametrize("level", [None, "0"])
def test_tensorflow_logs_errors_at_most_unless_the_user_chose_a_level(level):
    environ = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environ |= {} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}
    program = "import os, distloop; print(os.environ['TF_CPP_MIN_LOG_LEVEL'])"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900)
    assert result.stdout.strip() in ([level] if level else ["2", "3"]), result.stderr


def test_workers_meet_by_one_record_alone():
    callers = {}
    for name, path in MODULES.items():
        for function in [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)]:
            for called in {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}:
                callers.setdefault(called, set()).add(f"{name}.{function.name}")
    of_workers = {called: {f"distributed.collectives.{name}" for name in names} for called, names in {
        "_gather_function": {"_gather"}, "_gather": {"exchange", "_gather_bytes"}, "_gather_bytes": {"gather"},
    }.items()}  # fmt: skip
    assert {called: callers[called] for called in of_workers} == of_workers


def set_from_outside(tree):
    """Returns the attributes that a module sets of objects other than `self` and `cls`, in order, as text."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    others = [node for node in nodes if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))]
    return [ast.unparse(node) for node in sorted(others, key=lambda node: node.lineno)]


# Remove a line when its attribute is set by the methods of its own class alone; add none.
SET_FROM_OUTSIDE = {
    "run.stops": ["evaluation.stop_requests"],
    "training.diagnosis": ["report.loss_scale", "report.overflows"],
}


@pytest.mark.parametrize("folder", ["training", "run", "checkpoints"])
def test_nothing_of_another_object_is_set_from_outside(folder):
    found = {name: set_from_outside(tree_of(path)) for name, path in MODULES.items() if name.startswith(f"{folder}.")}
    allowed = {name: names for name, names in SET_FROM_OUTSIDE.items() if name.startswith(f"{folder}.")}
    assert {name: names for name, names in found.items() if names} == allowed


def test_an_attribute_of_another_object_is_found_wherever_it_is_set():
    source = "loop.secs = 1\nself.a = 2\nself.b.c += 3\nx, d.e = 4, 5\nfor f.g in h: pass\nwith i as j.k: pass"
    assert set_from_outside(ast.parse(source)) == ["loop.secs", "self.b.c", "d.e", "f.g", "j.k"]
