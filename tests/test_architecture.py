"""The structure of the package, read from its source with `ast`.

A rule is a pure function `(path, source) -> messages`; paths are relative to the package. Each rule
has a test over the package and negative controls: small sources that break it. Imports inside
functions and under TYPE_CHECKING count like any other.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

from syntax_trees import dotted_name, walk

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "ranvier"


LEVELS = (
    "errors system setting",
    "comm.algorithms",
    "comm.transports",
    "trace | models | html",
    "config",
    "token_order",
    "sharding",
    "comm.algorithm_table",
    "grid counter_rng",
    "cost",
    "launch",
    "comm",
    "memory",
    "buckets",
    "nn",
    "optim | checkpoint",
    "pipeline | data",
    "parallel",
    "planner",
    "scaling",
    "infer",
    "train",
    "tools",
    "integrations | eval",
    "cli",
    "__main__",
)
"""From the lowest up. Neighbours may import each other without cycles, but not across a bar. A
subpackage may have a level of its own."""

LEVEL = {name: i for i, level in enumerate(LEVELS) for name in level.replace("|", " ").split()}
APART = {"nn": {"models"}, "comm": {"models"}}
"""What a package must not import although it is below: layers take any model."""
VAGUE = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"}
ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
DISTRIBUTED = ("torch.distributed", "torch._C._distributed_c10d")

Rule = Callable[[PurePosixPath, str], list[str]]


def top(path: PurePosixPath) -> str:
    """The module or subpackage right under the root that a file belongs to."""
    return path.parts[0].removesuffix(".py")


def unit(*names: str) -> str:
    """The module or subpackage with a level that a dotted name belongs to."""
    inside = ".".join(names[:2]).removesuffix(".py")
    return inside if inside in LEVEL else names[0].removesuffix(".py")


def imports(path: PurePosixPath, source: str) -> Iterator[tuple[int, str, str]]:
    """Line, local name and absolute dotted name of each import."""
    for node in walk(source):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.asname or name.name, name.name
        elif isinstance(node, ast.ImportFrom):
            package = ("ranvier", *path.parent.parts)
            above = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join((*above, *filter(None, [node.module])))
            for name in node.names:
                yield node.lineno, name.asname or name.name, f"{origin}.{name.name}"


@functools.cache
def uses(path: PurePosixPath, source: str) -> list[tuple[int, str]]:
    """Line and absolute dotted name of all that is imported or reached through an imported name."""
    alias = {}
    found = []
    for line, local, name in imports(path, source):
        alias[local] = name
        alias.setdefault(local.partition(".")[0], name.partition(".")[0])
        found.append((line, name))
    for node in walk(source):
        if isinstance(node, ast.Attribute):
            head, _, rest = dotted_name(node).partition(".")
            if head in alias:
                found.append((node.lineno, f"{alias[head]}.{rest}"))
    return found


def forbidden(path: PurePosixPath, source: str, prefixes: tuple[str, ...]) -> list[str]:
    """A message for each line that uses one of the dotted names or something below it."""
    found = {
        (n, p) for n, name in uses(path, source) for p in prefixes if f"{name}.".startswith(f"{p}.")
    }
    return [f"{path}:{line}: {prefix}" for line, prefix in sorted(found)]


def layering(path: PurePosixPath, source: str) -> list[str]:
    own = unit(*path.parts)
    if own == "__init__":
        return []
    if own not in LEVEL:
        return [f"{path}: {own} has no level; add it to LEVELS"]
    problems = []
    for line, _, name in imports(path, source):
        root, _, rest = name.partition(".")
        other = unit(*rest.split("."))
        # The version is a fact of the package, not a module of it.
        if root != "ranvier" or other in (own, "__version__"):
            continue
        if other not in LEVEL:
            remedy = "give a new module a level; import a public name from where it is defined"
            problems.append(f"{path}:{line}: {name} is not in LEVELS: {remedy}")
        elif other in APART.get(own, ()):
            problems.append(f"{path}:{line}: {own} imports {other}, which it must not know")
        elif LEVEL[other] > LEVEL[own]:
            problems.append(f"{path}:{line}: {own} imports {other}, which is above it")
        elif LEVEL[other] == LEVEL[own] and "|" in LEVELS[LEVEL[own]]:
            problems.append(f"{path}:{line}: {own} imports {other}, its neighbour")
    return problems


def cycles(sources: Mapping[PurePosixPath, str]) -> list[str]:
    """The first cycle among the modules and subpackages under the root."""
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        names = {
            unit(*name.split(".")[1:])
            for _, _, name in imports(path, source)
            if name.startswith("ranvier.")
        }
        own = unit(*path.parts)
        graph.setdefault(own, set()).update(names - {own})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" imported by ".join(error.args[1])]
    return []


def distributed(path: PurePosixPath, source: str) -> list[str]:
    return [] if top(path) in {"comm", "grid", "launch"} else forbidden(path, source, DISTRIBUTED)


def environment(path: PurePosixPath, source: str) -> list[str]:
    return [] if top(path) == "launch" else forbidden(path, source, ENVIRONMENT)


def global_statements(path: PurePosixPath, source: str) -> list[str]:
    nodes = [node for node in walk(source) if isinstance(node, ast.Global)]
    return [f"{path}:{node.lineno}: global {', '.join(node.names)}" for node in nodes]


def raw_output(path: PurePosixPath, source: str) -> list[str]:
    """Texts may hold control characters, which `ranvier.system.terminal.print` makes visible."""
    # Accelerate prints its user's own words
    if str(path) in {"system/terminal.py", "integrations/accelerate.py"}:
        return []
    safe = any(name == "ranvier.system.terminal.print" for _, _, name in imports(path, source))
    problems = [
        f"{path}:{node.lineno}: print without `from ranvier.system.terminal import print`"
        for node in walk(source)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and not safe
    ]
    streams = ("sys.stdout.write", "sys.stderr.write", "sys.stdout.buffer", "sys.stderr.buffer")
    return problems + forbidden(path, source, streams)


SPLITTING_AXES = {"row", "col", "context"}


def local_shapes(path: PurePosixPath, source: str) -> list[str]:
    """Arithmetic with the degree of an axis that splits tokens or features."""
    if top(path) in {"sharding", "config", "planner"}:
        return []

    def is_degree(node: ast.AST) -> bool:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return (
                ast.unparse(node.value).endswith("degrees") and node.slice.value in SPLITTING_AXES
            )
        return (
            isinstance(node, ast.Attribute)
            and node.attr in SPLITTING_AXES
            and ast.unparse(node.value).endswith("plan")
        )

    arithmetic = (ast.Mult, ast.FloorDiv, ast.Div, ast.Mod)
    return [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for node in walk(source)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, arithmetic)
        and (is_degree(node.left) or is_degree(node.right))
    ]


def foreign_to_models(path: PurePosixPath, source: str) -> list[str]:
    if top(path) != "models":
        return []
    allowed = {"torch", *sys.stdlib_module_names}
    found = [(line, name) for line, _, name in imports(path, source)]
    return [
        f"{path}:{line}: {name}"
        for line, name in found
        if name.partition(".")[0] not in allowed
        and not f"{name}.".startswith(("ranvier.models.", "ranvier.setting."))
    ]


def parts_that_name_the_trainer(path: PurePosixPath, source: str) -> list[str]:
    """Imports, names and quoted annotations; `train.py` runs the trainer."""
    if top(path) != "train" or str(path) in {"train/trainer.py", "train/train.py"}:
        return []

    def names_trainer(node: ast.AST) -> bool:
        match node:
            case ast.Name(id="Trainer") | ast.Attribute(attr="Trainer"):
                return True
            case ast.Constant(value="Trainer"):
                return True
        return False

    imported = {
        line
        for line, _, name in imports(path, source)
        if f"{name}.".startswith("ranvier.train.trainer.")
    }
    named = {node.lineno for node in walk(source) if names_trainer(node)}  # type: ignore[attr-defined]
    return [f"{path}:{line}: Trainer" for line in sorted(imported | named)]


KINDS = ("ranvier.models.decoder", "ranvier.models.Decoder", "ranvier.models.build_decoder")


def kinds_of_models(path: PurePosixPath, source: str) -> list[str]:
    """Training that knows a model, or compares the name of a kind."""
    if top(path) != "train":
        return []
    compared = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for node in walk(source)
        if isinstance(node, ast.Compare | ast.Match)
        and any(
            isinstance(one, ast.Attribute) and ast.unparse(one).endswith("model.kind")
            for one in ast.walk(node.subject if isinstance(node, ast.Match) else node)
        )
    ]
    return forbidden(path, source, KINDS) + compared


def asserted_objects(path: PurePosixPath, source: str) -> list[str]:
    """Asserts that something is not empty, by its truth value.

    torch 2.11 makes a tensor of a condition that is no constant, number or tensor: a compiled block
    ends with `scalar_tensor(): argument 's' must be Number`.
    """
    if top(path) not in {"models", "nn", "comm", "buckets"}:
        return []
    return [
        f"{path}:{node.lineno}: {ast.unparse(node.test)}"
        for node in walk(source)
        if isinstance(node, ast.Assert)
        and isinstance(node.test, ast.Name | ast.Attribute | ast.Subscript)
        # A bool is a constant of the graph.
        and not dotted_name(node.test).rpartition(".")[2].startswith(("is_", "has_"))
    ]


def vague_names(path: PurePosixPath, source: str) -> list[str]:
    words = {part.removesuffix(".py").strip("_") for part in path.parts}
    return [f"{path}: {word}" for word in sorted(words & VAGUE)]


@pytest.fixture(scope="module")
def package() -> dict[PurePosixPath, str]:
    files = {
        PurePosixPath(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8")
        for path in sorted(Path(PACKAGE).rglob("*.py"))
    }
    assert files, f"No Python file under {PACKAGE}."
    return files


def check(rule: Rule, package: Mapping[PurePosixPath, str], message: str) -> None:
    problems = [problem for path, source in package.items() for problem in rule(path, source)]
    assert not problems, "\n  ".join([message, *problems])


def test_imports_go_down_only(package: dict[PurePosixPath, str]) -> None:
    check(layering, package, "Imports go down only: " + " < ".join(LEVELS))


def test_modules_have_no_cycle(package: dict[PurePosixPath, str]) -> None:
    assert not cycles(package), f"Neighbours import each other in a cycle: {cycles(package)[0]}"


def test_only_comm_grid_launch_use_torch_distributed(package: dict[PurePosixPath, str]) -> None:
    check(
        distributed,
        package,
        "torch.distributed belongs to comm, grid and launch; use their collectives:",
    )


def test_only_launch_reads_the_environment(package: dict[PurePosixPath, str]) -> None:
    check(environment, package, "Only launch reads the environment; pass the value as an argument:")


def test_no_global_statement(package: dict[PurePosixPath, str]) -> None:
    check(global_statements, package, "State is passed, never looked up; remove `global`:")


def test_what_is_printed_goes_through_terminal(package: dict[PurePosixPath, str]) -> None:
    check(
        raw_output,
        package,
        "Texts may hold control characters; ranvier.system.terminal shows them:",
    )


def test_local_shapes_are_asked_of_sharding(package: dict[PurePosixPath, str]) -> None:
    check(
        local_shapes,
        package,
        "Local shapes and multiples to pad to are asked of `ShardingTable`, not computed again:",
    )


def test_parts_of_training_take_the_train_state(package: dict[PurePosixPath, str]) -> None:
    check(
        parts_that_name_the_trainer,
        package,
        "A part of training takes `TrainState`, or what it needs of it, not the trainer:",
    )


def test_models_import_torch_only(package: dict[PurePosixPath, str]) -> None:
    check(
        foreign_to_models,
        package,
        "A model imports torch, the standard library, settings, other models:",
    )


def test_training_does_not_know_kinds_of_models(package: dict[PurePosixPath, str]) -> None:
    check(
        kinds_of_models,
        package,
        "What depends on the kind of a model is asked of its row in `config.kinds`:",
    )


def test_conditions_of_asserts_can_be_traced(package: dict[PurePosixPath, str]) -> None:
    check(asserted_objects, package, "Compare its length or its value:")


def test_names_say_what_is_inside(package: dict[PurePosixPath, str]) -> None:
    check(vague_names, package, "Name the module after the thing in it:")


BAD: list[tuple[Rule, str, str]] = [
    (layering, "config/plan.py", "from ranvier.grid import Grid"),
    (layering, "comm/collectives.py", "import ranvier.nn.linear"),
    (layering, "comm/collectives.py", "from ..train import step"),
    (layering, "nn/linear.py", "from ranvier.models.decoder import Decoder"),
    (layering, "models/decoder.py", "from ranvier import nn"),
    (layering, "optim/adamw.py", "def f():\n    from ranvier.data import loader"),
    (layering, "comm/transports/runner.py", "from ranvier.grid import Axis"),
    (layering, "comm/algorithms/ring.py", "from ranvier.comm import collectives"),
    (layering, "buckets/bucket.py", "from ranvier.nn.layer import ParallelLayer"),
    (layering, "checkpoint/load.py", "from ranvier.optim import optimizer"),
    (layering, "planner/search.py", "from ranvier.train import trainer"),
    (layering, "train/trainer.py", "from ranvier.tools import verify"),
    (layering, "eval/run.py", "from ranvier.integrations import fabric"),
    (layering, "train/trainer.py", "from ranvier import Plan"),
    (layering, "train/trainer.py", "import ranvier"),
    (layering, "novelty.py", ""),
    (distributed, "nn/linear.py", "import torch.distributed as dist"),
    (distributed, "nn/linear.py", "from torch import distributed"),
    (distributed, "nn/linear.py", "from torch.distributed import all_reduce"),
    (distributed, "nn/linear.py", "import torch\ntorch.distributed.barrier()"),
    (distributed, "nn/linear.py", "import torch as t\nt.distributed.barrier()"),
    (environment, "config/run.py", "import os\nos.environ['RANK']"),
    (environment, "config/run.py", "from os import getenv"),
    (environment, "config/run.py", "import os as system\nsystem.getenv('RANK')"),
    (environment, "__init__.py", "import os\nos.environ['RANK']"),
    (global_statements, "config/run.py", "def f():\n    global state\n    state = 1"),
    (raw_output, "config/run.py", "print('x')"),
    (raw_output, "config/run.py", "import sys\nsys.stdout.write('x')"),
    (local_shapes, "infer/logprobs.py", "m = -(-n // grid.degrees['row'])"),
    (local_shapes, "eval/run.py", "seq = n % (run.plan.row)"),
    (local_shapes, "tools/dry_run.py", "d = model.embed // plan.col"),
    (local_shapes, "train/train.py", "ranks = 2 * self.grid.degrees['context']"),
    (
        parts_that_name_the_trainer,
        "train/resume/checkpointing.py",
        "if TYPE_CHECKING:\n    from ranvier.train.trainer import Trainer",
    ),
    (parts_that_name_the_trainer, "train/lora.py", "from ranvier.train import trainer"),
    (parts_that_name_the_trainer, "train/health/guard.py", "from ..trainer import Trainer as T"),
    (parts_that_name_the_trainer, "train/pruning.py", "def f(trainer: 'Trainer'): ..."),
    (parts_that_name_the_trainer, "train/pruning.py", "def f(trainer: Trainer): ..."),
    (foreign_to_models, "models/decoder.py", "import numpy"),
    (foreign_to_models, "models/decoder.py", "from ranvier.errors import PlanError"),
    (foreign_to_models, "models/decoder.py", "from ..config.plan import Plan"),
    (kinds_of_models, "train/step.py", "from ranvier.models.decoder import Block"),
    (kinds_of_models, "train/step.py", "from ranvier.models import Decoder"),
    (kinds_of_models, "train/memory/usage.py", "from ranvier.models import build_decoder"),
    (kinds_of_models, "train/train.py", "if run.model.kind == 'decoder':\n    pass"),
    (kinds_of_models, "train/train.py", "x = 1 if run.model.kind in ('graph',) else 2"),
    (kinds_of_models, "train/train.py", "match run.model.kind:\n    case 'graph':\n        pass"),
    (asserted_objects, "models/decoder.py", "assert self.kv_caches, 'an engine sets the caches'"),
    (asserted_objects, "nn/attention.py", "assert layers[0]"),
    (vague_names, "comm/utils.py", ""),
    (vague_names, "common/collectives.py", ""),
    (vague_names, "_base.py", ""),
]

GOOD: list[tuple[Rule, str, str]] = [
    (layering, "__init__.py", "from ranvier.cli.main import main"),
    (layering, "sharding.py", "from ranvier.config.plan import Plan"),
    (
        layering,
        "comm/autograd.py",
        "from .collectives import gather\nfrom ..grid import Grid\nimport torch",
    ),
    (layering, "tools/verify.py", "from ranvier.train import trainer"),
    (distributed, "comm/collectives.py", "import torch.distributed as dist\ndist.barrier()"),
    (distributed, "nn/linear.py", "import torch\ntorch.nn.Linear(1, 1)\ntorch.distributions"),
    (environment, "launch/environment.py", "import os\nos.environ['RANK']"),
    (environment, "config/run.py", "import os\nos.path.join('a', 'b')"),
    (raw_output, "config/run.py", "from ranvier.system.terminal import print\nprint('x')"),
    (
        foreign_to_models,
        "models/vision.py",
        "import math\nimport torch\nfrom .decoder import Block",
    ),
    (local_shapes, "planner/search.py", "d = model.embed // plan.col"),
    (local_shapes, "infer/logprobs.py", "if grid.degrees['row'] > 1:\n    x = 2 * plan.pipe"),
    (parts_that_name_the_trainer, "train/train.py", "from ranvier.train.trainer import Trainer"),
    (parts_that_name_the_trainer, "tools/verify.py", "from ranvier.train.trainer import Trainer"),
    (parts_that_name_the_trainer, "train/lora.py", "from ranvier.train.state import TrainState"),
    (foreign_to_models, "nn/linear.py", "import numpy"),
    (foreign_to_models, "models/config.py", "from ranvier.setting import setting"),
    (kinds_of_models, "train/train.py", "row = find_kind(run.model.kind)"),
    (kinds_of_models, "infer/load.py", "from ranvier.models import Decoder"),
    (asserted_objects, "models/decoder.py", "assert len(self.kv_caches) > 0 and x is not None"),
    (asserted_objects, "comm/collectives.py", "assert self.is_even, self"),
    (asserted_objects, "train/train.py", "assert self.kv_caches"),
    (vague_names, "data/corpora.py", ""),
]


@pytest.mark.parametrize(("rule", "path", "source"), BAD)
def test_rule_reports_bad_source(rule: Rule, path: str, source: str) -> None:
    assert len(rule(PurePosixPath(path), source)) == 1, (
        f"{rule.__name__} missed {source!r} in {path}"
    )


@pytest.mark.parametrize(("rule", "path", "source"), GOOD)
def test_rule_accepts_good_source(rule: Rule, path: str, source: str) -> None:
    assert not rule(PurePosixPath(path), source)


def test_cycle_is_reported() -> None:
    down = {
        PurePosixPath("config/plan.py"): "",
        PurePosixPath("sharding.py"): "import ranvier.config.plan",
    }
    assert not cycles(down)
    assert cycles({**down, PurePosixPath("config/plan.py"): "from ..sharding import Place"})
