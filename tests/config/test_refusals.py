"""Combinations that are refused: every row can apply, and says value, rule and remedy."""

from __future__ import annotations

import pytest

from kinds.vectors import VECTORS
from ranvier.config import refusals
from ranvier.config.kinds import MODEL_KINDS
from ranvier.config.refusals import REFUSALS, Refusal
from ranvier.config.run import RunConfig, run_from_tables

CASES: list[tuple[str, str]] = [
    ("plan.row_splits='none'", "plan.row_splits='none' in a run"),
    (
        "optim.lr=0.0",
        "optim.lr=0.0 trains nothing. The learning rate must be greater than 0. Use 3e-4.",
    ),
    ("data.seq_len=4096 model.max_seq=64", "data.seq_len=4096 is longer than model.max_seq=64."),
    ("lora.alpha=3.0", "lora.alpha=3.0 with lora.rank=0, which trains all weights."),
    (
        "lora.rank=2 lora.target_modules=['x']",
        "lora.target_modules=['x']: ['x'] does not match a layer",
    ),
    (
        "lora.rank=2 lora.layers=[99]",
        "lora.layers=[99] names a block that does not exist. Blocks are numbered from 0 to",
    ),
    (
        "model.size='recurrent-tiny' plan.pipe=2",
        "plan.pipe=2 with model.core_layers=2. The recurrent core of a model cannot be split",
    ),
    (
        "model.size='recurrent-tiny' plan.cuda_graph=True",
        "plan.cuda_graph=True with model.core_layers=2. A CUDA graph repeats the same work",
    ),
    (
        "model.size='recurrent-tiny' plan.compile='on' plan.depth=2",
        "plan.compile='on' with model.core_layers=2 and weights that are split over 2 ranks.",
    ),
    (
        "model.size='recurrent-tiny' lora.rank=2",
        "lora.rank=2, lora.init_from='' with model.core_layers=2. Adapters are not defined",
    ),
    ("lora.rank=2 lora.layers=[1,1]", "lora.layers=[1, 1] names a block twice."),
    ("data.sources=[]", "data.sources=[] does not name a corpus."),
    (
        "data.mixture_weights=[0.5,0.5]",
        "data.mixture_weights has length 2, but data.sources has length 1.",
    ),
    ("data.mixture_weights=[-1.0]", "data.mixture_weights=[-1.0] has an invalid weight."),
    ("data.mixture_weights=[0.0]", "data.mixture_weights are all 0."),
    ("data.goldfish_k=1", "data.goldfish_k=1 drops every target. One of goldfish_k targets is"),
    (
        "data.goldfish_k=4 data.goldfish_context_width=96",
        "data.goldfish_context_width=96 with data.seq_len=96 drops at most the last target of a",
    ),
    (
        "model.kind='vectors' data.goldfish_k=4",
        "data.goldfish_k=4, data.canaries='' with model.kind='vectors'.",
    ),
    ("train.canary_interval=5", "train.canary_interval=5 without data.canaries."),
    ("plan.cuda_graph=True", "plan.cuda_graph=True with data.document_mask=True."),
    (
        "plan.cuda_graph=True model.parscale_streams=4",
        "plan.cuda_graph=True with model.parscale_streams=4. Attention to the prefixes",
    ),
    (
        "plan.compile='on' plan.context=2 model.parscale_streams=4",
        "plan.compile='on' and plan.context=2 with model.parscale_streams=4. A compiled",
    ),
    ("memory.optimizer_states='disk'", "memory.optimizer_states='disk' without memory.offload"),
    ("memory.offload_dir='x'", "memory.offload_dir='x' with memory.optimizer_states='device'."),
    ("memory.optimizer_states_on_device_gib=1.0", "memory.optimizer_states_on_device_gib=1.0 with"),
    (
        "memory.optimizer_states='host' plan.cuda_graph=True",
        "memory.optimizer_states='host' with plan.cuda_graph=True. A CUDA graph cannot copy",
    ),
    ("memory.activation_offload_fraction=-0.5", "memory.activation_offload_fraction=-0.5 is not"),
    (
        "memory.recompute_collectives='auto' memory.device_limit_gib=2.0 plan.pipe=2",
        "memory.recompute_collectives='auto' with memory.device_limit_gib=2.0 and a pipeline.",
    ),
    (
        "memory.parameters='host' guard.replay_interval=3",
        "memory.parameters='host' with guard.replay_interval=3.",
    ),
    ("memory.auto=True plan.cuda_graph=True", "memory.auto=True with plan.cuda_graph=True."),
    ("prune.n_m_pattern='4:2'", "prune.n_m_pattern='4:2' is not a valid pattern."),
    (
        "prune.n_m_pattern='2:4' prune.sparsity=0.7",
        "prune.sparsity=0.7 with prune.n_m_pattern='2:4'. "
        "The pattern already implies the sparsity 0.5. Remove",
    ),
    ("prune.mask_file='x' prune.sparsity=0.5", "prune.mask_file='x' with a sparsity or a pattern."),
    ("prune.sparsity=0.5 lora.rank=2", "Both prune and lora are enabled."),
    (
        "prune.sparsity=0.5 prune.final_step=9",
        "prune.update_interval=0, prune.final_step=9. A pruning",
    ),
    (
        "prune.sparsity=0.5 prune.update_interval=9 prune.final_step=3",
        "prune.update_interval=9, prune.final_step=3, train.steps=250.",
    ),
    (
        "prune.update_interval=1 prune.final_step=3",
        "prune.update_interval=1, prune.final_step=3 without prune.sparsity, or with a",
    ),
    (
        "prune.sparsity=0.5 prune.update_interval=1 prune.final_step=3 plan.cuda_graph=True",
        "prune.update_interval=1, prune.final_step=3 with plan.cuda_graph=True.",
    ),
    (
        "guard.replay_interval=2 plan.cuda_graph=True",
        "guard.replay_interval=2 with plan.cuda_graph=True.",
    ),
    (
        "model.kind='vectors' lora.rank=4",
        "lora.rank=4, lora.init_from='' with model.kind='vectors'.",
    ),
    ("model.kind='vectors' plan.context=2", "plan.context=2 with model.kind='vectors'."),
    (
        "model.sliding_window=8 plan.context=2 plan.context_attention='ring'",
        "plan.context_attention='ring' with a sliding window of 8 tokens. A ring has no kernel",
    ),
    (
        "plan.token_chunk=512 model.dropout=0.1",
        "plan.token_chunk=512 with model.dropout=0.1. Chunks need a decoder",
    ),
    ("plan.token_chunk=512 model.kind='vectors'", "plan.token_chunk=512 with model.kind='vec"),
    (
        "optim.name='jorge' optim.lr_rule='gemstone'",
        "optim.lr_rule='gemstone' with optim.name='jorge' and without optim.lr. An lr_eff is known",
    ),
    ("optim.name='muon' prune.sparsity=0.5", "optim.name='muon' with pruned training. The update"),
    ("optim.name='sgd' optim.state_dtype='int8'", "optim.name='sgd' with optim.state_dtype='int8'"),
    ("optim.name='jorge' lora.rank=4", "optim.name='jorge' with adapters (lora.rank=4). The fac"),
    (
        "optim.name='muon' plan.cuda_graph=True",
        "optim.name='muon' with plan.cuda_graph=True. A CUDA",
    ),
    (
        "optim.name='muon' optim.muon_coefficients=(1.0,2.0,1e999)",
        "optim.muon_coefficients=[1.0, 2.0, inf]. The coefficients of an iteration must be finite "
        "numbers. Use 3.4445 -4.775 2.0315.",
    ),
    (
        "optim.name='jorge' optim.max_preconditioner_dim=1000",
        "optim.max_preconditioner_dim=1000. The side of a tile must be a power of two. Use 512.",
    ),
    ("optim.warmup_steps=500", "optim.warmup_steps=500 is longer than train.steps=250."),
]


@pytest.fixture(autouse=True)
def second_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of model without adapters."""
    monkeypatch.setitem(MODEL_KINDS, VECTORS.name, VECTORS)


def run_of(words: str) -> RunConfig:
    tables: dict[str, dict[str, object]] = {}
    for word in words.split():
        name, _, value = word.partition("=")
        section, _, key = name.partition(".")
        tables.setdefault(section, {})[key] = eval(value)  # the literals above
    return run_from_tables(tables)


@pytest.mark.parametrize(("words", "start"), CASES, ids=[words for words, _ in CASES])
def test_a_combination_is_refused_with_value_rule_and_remedy(words: str, start: str) -> None:
    run = run_of(words)
    (text,) = [text for text in refusals.find_refusals(run) if text.startswith(start)]
    assert "{" not in text and text.count(". ") >= 2 and text.endswith("."), text
    assert text in [*run.find_problems()]


def test_every_row_applies_to_a_case_and_none_to_the_defaults() -> None:
    runs = [run_of(words) for words, _ in CASES]
    assert [one.says for one in REFUSALS if not any(map(one.when, runs))] == []
    assert not [*refusals.find_refusals(RunConfig())]


def test_a_new_refusal_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Refusal(
        lambda run: run.train.steps > 7 and run.plan.row > 1,
        "train.steps={train.steps} with plan.row={plan.row}",
        "A rule",
        "Use plan.row=1",
    )
    monkeypatch.setattr(refusals, "REFUSALS", (*REFUSALS, row))
    assert [*run_of("train.steps=9 plan.row=2").find_problems()] == [
        "train.steps=9 with plan.row=2. A rule. Use plan.row=1."
    ]
