"""Position in data: what a position depends on, as noted in checkpoints, and its conversion to changed data.

    facts = facts_of(num_batches=100, batch_size=32)            # of a tf.data.Dataset or batches that Python makes
    place = convert_batches({"batches": 250, **facts_then}, facts)

Data by number has an order that does not depend on its batches, so its position is exact. It does not know how data is
read.
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


def convert_batches(place: Mapping[str, Any], facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a position in batches of another size, or in epochs of another length; a warning names both.

    The position is after as many examples of the same epoch, rounded down to a batch, so no example is left out if the
    order of the examples does not depend on the batches.

    Args:
        place: as `Source.save_position` returned it; of an older version, without facts, it is returned as it is.
        facts: of the data now, from `facts_of`.

    Raises:
        ValueError: if the position is one in data by number.
    """
    if not place["batches"]:
        return place
    if "order" in place:
        raise _is_other_data("the checkpoint is of data by number, such as arrays, and the given data is not")
    names = ("batch_size", "batches_per_epoch")
    sides: list[list[Any]] = [[side.get(name) for name in names] for side in (place, facts)]
    (saved_size, saved_count), (size, count) = sides
    if place.get("workers") != facts.get("workers"):
        return place
    is_sized = bool(saved_size and size)
    saved_size, size = (saved_size, size) if is_sized else (1, 1)
    is_by_epoch = bool(saved_count and count)
    if saved_size == size and (not is_by_epoch or saved_count == count):
        return place

    def converted(num_batches: int) -> int:
        if not is_by_epoch:
            return int(num_batches * saved_size // size)
        epoch, batch = divmod(num_batches, saved_count)
        return int(epoch * count + min(batch * saved_size // size, count))

    def shown(size: int, count: int | None) -> str:
        sizes = [f"batches of {size} examples"] if is_sized else []
        return " and ".join([*sizes, *([f"{count} batches an epoch"] if is_by_epoch else [])])

    batches = converted(place["batches"])
    where = "in the same epoch" if saved_size == size else "after as many examples"
    log.warning(_OTHER_BATCHES, shown(saved_size, saved_count), shown(size, count), batches, place["batches"], where)
    return {**place, "batches": batches, "skipped": [converted(number) for number in place["skipped"]]}


def _is_other_data(change: str) -> ValueError:
    """Returns the error about a position that does not exist in the given data."""
    return ValueError(
        f"The run cannot go on at its position in the data, as {change}: give the data and the seed that it began "
        "with, or begin another run in a new workdir (from these weights, with init_from)."
    )


def convert_place(
    place: Mapping[str, Any],
    facts: Mapping[str, Any],
    describe_change: Callable[[str], str] | None = None,
    batch_at: Callable[[int], int] | None = None,
) -> Mapping[str, Any]:
    """Returns a position from `Source.save_position` in other batches, or epochs of another length, with a warning.

    The order of the examples does not depend on the batch size. No example is left out: the position is the last batch
    that begins at the saved position or before it, so up to `batch_size - 1` examples are read once more. A position
    behind the end of a shorter epoch is the start of the next one.

    Args:
        place: as it was saved.
        facts: of the data now, from `NumberedDataset.facts_at`.
        describe_change: returns how the data differs from that of a fingerprint, as a part of a sentence.
        batch_at: of a mixture, `MixedOrder.batch_at`.

    Raises:
        ValueError: if the position is one in other data, or in another order of it.
    """
    if not place["batches"]:
        return place
    words = {
        "mixture": "the shares %s",
        "lengths": "batches by length, %s",
        "num_rows": "%s rows",
        "seed": "seed=%s",
        "order": "version %s of the order",
        "fingerprint": "content %s",
    }
    for name, phrase in words.items():
        if (then := place.get(name)) == (now := facts.get(name)):
            continue
        before, after = (f"no {name}" if value is None else phrase % value for value in (then, now))
        change = f"the checkpoint's data had {before}, and the data given has {after}"
        if name == "fingerprint" and then and describe_change is not None:
            change = describe_change(then)
        if "order" not in place:
            change = "the checkpoint is of other data, such as a tf.data.Dataset, or of arrays in an older order"
        raise _is_other_data(change)
    if CONTENT in place and place[CONTENT] != facts.get(CONTENT, place[CONTENT]):
        log.warning(
            "The arrays given hold other values than the checkpoint's (content %s, now %s): going on at the same "
            "position in their order, with the values of now; if that is not meant, give the arrays that the run began "
            "with, or begin another run in a new workdir.",
            *(place[CONTENT], facts[CONTENT]),
        )
    if batch_at is None:
        return _in_other_epochs(place, facts)
    saved_size, batch_size = place["batch_size"], facts["batch_size"]

    def converted(num_batches: int) -> int:  # exact unless batches to skip are beyond a change of the size
        return batch_at(place["examples"] + (num_batches - place["batches"]) * saved_size)

    if (batches := converted(place["batches"])) == place["batches"]:
        return place
    log.warning(_OTHER_SIZE, saved_size, batch_size, batches)
    return {**place, "batches": batches, "skipped": [converted(number) for number in place["skipped"]]}


def _in_other_epochs(place: Mapping[str, Any], facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a position in epochs of other batches: in the same epoch, at the same examples."""
    saved_size, batch_size = place.get("batch_size"), facts.get("batch_size")
    saved_count: Any = place.get("batches_per_epoch")
    count: Any = facts.get("batches_per_epoch")
    if not batch_size or not saved_size or (saved_size == batch_size and saved_count in (count, None)):
        return place
    if saved_count is None:  # of a version that did not save it, and had no limit
        saved_count, count = (math.ceil(facts["num_rows"] / size) for size in (saved_size, batch_size))

    def converted(num_batches: int) -> tuple[int, int]:
        epoch, batch = divmod(num_batches, saved_count)
        return epoch * count, min(batch * saved_size // batch_size, count)

    batches = sum(converted(place["batches"]))
    skipped = [sum(found) for found in map(converted, place["skipped"]) if found[1] < count]  # others are in no batch
    if saved_size != batch_size:
        log.warning(_OTHER_SIZE, saved_size, batch_size, batches)
    else:
        log.warning(
            "The checkpoint's epochs had %d batches, these have %d: going on at batch %d, in the same epoch.",
            *(saved_count, count, batches),
        )
    return {**place, "batches": batches, "skipped": skipped}
