"""No circle of modules inside a Python package of the project, whether imports stand at the top of a module or in a function."""

import ast
import posixpath

import rooms
from tree import Tree


def _imported(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """(module, names or None) of each absolute import that is executed; those under TYPE_CHECKING are not."""
    found: list[tuple[str, tuple[str, ...]]] = []

    class Imports(ast.NodeVisitor):
        def visit_If(self, node: ast.If) -> None:
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                self.generic_visit(node)

        def visit_Import(self, node: ast.Import) -> None:
            found.extend((alias.name, ()) for alias in node.names)

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            if node.module is not None and node.level == 0:
                found.append((node.module, tuple(alias.name for alias in node.names)))

    Imports().visit(ast.parse(text))
    return found


def python_cycles(tree: Tree) -> list[str]:
    """A package is a folder with __init__.py, whose parent folder imports start from."""
    sources = tree.files(".py")
    errors = []
    for package in [posixpath.dirname(name) for name in sources if posixpath.basename(name) == "__init__.py"]:
        modules = {posixpath.basename(name).removesuffix(".py"): name for name in sources if posixpath.dirname(name) == package}
        package_name = posixpath.basename(package)
        arrows = {}
        for module, name in modules.items():
            to: set[str] = set()
            for imported, names in _imported(tree.text(name)):
                if imported == package_name:
                    to.update(entry if entry in modules else "__init__" for entry in names)
                elif imported.startswith(package_name + "."):
                    to.add(imported.split(".")[1])
            arrows[module] = to & (set(modules) - {module})
        errors += [f"{package}: a circle of modules: {', '.join(circle)}" for circle in rooms.circles(arrows)]
    return errors
