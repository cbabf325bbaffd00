"""Tables in a pipe; tests/test_report.py shows them on terminals of several widths."""

from rich.console import Console

from distloop.monitoring import text_tables
from distloop.monitoring.text_tables import Table


def test_a_pipe_gets_a_line_for_each_row_and_two_spaces_between_columns(capsys):
    text_tables.show(Table("Runs", ["run", "step"], [["a long name", "1"], ["b", "200"]]), Console())
    assert capsys.readouterr().out == "run          step\na long name  1\nb            200\n\n"
