"""What an import needs: `import ranvier` no torch, the core none of the optional packages."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = ("tyro", "rich", "tokenizers", "tensorboard", "transformers", "safetensors", "pyarrow")
BLOCK = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocker())
"""


def run(code: str) -> str:
    """What a fresh interpreter prints; warnings are errors there too."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        f"import sys\nsys.path[:0] = {sys.path}\n{code}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_does_not_load_torch() -> None:
    """Names are imported when they are asked for; plans and grids need no torch."""
    loaded = "print('torch' in sys.modules, 'numpy' in sys.modules)"
    code = f"""
import ranvier
{loaded}
ranvier.Plan(row=2).check_and_resolve({{"heads": 4}}, 2)
assert not hasattr(ranvier, "plam")
{loaded}
ranvier.Grid({{"row": 2}}).axis("row")
print('torch' in sys.modules)
"""
    assert run(code).split() == ["False"] * 5


def test_core_works_without_optional_packages() -> None:
    """The blocker blocks (control), and a model is parallelized and run behind it."""
    code = f"""{BLOCK}
for name in {BLOCKED}:
    try:
        __import__(name)
    except ImportError:
        continue
    print(name, "was not blocked")
import torch
import ranvier
import ranvier.parallel.parallelize
from ranvier.models.decoder import Decoder, DecoderConfig
model = ranvier.parallelize(Decoder(DecoderConfig(layers=1)), ranvier.Grid({{}}))
model.parallel.bucket_scheduler.begin_step("")
tokens = torch.zeros(1, 4, dtype=torch.long)
print(tuple(model(tokens).shape))
"""
    assert run(code) == "(1, 4, 256)"


def test_public_names_are_there() -> None:
    import ranvier

    assert len(ranvier.__all__) <= 20
    for name in ranvier.__all__:
        assert getattr(ranvier, name) is not None
