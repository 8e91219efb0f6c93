"""What stands behind every claim, in two words: the arithmetic of its check and how far the check reaches.

Arithmetic: `exact` (a number field, or polynomials) or `float` (float64 and less, and searches).

Coverage:
- `all`: every case of the statement, by enumeration or as an identity of polynomials;
- `exhaustive to N`: every case up to a size, which the text names; beyond it the paper's (or our) proof;
- `sampled`: random or chosen cases;
- `adversary`: a search tried to break it, with a control that shows what the search can find;
- `certificate`: a proof in steps, each labelled by how it was checked;
- `prose proof`: the argument is in words (docs/theory_proofs.md or the paper), the program checks its computations.
"""

from typing import NamedTuple

__all__ = ["LABELS", "Label"]


class Label(NamedTuple):
    """The two parts."""

    arithmetic: str
    coverage: str

    def __str__(self) -> str:
        return f"{self.arithmetic}; {self.coverage}"


_SAMPLED = "sampled; for all of them the paper's proof"

#: label of a claim -> what stands behind it
LABELS: dict[str, Label] = {
    "prop:axis-test": Label("exact", "sampled (900 rotations) beside prop:axis-test/symbolic"),
    "prop:axis-test/symbolic": Label("exact", "all rotations"),
    "prop:planar-groups": Label("exact", "exhaustive to n = 16; every n by prop:planar-groups/symbolic"),
    "prop:planar-groups/symbolic": Label("exact", "all angles"),
    "prop:cube": Label("exact", "all"),
    "prop:so3-four-dimensional-encoding": Label("exact", "all (identities); |Gamma_H| exhaustive to n = 8, A4, S4, A5"),
    "cor:a5-four": Label("exact", "all"),
    "lem:finite-tracking-homomorphism": Label("exact", "sampled (13 heads); for all of them the paper's proof"),
    "lem:finite-query-readout": Label("exact", "sampled (13 heads); for all of them the paper's proof"),
    "thm:main-positive": Label("exact", "all for A4, S4, A5; Z_n, D_n exhaustive to n = 12 and by symbols"),
    "app:silu": Label("exact", "all for S3; D_n exhaustive to n = 12; every n: prose proof"),
    "tab:recurrence-spectrum/CKDA": Label("float", "adversary, width 3"),
    "tab:recurrence-spectrum/MDN": Label("float", "adversary, width 3"),
    "tab:recurrence-spectrum/SFDA": Label("float", "adversary, width 3"),
    "tab:theory-summary/pairs/CKDA": Label("float", "adversary, widths 2 to 6"),
    "tab:theory-summary/pairs/GDN": Label("float", "adversary, width 4"),
    "tab:theory-summary/pairs/DeltaProduct": Label("float", "adversary, six (d, k)"),
    "tab:theory-summary/pairs/RWKV-7": Label("float", "adversary, width 4"),
    "app:complex_eigenvalues/two-householders": Label("float", "adversary, width 4"),
    "sec:dplr/rope": Label("float", "sampled; adversary for CKDA"),
    "tab:theory-summary/parity": Label("exact", "sampled words; both transitions are all there are"),
    "tab:theory-summary/deltaproduct-2": Label("exact", "all for S4, A5; Z_n, D_n sampled (n = 3, 12)"),
    "prop:orthogonal-dplr": Label("exact", "sampled (matrices built from the theorem's form); the converse: adversary"),
    "prop:orthogonal-dplr/search": Label("float", "adversary, widths 2 to 5"),
    "prop:CKDA-canonical": Label("exact", "sampled beside prop:CKDA-canonical/symbolic"),
    "prop:CKDA-canonical/symbolic": Label("exact", "all widths"),
    "prop:CKDA-canonical/not-the-whole": Label("exact", "all (two witnesses)"),
    "sec:free": Label("exact", "sampled beside sec:free/symbolic"),
    "sec:free/symbolic": Label("exact", "all widths (an identity of each entry)"),
    "sec:free/scalar-gate": Label("exact", _SAMPLED),
    "eq:kda_alpha_rotation": Label("exact", "all"),
    "eq:diagfactor": Label("exact", "exhaustive to n = 5 with symbols"),
    "thm:complex_eigenvalues": Label("exact", "sampled beside thm:complex_eigenvalues/symbolic"),
    "thm:complex_eigenvalues/symbolic": Label("exact", "exhaustive to n = 5 with symbols; every n: prose proof"),
    "thm:complex_eigenvalues/search": Label("float", "adversary"),
    "thm:complex_eigenvalues/unit-key": Label("exact", "all (a witness)"),
    "thm:dplr-persistent-pairs-app": Label("exact", "sampled (the bound is attained); adversary in float beyond it"),
    "app:non_expansive_dplr": Label("exact", "sampled beside app:non_expansive_dplr/symbolic"),
    "app:non_expansive_dplr/symbolic": Label("exact", "exhaustive to n = 4 with symbols; every n: prose proof"),
    "prop:CKDA-factorization": Label("exact", "sampled to n = 6; contractions in float to n = 12; prose proof"),
    "prop:CKDA-factorization/cycle": Label("exact", "exhaustive to n = 12 (the minor); adversary in float"),
    "prop:CKDA-factorization/n=2": Label("exact", "all"),
    "lem:gauge": Label("float", "sampled, equal in every bit"),
    "lem:gauge/operator": Label("float", "sampled"),
    "prop:affine-orthogonal-reduction": Label(
        "exact", "sampled trackers through the algorithm; the paper's prose proof"
    ),
    "prop:independent-head-reduction": Label(
        "exact", "sampled trackers through the algorithm; the paper's prose proof"
    ),
    "lem:ico-plane": Label("exact", "all"),
    "thm:a5-three": Label("exact", "certificate; step 1 tried on S4, step 3 on the cube, one step cited"),
    "lem:planar-rotation-product": Label("exact", "all for the solids, sampled in the hidden group of A5; prose proof"),
    "thm:s5-impossibility": Label(
        "exact", "certificate; steps 4, 6, 10 tried on examples, step 5 to order 300, one cited"
    ),
    "thm:s5-impossibility/other-groups": Label("exact", "sampled groups; odd Sylow: prose proof"),
    "thm:s5-impossibility/deltaproduct-4": Label("exact", "all"),
    "thm:main-positive/verdicts": Label("exact", "sampled groups, each on all reachable states"),
    "thm:main-positive/brute-force": Label(
        "exact", "exhaustive to order 15 in the listed heads; [48,3], Heis3, Frob21 by floats"
    ),
    "planar-heads": Label("exact", "all for three groups of order 32; prose proof"),
    "odd-pairs": Label("exact", "all (pairs and laws in 2T, 2O, 2I); classification cited; prose proof"),
    "frobenius-four": Label("exact", "all for q = 5, 13 and Z_3^2 : Z_4; every q: prose proof"),
    "quaternion-chain": Label("exact", "all for 2T, 2O, 2I; Dic_n: prose proof"),
    "thm:main-positive/operator": Label("float", "sampled words"),
    "lem:wfamincount": Label("exact", "exhaustive to m = 72, and 119; every m: prose proof"),
    "prop:automata-factor-counts/permutation": Label("exact", "exhaustive to n = 6, sampled to 12; prose proof"),
    "prop:automata-factor-counts/column-copy": Label("exact", "all (an identity of two coordinates)"),
    "prop:automata-factor-counts/deterministic": Label("exact", "exhaustive to n = 5, sampled to 9; prose proof"),
    "prop:automata-factor-counts/fibres": Label("exact", "exhaustive to n = 5, sampled to 30; prose proof"),
    "prop:automata-factor-counts/positive-scale": Label("exact", "exhaustive to n = 4, sampled to 6; prose proof"),
    "prop:automata-factor-counts/rational": Label(
        "exact", "sampled to n = 5; one program with symbols in certificates"
    ),
    "thm:multilayer/groups": Label("exact", "sampled words; prose proof"),
    "thm:multilayer/dfa": Label("exact", "sampled machines and words; prose proof"),
    "thm:multilayer/wfa": Label("exact", "sampled machines and words; prose proof"),
    "thm:multilayer/regular-languages": Label("exact", "sampled words"),
    "thm:multilayer/no-peeking": Label("exact", "sampled words"),
    "thm:multilayer/fixed-datatype": Label("exact", "exhaustive to 4 states"),
    "thm:multilayer/float64": Label("float", "sampled words"),
    "thm:multilayer/float32": Label("float", "sampled words"),
    "thm:multilayer/float-for-ever": Label("float", "sampled machines, all lengths by a repeated state"),
}
