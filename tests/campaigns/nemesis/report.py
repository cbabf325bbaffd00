"""The report: what the rounds came to, as text."""

import collections
import statistics


def summarize(results):
    """Returns the lines of a report.

    Args:
        results: of each round its violations and its losses.
    """
    failed = sum(bool(violations) for violations, _ in results)
    count = len(results)
    bound = f"; with 95 % confidence fewer than {3 / count:.1%} of rounds fail (3 / {count})" if not failed else ""
    lines = [f"{failed} of {count} rounds broke an invariant{bound}."]
    counts = collections.Counter(violation.invariant for violations, _ in results for violation in violations)
    lines += [f"{invariant}: {times} violations" for invariant, times in sorted(counts.items())]
    losses = collections.defaultdict(list)
    for _, of_round in results:
        for loss in of_round:
            losses[loss.fault].append(loss)
    lines += ["", "| fault | times | seconds to the last end: median | 99 % | steps trained again: mean | most |"]
    lines += ["|---|---|---|---|---|---|"]
    for fault, of_fault in sorted(losses.items()):
        secs = sorted(loss.secs for loss in of_fault)
        steps = [loss.steps for loss in of_fault if loss.steps is not None] or [0]
        late = secs[min(len(secs) - 1, int(0.99 * len(secs)))]
        numbers = f"{statistics.median(secs):.1f} | {late:.1f} | {statistics.mean(steps):.1f} | {max(steps)}"
        lines.append(f"| {fault} | {len(secs)} | {numbers} |")
    return lines
