"""Registry: the algorithms by name. A new one is a file and a line of the table.

    native, ring, ...                names of the table
    hierarchical/INTER/INTRA         INTER between nodes, INTRA inside: flat algorithms or `native`;
                                     INTRA may also be `shared_memory`, and is `native` if left out
    nvrar/INTRA                      the same for the ranks inside nodes

An operation that INTER or INTRA does not implement is done by its companion: `bruck` gathers and
`folded` reduces, `direct` does both for `one_shot`. `hierarchical` is `hierarchical/bruck/native`.
"""

from __future__ import annotations

import difflib

from ranvier.comm.algorithms.bruck import BRUCK
from ranvier.comm.algorithms.direct import DIRECT
from ranvier.comm.algorithms.doubling import DOUBLING
from ranvier.comm.algorithms.flat import FlatAlgorithm
from ranvier.comm.algorithms.folded import FOLDED
from ranvier.comm.algorithms.hierarchical import Hierarchical
from ranvier.comm.algorithms.native import NATIVE, SHARED_MEMORY
from ranvier.comm.algorithms.nvrar import Nvrar
from ranvier.comm.algorithms.one_shot import ONE_SHOT
from ranvier.comm.algorithms.ring import RING
from ranvier.comm.algorithms.schedule import Algorithm, Level
from ranvier.errors import PlanError

ALGORITHMS: dict[str, Algorithm] = {
    "native": NATIVE,
    "ring": RING,
    "doubling": DOUBLING,
    "bruck": BRUCK,
    "folded": FOLDED,
    "direct": DIRECT,
    "one_shot": ONE_SHOT,
    "hierarchical": Hierarchical("hierarchical", inter=BRUCK.complete_with(FOLDED), intra=NATIVE),
    "nvrar": Nvrar("nvrar", intra=NATIVE),
}


def level_algorithms(level: Level) -> dict[str, FlatAlgorithm]:
    """Returns the algorithms that can be a level of a hierarchical algorithm, by name."""
    flat = {name: one for name, one in ALGORITHMS.items() if isinstance(one, FlatAlgorithm)}
    complete: dict[str, FlatAlgorithm] = {}
    for name, one in flat.items():
        complete[name] = one.complete_with(flat[one.companion]) if one.companion else one
    if level == "intra":
        complete["shared_memory"] = SHARED_MEMORY
    return complete


def algorithm_names() -> list[str]:
    """Returns all names that `find_algorithm` accepts, those of the table first."""
    intra = level_algorithms("intra")
    names = [*ALGORITHMS]
    for between in level_algorithms("inter"):
        names += [f"hierarchical/{between}/{inside}" for inside in intra]
    return names + [f"nvrar/{inside}" for inside in intra]


def find_algorithm(name: str) -> Algorithm:
    """Returns the algorithm with this name."""
    inter = level_algorithms("inter")
    intra = level_algorithms("intra")
    match name.split("/"):
        case [plain] if plain in ALGORITHMS:
            return ALGORITHMS[plain]
        case ["hierarchical", between] if between in inter:
            return Hierarchical(name, inter=inter[between], intra=NATIVE)
        case ["hierarchical", between, inside] if between in inter and inside in intra:
            return Hierarchical(name, inter=inter[between], intra=intra[inside])
        case ["nvrar", inside] if inside in intra:
            return Nvrar(name, intra=intra[inside])
    family = name.partition("/")[0]
    names = algorithm_names()
    known = [one for one in names if one.partition("/")[0] == family] or names
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    raise PlanError(
        f"{name!r} is not an algorithm for collectives. The algorithms are "
        f"{', '.join(ALGORITHMS)}, hierarchical/INTER/INTRA and nvrar/INTRA, with INTER in "
        f"{', '.join(inter)}, and INTRA in {', '.join(intra)}. Use {near!r}."
    )
