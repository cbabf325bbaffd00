"""A part of the bucket matrix; `python -m tests.campaigns.crash_matrix.buckets`: the whole."""

import pytest

from distloop.bucket.remote_directory import RemoteDirectory
from tests.campaigns.crash_matrix.buckets import PACE, SCENARIOS, cells
from tests.campaigns.crash_matrix.scenarios import BEFORE, NEW
from tests.problems import mostly_wide


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("number", mostly_wide(range(len(SCENARIOS)), 0))
def test_whatever_request_a_machine_is_lost_at_the_run_goes_on(number, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(RemoteDirectory, "pace", PACE)
    with caplog.at_level("CRITICAL", "distloop"):
        block = cells(SCENARIOS[number], share=0.3, is_fresh=number != 0, every=9, offset=number)
    assert len(block) > 4
    assert {cell.colour for cell in block} <= {NEW, BEFORE}, [c for c in block if c.colour not in (NEW, BEFORE)]
