"""What a position in data depends on, as recorded in checkpoints, and its conversion to changed data.

    facts = facts_of(num_batches=100, batch_size=32)            # of a tf.data.Dataset or batches that Python makes
    position = convert_batches({"batches": 250, **facts_then}, facts)

Data by number has an order that does not depend on its batches, so its position is exact.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from distloop.log import log

CONTENT = "content"  # the digest of arrays in memory, which may change while the order of their rows stays
_OTHER_SIZE = "The checkpoint's batches had %d examples, these have %d: going on at batch %d, at the same examples."
_OTHER_BATCHES = (
    "The checkpoint's data had %s, the data given has %s: going on at batch %d in place of %d, %s. Examples that are "
    "shuffled after they are batched are then seen twice or not in this epoch: give batches as they were, or "
    "distloop.make_dataset, whose order does not depend on them."
)


def facts_of(*, num_batches: float | None, batch_size: int | None, num_workers: int | None = None) -> dict[str, Any]:
    """Returns what a position in data without numbers depends on, as far as it is known, for JSON.

    Args:
        num_batches: of a pass; None: unknown; inf: endless.
        batch_size: of a whole batch.
        num_workers: of the run, if other workers have other batches.
    """
    is_finite = num_batches is not None and num_batches != math.inf
    facts = {"batch_size": batch_size, "batches_per_epoch": int(num_batches or 0) if is_finite else None}
    return facts if num_workers is None else {**facts, "workers": num_workers}


def convert_batches(position: Mapping[str, Any], facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a position in batches of another size, or in epochs of another length; a warning names both.

    The position is after as many examples of the same epoch, rounded down to a batch, so no example is left out if the
    order of the examples does not depend on the batches.

    Args:
        position: as `Source.save_position` returned it; of an older version, without facts, it is returned as it is.
        facts: of the data now, from `facts_of`.

    Raises:
        ValueError: if the position is one in data by number.
    """
    if not position["batches"]:
        return position
    if "order" in position:
        raise _is_other_data("the checkpoint is of data by number, such as arrays, and the given data is not")
    if position.get("workers") != facts.get("workers"):
        return position

    def then_and_now(name: str) -> Any:
        pair = position.get(name), facts.get(name)
        return pair if all(pair) else None

    sizes, counts = then_and_now("batch_size"), then_and_now("batches_per_epoch")
    is_one_size = sizes is None or sizes[0] == sizes[1]
    if is_one_size and (counts is None or counts[0] == counts[1]):
        return position
    converted = _in_other_batches(position, sizes or (1, 1), counts)

    def shown(side: int) -> str:
        words = [f"batches of {sizes[side]} examples"] if sizes else []
        return " and ".join([*words, *([f"{counts[side]} batches an epoch"] if counts else [])])

    where = "in the same epoch" if is_one_size else "after as many examples"
    log.warning(_OTHER_BATCHES, shown(0), shown(1), converted["batches"], position["batches"], where)
    return converted


def _in_other_batches(
    position: Mapping[str, Any], sizes: tuple[int, int], counts: tuple[int, int] | None
) -> dict[str, Any]:
    """Returns a position after as many examples, rounded down; behind the end of a shorter epoch, the next one's start.

    Args:
        position: as it was saved.
        sizes: the examples of a batch, then and now.
        counts: the batches of an epoch, then and now; None: unknown.
    """

    def converted(num_batches: int) -> tuple[int, int]:
        epoch, batch = divmod(num_batches, counts[0]) if counts else (0, num_batches)
        first, most = (epoch * counts[1], counts[1]) if counts else (0, math.inf)
        return first, int(min(batch * sizes[0] // sizes[1], most))

    skipped = [(first, batch) for first, batch in map(converted, position["skipped"])]
    kept = [first + batch for first, batch in skipped if not counts or batch < counts[1]]  # others are in no batch
    return {**position, "batches": sum(converted(position["batches"])), "skipped": kept}


def _is_other_data(change: str) -> ValueError:
    """Returns the error about a position that does not exist in the given data."""
    return ValueError(
        f"The run cannot go on at its position in the data, as {change}: give the data and the seed that it began "
        "with, or begin another run in a new workdir (from these weights, with init_from)."
    )


def convert_numbered(
    position: Mapping[str, Any],
    facts: Mapping[str, Any],
    describe_change: Callable[[str], str] | None = None,
    batch_at: Callable[[int], int] | None = None,
) -> Mapping[str, Any]:
    """Returns a position in data by number in other batches, or epochs of another length, with a warning.

    The order of the examples does not depend on the batch size. No example is left out: the position is the last batch
    that begins at the saved position or before it, so up to `batch_size - 1` examples are read once more. A position
    behind the end of a shorter epoch is the start of the next one.

    Args:
        position: as it was saved.
        facts: of the data now, from `NumberedDataset.facts_at`.
        describe_change: returns how the data differs from that of a fingerprint, as a part of a sentence.
        batch_at: of a mixture, `MixedOrder.batch_at`.

    Raises:
        ValueError: if the position is one in other data, or in another order of it.
    """
    if not position["batches"]:
        return position
    _require_same(position, facts, describe_change)
    if CONTENT in position and position[CONTENT] != facts.get(CONTENT, position[CONTENT]):
        log.warning(
            "The arrays given hold other values than the checkpoint's (content %s, now %s): going on at the same "
            "position in their order, with the values of now; if that is not meant, give the arrays that the run began "
            "with, or begin another run in a new workdir.",
            *(position[CONTENT], facts[CONTENT]),
        )
    saved_size, size = position.get("batch_size"), facts.get("batch_size")
    if batch_at is not None:

        def converted(num_batches: int) -> int:  # exact unless batches to skip are beyond a change of the size
            return batch_at(position["examples"] + (num_batches - position["batches"]) * saved_size)

        if (batches := converted(position["batches"])) == position["batches"]:
            return position
        log.warning(_OTHER_SIZE, saved_size, size, batches)
        return {**position, "batches": batches, "skipped": [converted(number) for number in position["skipped"]]}
    counts = position.get("batches_per_epoch"), facts.get("batches_per_epoch")
    if not size or not saved_size or (saved_size == size and counts[0] in (counts[1], None)):
        return position
    if counts[0] is None:  # of a version that did not save it, and had no limit
        counts = math.ceil(facts["num_rows"] / saved_size), math.ceil(facts["num_rows"] / size)
    found = _in_other_batches(position, (saved_size, size), counts)  # type: ignore[arg-type]
    if saved_size != size:
        log.warning(_OTHER_SIZE, saved_size, size, found["batches"])
    else:
        log.warning(
            "The checkpoint's epochs had %d batches, these have %d: going on at batch %d, in the same epoch.",
            *(*counts, found["batches"]),
        )
    return found


def _require_same(
    position: Mapping[str, Any], facts: Mapping[str, Any], describe_change: Callable[[str], str] | None
) -> None:
    """Raises a ValueError if a position is one in other data by number, or in another order of it."""
    words = {
        "mixture": "the fractions %s",
        "lengths": "batches by length, %s",
        "num_rows": "%s rows",
        "seed": "seed=%s",
        "order": "version %s of the order",
        "fingerprint": "content %s",
    }
    name = next((name for name in words if position.get(name) != facts.get(name)), "")
    if not name:
        return
    if "order" not in position:
        raise _is_other_data(
            "the checkpoint is of other data, such as a tf.data.Dataset, or of arrays in an older order"
        )
    if name == "fingerprint" and position.get(name) and describe_change is not None:
        raise _is_other_data(describe_change(position[name]))
    before, after = (f"no {name}" if (v := side.get(name)) is None else words[name] % v for side in (position, facts))
    raise _is_other_data(f"the checkpoint's data had {before}, and the data given has {after}")
