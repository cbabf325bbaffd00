"""Every row reaches each writer, in order: over kills at any point, failures of the writer, and runs that go back."""

import contextlib
import json
import shutil
import threading
import time
import types

import pytest

import distloop
from distloop import atomic_files
from distloop.actions.write import JsonWriter
from distloop.monitoring import deliveries
from distloop.monitoring.deliveries import Deliveries
from distloop.monitoring.media import PRCurve, Text
from distloop.monitoring.writers import RunFile, check_writers
from tests import forked
from tests.problems import classification, classifier, on, refused


class Rows:
    """A writer that keeps its rows in a list; other methods may take the place of its own."""

    def __init__(self, name="", fails_at=(), **methods):
        self.name, self.rows, self.fails_at = name, [], list(fails_at)
        self.opened, self.errors, self.num_closed, self.threads = [], [], 0, set()
        vars(self).update(methods)

    def open(self, settings, run_id):
        self.opened.append((dict(settings), run_id))
        return "the run"

    def write(self, step, numbers, time):
        self.threads.add(threading.get_ident())
        if step in self.fails_at:
            self.fails_at.remove(step)
            raise ConnectionError("no route")
        self.rows.append((step, numbers, time))

    def on_error(self, error):
        self.errors.append(error)

    def close(self):
        self.num_closed += 1

    @property
    def steps(self):
        return [step for step, *_ in self.rows]


class Gallery(Rows):
    """A writer that takes media and files, too."""

    def __init__(self, name="", fails_at=(), **methods):
        self.media, self.files = [], []
        super().__init__(name, fails_at, **methods)

    def write_media(self, step, media, time):
        if "bad" in media:
            raise ValueError("too large")
        self.media.append((step, len(self.rows), media))

    def write_file(self, name, path, step):
        self.files.append((name, path, step))


def raising(error):
    """Returns a method that raises an error."""

    def method(*_):
        raise error

    return method


def settle(opened):
    """Waits until the thread has handed over what it can."""
    done, deliveries = threading.Event(), opened._deliveries
    last = types.SimpleNamespace(catch_up=lambda *_: done.set() if opened._calls.empty() else None)
    opened._deliveries = [*deliveries, last]
    opened.flush()
    assert done.wait(300)
    opened._deliveries = deliveries


def write(opened, steps, workdir):
    """Writes rows, to the workdir's own file first, if there is one."""
    for step in steps:
        row = step, {"loss": step / 7, "bad": float("nan")}, 1e9 + step
        if workdir:
            with contextlib.closing(JsonWriter(f"{workdir}/metrics.jsonl", step - 1, goes_on=True)) as json_writer:
                json_writer.write(*row)
        opened.write(*row)
        opened.flush()


def deliver(writers, steps, workdir="", start=0, error=None, **options):
    with Deliveries(writers, str(workdir)).open(start, {}, **options) as opened:
        write(opened, steps, workdir)
        if error:
            raise error


PROGRAM = """
import os, random, sys, traceback
from distloop.monitoring import deliveries
from distloop.actions.write import JsonWriter

deliveries._BUFFER_SECS = 0.0

class Writer:  # has a file, and ends the process as SIGKILL does: before a row is in the file, or after

    def __init__(self, path, is_buffered, killed_at, is_there):  # buffered: a row is written when the next comes
        self.path, self.is_buffered, self.killed_at, self.is_there = path, is_buffered, killed_at, is_there
        self.lines = []

    @property
    def last_step(self):
        rows = open(self.path).read().splitlines() if os.path.exists(self.path) else []
        return int(rows[-1].split()[0]) if rows and not self.is_buffered else None

    def write(self, step, numbers, time):
        if step == self.killed_at and not self.is_there:
            os._exit(9)
        self.lines.append(f"{step} {numbers['loss']}\\n")
        self.put(len(self.lines) - self.is_buffered)
        if step == self.killed_at:
            os._exit(9)

    def put(self, count):
        with open(self.path, "a") as file:
            file.writelines(self.lines[:count])
        del self.lines[:count]

    def close(self):
        self.put(len(self.lines))

def run(workdir, is_buffered, draw):  # is killed between two steps, in the writer, or not
    checkpoint = workdir + "/checkpoint"
    start = int(os.readlink(checkpoint)) if os.path.lexists(checkpoint) else 0
    killed_at = start + draw.randrange(1, 12)
    writer = Writer(workdir + "/rows", is_buffered, killed_at if draw.random() < 0.7 else None, draw.random() < 0.5)
    json_writer = JsonWriter(workdir + "/metrics.jsonl", start)
    with deliveries.Deliveries([writer], workdir).open(start, {}) as opened:
        for step in range(start + 1, 31):
            for file in (json_writer, opened):
                file.write(step, {"loss": step / 7}, 1e9)
            if draw.random() < 0.5 or step % 7 == 0:
                json_writer.flush()
                opened.flush()
            if step % 7 == 0:
                os.symlink(str(step), f"{checkpoint}.{os.getpid()}")
                os.replace(f"{checkpoint}.{os.getpid()}", checkpoint)
            if step == killed_at and draw.random() < 0.7:
                os._exit(9)
        json_writer.close()

for seed in range(12):
    workdir = f"{sys.argv[1]}/{seed}"
    os.mkdir(workdir)
    for attempt in range(100):
        if not (process := os.fork()):
            try:
                run(workdir, seed % 2, random.Random(seed * 1000 + attempt))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if (code := os.waitpid(process, 0)[1] >> 8) != 9:
            break
    print(seed, attempt, code)
"""


@pytest.mark.slow
def test_every_row_is_there_in_order_however_often_the_process_is_killed(tmp_path):
    result = forked.run_program(tmp_path, PROGRAM)
    ends = [line.split() for line in result.stdout.splitlines()]
    assert len(ends) == 12 and {code for *_, code in ends} == {"0"}, result.stderr
    assert sum(int(kills) for _, kills, _ in ends) > 30
    for seed in range(12):
        rows = (tmp_path / str(seed) / "rows").read_text().splitlines()
        first = list(dict.fromkeys(rows))  # of a writer with a buffer, the last few before a kill come again
        assert first == [f"{step} {step / 7}" for step in range(1, 31)], seed
        assert seed % 2 or rows == first


def test_a_writer_that_fails_gets_the_row_again_and_one_line_says_so(capsys):
    writer, other = Rows(fails_at=[3, 3, 4]), Rows("other")
    deliver([writer, other], range(1, 7))
    assert writer.steps == other.steps == [1, 2, 3, 4, 5, 6]
    lines = capsys.readouterr().err.splitlines()
    failure = "Rows failed after step 2 (ConnectionError: no route): the run goes on, and its rows are kept"
    assert any(line.startswith(f"distloop: error: {failure}") for line in lines)
    assert "Rows takes rows again." in lines[-1] and len(lines) <= 4


def test_rows_that_were_never_taken_are_counted_and_come_next_time(tmp_path, capsys):
    deliver([Rows(fails_at=[3] * 100)], range(1, 7), tmp_path)
    assert "Rows lacks 4 rows after step 2." in capsys.readouterr().err
    again, newcomer, complete = Rows(), Rows("newcomer"), Rows()
    deliver([again, newcomer], [], tmp_path, 6, is_over=True)
    assert again.steps == [3, 4, 5, 6] and newcomer.steps == [1, 2, 3, 4, 5, 6]
    step, numbers, when = again.rows[-1]
    assert numbers.pop("bad") != 0 and (numbers, when) == ({"loss": 6 / 7}, 1e9 + 6)
    deliver([complete], [], tmp_path, 6, is_over=True)
    assert not complete.opened and not complete.num_closed


def test_a_writer_is_told_its_run_again_and_is_called_from_one_thread(tmp_path):
    first, second = Rows(), Rows()
    deliver([first], [1, 2], tmp_path)
    with Deliveries([second], str(tmp_path)).open(2, {"steps": 4}) as opened:
        write(opened, [3], tmp_path)
    assert first.opened + second.opened == [({}, None), ({"steps": 4}, "the run")]
    assert len(second.threads) == 1 and threading.get_ident() not in second.threads and second.num_closed == 1


def test_a_run_that_goes_back_hands_no_step_over_twice():
    writer = Rows(fails_at=[5] * 100)
    with Deliveries([writer], "").open(0, {}) as opened:
        for step in (1, 2, 3, 4, 5):
            opened.write(step, {"loss": 1.0}, 0.0)
        opened.flush()
        settle(opened)  # the thread has come to the failure
        writer.fails_at.clear()
        opened.write(6, {"loss": 1.0}, 0.0)  # not flushed
        opened.discard(3)  # back at step 2
        for step in (3, 4, 5, 6):
            opened.write(step, {"loss": 2.0}, 0.0)
    assert writer.steps == [1, 2, 3, 4, 5, 6]
    assert [numbers["loss"] for _, numbers, _ in writer.rows] == [1.0] * 4 + [2.0] * 2


def test_a_start_at_step_0_with_rows_noted_is_said(tmp_path, capsys):
    deliver([Rows()], [1, 2], tmp_path)
    deliver([writer := Rows()], [1, 2, 3], tmp_path)
    assert writer.steps == [3]
    assert "Rows has the rows up to step 2 and gets those after it; remove" in capsys.readouterr().err


def test_notes_that_cannot_be_read_are_said(tmp_path, capsys):
    for text in ("{", "[1]", '{"Rows": {"step": null}}'):
        (tmp_path / "writers.json").write_text(text)
        deliver([writer := Rows()], [1], tmp_path)
        assert writer.steps == [1]
        warning = capsys.readouterr().err
        assert "writers.json' cannot be read (" in warning and "): writers get all rows" in warning
    note = json.loads((tmp_path / "writers.json").read_text())["Rows"]
    assert note.items() >= {"step": 1, "id": "the run", "is_open": False, "workdir": str(tmp_path)}.items()


def test_an_error_reaches_each_writer_before_it_is_closed(caplog):
    writer, failing = Rows(), Rows("failing", on_error=raising(ConnectionError("no route")))
    with pytest.raises(KeyError):
        deliver([failing, writer], [1], error=KeyError("x"))
    assert writer.steps == [1] and isinstance(writer.errors[0], KeyError)
    assert writer.num_closed == failing.num_closed == 1
    assert "failing did not take the error that ended the run" in caplog.text


def test_an_action_that_cannot_name_its_files_is_an_error_of_the_run():
    calls, writers = [], [Gallery(), Rows()]
    left_files = raising(KeyError("run_files"))
    opened = Deliveries(writers, "", left_files=lambda: calls.append(1) or left_files()).open(0, {})
    with pytest.raises(KeyError, match="run_files"), opened:
        pass
    assert len(calls) == 1
    for writer in writers:
        assert writer.num_closed == 1 and isinstance(writer.errors[0], KeyError)


@pytest.mark.parametrize(
    "error", [RuntimeError("no API key"), SystemExit(1)], ids=["an error", "it leaves the program"]
)
def test_a_writer_that_cannot_be_opened_ends_fit_and_closes_the_others(error):
    words = rf"The writer Broken cannot be opened \({type(error).__name__}: {error}\): correct it"
    with pytest.raises(ValueError, match=words):
        deliver([first := Rows(), Rows("Broken", open=raising(error))], [])
    assert first.num_closed == 1


def test_a_writer_that_is_down_when_a_run_resumes_is_opened_later(tmp_path, capsys):
    def open(settings, run_id):
        run_ids.append(run_id)
        if len(run_ids) < 3:
            raise ConnectionError("no route")
        return run_id

    run_ids, writer = [], Rows(open=open)
    deliver([Rows()], [1, 2], tmp_path)
    deliver([writer], [3, 4, 5], tmp_path, start=2)
    assert writer.steps == [3, 4, 5] and run_ids == ["the run"] * 3
    errors = capsys.readouterr().err
    assert "Rows cannot be opened (ConnectionError: no route): the run goes on" in errors
    assert errors.count("no route") == 1 and "Rows takes rows again." in errors


@pytest.mark.parametrize("is_new", [True, False])
def test_a_writer_that_takes_long_to_open_holds_up_no_run(is_new, tmp_path, monkeypatch, capsys):
    def open(*arguments):
        assert may_open.wait(300)
        return Rows.open(writer, *arguments)

    may_open, writer = threading.Event(), Rows(open=open)
    if is_new:
        monkeypatch.setattr(deliveries, "_OPEN_SECS", 0.1)
    else:
        deliver([Rows()], [1], tmp_path)
    with Deliveries([writer], str(tmp_path)).open(0 if is_new else 1, {}) as opened:
        write(opened, [2, 3], tmp_path)
        assert not writer.opened and writer.steps == []
        may_open.set()
    assert writer.steps == [2, 3]
    assert ("New writers are not open after 0.1 seconds: the run goes on" in capsys.readouterr().err) is is_new


@pytest.mark.parametrize("has_lasting_inodes", [True, False])
def test_a_copied_workdir_is_refused_where_the_run_of_a_writer_is_in_use(has_lasting_inodes, tmp_path, monkeypatch):
    assert atomic_files._has_lasting_inodes(str(tmp_path))
    monkeypatch.setattr(atomic_files, "_has_lasting_inodes", lambda path: has_lasting_inodes)

    def opened(workdir):
        with Deliveries([writer := Rows()], str(workdir)).open(0, {}):
            return writer.opened[0][1]

    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    assert (opened(run), opened(run)) == (None, "the run")
    shutil.copytree(run, copy)
    refused(lambda: opened(copy), "copy' is a copy of '", "run', whose run 'the run' at Rows", "remove", "writers.json")
    assert opened(moved := run.rename(tmp_path / "moved")) == "the run"
    refused(lambda: opened(shutil.copytree(moved, run)), "is a copy of '", "moved'")
    (copy / "writers.json").unlink()
    assert opened(copy) is None


def test_a_copied_bucket_is_refused_by_its_url(tmp_path):
    for url in ("memory://bucket/run", "memory://bucket/run"):
        with Deliveries([Rows()], str(tmp_path), url).open(0, {}):
            pass
    copy = Deliveries([Rows()], str(tmp_path), "memory://bucket/copy")
    refused(copy.open(0, {}).__enter__, "workdir='memory://bucket/copy' is a copy of 'memory://bucket/run'")


def test_a_writer_that_hangs_does_not_keep_a_run_from_leaving(monkeypatch, capsys):
    monkeypatch.setattr(deliveries, "_LEAVE_SECS", 0.05)
    release, started = threading.Event(), time.monotonic()
    with pytest.raises(SystemExit):
        deliver([Rows("Hanging", write=lambda *_: release.wait(300))], [1, 2], error=SystemExit(75))
    release.set()
    assert time.monotonic() - started < 200 and "Hanging lacks 2 rows after step -1." in capsys.readouterr().err


def test_a_writer_that_lost_rows_gets_them_again_from_the_workdir(tmp_path):
    deliver([Rows()], range(1, 5), tmp_path)
    deliver([forgetful := Rows(last_step=1)], [5], tmp_path, start=4)
    assert forgetful.steps == [2, 3, 4, 5]


def test_a_run_without_a_workdir_keeps_the_last_rows_for_a_writer(monkeypatch, capsys):
    monkeypatch.setattr(deliveries, "_MAX_ROWS", 3)
    monkeypatch.setattr(deliveries, "_MAX_MEDIA", 2)
    writer = Gallery(fails_at=[1] * 1000 + list(range(2, 10)) * 1000)
    with Deliveries([writer], "").open(0, {}) as opened:
        for step in range(1, 10):
            opened.show(step, {"note": Text("x")}, 0.0)
            opened.write(step, {"loss": step / 7}, 1e9 + step)
        writer.fails_at.clear()
    assert writer.steps == [7, 8, 9] and [step for step, *_ in writer.media] == [8, 9]


def test_a_file_comes_at_the_end_of_a_run_and_again_if_it_was_not_taken(tmp_path, capsys):
    (tmp_path / "model").write_text("1")
    files = [RunFile(name, str(tmp_path / name), 2) for name in ("model", "gone")]

    def taken(writer, error=None, is_over=True):
        opened = Deliveries([writer], str(tmp_path), left_files=lambda: files).open(2, {}, is_over=is_over)
        with pytest.raises(type(error)) if error else contextlib.nullcontext(), opened:
            if error:
                raise error
        return [step for _, _, step in writer.files]

    assert taken(Gallery(), SystemExit(75), is_over=False) == []
    assert taken(Gallery(close=raising(ConnectionError("no route")))) == [2]
    assert "Gallery cannot be closed (ConnectionError: no route)" in capsys.readouterr().err
    assert taken(Gallery(write_file=raising(ConnectionError("no room")))) == []
    assert "(ConnectionError: no room): the same command tries it again." in capsys.readouterr().err
    assert taken(again := Gallery()) == [2] and len(again.opened) == again.num_closed == 1
    assert taken(unopened := Gallery()) == [] and not unopened.opened and not unopened.num_closed
    assert taken(Gallery(), is_over=False) == [2]  # the run was longer


def test_media_come_before_their_row_and_those_that_fail_hold_up_nothing(capsys):
    writer, plain = Gallery(fails_at=[3]), Rows("plain")
    with Deliveries([writer, plain], "").open(0, {}) as opened:
        for step, name in [(1, "note"), (2, "bad"), (3, "note"), (4, "note")]:
            opened.show(step, {name: Text("x"), "curve": PRCurve([0, 1], [0.1, 0.9])}, 0.0)
            opened.write(step, {}, 0.0)
            opened.flush()
    assert writer.steps == plain.steps == [1, 2, 3, 4]
    assert [(step, before) for step, before, _ in writer.media] == [(1, 0), (3, 2), (4, 3)]
    assert writer.media[0][2] == {"note": (".md", b"x")}  # a curve has no file
    errors = capsys.readouterr().err
    assert "Gallery did not take bad of step 2 (ValueError: too large): they are left out." in errors


def fit(workdir, steps, *writers, actions=(), last=(), **settings):
    trainer = distloop.Trainer(classifier(), on(1, workdir=str(workdir), log_every=2, **settings))
    export = distloop.Export(trainer.export, str(workdir / "models"), suffix=".npz")
    data = distloop.make_dataset(classification(20), 8)
    return trainer.fit(data, steps=steps, actions=[*actions, export, *last], writers=writers)


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_each_writer_stands(tmp_path, capsys):
    first, second, newcomer, complete = Rows(), Rows(), Rows("newcomer"), Rows()
    fit(tmp_path, 6, first, Rows("failing", fails_at=[4] * 1000), checkpoint_every=4)
    assert "failing lacks 2 rows after step 2." in capsys.readouterr().err
    assert first.opened[0][0]["workdir"] == str(tmp_path) and first.num_closed == 1
    fit(tmp_path, 10, second, newcomer, checkpoint_every=4)
    assert (first.steps, second.steps, newcomer.steps) == ([2, 4, 6], [8, 10], [2, 4, 6, 8, 10])
    result = fit(tmp_path, 10, complete, checkpoint_every=4)
    assert result["loss"] == second.rows[-1][1]["loss"] and not complete.opened
    rows = [(int(row.pop("step")), row.pop("time"), row) for row in distloop.read_metrics(tmp_path)]
    assert [(step, time, numbers) for step, numbers, time in first.rows + second.rows] == rows


@pytest.mark.slow
def test_fit_hands_over_media_and_at_the_end_exports_and_the_best(tmp_path):
    def fail(report):
        raise KeyError("x")

    fail.every = 4
    note = distloop.Summary("note", lambda state: distloop.Text("x"), every=2)
    actions = lambda: [note, distloop.SaveBest("loss")]  # noqa: E731
    first, second, complete = Gallery(), Gallery(), Gallery()
    with pytest.raises(KeyError):
        fit(tmp_path, 4, first, actions=actions(), last=[fail])
    assert not first.files and [step for step, *_ in first.media] == [2]
    fit(tmp_path, 4, second, actions=actions())
    best = json.loads((tmp_path / "checkpoints" / "best.json").read_text())["loss"][0]
    assert second.files == [
        ("best/loss", str(tmp_path / "checkpoints" / str(best)), best),
        ("models.npz", str(tmp_path / "models" / "4.npz"), 4),
    ]
    assert [step for step, *_ in second.media] == [4] and second.opened[0][0]["steps"] == 4
    fit(tmp_path, 4, complete, actions=actions())
    assert not complete.opened


def test_what_is_no_writer_is_refused_before_the_run():
    for given, sentence in [
        (Rows(), r"fit takes a list of writers: writers=\[writer\]"),
        ([print], r"a writer is an object with write\(step, numbers, time\) and close\(\)"),
        (
            [types.SimpleNamespace(write=lambda step, numbers: None, close=print)],
            r"^write of the writer 'SimpleNamespace' takes "
            r"\(step, numbers\) and is called with \(step, numbers, time\) \(.*: let it take these, or give a lambda",
        ),
        (
            [types.SimpleNamespace(write=print, close=lambda error: None)],
            r"^close of the writer .* is called with \(\) ",
        ),
        ([Rows(), Rows()], "Two writers are called 'Rows', .* give one of them another attribute `name`"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            check_writers(given)
    check_writers([Rows("a"), Rows("b")])


def test_a_run_that_a_writer_has_not_begun_has_an_id_before_it_does(tmp_path):
    with pytest.raises(ValueError, match="cannot be opened"):
        deliver([Rows(new_run_id=lambda: "new", open=raising(RuntimeError("killed")))], [1], tmp_path)
    deliver([writer := Rows(new_run_id=lambda: "another")], [1], tmp_path)
    assert writer.opened[0][1] == "new"
