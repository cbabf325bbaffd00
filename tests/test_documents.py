"""Tests the documents: Python blocks run, commands name modules and flags that exist, links and quotes are right."""

import ast
import functools
import http.server
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shlex
import shutil
import site
import subprocess
import threading
import venv

import pytest
from absl import flags
from absl.testing import flagsaver
from PIL import Image

import distloop
from distloop import report, testing
from distloop.launcher import launch_command
from distloop.settings import config
from distloop.workdir.records import ABOUT_THE_RUN
from experiments import planning
from tests import forked
from tests.problems import mostly_wide
from tests.test_house import ORDER

ROOT = pathlib.Path(__file__).resolve().parent.parent
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
DOCS = [*sorted((ROOT / "docs").glob("*.md")), *REFERENCE]
BENCHMARKS = sorted((ROOT / "experiments" / "benchmarks").glob("*.md"))
README = ROOT / "README.md"
PAGES = [README, *(ROOT / name for name in ("WORKSPACE.md", "CHANGELOG.md")), *DOCS, *BENCHMARKS]
LAUNCHER = {*launch_command._NUMBERS, "workers", "hosts", "ray"}
OTHERS = LAUNCHER | {*planning.COSTS, *"gpu logical_gpus environment diff card tolerance rows all help json".split()}
OTHERS |= {*"png csv workloads replicas logdir flagfile config".split()}

LAWS = ["replicas", "microbatches", "order", "overflow", "boundaries", "settings", "resume"]
LAWS += ["whole step", "rows", "durability", "state"]
LAWS += ["elastic", "evaluation", "prediction", "chief", "bits", "position", "one writer", "elastic run", "sharding"]
LAWS += ["sparse", "tokens", "gpu graph", "replay", "compiled loop", "shares", "processes", "parts"]


def name_of(page):
    return str(page.relative_to(ROOT))


def text_of(page):
    return page.read_text(encoding="utf-8")


def text_of_all(pages):
    return "".join(map(text_of, pages))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def blocks(page, language):
    """Returns the page's fenced blocks in a language, without those marked as not to run."""
    return blocks_of(text_of(page), language)


def blocks_of(text, language):
    """Returns the fenced blocks of a text with these words after the fence."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def shortened(program):
    """Returns the program with its number of steps cut to 2, on one device."""
    program = re.sub(r"\bConfig\((?=steps|epochs)", "Config(num_devices=1, ", program)
    program = program.replace("num_devices=2, device_shares=[3, 1]", "num_devices=1, device_shares=[1]")
    program = program.replace("num_devices=2", "num_devices=1")
    program = re.sub(r"\bConfig\(device=\"cpu\"(?!, num_devices)", 'Config(device="cpu", num_devices=1', program)
    program = re.sub(r"\bsteps=[\d_]+", "steps=2", re.sub(r"\bepochs=\d+", "steps=2", program))
    return program.replace("steps=2, verbose=0)", "epochs=1, verbose=0)")  # of a Keras model


def fresh_environment(directory):
    """Returns the Python of a new environment that has the packages of this one, and a copy of distloop's in place of
    the clone; `pip install .` in an empty one does the same, and downloads TensorFlow."""
    venv.create(directory, with_pip=False)
    packages = next(directory.glob("lib/python*/site-packages"))
    shutil.copytree(ROOT / "distloop", packages / "distloop", ignore=shutil.ignore_patterns("__pycache__"))
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))  # whose own .pth files do not count
    return directory / "bin" / "python"


@pytest.mark.slow
def test_the_program_of_the_readme_prints_what_it_shows_without_the_clone(tmp_path):
    program = "\n".join(blocks(README, "python"))
    (tmp_path / "empty").mkdir()
    script = tmp_path / "program.py"
    script.write_text(f"{program}\nprint(logits.shape)\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TF_"))}
    command = [fresh_environment(tmp_path / "environment"), script]
    done = subprocess.run(command, cwd=tmp_path / "empty", env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, printed, shape = done.stdout.splitlines()
    shown = re.search(r"print\(trainer\.evaluate\(test\)\)  # (.+)", program)[1]
    assert re.fullmatch(re.escape(shown).replace(r"\.\.", r"\d+"), printed), done.stdout
    assert shape == "(1000, 3)"
    of_loading = "WARNING: All log messages before|.*(Could not find cuda drivers|oneDNN custom operations are on)"
    assert [line for line in done.stderr.splitlines() if not re.match(of_loading, line)] == []


# Their Python takes 10 s or more.
LONG_PAGES = ["cookbook.md", "coming_from.md", "fine_tuning.md", "measuring.md", "models.md", "replay.md"]
LONG_PAGES += ["schedules.md", "testing.md", "watching.md"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    mostly_wide(
        pages := [page for page in PAGES[1:] if blocks(page, "python")],
        *(page for page in pages if page.name not in LONG_PAGES),
    ),
    ids=name_of,
)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = "\n".join(blocks(page, "python"))
    with flagsaver.flagsaver():
        exec(compile(shortened(program), page.name, "exec"), {"__name__": page.stem})
    flags.FLAGS.unparse_flags()


@pytest.mark.slow
def test_the_file_of_the_first_hour_runs_with_flags(tmp_path):
    (program,) = blocks(ROOT / "docs" / "first_hour.md", "python no-run: a file of its own, spirals.py")
    (tmp_path / "spirals.py").write_text(program)
    given = ["--steps=40", f"--workdir={tmp_path}/run", "--device=cpu", "--num_devices=2", "--learning_rate=0.02"]
    done = forked.run([tmp_path / "spirals.py", *given], env=os.environ)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"^accuracy (.+)$", done.stdout, re.M)[1]) > 0.4
    assert (tmp_path / "run" / "checkpoints" / "40").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("page, name", [("cookbook.md", "words.py"), ("data.md", "faces.py")])
def test_a_file_with_worker_processes_prints_what_its_page_shows(page, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (program,) = blocks(ROOT / "docs" / page, f"python no-run: a file of its own, {name}")
    (tmp_path / name).write_text(program)
    (tmp_path / "faces").mkdir()
    for number in range(70):
        Image.new("RGB", (80, 70), (number, 0, 0)).save(tmp_path / "faces" / f"{number}.png")
    done = forked.run([tmp_path / name], env=os.environ)
    assert done.stdout == {"words.py": "[[4, 4], [3, 8]]\n", "faces.py": "(64, 64, 64, 3)\n"}[name], done.stderr


@pytest.mark.slow
def test_the_message_of_the_cookbook_comes_to_a_server(tmp_path, monkeypatch):
    received = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    monkeypatch.chdir(tmp_path)
    first, recipe = (
        next(block for block in blocks(ROOT / "docs" / "cookbook.md", "python") if mark in block)
        for mark in ("def model_fn", "class Message")
    )
    with http.server.HTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WEBHOOK", f"http://127.0.0.1:{server.server_port}/hook")
        exec(compile(shortened(f"{first}\n{recipe}"), "cookbook.md", "exec"), names := {"__name__": "cookbook"})
        assert len(received) == 1 and re.match(r"finished at step 2: \{.*'test/accuracy': ", received[0])

        def fail(report):
            raise OSError("no such disk")

        fail.every = 1
        trainer = distloop.Trainer(names["model_fn"], distloop.Config(num_devices=1, device="cpu", steps=3))
        with pytest.raises(OSError):
            trainer.fit(names["train"], actions=[fail, *names["messages"]])
        assert received[1:] == ["failed: OSError: no such disk"]
        server.shutdown()
    trainer = distloop.Trainer(names["model_fn"], distloop.Config(num_devices=1, device="cpu", steps=1))
    trainer.fit(names["train"], actions=names["messages"])  # the server is gone, and the run ends well


@pytest.mark.slow
def test_two_workers_print_the_lines_that_the_page_on_workers_shows(tmp_path):
    page = ROOT / "docs" / "several_workers.md"
    (program,) = blocks(page, "python no-run: a file of its own, train.py")
    (tmp_path / "train.py").write_text(program)
    command = re.search(r"^python -m distloop\.launch (--workers=2) train\.py (--device=cpu)$", text_of(page), re.M)
    done = forked.launch([command[1], tmp_path / "train.py", command[2]], env=os.environ)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^    (\[worker \d\] worker .+)$", text_of(page), re.M)
    assert len(shown) == 2 and set(shown) <= set(done.stdout.splitlines())


def test_the_first_program_is_the_same_on_every_page():
    first = blocks(README, "python")[0]
    assert blocks(ROOT / "docs" / "index.md", "python") == [first]
    model_fn = re.search(r"^def model_fn.*?^    \)\n", first, re.M | re.S)[0]
    assert model_fn in "".join(blocks(ROOT / "docs" / "first_hour.md", "python"))


@each_page
def test_blocks_that_do_not_run_say_why(page):
    for head in re.findall(r"^```(\S.*)$", text_of(page), re.M):
        kinds = r"python|sh|text written by make docs|\{eval-rst\}|\{program-output\} .+|python no-run: \S.{10,}"
        assert re.fullmatch(kinds, head), head


@each_page
def test_commands_name_modules_and_flags_that_exist(page):
    text = text_of(page)
    if page.name == "CHANGELOG.md":
        text = text.split("\n## ")[1]  # released versions had other flags
    modules = set(re.findall(r"-m ((?:distloop|experiments)[.\w]*)", text))
    assert not [name for name in modules if importlib.util.find_spec(name) is None]
    known = set(config.Config.__dataclass_fields__) | OTHERS | set(flags.FLAGS)
    of_experiments = "\n".join(path.read_text() for path in (ROOT / "experiments").rglob("*.py"))
    known |= set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', of_experiments))
    for line in re.findall(r"^.*python\S* -m (?:distloop|experiments).*$", text, re.M):
        unknown = set(re.findall(r"--(\w+)", line)) - known
        assert not unknown, line


def anchors(page):
    """Returns the anchors that a Markdown viewer gives the page's headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text_of(page)):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@functools.cache
def messages():
    """Returns the strings in the source, with a mark for each formatted part."""
    texts = []
    for path in sorted((ROOT / "distloop").rglob("*.py")):
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


QUOTED = re.findall(r"^> (.+)$", text_of(ROOT / "docs" / "errors.md"), re.M)


@pytest.mark.slow
@pytest.mark.parametrize("quoted", QUOTED)
def test_an_error_is_quoted_as_it_is(quoted):
    pattern = ".*".join(re.escape(part) for part in quoted.split("…"))
    assert any(re.search(pattern, text, re.S) for text in messages()), quoted


def test_tests_that_a_page_names_exist():
    tests = text_of_all((ROOT / "tests").rglob("test_*.py"))
    named = {name for page in DOCS for name in re.findall(r"`(test_\w+)`", text_of(page))}
    assert sorted(name for name in named if f"def {name}(" not in tests) == []


def linked_pages(name):
    """Returns the pages that a page of the documents lists in tables, as paths from `docs`, by heading."""
    sections = text_of(ROOT / "docs" / name).split("\n## ")[1:]
    tables = {section.partition("\n")[0]: re.findall(r"\]\(([\w./]+)\) \|$", section, re.M) for section in sections}
    return {heading: pages for heading, pages in tables.items() if pages}


def test_the_index_begins_with_six_pages_and_lists_all_but_the_evidence():
    index, laws = linked_pages("index.md"), linked_pages("laws.md")
    assert [len(index[heading]) for heading in (next(iter(index)), "Evidence")] == [6, 1]
    listed = [page for pages in (*index.values(), *laws.values()) for page in pages]
    paths = {os.path.relpath(page, ROOT / "docs") for page in PAGES if page != README} | {"notebook.ipynb"}
    assert sorted(listed) == sorted(paths - {"index.md"})


def test_every_public_name_is_in_the_reference_once_with_an_example():
    text = text_of_all(REFERENCE)
    programs = "".join(blocks_of(text, "python"))
    of_testing = [name for name, value in vars(testing).items() if inspect.isfunction(value) and name[0] != "_"]
    of_testing = [name for name in of_testing if vars(testing)[name].__module__ == testing.__name__]
    names = [f"distloop.{name}" for name in distloop.__all__] + [f"distloop.testing.{name}" for name in of_testing]
    listed = re.findall(r"^\.\. auto(?:class|function|exception):: (distloop\.[\w.]+)", text, re.M)
    assert sorted(listed) == sorted(names)
    examples = {name: name.replace("distloop.testing", "testing") for name in names}
    assert [name for name, used in examples.items() if not re.search(rf"\b{used}\b", programs)] == []


@pytest.mark.parametrize("command", ["launch", "report", "smoke"])
def test_the_reference_shows_the_flags_of_a_command_with_an_example(command):
    text = text_of(ROOT / "docs" / "reference" / "commands.md")
    assert f"{{program-output}} python -m distloop.{command} --help\n" in text
    assert re.search(rf"^python -m distloop\.{command} \S", text, re.M)


def test_every_law_is_there_with_tests_that_exist_where_it_links():
    text = text_of(ROOT / "docs" / "laws.md")
    rows = re.findall(r"^\| ([a-z ]+) \| (.+) \| (\[.+) \|$", text, re.M)
    assert [law for law, _, _ in rows] == LAWS
    for _, _, tests in rows:
        for name, path in re.findall(r"\[`(\w+)`\]\(\.\./([\w/.]+)\)", tests):
            assert f"\ndef {name}(" in text_of(ROOT / path), name
        assert tests.count("test_") >= tests.count(", ") + 1


@each_page
def test_what_was_measured_on_a_day_names_the_commit(page):
    is_written = page.name == "public_models.md"  # by a program, from cells of several days
    of_pages = page.parent == ROOT / "docs" and not is_written
    paragraphs = re.split(r"\n\s*\n", text_of(page)) if of_pages else []
    dated = [p for p in paragraphs if re.search(r"\bon \d{4}-\d\d-\d\d|\(\d{4}-\d\d-\d\d", p)]
    assert not [p for p in dated if not re.search(r"\bcommit [0-9a-f]{7}\b", p)]


@each_page
def test_no_page_installs_distloop_from_an_index_that_does_not_have_it(page):
    assert not re.search(r"pip install [^\n`]*distloop", text_of(page))


def imports_of(program):
    """Returns which of distloop, keras and tensorflow a program imports, in this order."""
    nodes = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Import | ast.ImportFrom)]
    nodes.sort(key=lambda node: node.lineno)
    names = [(getattr(node, "module", None) or node.names[0].name).partition(".")[0] for node in nodes]
    return [name for name in names if name in ("distloop", "keras", "tensorflow")]


@each_page
def test_distloop_is_imported_before_keras_so_that_only_errors_are_logged(page):
    for program in blocks(page, "python(?: no-run[^\n]*)?"):
        imported = imports_of(program)
        assert "distloop" not in imported or imported[0] == "distloop", program


def test_the_notebook_imports_distloop_before_keras():
    cells = json.loads(text_of(ROOT / "docs" / "notebook.ipynb"))["cells"]
    program = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert imports_of(program)[0] == "distloop"


def test_the_notebook_shows_the_display_and_the_plot_of_its_run():
    text = text_of(ROOT / "docs" / "notebook.ipynb")
    outputs = [out for cell in json.loads(text)["cells"] if cell["cell_type"] == "code" for out in cell["outputs"]]
    shown = ["".join(out["data"]["text/plain"]) for out in outputs if out["output_type"] == "display_data"]
    assert len(shown) == 1 and "step 20/200" in shown[0] and "Finished 200 steps" in shown[0]
    assert [out for out in outputs if "image/svg+xml" in out.get("data", {})] == outputs[-1:]
    assert [out for out in outputs if out.get("name") == "stderr" or out["output_type"] == "error"] == []
    assert len(text) < 80_000 and not re.search(r"/(home|work|root|tmp)/", text)


@pytest.mark.slow
def test_the_notebook_of_the_documents_runs():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel"), pytest.importorskip("matplotlib")
    book = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(book, timeout=900, kernel_name="python3").execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.data for output in outputs if output.output_type == "display_data"]
    assert len(shown) == 1 and "Finished 200 steps" in shown[0]["text/plain"]
    results = [output.data for output in outputs if output.output_type == "execute_result"]
    assert len(results) == 3 and "'test/accuracy': 0.9" in results[0]["text/plain"] and "image/svg+xml" in results[2]


def test_written_pages_are_what_their_program_writes():
    spec = importlib.util.spec_from_file_location("docs_generated", ROOT / "docs" / "generated.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert text_of(program.PAGE) == program.render(), "run `make docs`"
    for page in REFERENCE:
        text = text_of(page)
        assert text == program.render_reference(text), f"run `make docs`: {page.name}"
    guide = text_of(program.GUIDE)
    assert guide == program.render_map(guide), "run `make docs`: WORKSPACE.md"


def test_the_map_has_the_loop_in_order_of_its_imports_then_the_parts():
    names = re.findall(r"^      (\w+)", text_of(ROOT / "WORKSPACE.md").partition("    distloop/\n")[2], re.M)
    of_loop = [name for rank in ORDER[3:] for name in rank]
    first, last = names.index("trainer"), names.index("installed")
    assert names[first : last + 1] == of_loop
    assert set(names[last + 1 :]) >= {name for rank in ORDER[1:3] for name in rank}


def test_the_tasks_of_a_new_contributor_open_six_files_at_most_which_exist():
    section = text_of(ROOT / "WORKSPACE.md").partition("## First tasks\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w.+) \| (`.+) \|$", section, re.M)
    tasks = {task: re.findall(r"`([\w/]+\.\w+)`", files) for task, files in rows}
    assert len(tasks) == 5 and all(3 <= len(paths) <= 6 for paths in tasks.values()), tasks
    assert [path for paths in tasks.values() for path in paths if not (ROOT / path).is_file()] == []


def test_files_that_the_page_for_contributors_names_exist():
    named = re.findall(r"`([\w/]+\.(?:py|md)|\w+/)`", text_of(ROOT / "WORKSPACE.md"))
    assert [path for path in named if not (ROOT / path).exists() and not (ROOT / "distloop" / path).exists()] == []


def test_the_reference_shows_signatures_without_a_build():
    text = text_of_all(REFERENCE)
    written = "".join(blocks_of(text, "text written by make docs"))
    assert "\ndistloop.Trainer.fit(\n        train,\n" in written and "\ndistloop.make_schedule(" in written
    missing = [name for name in distloop.__all__ if not re.search(rf"^distloop\.{name}\b", written, re.M)]
    assert missing == []


def test_the_page_on_watching_names_every_number_that_distloop_reports():
    text = text_of(ROOT / "docs" / "watching.md")
    assert [name for name in sorted(ABOUT_THE_RUN) if f"{name}`" not in text] == []


MAX_CELL_WORDS = 20


def cells(page):
    """Returns the cells of the page's tables, each link as its text."""
    rows = re.findall(r"^\|(.+)\|$", text_of(page), re.M)
    return [re.sub(r"\]\([^)]+\)", "]", cell).strip() for row in rows for cell in row.split(" | ")]


@pytest.mark.parametrize("name", ["data.md", "watching.md", "several_workers.md"])
def test_a_page_that_teaches_shows_a_program_before_its_first_table(name):
    page = ROOT / "docs" / name
    assert [cell for cell in cells(page) if len(cell.split()) > MAX_CELL_WORDS] == []
    text = text_of(page)
    assert 0 < text.find("\n```python") < text.index("\n|")


@pytest.mark.slow
def test_the_examples_of_the_report_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = "\n".join(blocks(ROOT / "docs" / "reference" / "watching.md", "python")[:1])
    exec(compile(shortened(program), "watching.md", "exec"), names := {"__name__": "watching"})
    names["trainer"].fit(names["rows"])
    examples = "".join(blocks(ROOT / "docs" / "reference" / "commands.md", "sh"))
    lines = re.findall(r"^python -m distloop\.report (.+)$", examples, re.M)
    assert lines and all(report.main(shlex.split(line)) == 0 for line in lines)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "RESULTS.md"], ids=name_of)
def test_no_line_of_prose_is_wider_than_120_characters(page):
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    ", "![", ">"))]
    assert [line for line in prose if len(line) > 120 and " " in line.strip()[:100]] == []


def test_the_page_on_a_step_shows_the_code_as_it_is():
    page = text_of(ROOT / "docs" / "how_a_step_works.md")
    quoted = re.findall(r"^```python no-run: (distloop/\S+)\n(.*?)^```$", page, re.M | re.S)
    assert len(quoted) >= 6
    for path, code in quoted:
        lines = [line.strip() for line in text_of(ROOT / path).splitlines()]
        assert "\n".join(line.strip() for line in code.splitlines()) in "\n".join(lines), code
