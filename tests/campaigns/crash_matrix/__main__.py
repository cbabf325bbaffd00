"""Makes the whole crash matrix, and writes `docs/crash_matrix.md` and `docs/crash_matrix.svg`.

    python -m tests.campaigns.crash_matrix

TensorFlow's, Keras's and Orbit's savers are in it where gcc is there, and Orbit can be imported.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from distloop.checkpoints import checkpoint
from distloop.log import log
from tests.campaigns.crash_matrix.picture import Row, draw, tables
from tests.campaigns.crash_matrix.scenarios import BEFORE, COLUMNS, NEW, SCENARIOS, Export, cells, power_cells

FOLDER = pathlib.Path(__file__).resolve().parent
DOCS = FOLDER.parents[2] / "docs"


def distloop_rows(place: pathlib.Path) -> list[Row]:
    """Returns all cells of distloop."""
    checkpoint._PAUSES_SECS = (0,)
    log.setLevel("CRITICAL")
    rows = []
    for name, scenario in SCENARIOS.items():
        for keep in (1,) if isinstance(scenario, Export) else (1, 3):
            block = [*cells(scenario, keep, place, COLUMNS), *power_cells(scenario, keep, place)]
            rows += [{"who": "distloop", "what": name, "keep": keep, **dataclasses.asdict(cell)} for cell in block]
            print(f"distloop, {name}, keep {keep}: {len(block)} cells", flush=True)
    return rows


def other_rows(place: pathlib.Path) -> list[Row]:
    """Returns the cells of TensorFlow, Keras and Orbit; none if there is no gcc."""
    if shutil.which("gcc") is None:
        print("There is no gcc: TensorFlow's and Keras's savers are left out.")
        return []
    library = str(place / "file_faults.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, str(FOLDER / "file_faults.c"), "-ldl"], check=True)
    command = [sys.executable, "-m", "tests.campaigns.crash_matrix.peers", library, str(place / "peers")]
    environment = {**os.environ, "LD_PRELOAD": library}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def write_pages(rows: list[Row]) -> None:
    """Writes the page and the picture."""
    has_orbit = any(row["who"] == "Orbit" for row in rows)
    orbit = "" if has_orbit else "Orbit was not installed here; it saves with `tf.train.CheckpointManager`."
    text = (FOLDER / "page.md").read_text()
    (DOCS / "crash_matrix.svg").write_text(draw(rows))
    (DOCS / "crash_matrix.md").write_text(text.format(tables=tables(rows), orbit=orbit).rstrip() + "\n")


def main() -> int:
    """Returns the process's code: 1 if a cell of distloop is not green."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        rows = distloop_rows(pathlib.Path(directory))
        write_pages(rows + other_rows(pathlib.Path(directory)))
    bad = [row for row in rows if row["colour"] not in (NEW, BEFORE)]
    print(f"distloop: {len(rows)} cells, {len(bad)} of them neither from the new checkpoint nor from the one before")
    for row in bad:
        print(row)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
