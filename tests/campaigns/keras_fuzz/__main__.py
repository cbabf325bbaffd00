"""Compares programs drawn from Keras's public names with Keras itself, from the same weights.

    python -m tests.campaigns.keras_fuzz --seconds=3600 --seed=1  # for a time; each finding is shrunk and printed once
    python -m tests.campaigns.keras_fuzz --program=100007            # one program, with its source

Programs are numbered from 100000 times the seed. Each process compares a hundred, as TensorFlow gives little memory
back, and a process that crashes, or hangs over one program, is replaced. The last lines count outcomes, refusals and
findings.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

PROGRAMS_A_PROCESS = 100
HANG_SECS = 600.0  # of one program, shrinking included


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long programs are begun")
    parser.add_argument("--seed", type=int, default=1, help="which programs")
    parser.add_argument("--program", type=int, help="the number of the only program")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--known", default="[]", help=argparse.SUPPRESS)  # signatures that were printed
    arguments = parser.parse_args()
    if arguments.program is not None:
        compare_one(arguments.program)
    elif arguments.first is not None:
        compare_some(arguments.first, arguments.seconds, set(json.loads(arguments.known)))
    else:
        run_processes(arguments.seconds, arguments.seed * 100_000)


def run_processes(seconds: float, number: int) -> None:
    """Compares programs in processes, one after the other, and prints what they report."""
    end = time.monotonic() + seconds
    counts, signatures = collections.Counter(), collections.Counter()
    while (left := end - time.monotonic()) > 0:
        command = [sys.executable, "-m", "tests.campaigns.keras_fuzz", f"--seconds={left}", f"--first={number}"]
        command.append(f"--known={json.dumps(list(signatures))}")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        compared = 0
        for line in lines_of(process, HANG_SECS):
            if not line.startswith("{"):
                print(line, end="", flush=True)
                continue
            result = json.loads(line)
            compared, number = compared + 1, result["number"] + 1
            counts[result["kind"]] += 1
            signatures[f"{result['kind']}: {result['signature']}"] += 1
            print(f"# {result['number']} {result['kind']} {result['secs']:.0f} s {result['signature']}", flush=True)
        if process.wait() != 0:
            print(f"# {number} ended the process with code {process.returncode}", flush=True)
            counts["crash"] += 1
            number += 1
        elif not compared:
            break
    print(f"\n{counts.total()} programs: " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    for signature, count in signatures.most_common():
        if not signature.startswith(("equal", "invalid")):
            print(f"{count:5} {signature}")


def lines_of(process: subprocess.Popen[str], limit_secs: float) -> Iterator[str]:
    """Yields the lines of a process; kills it when none has come for a time."""
    while True:
        timer = threading.Timer(limit_secs, process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        if not line:
            return
        yield line


def compare_some(first: int, seconds: float, known: set[str]) -> None:
    """Compares programs and writes a line of JSON for each; new refusals and findings are printed before it."""
    draw_program, compare, shrink = _modules()
    end = time.monotonic() + seconds
    for number in range(first, first + PROGRAMS_A_PROCESS):
        start = time.monotonic()
        if start > end:
            return
        with contextlib.redirect_stdout(io.StringIO()):
            program = draw_program(number)
            outcome = compare(program)
            key = f"{outcome.kind}: {outcome.signature}"
            if outcome.is_finding and key not in known:
                program, outcome = shrink(program, outcome, compare, seconds=min(120.0, end - time.monotonic()))
        if key not in known and (outcome.is_finding or outcome.kind == "refused"):
            known.add(key)
            source = f"{program.source()}\n" if outcome.is_finding else ""
            print(f"\n{source}# {program.route}, {outcome.text}".replace("\n{", "\n {"))
        row = {"number": number, "kind": outcome.kind, "signature": key.partition(": ")[2]}
        print(json.dumps({**row, "secs": time.monotonic() - start}), flush=True)


def compare_one(number: int) -> None:
    """Prints a program and what came of it."""
    draw_program, compare, _ = _modules()
    program = draw_program(number)
    print(program.source())
    with contextlib.redirect_stdout(io.StringIO()):
        outcome = compare(program)
    print(f"# {program.route}, {outcome.kind}: {outcome.text}")


def _modules():
    """Prepares the devices, then imports what uses TensorFlow."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import distloop

    distloop.prepare(distloop.Config(device="cpu", num_devices=3))
    from tests.campaigns.keras_fuzz import comparison, drawing, shrinking

    return drawing.draw_program, comparison.compare, shrinking.shrink


if __name__ == "__main__":
    main()
