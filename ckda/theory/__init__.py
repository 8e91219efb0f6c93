"""The paper's theory as programs that check themselves, and as a compiler from groups and automata to layers.

`ckda theory list | verify | show | table | verdict | compile | run`; in Python :func:`compile` and :func:`load`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckda.theory.compiler import Machine

__all__ = ["compile", "load"]


def compile(source: Any, letters: str = "generators", **options: Any) -> "Machine":
    """A group (by name, file or data), a DFA or a rational WFA as a runnable machine, checked (docs/theory.md).

    Options are those of :class:`ckda.theory.compiler.Compile`. Raises :class:`ckda.theory.compiler.NoRealisation` with
    the obstruction where one layer cannot track the group, and where no realisation is known.

    Example:
        >>> machine = compile({"generators": [[1, 2, 0], [1, 0, 2]]})
        >>> machine.config["realisation"], machine.answers([0, 0, 0])
        ('one layer, one head of dimension 2 (prop:planar-groups)', [1, 3, 0])
    """
    from ckda.theory.compiler import Compile, compile_machine

    return compile_machine(Compile(source, letters, **options))


def load(folder: Any) -> "Machine":
    """The machine that `ckda theory compile --out folder` wrote."""
    from ckda.theory.compiler import load as load_machine

    return load_machine(folder)
