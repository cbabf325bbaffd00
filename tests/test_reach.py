"""Which tests `make check` runs after a change."""

from tests import reach
from tests.reach import ROOT, TESTS


def reached(*names):
    files, whole = reach.reach([ROOT / name for name in names])
    return {str(path.relative_to(TESTS)) for path in files}, {str(path.relative_to(TESTS)) for path in whole}


def test_a_module_reaches_its_slow_tests_and_fast_ones_of_its_importers():
    files, whole = reached("distloop/optimizers/gradients.py")
    assert whole == {"optimizers/test_gradients.py"}
    assert (
        {path.name for path in reach.ALWAYS} <= files
        and "training/test_step.py" in files
        and "bucket/test_tree.py" not in files
    )


def test_a_public_name_reaches_the_tests_that_take_it_from_the_top():
    files, _ = reached("distloop/exports/export_action.py")
    assert "exports/test_exports.py" in files and "data/test_order.py" not in files


def test_a_module_without_tests_of_its_own_reaches_those_of_its_folder():
    files, whole = reached("distloop/training/application.py")
    assert "training/test_loop.py" in files and whole == set()
    assert "bucket/test_tree.py" in reached("distloop/__init__.py")[0]  # no folder: all


def test_a_test_file_reaches_itself_and_a_shared_one_those_that_import_it():
    assert reached("tests/data/test_order.py")[1] == {"data/test_order.py"}
    files, whole = reached("tests/records/record_shards.py")
    assert any(name.startswith("records/") for name in files) and whole == set()


def test_pages_and_experiments_reach_their_tests():
    assert "test_documents.py" in reached("docs/data.md")[0]
    assert "experiments/test_experiments.py" in reached("experiments/digits.py")[1]
