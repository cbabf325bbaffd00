"""The imports of the package and of its tests, read from the source."""

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "distloop"


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path):
    """Lists the dotted names that a file imports, `from a import b` as a.b, wherever in the file it does so."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return found


@functools.cache
def names_of(path):
    """Lists every name and attribute that a file's code uses; docstrings and comments do not count."""
    nodes = list(ast.walk(tree_of(path)))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


def modules_imported(module):
    """Lists the modules of the package that a module imports, as `MODULES` names them."""
    for name in imports_of(MODULES[module]):
        assert not name.startswith("."), f"{module} imports {name}: write distloop.<module>"
        package, _, rest = name.partition(".")
        if package == "distloop" and rest:
            yield next(m for m in (rest, rest.rpartition(".")[0]) if m in MODULES)
