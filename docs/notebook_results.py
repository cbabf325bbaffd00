"""Runs notebook.ipynb and keeps its results in the file, without what TensorFlow's libraries print while they load.

python docs/notebook_results.py
"""

import pathlib
import re

import nbclient
import nbformat

BOOK = pathlib.Path(__file__).parent / "notebook.ipynb"


def run(book: nbformat.NotebookNode) -> None:
    """Runs the cells of a notebook, and stores their results in it, without times of the day."""
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    for cell in (cell for cell in book.cells if cell.cell_type == "code"):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        cell.metadata.pop("execution", None)
        for data in (output.data for output in cell.outputs if "image/svg+xml" in output.get("data", {})):
            data["image/svg+xml"] = re.sub(r"<metadata>.*?</metadata>", "", data["image/svg+xml"], flags=re.S)
    book.metadata.language_info = {"name": "python"}


if __name__ == "__main__":
    notebook = nbformat.read(BOOK, as_version=4)
    run(notebook)
    nbformat.write(notebook, BOOK)
