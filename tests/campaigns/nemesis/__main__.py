"""Trains, strikes and checks: does a run lose anything, whatever befalls it?

    python -m tests.campaigns.nemesis --rounds=20 --seed=1            # prints each round, and what the faults cost
    python -m tests.campaigns.nemesis --seed=1 --round=7              # one of them again
    python -m tests.campaigns.nemesis --rounds=20 --seed=1 --plans    # only shows what would be done
    python -m tests.campaigns.nemesis --report /tmp/nemesis-*         # of the rounds of several calls together
    python -m tests.campaigns.nemesis --rounds=20 --elastic  # workers fail and come back, and the launcher goes on
    python -m tests.campaigns.nemesis --rounds=20 --elastic --most=3  # the same with places for three

Rounds whose invariants hold are deleted; of the others the directory is kept, with the log and all output. It takes a
root user on Linux for all faults; those that a machine does not allow are left out and named.
"""

import argparse
import concurrent.futures
import functools
import json
import os
import shutil
import tempfile
import time
import traceback

from tests.campaigns.nemesis import checker, kernel, report, rounds, schedule


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="of what befalls them")
    parser.add_argument("--round", type=int, help="the only one")
    parser.add_argument("--secs", type=float, default=float("inf"), help="how long rounds are begun")
    parser.add_argument("--jobs", type=int, default=1, help="rounds at a time")
    parser.add_argument("--elastic", action="store_true", help="elastic runs alone")
    parser.add_argument("--most", type=int, default=4, choices=range(2, 5), help="workers of elastic runs")
    parser.add_argument("--plans", action="store_true", help="print what would be done")
    parser.add_argument("--directory", default=None, help="for logs; default: a new one")
    parser.add_argument("--report", nargs="+", help="directories of earlier calls, to report on together")
    arguments = parser.parse_args()
    if arguments.report:
        print(*report.summarize([result for path in arguments.report for result in read_results(path)]), sep="\n")
        return
    numbers = [arguments.round] if arguments.round is not None else list(range(arguments.rounds))
    elastic = functools.partial(schedule.draw_elastic_plan, most=arguments.most)
    draw = elastic if arguments.elastic else schedule.draw_plan
    plans = [draw(arguments.seed, number) for number in numbers]
    if arguments.plans:
        print(*map(describe, plans), sep="\n")
        return
    for allowed, names in (
        (kernel.can_mount(), "a full disk"),
        (kernel.can_make_networks(), "packets lost, late or one way, hosts, stale names"),
        (kernel.can_number_processes(), "the same process number"),
    ):
        if not allowed:
            print(f"left out, as this machine does not allow it: {names}")
    directory = arguments.directory or tempfile.mkdtemp(prefix="nemesis-")
    print(f"logs: {directory}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        references = make_references(plans, directory, pool)
    end = time.monotonic() + arguments.secs
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for _ in pool.map(lambda plan: try_round(plan, references, directory, end), plans):
            pass
    print(*report.summarize(read_results(directory)), sep="\n")


def describe(plan):
    """Returns a plan as text, of several lines."""
    lines = [f"seed {plan.seed} round {plan.number}: {plan.setting}"]
    for number, life in enumerate(plan.lives):
        flip = "; then a byte is flipped" if life.flips_byte else ""
        lines.append(f"  life {number}: {', '.join(map(str, life.strikes)) or 'no fault'}{flip}")
    return "\n".join(lines)


def make_references(plans, directory, pool):
    """Returns the events of the undisturbed run of each setting."""
    settings = sorted({plan.setting.reference for plan in plans})
    paths = [os.path.join(directory, f"undisturbed-{number}") for number in range(len(settings))]
    return dict(zip(settings, pool.map(rounds.run_undisturbed, settings, paths), strict=True))


def try_round(plan, references, directory, end):
    """Runs and checks a round, and prints and writes what came of it, unless the time is over."""
    if time.monotonic() > end:
        return
    path = os.path.join(directory, f"round-{plan.seed}-{plan.number}")
    shutil.rmtree(path, ignore_errors=True)
    began = time.monotonic()
    try:
        events = rounds.run_round(plan, path)
        outputs = read_outputs(path, len(plan.lives) + rounds.EXTRA_LIVES)
        violations = checker.check(plan, events, outputs, references[plan.setting.reference])
        of_round = violations, checker.losses(events)
    except Exception:
        of_round = [checker.Violation("harness", traceback.format_exc())], []
    secs = time.monotonic() - began
    lines = [f"{describe(plan)}\n  {secs:.0f} s, {'holds' if not of_round[0] else 'BROKEN'}"]
    lines += [f"    {violation.invariant}: {violation.text}" for violation in of_round[0]]
    print("\n".join(lines), flush=True)
    with open(os.path.join(directory, "results.jsonl"), "a") as file:
        file.write(json.dumps({"seed": plan.seed, "round": plan.number, "results": of_round}) + "\n")
    if not of_round[0]:
        shutil.rmtree(path)


def read_results(directory):
    """Returns violations and losses of each round that was run in a directory."""
    with open(os.path.join(directory, "results.jsonl")) as file:
        rounds_results = [json.loads(line)["results"] for line in file]
    return [
        ([checker.Violation(*values) for values in violations], [checker.Loss(*values) for values in losses])
        for violations, losses in rounds_results
    ]


def read_outputs(path, count):
    """Returns what the commands printed, by life."""
    outputs = {number: "" for number in range(count)}
    for name in sorted(os.listdir(path)):
        kind, _, rest = name.partition("-")
        if kind == "output" and name.count("-") == 2 and not name.endswith(("second", ".pipe")):
            with open(os.path.join(path, name), errors="replace") as file:
                outputs[int(rest.partition("-")[0])] += file.read()
    return outputs


if __name__ == "__main__":
    main()
