"""Reports of runs whose files were damaged or written by somebody else end in a table or a sentence."""

import json
import random
import shutil

import pytest

from distloop import report

STEPS = 8
POSITION = {
    "batches": 0,
    "skipped": [],
    "order": 2,
    "num_rows": 61,
    "batch_size": 16,
    "batches_per_epoch": 4,
    "seed": 3,
}
ODD_VALUES = [None, True, -1, 0, 2.5, 10**400, 2**62, 2**40, float("nan"), "", "4", "x" * 300, [], [1], {}, {"step": 4}]
ODD_LINES = [
    b"",
    b"7",
    b"[1]",
    b"null",
    b'"x"',
    b'{"step": 4',
    b"{}",
    b'{"step": -1}',
    b'{"step": 1e3}',
    b"\xff\x00\xfe",
    b"[" * 2000,
]


def start(step, **changes):
    """A row of a start, which has noted its position in the data."""
    place = {**POSITION, "batches": step, **changes}
    times = {"time": 1000.0 + step, "last_row_time": None, "progress": None, "process_secs": 2.0, "restore_secs": None}
    return {"step": step, "devices": 1, "kind": "CPU", **times, "input": place, "before": {"step": 3.0}}


def write_run(path):
    """Writes the files of a run of two starts, the second with another batch size."""
    rows = [{"step": step, "time": 1000.0 + step, "loss": 1.0 / step} for step in range(1, STEPS + 1)]
    starts = [start(0), start(4, batch_size=12, batches_per_epoch=6)]
    metadata = {"input": {**POSITION, "batches": STEPS}, "versions": {"tensorflow": "2.21.0"}}
    files = {
        "metrics.jsonl": rows,
        "starts.jsonl": starts,
        "incidents.jsonl": [{"step": 3, "time": 1003.0, "action": "rollback", "batch": 2, "left_out": 2}],
        "config.json": {"steps": STEPS, "batch_size": 16},
        "progress.json": {"time": 1009.0, "step": STEPS, "secs": {"step": 4.0}},
        "memory.json": {"devices": {"CPU:0": {"weights": 12}}},
        f"checkpoints/{STEPS}/manifest.json": {"step": STEPS, "notes": metadata, "files": {}},
    }
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        texts = [json.dumps(value) for value in (content if isinstance(content, list) else [content])]
        (path / name).write_text("".join(f"{text}\n" for text in texts))
    return list(files)


def places_in(value, path=()):
    """Returns the paths of all values within a value of JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, item in items for place in places_in(item, (*path, key))]


def with_odd_value(line, draw):
    """Returns a line of JSON with another value, or without it."""
    value = json.loads(line)
    *outer, key = draw.choice(places_in(value))
    parent = value
    for part in outer:
        parent = parent[part]
    if draw.random() < 0.2 and isinstance(parent, dict):
        del parent[key]
    else:
        parent[key] = draw.choice(ODD_VALUES)
    return json.dumps(value).encode()


def damage(path, names, draw):
    """Changes a file of a run as drawn; returns what was done."""
    file = path / draw.choice(names + ["starts.jsonl"] * 3)
    lines = file.read_bytes().splitlines()
    number = draw.randrange(len(lines))
    kind = draw.choice(["missing", "half", "odd line", "back", "twice", "value", "value", "value", "value"])
    if kind == "missing":
        file.unlink()
        return f"no {file.name}"
    if kind == "half":
        file.write_bytes(file.read_bytes()[: draw.randrange(1 + sum(map(len, lines)))])
        return f"half of {file.name}"
    if kind == "odd line":
        lines[number] = draw.choice(ODD_LINES)
    elif kind == "back":
        lines.append(lines[0])
    elif kind == "twice":
        lines.insert(number, lines[number])
    else:
        lines[number] = with_odd_value(lines[number], draw)
    file.write_bytes(b"\n".join(lines) + b"\n")
    return f"{kind} in {file.name}: {lines[number][:400]!r}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_damaged_files_end_in_a_table_or_a_sentence(part, tmp_path, capsys):
    draw = random.Random(part)
    for i in range(70):
        run = tmp_path / str(i)
        done = [damage(run, write_run(run), draw)]
        arguments = draw.choice(
            [["--rows", "3"], ["--rows", str(STEPS)], ["--steps-of", "7"], ["--steps-of", "60"], [], ["--json"]]
        )
        code = report.main([str(run), *arguments])
        out, err = capsys.readouterr()
        assert code in (0, 2) and (out if code == 0 else "distloop.report: " in err), (done, arguments, out, err)
        assert "Traceback" not in err, (done, err)
        shutil.rmtree(run)
