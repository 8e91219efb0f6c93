"""Arms: a mixer with the label and the colour under which figures show it."""

from typing import NamedTuple

__all__ = ["ARMS", "Arm"]


class Arm(NamedTuple):
    """How an arm is shown."""

    label: str
    colour: str

    @property
    def words(self) -> str:
        """The label as running text.

        Example:
            >>> ARMS["kda"].words
            'KDA α∈[0,1], β∈[0,1]'
        """
        return " ".join(self.label.split())


#: the ranges of the gate and of beta as in fig:group_word_problems, and the baselines that have a colour of their own
ARMS = {
    "kda": Arm("KDA   α∈[0,1], β∈[0,1]", "#9aa5b1"),
    "kda-beta2": Arm("α∈[0,1], β∈[0,2]", "#d08a2e"),
    "kda-signed": Arm("α∈[-1,1], β∈[0,1]", "#7a4fa3"),
    "ckda": Arm("Complex KDA   α∈[-1,1], β∈[0,2]", "#16548c"),
    "deltaproduct2-gated": Arm("Gated DeltaProduct₂, reflection start", "#00838f"),
    "deltaproduct2": Arm("DeltaProduct₂, reflection start", "#2f7f4f"),
    "deltaproduct2-standard": Arm("DeltaProduct₂, standard start", "#8ab79a"),
    "gru": Arm("GRU", "#c8553d"),
    "transformer": Arm("Transformer", "#b58900"),
}
