"""What is no writer is refused, and two writers need two names."""

import pytest

from distloop.monitoring.writers import check_writers
from tests.monitoring.test_deliveries import Rows


def test_what_is_no_writer_is_refused_before_the_run():
    for given, sentence in [
        (Rows(), r"fit takes a list of writers: writers=\[writer\]"),
        ([print], r"a writer is an object with write\(step, numbers, time\) and close\(\)"),
        ([Rows(), Rows()], "Two writers are called 'Rows', .* give one of them another attribute `name`"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            check_writers(given)
    check_writers([Rows("a"), Rows("b")])
