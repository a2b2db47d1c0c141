"""Mutation test: change one expression at a time, and check that the given tests fail.

    python benchmarks/mutants.py                     every mutant, a table at the end
    python benchmarks/mutants.py rotary carry        those whose name has one of these words
    python benchmarks/mutants.py --check             only whether each text still occurs once

Each mutant is a text that occurs once in the package, its replacement, and the tests that must
fail. The whole package is searched, so that code may move; if the code has several possible forms,
a mutant has several texts, of which the first that occurs once is used. Every mutant runs in a copy
of the repository. The exit code is 1 if one survives or no longer applies.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md")
PARTS = ("lightning_app", "tests", "ablations", "benchmarks", "docs", *FILES)


LONGEST = 600.0  # seconds that the tests of a mutant may take
LIBRARIES = ("lightning.pytorch", "optuna", "pandas", "scipy.special", "matplotlib")
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload([*LIBRARIES, "pytest", "sacrebleu"])


@dataclass(frozen=True)
class Mutant:
    """A mistake: `changes` are alternatives of (text, replacement).

    `tests` are paths from the root; missing ones are skipped, but at least one must exist.
    """

    name: str
    tests: str
    changes: tuple[tuple[str, str], ...]


def mutant(name: str, tests: str, *texts: str) -> Mutant:
    """`texts` are pairs: a text, its replacement, another text, its replacement, ..."""
    return Mutant(name, tests, tuple(zip(texts[::2], texts[1::2], strict=True)))


def at(*names: str) -> str:
    return " ".join(f"tests/{name}" for name in names)


WIRING = at("models/test_reference.py", "blocks/test_block.py")
FORMS = at("blocks/test_forms.py", "blocks/test_kernels.py")
DOCUMENTS = at("models/test_documents.py")
MEASURES = at("report/test_recompute.py", "report/test_scores.py")
VERDICTS = at("report/test_labels.py", "report/test_recompute.py", "report/test_scores.py")
API_BLOCKS = at("api/test_blocks.py")
STEPS = at(
    "blocks/test_halting.py", "models/test_reference_steps.py", "models/test_shared_steps.py"
)
SPANS = at("models/test_localised_span.py")
SOFTMAX = at("blocks/test_softmax_parts.py", "models/test_reference.py")
MEMORY = at("models/test_memory.py", "tasks/test_causal_streams.py")
ADAPTIVE = at("models/test_adaptive_span.py")
SQUAD_FILES = at("data/test_squad.py")
SQUAD_ROWS = at("tasks/test_question_rows.py")
SQUAD_MODEL = at("models/test_span_predictor.py")
SQUAD_RUNS = at("test_squad.py")
PRESETS = at("blocks/test_presets.py", "models/test_reference.py")
LOSS = at("models/test_chunked_cross_entropy.py", "tasks")
TASKS = at("tasks", "test_module.py", "models/test_chunked_cross_entropy.py")
BATCHES = at(
    "data/test_batching.py",
    "data/test_cutting.py",
    "data/test_token_batching.py",
    "data/test_datamodule.py",
)
MASKED = at("tasks")
PAIRS = at(
    "tasks/test_sentence_pairs.py",
    "tasks/test_whole_words.py",
    "tasks/test_next_sentence.py",
    "models/test_next_sentence.py",
)
QUEUE = at("grids/test_queue.py", "grids/test_several.py", "grids/test_runner.py")
RULES = at("plugins/test_residual_rules.py")
STREAMS = at("blocks/test_streams.py", "models/test_reference.py")

STATISTICS = at("report/test_statistics.py")
SENSITIVITY = at("report/test_scores.py")
FINE_TUNING = at("report/test_fine_tuning.py")
LABELS = at("report/test_labels.py", "report/test_scores.py")
COMPARISON = at("report/test_comparison.py", "report/test_scores.py")
FACTORS = at("report/test_scores.py")
SCORES = at("scores")

MUTANTS = (
    # Blocks.
    mutant(
        "an attention of one's own sees no biases of positions",
        "tests/plugins/test_stream_rules.py",
        "for added in (self.score_bias, self.log_weights, self.bias(scores.dtype)):",
        "for added in (self.log_weights, self.bias(scores.dtype)):",
    ),
    mutant(
        "an attention of one's own has no state of the layer below",
        "tests/plugins/test_stream_rules.py",
        "self.own(query, keys, values, mask, carry, dropout)",
        "self.own(query, keys, values, mask, None, dropout)",
    ),
    mutant(
        "values of the ids of a text are those of the token before",
        "tests/plugins/test_stream_rules.py",
        "value_carry(values, u, call.tokens)",
        "value_carry(values, u, call.tokens.roll(1, 1))",
    ),
    mutant(
        "a window starts at its query",
        SPANS,
        "start = query - query % self.block\n",
        "start = query\n",
    ),
    mutant(
        "the trimmed window is a token too narrow",
        ADAPTIVE,
        "TRIM * math.ceil(math.floor(most) / TRIM)",
        "TRIM * math.ceil((math.floor(most) - 1) / TRIM)",
    ),
    mutant(
        "a key at the end of the ramp has no gradient",
        ADAPTIVE,
        "logarithm = torch.where(end, faint, logarithm)",
        "logarithm = torch.where(end, faint.detach(), logarithm)",
    ),
    mutant(
        "the soft mask enters carried scores",
        ADAPTIVE,
        "        logits = scores / divisor if divisor != 1.0 else scores\n"
        "        if mask.log_weights is not None:\n"
        "            logits = logits +",
        "        logits = scores / divisor if divisor != 1.0 else scores\n"
        "        if mask.log_weights is not None:\n"
        "            scores = logits = logits +",
    ),
    mutant(
        "the penalty is divided by tokens",
        ADAPTIVE,
        "Term(self.tokens.mean(), weight=self.spec.penalty)",
        "Term(self.tokens.mean(), weight=self.spec.penalty, over_tokens=True)",
    ),
    mutant(
        "dynamic spans of the first queries serve all blocks",
        ADAPTIVE,
        "spans if spans.shape[2] == 1 else mask.queries(spans)",
        "spans if spans.shape[2] == 1 else mask.queries(spans).roll(1, 2)",
    ),
    mutant(
        "the mean span counts padding",
        ADAPTIVE,
        "(spans * self._counted.here[:, None]).sum(dim=(0, 2))",
        "spans.sum(dim=(0, 2))",
    ),
    mutant(
        "the mean span is that of each rank alone",
        at("models/test_adaptive_span.py", "test_ddp.py"),
        "number = over_ranks(counted[name].sum().to(torch.float64))",
        "number = counted[name].sum().to(torch.float64)",
    ),
    mutant(
        "windows reach beyond the text",
        SPANS,
        "((keys >= 0) & (keys < fold.length))",
        "(keys >= 0)",
    ),
    mutant(
        "decoding drops a key of the window",
        SPANS,
        "self.places >= first",
        "self.places > first",
    ),
    mutant("norm epsilon", at("blocks/test_norm.py"), "EPSILON = 1e-5", "EPSILON = 1e-3"),
    mutant(
        "rotary turns backwards",
        at("models/test_reference.py", "models/test_embedding.py", "blocks"),
        "even * by.cos - odd * by.sin, even * by.sin",
        "even * by.cos + odd * by.sin, even * by.sin",
    ),
    mutant(
        "rotary pairs are halves",
        at("models/test_reference.py", "models/test_embedding.py", "blocks"),
        "x[..., 0::2], x[..., 1::2]",
        "x.chunk(2, dim=-1)",
    ),
    mutant(
        "relative positions are those of the key before the query",
        at("models/test_reference.py", "models/test_relative_positions.py"),
        "a_cos * self.sin - a_sin * self.cos",
        "a_cos * self.sin + a_sin * self.cos",
    ),
    mutant(
        "causal mask hides the token itself",
        WIRING + " " + FORMS,
        "every.tril() if",
        "every.tril(-1) if",
    ),
    mutant(
        "centre of a causal map sees later keys",
        FORMS + " " + at("models/test_reference.py"),
        "total = values.cumsum(dim=2)",
        "total = values.sum(dim=2, keepdim=True).expand_as(values)",
    ),
    mutant(
        "gradient of alpha",
        FORMS,
        "(grad * v_own).sum_to_size(alpha.shape)",
        "(grad * attended).sum_to_size(alpha.shape)",
    ),
    mutant(
        "gradient of gamma",
        FORMS,
        "-(all_queries * mean).sum_to_size(gamma.shape)",
        "(all_queries * mean).sum_to_size(gamma.shape)",
    ),
    mutant(
        "identity of a shaped map belongs to the oldest keys",
        at("models", "blocks/test_attention.py"),
        "value[:, :, value.shape[2] - like.shape[2] :]",
        "value[:, :, : like.shape[2]]",
    ),
    mutant(
        "scale of carried scores",
        FORMS + " " + at("models/test_reference.py"),
        "q = query.to(kept).flatten(0, 1) * query.shape[-1] ** -0.5",
        "q = query.to(kept).flatten(0, 1)",
    ),
    mutant(
        "stored maps: gradient of gamma",
        FORMS,
        "sums[2].append(_each_head(dm, plan, shape_parts.centre[i]).neg_())",
        "sums[2].append(_each_head(dm, plan, shape_parts.centre[i]))",
    ),
    mutant(
        "stored maps: identity of the oldest keys",
        FORMS,
        "[keys - query.shape[2] :]",
        "[: query.shape[2]]",
    ),
    mutant(
        "stored maps: the gradient of beta forgets dropout",
        FORMS,
        "sums[1].append(_each_head(dm, plan, dropped))",
        "sums[1].append(_each_head(dm, plan, w))",
    ),
    mutant(
        "a split of heads leaves unused parts unwritten",
        at("blocks/test_attention.py"),
        "split[part].zero_() if grad is None else split[part].copy_(grad)",
        "None if grad is None else split[part].copy_(grad)",
    ),
    mutant(
        "the transposed gradient of a weight is not turned back",
        at("blocks/test_linear.py"),
        "return product(x.t(), above).t().contiguous()",
        "return product(x.t(), above).reshape(above.shape[1], -1)",
    ),
    mutant(
        "the last block of masked words takes other tokens",
        at("models/test_heads.py"),
        "start = stream = start.at(call.kept)",
        "start = stream = start.at(call.kept.flip(0))",
    ),
    mutant(
        "reversible scores are not undone",
        FORMS,
        "z.baddbmm_(q, k.transpose(1, 2), alpha=-scale)",
        "pass",
    ),
    mutant(
        "sums of keys forget the layer below",
        FORMS + " " + at("models/test_reference.py"),
        "sums.key + previous.key",
        "sums.key",
    ),
    mutant(
        "mean of scores is a sum",
        PRESETS + " " + at("blocks/test_axes.py", "blocks/test_block_config.py"),
        'layer if kind == "mean" else 1',
        "1",
    ),
    mutant(
        "norm of queries after their rotation",
        at("models/test_reference.py", "blocks/test_attention.py"),
        "heads = norm(self._split(x))\n        return heads if rotation is None else "
        "rotate(heads, rotation)",
        "heads = self._split(x)\n        return norm(heads if rotation is None else "
        "rotate(heads, rotation))",
        "norm(self._split(x))",
        "self._split(x)",
        "key = self.key_norm(self._disturbed(key))\n        if placed is not None:",
        "key = self._disturbed(key)\n        if placed is not None:",
    ),
    mutant(
        "a sink has a value",
        SOFTMAX,
        "(F.pad(x, (0, 0, 0, 1)) for x in (keys, values))",
        "(F.pad(x, (0, 0, 0, 1), value=v) for x, v in ((keys, 0.0), (values, 1.0)))",
    ),
    mutant(
        "no query sees the sink",
        SOFTMAX,
        "self._wider(self.allowed, 1.0)",
        "self._wider(self.allowed, 0.0)",
    ),
    mutant(
        "a sink drops the soft mask",
        at("models/test_family_combinations.py"),
        "column if others is None else others + column",
        "column",
    ),
    mutant(
        "a cap without its slope",
        SOFTMAX,
        "cap * torch.tanh(scores / cap)",
        "cap * torch.tanh(scores)",
    ),
    mutant(
        "cosines without a largest factor",
        SOFTMAX,
        "self.log_scale.clamp(max=math.log(100.0)).exp()",
        "self.log_scale.exp()",
    ),
    mutant("probes see scores without a cap", SOFTMAX, "whole, module.spec.score_cap)", "whole)"),
    mutant(
        "noise on queries in evaluation",
        at(
            "blocks/test_attention.py",
            "blocks/test_axes.py",
            "blocks/test_block_config.py",
            "models/test_conformance.py",
        ),
        "if self.spec.query_key_noise and self.training:",
        "if self.spec.query_key_noise:",
        "if not (self.spec.query_key_noise and self.training):",
        "if not self.spec.query_key_noise:",
    ),
    mutant(
        "dropout before the norm of a branch",
        at("blocks", "models/test_conformance.py"),
        "self.dropout(self.norm_branch(branch))",
        "self.norm_branch(self.dropout(branch))",
    ),
    mutant(
        "second stream without the gain of the branch",
        at("blocks/test_residual.py", "models/test_reference.py"),
        "self.stream.write(stream, added, self.join)",
        "self.stream.write(stream, branch, self.join)",
    ),
    mutant(
        "two streams end without the first",
        PRESETS,
        "return stream.x + norm(stream.parts[0])",
        "return norm(stream.parts[0])",
    ),
    mutant("x takes the whole branch beside y", STREAMS, "self.share * branch", "branch"),
    mutant(
        "shares count from 1", STREAMS, "(2 * place.layer) ** -0.5", "(place.layer + 1) ** -0.5"
    ),
    mutant("every sub-layer reads state 0", STREAMS, "(place.number - 1) % n", "0"),
    mutant("Sinkhorn ends early", STREAMS, "range(SINKHORN_STEPS - 1)", "range(2)"),
    mutant(
        "states are mixed by the transpose",
        STREAMS,
        "unrounded(mixing.to(states.dtype).transpose(-2, -1), states)",
        "unrounded(mixing.to(states.dtype), states)",
    ),
    mutant(
        "autocast rounds the states",
        STREAMS,
        "with torch.autocast(a.device.type, enabled=False):\n        return a @ b",
        "if True:\n        return a @ b",
    ),
    mutant(
        "the placement alone decides about the norm at the end of a stream",
        at("blocks/test_block_config.py"),
        'return spec.norm if rule.norms_end and norm == "none" else norm',
        "return norm",
    ),
    mutant(
        "a placement makes layer norms of all",
        at("blocks/test_block_config.py"),
        "kinds = [norm if placed else",
        'kinds = ["layer_norm" if placed else',
    ),
    mutant(
        "a branch of another size does not rise",
        at("blocks/test_block_config.py"),
        "branch = replace(branch, ramp=residual.branch.ramp)",
        "pass",
    ),
    mutant(
        "rows of gates have length 1",
        at("test_optim.py"),
        'gate = "output_gate" in path',
        "gate = False",
    ),
    mutant(
        "a checkpoint brings the rate of its schedule",
        at("test_module.py"),
        "set_rates(config.scheduler)",
        "pass",
    ),
    mutant(
        "single numbers decay",
        at("test_optim.py"),
        'exempt = gain or name.endswith("bias") or parameter.dim() == 0',
        'exempt = gain or name.endswith("bias")',
    ),
    mutant(
        "keys over depth are not normalized",
        STREAMS,
        "(self.norm_keys(values) @ self.over.query)",
        "((values * self.norm_keys.weight) @ self.over.query)",
    ),
    mutant("additions are drawn with the rest", STREAMS, "if module not in last:", "if True:"),
    mutant(
        "no layer reads the values of the first",
        STREAMS,
        "if call.carries_values and first is None:",
        "if call.carries_values:",
    ),
    mutant(
        "gates are linear",
        STREAMS,
        "self.matrix(u), self.num_heads).sigmoid()",
        "self.matrix(u), self.num_heads)",
    ),
    mutant(
        "a stream takes a norm of the sum",
        STREAMS,
        'if not rule.joins and plain != (1.0, False, "none", SUM):',
        "if not rule.joins and plain[:2] != (1.0, False):",
    ),
    mutant(
        "decoder's cross-attention has a gain of its own",
        PRESETS + " " + at("models/test_counting.py"),
        "for residual in (self.around_cross, self.around_ff):",
        "for residual in (self.around_ff,):",
    ),
    mutant(
        "a zero output is not that of a cross-attention with gains of its own",
        at("models/test_initialization.py"),
        "sizes.output if init.output else 0.0",
        "sizes.output",
    ),
    mutant(
        "norms of branches that start at zero are no branches at zero",
        at("blocks/test_block_config.py"),
        'elif self.init.branch_norm == 0.0 and around.norm_branch != "none":',
        "elif False:",
    ),
    mutant(
        "exploding streams are let through",
        at(
            "blocks/test_axes.py",
            "blocks/test_block_config.py",
            "blocks/test_presets.py",
            "test_training.py",
        ),
        "> 1.0 + 1e-9",
        "> 1e9",
    ),
    mutant(
        "gated unit without its gate",
        at("blocks/test_feed_forward.py", "models/test_reference.py"),
        "inner = inner * self.scale_gate(self.gate(x))",
        "inner = inner",
    ),
    # Memory and streams.
    mutant(
        "the memory keeps its gradient",
        MEMORY,
        "- most) :].detach() for x in joined",
        "- most) :] for x in joined",
    ),
    mutant(
        "the memory forgets its oldest token",
        MEMORY,
        "x.shape[1] - most)",
        "x.shape[1] - most + 1)",
    ),
    mutant(
        "the same length is one key too long",
        MEMORY,
        "seen & (distance < limit)",
        "seen & (distance <= limit)",
    ),
    mutant(
        "an evaluation goes on from the memory of training",
        MEMORY,
        "self._training if model.training else self._evaluation",
        "self._training",
    ),
    mutant(
        "a memory of another segment is used",
        MEMORY,
        "if (self._read, self._numbers) != (read, numbers) or",
        "if self._numbers != numbers or",
    ),
    mutant(
        "a checkpoint of other streams is used",
        MEMORY,
        "sorted(self._loaded) != list(range(streams)) or places",
        "places",
    ),
    mutant(
        "a stream begins a token late",
        MEMORY,
        "self._starts = np.arange(streams) * length",
        "self._starts = np.arange(streams) * length + 1",
    ),
    mutant(
        "one distance too many is clamped",
        MEMORY,
        "distance.clamp(-most, most)",
        "distance.clamp(-most, most - 1)",
    ),
    mutant(
        "distances that no score has are clamped",
        MEMORY,
        "if self.clamp_length is not None and not self.order().clamps:",
        "if False:",
    ),
    mutant(
        "a child may carry scores as it likes",
        at("test_parent.py"),
        "if ours.get(key) not in (parents, _MAY_BE.get((part, key), parents)):",
        "if (part, key) not in _MAY_BE and ours.get(key) != parents:",
    ),
    mutant(
        "distances to later tokens are clamped at 0",
        at("models/test_relative_positions.py"),
        "distance.clamp(-most, most)",
        "distance.clamp(0, most)",
    ),
    mutant(
        "all beams have the clamped scores of the first",
        at("models/test_relative_positions.py"),
        "self.distance[:, None].expand(*x.shape[:3], -1)",
        "self.distance[:, None].expand(*x.shape[:2], -1, -1)",
    ),
    # Shared steps and halting.
    mutant(
        "a token that halts keeps its probability, not the rest",
        STEPS,
        "weight = torch.where(ends, remainder, h) * before.running",
        "weight = h * before.running",
    ),
    mutant(
        "halted tokens go on changing",
        STEPS,
        "state = torch.where(pondering.running.unsqueeze(-1), stream.x, before)",
        "state = stream.x",
    ),
    mutant(
        "ponder cost of padding",
        STEPS,
        "cost = (self._cost * self.counted).sum()",
        "cost = self._cost.sum()",
    ),
    mutant(
        "a shared block has the divisor of its first layer",
        STEPS,
        "start, spec = stream, call.spec or self.spec",
        "start, spec = stream, self.spec",
    ),
    mutant(
        "profiled skips are shared",
        STEPS,
        "if len(blocks) > 1 and any(residual.skip.profiled for residual in residuals):",
        "if False:",
    ),
    # Presets.
    mutant(
        "deepnorm encoder alpha", at("blocks/test_presets.py"), "return 0.81 * root", "return root"
    ),
    mutant(
        "keel counts two sub-layers in a decoder",
        at("blocks/test_presets.py"),
        'self.depth * (3 if self.side == "decoder" else 2)',
        "self.depth * 2",
        "self.depth * (3 if self.cross else 2)",
        "self.depth * 2",
    ),
    mutant(
        "mix_ln rounds up",
        at("blocks/test_presets.py"),
        "max(1, stack.depth // 4)",
        "max(1, -(-stack.depth // 4))",
    ),
    mutant(
        "layer_norm_scaling by the layer",
        PRESETS,
        "input_scale=layer**-0.5",
        "input_scale=layer**-1.0",
    ),
    mutant(
        "layer_scale at depth 18",
        at("blocks/test_presets.py"),
        "0.1 if stack.depth <= 18",
        "0.1 if stack.depth < 18",
    ),
    mutant(
        "t_fixup encoder scale",
        at("blocks/test_presets.py", "models/test_initialization.py"),
        "0.67 * depth**-0.25",
        "0.67 * depth**-0.5",
        "0.67 * stack.depth**-0.25",
        "0.67 * stack.depth**-0.5",
    ),
    mutant(
        "peri_ln without its input norm",
        PRESETS,
        'replace(sandwich_ln(stack), input_norm="layer_norm")',
        "sandwich_ln(stack)",
    ),
    # Models.
    mutant(
        "embedding without its factor",
        at("models"),
        "embedded = embedded * math.sqrt(self.model_dim)",
        "pass",
    ),
    mutant(
        "wavelengths of sinusoids",
        at("models/test_embedding.py", "models/test_reference.py"),
        "device=device, dtype=torch.float64) * (-math.log(10000.0)",
        "device=device, dtype=torch.float64) * (-math.log(1000.0)",
    ),
    mutant(
        "padding has an embedding",
        at("models/test_initialization.py", "models/test_embedding.py"),
        "module.tokens.weight[module.tokens.padding_idx] = 0.0",
        "pass",
    ),
    mutant(
        "normal initial values are uniform",
        at("models/test_initialization.py"),
        "nn.init.xavier_normal_(part.weight, gain=gain)",
        "nn.init.xavier_uniform_(part.weight, gain=gain)",
    ),
    mutant(
        "queries of shaped attention start at random",
        at("models/test_initialization.py", "models/test_conformance.py"),
        'if attention.spec.query_init == "zeros":',
        "if False:",
    ),
    mutant(
        "tied output is not transposed",
        at("models/test_initialization.py"),
        "output.copy_(value.T)",
        "output.copy_(value)",
    ),
    mutant(
        "admin forgets omega's square",
        at("models/test_profiling.py", "models/test_admin_init.py"),
        "omega**2 * self.variance",
        "omega * self.variance",
    ),
    mutant(
        "search may write the mask",
        at("models/test_search.py"),
        "[model.pad, marks.bos, marks.mask]",
        "[model.pad, marks.bos]",
    ),
    mutant(
        "no penalty of length",
        at("models/test_search.py"),
        "step**length_penalty",
        "1",
    ),
    mutant(
        "search goes a token too far",
        at("models/test_search.py"),
        "(self.limit <= step)",
        "(self.limit < step)",
    ),
    mutant(
        "masked head without its norm",
        at("models/test_reference.py", "models/test_heads.py"),
        "self.norm(F.gelu(self.transform(states)))",
        "F.gelu(self.transform(states))",
    ),
    mutant(
        "the last block of a classifier goes on with the first row",
        at("models/test_classifier.py"),
        "first = torch.arange(rows, device=tokens.device) * width",
        "first = torch.arange(rows, device=tokens.device)",
    ),
    # Branches that rise, starts and sums.
    mutant(
        "parts: deep layers rise first",
        at("blocks/test_residual.py"),
        '"deeper_later": layer,',
        '"deeper_later": depth + 1 - layer,',
    ),
    mutant(
        "parts: the branches of a child rise again",
        at("test_parent.py"),
        "part.rises = False",
        "part.rises = True",
    ),
    mutant(
        "parts: branches rise a step late",
        at("blocks/test_residual.py"),
        "(done + 1) / self.gain.ramp",
        "done / self.gain.ramp",
    ),
    mutant(
        "parts: the gradient of a shrunk sum",
        at("models/test_reference.py"),
        "silu(self.gate) * total.detach()",
        "silu(self.gate) * total",
    ),
    mutant(
        "parts: cross-attention starts as self-attention",
        at("models/test_initialization.py"),
        "init if init.cross or attention is not block.cross_attention else usual",
        "init",
    ),
    mutant(
        "gpt2: outputs start as large as other matrices",
        at("models/test_initialization.py"),
        "std=std / math.sqrt(branches)",
        "std=std",
    ),
    mutant(
        "a rule draws without the gains of a preset",
        at("models/test_initialization.py"),
        "part.weight.mul_(gain / usual)",
        "pass",
    ),
    mutant(
        "random windows are those of the first epoch",
        at("tasks/test_causal_lm.py"),
        "default_rng((self._seed or 0, epoch, 1))",
        "default_rng((self._seed or 0, 0, 1))",
    ),
    mutant(
        "parts: norms of branches start at one",
        at("models/test_initialization.py"),
        "if init.branch_norm != 1.0:",
        "if init.branch_norm > 1.0:",
    ),
    mutant(
        "parts: the embedding is blended once",
        at("models/test_reference.py"),
        "place.ends_layer and place.number < place.sub_layers",
        "False",
    ),
    # Objectives and tasks.
    mutant(
        "outputs that are not finite are of class 0",
        at("models/test_classifier.py"),
        "classes.where(outputs.isfinite().all(dim=1), math.nan)",
        "classes",
    ),
    mutant(
        "smoothing does not lower the label's share",
        LOSS,
        "(1.0 - label_smoothing) * nll",
        "nll",
    ),
    mutant(
        "gradient of the smoothed label",
        LOSS,
        "g.scatter_(1, y, e - 1.0",
        "g.scatter_(1, y, -1.0",
    ),
    mutant(
        "gradient of the table without smoothing",
        LOSS,
        "row = -linear_e / len(table) * total",
        "row = 0.0 * total",
    ),
    mutant(
        "heads: the loss has no cap",
        at("models/test_chunked_cross_entropy.py"),
        "sums if cap is None else partial(sums, cap=cap)",
        "sums",
    ),
    mutant(
        "heads: the cap has no slope",
        at("models/test_chunked_cross_entropy.py"),
        ".mul_(logits.div_(cap).square_().neg_().add_(1.0))",
        "",
    ),
    mutant(
        "heads: half of the gradient of the z-loss",
        at("models/test_chunked_cross_entropy.py"),
        "g.mul_(1.0 + 2.0 * z_loss",
        "g.mul_(1.0 + z_loss",
    ),
    mutant(
        "heads: groups of heads that are no neighbours",
        at("models/test_grouped_queries.py"),
        "x.repeat_interleave(num_heads // groups, dim=1)",
        "x.repeat(1, num_heads // groups, 1, 1)",
    ),
    mutant(
        "heads: the second matrix starts as the first",
        at("models/test_initialization.py"),
        "draw(block.feed_forward.outer, init.outer,",
        "draw(block.feed_forward.outer, init.ff,",
    ),
    mutant(
        "padding is predicted",
        TASKS,
        "labels, labels != PAD, seen)",
        "labels, labels == labels, seen)",
    ),
    mutant(
        "one more sentence of a validation is decoded",
        at("objectives", "tasks", "callbacks/test_pictures.py", "training/test_loggers.py"),
        "wanted &= batch.index < limit",
        "wanted &= batch.index <= limit",
    ),
    mutant(
        "cased bleu",
        at(
            "objectives",
            "tasks",
            "callbacks/test_pictures.py",
            "training/test_loggers.py",
            "test_module.py",
        ),
        'sacrebleu.BLEU(tokenize="none", lowercase=lowercase, force=True)',
        'sacrebleu.BLEU(tokenize="none", lowercase=False, force=True)',
    ),
    mutant(
        "tokenised translations beside plain references",
        at("tasks/test_translation.py"),
        "spaced = datamodule.tokenized or references != lines",
        "spaced = datamodule.tokenized",
    ),
    mutant(
        "words of English in every language",
        at("tasks/test_translation.py"),
        "lowercase=lowercase, trg_lang=code)",
        "lowercase=lowercase)",
    ),
    mutant(
        "blank rows in Admin's pass",
        at("models/test_admin_init.py"),
        "self.present[name] & tokens.any(dim=1, keepdim=True)",
        "self.present[name]",
    ),
    mutant(
        "parts of a split of two tokenizers compared",
        at("test_rulers.py"),
        '("data.tokens_per_batch", *_LENGTHS)',
        '("data.tokens_per_batch", "data.window")',
    ),
    mutant(
        "derived fields replaced without a word",
        at("config/test_sources.py"),
        '"data.seed": ("seed_everything", lambda given: given),',
        "",
    ),
    # Optimizer, schedule and module.
    mutant(
        "a grid file beside its plan may be edited",
        at("report/test_packed_grid.py"),
        "        for name in files if beside else ():\n",
        "        for name in ():\n",
    ),
    mutant(
        "a specification of a subclass is trained as its base",
        at("blocks/test_checked.py"),
        "if is_dataclass(option) and type(value) is option:",
        "if is_dataclass(option) and isinstance(value, option):",
    ),
    mutant(
        "a residual rule is the sum",
        RULES,
        "self.rule(self.skip(x), added)",
        "self.skip(x) + added",
    ),
    mutant(
        "a residual rule loses the gain of the skip",
        RULES,
        "self.rule(self.skip(x), added)",
        "self.rule(x, added)",
    ),
    mutant(
        "a second stream goes on beside a residual rule",
        RULES,
        "if around.rule == LERP or (kind == DUAL and around.rule != SUM):",
        "if around.rule == LERP:",
    ),
    # Finished cells of other folders.
    mutant(
        "parent that was cut short counts as finished",
        at("test_parent.py"),
        '    if state.short:\n        raise UserError(\n            f"{FIELD}: {run.folder.path}',
        '    if False:\n        raise UserError(\n            f"{FIELD}: {run.folder.path}',
    ),
    mutant(
        "failed reference runs leave no bound",
        at("report/test_studies.py"),
        "            at_most=all(other.failed((0, lr))) or any(own.failed((ref, lr))),\n",
        "            at_most=all(other.failed((0, lr))),\n",
    ),
    mutant(
        "publishing removes files of others",
        at("report/test_packed_grid.py"),
        "        elif removes:\n            path.unlink",
        "        else:\n            path.unlink",
    ),
    mutant(
        "a report replaces a published study",
        at("report/test_packed_grid.py"),
        '    if (out / PACKED).is_file():\n        raise UserError(\n            f"--out',
        '    if False:\n        raise UserError(\n            f"--out',
    ),
    mutant(
        "norms of subclasses are called again",
        at("blocks/test_recomputed_norms.py"),
        "if type(part) in NORMS]",
        "if isinstance(part, NORMS)]",
    ),
    mutant(
        "spans of the API leave their range",
        at("api/test_blocks.py"),
        "        if self._projects:  #",
        "        if False:  #",
    ),
    mutant(
        "what a plug-in imports does not count",
        at("plugins/test_imports.py"),
        "parts = parts_at((*own, *others), copies=True)",
        "parts = parts_at(own, copies=True)",
    ),
    mutant(
        "a module that a function imports is taken as covered",
        at("plugins/test_imports.py"),
        "        for module, path in reached(each.name, late=True).items():",
        "        for module, path in reached(each.name).items():",
    ),
    mutant(
        "grid copied beside another store is a new one",
        at("grids/test_store.py"),
        "    if not place.exists():\n        _check_brought(grid, place.parent)\n",
        "",
    ),
    mutant(
        "a changed result counts",
        at("test_records.py"),
        'if seal.get("sha256") != _content_digest(body, files):',
        "if not _content_digest(body, files):",
    ),
    mutant(
        "a changed file beside a result counts",
        at("test_records.py"),
        "        if digest != files[name]:\n",
        "        if not digest:\n",
    ),
    mutant(
        "a result that lost its seal counts as an old one",
        at("test_records.py"),
        "    if SEAL not in tree and not later:",
        "    if SEAL not in tree:",
    ),
    mutant(
        "a checkpoint of another run is read",
        at("grids/test_checkpoint.py"),
        '    if not named or known.get("id") in (None, named["id"]):',
        '    if not named or known.get("id") != 0:',
    ),
    mutant(
        "a warm-up of the momentum begins a step late",
        at("models/test_optimizers.py"),
        "share = min(1.0, (step - 1) / steps)",
        "share = min(1.0, step / steps)",
    ),
    mutant(
        "a correction forgets that beta1 changed",
        at("models/test_optimizers.py"),
        'state["left"] = state.get("left", 1.0) * beta1',
        'state["left"] = beta1 ** state["step"]',
    ),
    mutant(
        "moments of bfloat16 are read in its type",
        at("models/test_optimizers.py"),
        "self.state[parameter][name] = value.to(parameter.device, copy=True)",
        "pass",
    ),
    mutant(
        "the decay of another package's optimizer is part of the gradient",
        at("models/test_optimizers.py"),
        '"weight_decouple": True',
        '"weight_decouple": False',
    ),
    mutant(
        "scalars with a rate of their own take that of their block",
        at("test_optim.py"),
        "rate = rate_of(role, in_block) if own is None else own",
        "rate = rate_of(role, in_block) or own",
    ),
    mutant(
        "muP lowers the rate of norm gains too",
        at("models/test_width.py"),
        'if in_block and role == "matrices":',
        "if in_block:",
    ),
    mutant(
        "muP leaves the scores as they are",
        at("models/test_width.py"),
        "gain = FixedGain((self.model_dim // self.num_heads) ** -0.5)",
        "gain = FixedGain(1.0)",
    ),
    mutant(
        "the ids of a ready tokenizer collide with the special ones",
        at("data/test_tokens.py"),
        "yield (part.astype(np.int64) + shift).astype(kind)",
        "yield part.astype(kind)",
    ),
    mutant(
        "another tokenizer file is the same experiment",
        at("data/test_tokens.py"),
        "return sha256_of(given_tokenizer(config).read_bytes() + digest.encode())",
        "return digest",
    ),
    mutant(
        "a growing batch reads the shortest rows first",
        at("data/test_batching.py"),
        "rows[np.arange(kept) * len(rows) // kept]",
        "rows[:kept]",
    ),
    mutant(
        "a validation rounds the weights that a schedule-free run trains",
        at("training/test_save_on_signal.py"),
        "                parameter.copy_(value)\n            self._trained = None",
        "                pass\n            self._trained = None",
    ),
    mutant(
        "a checkpoint of a schedule-free run has the trained weights as its model",
        at("training/test_save_on_signal.py"),
        'averaged.evaluate()\n        checkpoint["state_dict"]',
        'checkpoint["state_dict"]',
    ),
    mutant(
        "arguments of another package's optimizer do not reach it",
        at("models/test_optimizers.py"),
        "**self.reads(config), **(config.arguments or {})}",
        "**self.reads(config)}",
    ),
    mutant(
        "blocks beyond torch's limit of graphs run uncompiled",
        at("test_compiled.py"),
        "limits.recompile_limit += GRAPHS",
        "pass",
    ),
    mutant(
        "options of a rule keep their usual values",
        at("models/test_optimizers.py"),
        "constants |= {**self.options, **(config.arguments or {})}",
        "constants |= self.options",
    ),
    mutant(
        "a moment stays in the old basis when the basis changes",
        at("models/test_optimizers.py"),
        'state["exp_avg"] = bases[0].mT @ first @ m @ second.mT @ bases[1]',
        "pass",
    ),
    mutant(
        "a warm-up of one group is of all",
        at("models/test_optimizers.py"),
        "factor if role == config.warmup_of else full for role in roles",
        "factor for role in roles",
    ),
    mutant(
        "bounded logits keep their biases",
        at("training/test_qk_clip.py"),
        "for parameter in linear.parameters():",
        "for parameter in [linear.weight]:",
    ),
    mutant(
        "inverse square root without the root",
        at("test_optim.py"),
        "math.sqrt(config.start / step)",
        "(config.start / step)",
    ),
    mutant(
        "schedule starts at step 0",
        at("test_optim.py"),
        "config.factor(done + 1, total)",
        "config.factor(done, total)",
    ),
    mutant(
        "biases decay",
        at("test_optim.py"),
        'exempt = gain or name.endswith("bias")',
        "exempt = gain",
        'name.endswith("bias")',
        'name.endswith("no bias")',
    ),
    mutant(
        "linear decay ends a step early",
        at("test_optim.py"),
        "(total - step + 1) / max(total - start + 1, 1)",
        "(total - step) / max(total - start + 1, 1)",
    ),
    mutant(
        "a cosine decay forgets its floor",
        at("test_optim.py"),
        "config.floor + (1.0 - config.floor) * wave",
        "(1.0 - config.floor) * wave",
    ),
    mutant(
        "a token is predicted from itself",
        at("tasks/test_causal_lm.py"),
        "np.where(after, PAD, np.where(places == 0, EOS, _tokens_at(self.ids, places - 1)))",
        "np.where(after, PAD, np.where(places == 0, EOS, _tokens_at(self.ids, places)))",
    ),
    mutant(
        "overlapping windows predict a token twice",
        at("tasks/test_causal_lm.py"),
        "np.where(after | seen_before, PAD",
        "np.where(after, PAD",
    ),
    mutant(
        "documents see those before them",
        DOCUMENTS,
        "documents[:, None, :, None] == documents",
        "documents[:, None, :, None] >= documents",
    ),
    mutant(
        "positions run on from document to document",
        DOCUMENTS,
        "places - torch.nn.functional.pad(first, (1, 0))",
        "places - 0 * torch.nn.functional.pad(first, (1, 0))",
    ),
    mutant(
        "the centre has keys of other documents",
        DOCUMENTS,
        "total = mask.allowed.to(kept) @ values",
        "total = values.cumsum(dim=2)",
    ),
    mutant(
        "a second target is of the next document",
        DOCUMENTS,
        "known & (documents == documents.roll(-1, dims=-1))",
        "known",
    ),
    mutant(
        "documents begin a token late",
        at("tasks/test_causal_lm.py"),
        'np.searchsorted(self.documents, places, side="right")',
        'np.searchsorted(self.documents, places, side="left")',
    ),
    mutant(
        "bits per byte are nats",
        at("tasks/test_causal_lm.py"),
        'found.nll / (math.log(2) * counts["bytes"])',
        'found.nll / counts["bytes"]',
    ),
    mutant(
        "top-p leaves out the token that reaches p",
        at("models/test_generation.py"),
        "p.cumsum(dim=-1) - p >= how.top_p",
        "p.cumsum(dim=-1) >= how.top_p",
    ),
    mutant(
        "dropout does not depend on the step",
        at("test_module.py", "test_ddp.py", "grids/test_resume.py"),
        "mix(self._seed, self.global_step, batch_idx, self.global_rank)",
        "mix(self._seed, batch_idx, self.global_rank)",
    ),
    mutant(
        "dropout does not depend on the rank",
        at("test_module.py", "test_ddp.py"),
        "mix(self._seed, self.global_step, batch_idx, self.global_rank)",
        "mix(self._seed, self.global_step, batch_idx)",
    ),
    mutant(
        "a loss is divided by the tokens of one rank",
        at("test_module.py", "test_ddp.py"),
        "batch.predicted_tokens.to(sums.loss.dtype)",
        "sums.tokens.to(sums.loss.dtype)",
    ),
    mutant(
        "sums over a split are taken in the precision of the model",
        at("test_precision.py"),
        "sums.set_dtype(torch.promote_types(self.weight_type, torch.float32))",
        "sums.set_dtype(self.weight_type)",
    ),
    mutant(
        "a NaN of a validation is left out",
        at("test_module.py", "training/test_divergence.py"),
        'SumMetric(nan_strategy="disable")',
        'SumMetric(nan_strategy="ignore")',
    ),
    mutant(
        "totals of an evaluation are kept",
        at("test_module.py"),
        "            total.reset()\n",
        "            pass\n",
    ),
    # Data.
    mutant(
        "tokens are not shared out over ranks",
        at("test_module.py", "test_ddp.py"),
        "batch.predicted_tokens.to(sums.loss.dtype) / self.trainer.world_size",
        "batch.predicted_tokens.to(sums.loss.dtype)",
    ),
    mutant(
        "masks hide nine of ten",
        MASKED,
        "np.where(die < 8, MASK",
        "np.where(die < 9, MASK",
    ),
    mutant(
        "ends of sentences are masked",
        MASKED,
        "return (rank < budgets[:, None]) & words",
        "return rank < budgets[:, None]",
        "return chosen & (tokens != EOS)",
        "return chosen",
    ),
    mutant(
        "a word that fits exactly is skipped",
        PAIRS,
        "if size <= left:",
        "if size < left:",
    ),
    mutant(
        "a random text may be of the same document",
        PAIRS,
        "other += other >= document",
        "other += 0",
    ),
    mutant(
        "sentences are not put back",
        PAIRS,
        "at = cut if is_random else stop",
        "at = stop",
    ),
    mutant(
        "labels of pairs are exchanged",
        PAIRS,
        "random[rows[mine]], RANDOM, NEXT)",
        "random[rows[mine]], NEXT, RANDOM)",
    ),
    mutant(
        "padding is of the second text",
        PAIRS,
        "return tokens, ((place > end) & (place <= last)).astype(np.int64)",
        "return tokens, (place > end + 0 * last).astype(np.int64)",
    ),
    mutant(
        "pairs are attended to with their padding",
        PAIRS,
        "return padding_mask(tokens != self.pad)",
        "return full_mask(tokens.shape[1], tokens.device)",
    ),
    mutant(
        "the loss of pairs is divided by tokens",
        PAIRS,
        "* tokens.to(nll) / pairs.to(nll)",
        "",
    ),
    mutant(
        "blank rows count as pairs",
        PAIRS,
        "self._loss = (nll * counted).sum()",
        "self._loss = nll.sum()",
    ),
    mutant(
        "pairs of an evaluation are kept for the next one",
        PAIRS,
        "    def start_decoding(self) -> None:\n        self.scored = {}",
        "    def start_decoding(self) -> None:\n        pass",
    ),
    mutant(
        "pairs of training are the same in every epoch",
        PAIRS,
        "random = np.random.default_rng((seed, epoch, 1))",
        "random = np.random.default_rng((seed, 0, 1))",
    ),
    mutant(
        "masks of a validation change with the epoch",
        MASKED,
        'row and position."""\n        seed, epoch = (FIXED_SEED, 0)',
        'row and position."""\n        seed, epoch = (FIXED_SEED, epoch)',
    ),
    mutant(
        "a batch leaves its budget unused",
        BATCHES,
        'np.searchsorted(places, budget, side="right")',
        'np.searchsorted(places, budget, side="left")',
    ),
    mutant(
        "every rank has all rows", BATCHES, "rows[rank::world_size]", "rows[:: min(1, world_size)]"
    ),
    mutant(
        "a resumed loader takes its last batch again",
        BATCHES + " " + at("grids/test_resume.py"),
        'begin = self._state["consumed"]',
        'begin = max(0, self._state["consumed"] - 1)',
    ),
    mutant(
        "a changed file of a corpus is not found",
        at("data/test_digests.py"),
        "if found == listed:",
        "if len(found) == len(listed):",
    ),
    # Checkpoints and going on.
    mutant(
        "other wiring in a checkpoint is let through",
        at("grids/test_trial.py"),
        '("block", "architecture", *trained)',
        '("architecture", *trained)',
    ),
    mutant(
        "other data of a checkpoint is let through",
        at("test_damage.py"),
        'if there != here:\n            raise UserError(\n                f"is of other data',
        'if False:\n            raise UserError(\n                f"is of other data',
        "if there != here:",
        "if False:",
    ),
    mutant(
        "a damaged checkpoint is read",
        at("test_damage.py", "grids/test_checkpoint.py", "test_records.py"),
        "if _digest(file, size - _SEAL_SIZE) != seal",
        "if False and _digest(file, size - _SEAL_SIZE) != seal",
    ),
    mutant(
        "admin is profiled again after a resumption",
        at(
            "test_module.py",
            "models/test_profiling.py",
            "models/test_admin_init.py",
            "grids/test_checkpoint.py",
        ),
        'self.profiled = checkpoint["profiled"]',
        "self.profiled = False",
    ),
    mutant(
        "tokens of earlier attempts are forgotten",
        at("training/test_throughput.py"),
        'self.tokens, self.seconds = state_dict["tokens"], state_dict["seconds"]',
        'self.tokens, self.seconds = 0, state_dict["seconds"]',
    ),
    mutant(
        "a stall is judged by the margin's other side",
        at("training/test_divergence.py"),
        "bar = floor - STALL_MARGIN",
        "bar = floor + STALL_MARGIN",
    ),
    # The grid.
    mutant(
        "failed cells run again unasked",
        QUEUE,
        'return retries.retried == (run.short["attempt"] if run.short else run.attempts)',
        "return True",
    ),
    mutant(
        "deaths of a cell are not counted",
        QUEUE,
        "claim.retries.deaths + 1, claim.retries.alone",
        "claim.retries.deaths, claim.retries.alone",
    ),
    mutant(
        "two supervisors run a cell",
        QUEUE,
        "            if not is_held(folder.lock):\n",
        "            if True:\n",
    ),
    mutant(
        "a claim is no lock",
        QUEUE,
        "                lock.acquire(timeout=0)\n        except Timeout:\n            run =",
        "                pass\n        except Timeout:\n            run =",
    ),
    mutant(
        "half a line of a killed writer stays in the journal",
        at("grids/test_storages.py"),
        "if _cut_torn_line(self._path):",
        "if False:",
    ),
    mutant(
        "a damaged journal is replaced under the supervisors that use it",
        at("grids/test_several.py"),
        "            if not alone:\n                raise UserError(",
        "            if False:\n                raise UserError(",
    ),
    mutant(
        "cells that are over run again",
        QUEUE,
        'return run.state == "missing"\n\n\n@dataclass\nclass Claim',
        'return run.state in ("missing", "done")\n\n\n@dataclass\nclass Claim',
    ),
    mutant(
        "the weights of a parent that is not finite are taken",
        at("test_parent.py"),
        "    if parent.non_finite:\n        raise NothingToFineTune(",
        "    if False:\n        raise NothingToFineTune(",
    ),
    mutant(
        "a run of too few steps counts",
        at("test_run_state.py"),
        'result["steps"] < asked',
        "False",
    ),
    # Auxiliary losses.
    mutant(
        "a lower layer predicts until l / n of the steps",
        at("models/test_auxiliary_heads.py"),
        "if 2 * self.depth * done < layer * total",
        "if self.depth * done < layer * total",
    ),
    mutant(
        "the second target is the next token",
        at("models/test_auxiliary_heads.py"),
        "return labels.roll(-1, dims=-1), known",
        "return labels, known",
    ),
    mutant(
        "a resumed run counts its own steps",
        at("test_auxiliary_losses.py"),
        "not (self.global_step and self.total_steps)",
        "True",
    ),
    mutant(
        "heads that have stopped are no part of a distributed step",
        at("test_ddp.py"),
        "below = below + sum(part.flatten()[:0].sum() for part in self._idle())",
        "pass",
    ),
    # Identity and provenance.
    mutant(
        "1 and 1.0 are one value of an id",
        at("config/test_ids.py"),
        "type(left) is type(right) and left == right",
        "left == right",
    ),
    # Analysis.
    mutant(
        "standard deviation of the population",
        STATISTICS,
        "half = t_quantile(count, level) * error",
        "half = t_quantile(count, level) * error * math.sqrt((count - 1) / count)",
    ),
    mutant(
        "holm without its running maximum",
        STATISTICS,
        "np.maximum.accumulate(steps, axis=-1)",
        "steps",
    ),
    mutant(
        "wilson without its centre",
        STATISTICS,
        "centre = (share + z**2 / (2 * count)) / scale",
        "centre = share",
    ),
    mutant(
        "a p value of two seeds",
        LABELS + " " + SENSITIVITY,
        "return t_interval(values)[2] if len(values) >= LEAST_SEEDS else math.nan",
        "return t_interval(values)[2]",
    ),
    mutant(
        "a loss of failures that few seeds share by chance",
        LABELS,
        "p = max(p, failures_p(counts[0], counts[1], 1, planned))",
        "p = max(p, 0.0)",
    ),
    mutant(
        "the bound of an arm that always fails, whatever is planned",
        LABELS,
        "few = planned < FEW_SEEDS and len(first) == len(second)",
        "few = len(first) == len(second)",
    ),
    mutant(
        "comparisons whose runs ended differently are no part of the family",
        LABELS,
        "ps = holm_values([rows[n].p for n in members], untested).tolist()",
        "ps = holm_values([rows[n].p for n in members]).tolist()",
    ),
    mutant(
        "a comparison is decided by the runs that did not become non-finite",
        at("report/test_comparison.py"),
        "[failed(own[s]) for s in both], [failed(other[s]) for s in both]",
        "[failed(own[s]) for s in seeds], [failed(other[s]) for s in seeds]",
    ),
    mutant(
        "an interval over seeds of which some failed has a p value",
        SENSITIVITY,
        '"p": max(seeds_p(found), floor) if decides else math.nan',
        '"p": max(seeds_p(found), floor)',
    ),
    mutant(
        "a run that became non-finite has the metrics of a validation before",
        COMPARISON,
        'ended = outcome != "non_finite" or tag.startswith("train/")',
        "ended = True",
    ),
    mutant(
        "the best trial of an arm by the seeds that are left",
        COMPARISON,
        "len(values) - len(finite), sign * centre",
        "0, sign * centre",
    ),
    mutant(
        "a loss is reached along a line from a validation without one",
        COMPARISON,
        "if before is None or not math.isfinite(curve[before]):",
        "if before is None:",
    ),
    mutant(
        "an arm that lacks a seed has more trials",
        at("grids/test_search.py"),
        "seeds = max(map(len, grouped.values()), default=1)",
        "seeds = min(map(len, grouped.values()), default=1)",
    ),
    mutant(
        "whole numbers between whole bounds of a float",
        at("grids/test_search.py"),
        "        if is_float(field)\n",
        "        if not field\n",
    ),
    mutant(
        "settings chosen by the test split",
        at("grids/test_search.py"),
        '(refine or search) and not grid.metric.startswith("val/") and grid.metric',
        "None",
    ),
    mutant(
        "a search over fields that its metric counts",
        at("grids/test_search.py"),
        "if field in (*EVALUATION, *BUDGET) or differences(ends):",
        "if not field:",
    ),
    mutant(
        "a sampler without its package",
        at("grids/test_search.py"),
        'if find_spec("cmaes") is None:',
        "if False:",
    ),
    mutant(
        "an interval over seeds of which some failed",
        SENSITIVITY + " " + STATISTICS,
        "found.all(axis=-1) | ~found.any(axis=-1)",
        "np.ones_like(found.all(axis=-1))",
    ),
    mutant(
        "a report hides that a search may ask for more cells",
        at("report/test_runs.py"),
        "more=plan.more",
        "more=0",
    ),
    mutant(
        "a figure's means over other seeds at each rate",
        at("report/test_uneven_grids.py"),
        "[c for c in of if not seeds or (c.seed or 0) in seeds]",
        "of",
    ),
    mutant(
        "an index that is as it was is made again each time",
        at("report/test_tensorboard.py"),
        "kept.touch()",
        "pass",
    ),
    mutant(
        "a rule returns a number for a matrix",
        at("models/test_optimizers.py"),
        'if getattr(new, "shape", None) != parameter.shape:',
        "if new is None:",
    ),
    mutant(
        "a slow index as often as a fast one",
        at("grids/test_runner.py"),
        "(ended - began) / _INDEX_SHARE",
        "0.0",
    ),
    mutant(
        "one setting that only one variant has",
        FINE_TUNING,
        "compared = [own] if axis in grid.linked else arms.values()",
        "compared = [own]",
    ),
    mutant(
        "a finished refinement stays finished",
        at("grids/test_search.py"),
        "grid = reopened(grid)",
        "pass",
    ),
    mutant(
        "time that ends between two rounds is a success",
        at("grids/test_search.py"),
        'elsewhere=elsewhere, cut="stopped between two rounds"',
        "elsewhere=elsewhere",
    ),
    mutant(
        "reports of any metric",
        at("grids/test_pruning.py"),
        'report["metric"] == self.metric and value',
        "value",
    ),
    mutant(
        "a failed run counts by its last validation",
        at("grids/test_plan.py"),
        "return cap if diverged or value is None else min(value, cap)",
        "return cap if value is None else min(value, cap)",
    ),
    mutant(
        "a variant that learned with another warm-up never learned",
        SENSITIVITY,
        "return ELSEWHERE if pairs.learned_with_another_warmup(point[1]) else NEVER",
        "return NEVER",
    ),
    mutant(
        "a constant answer has not failed",
        FINE_TUNING,
        "return score > constant and not math.isclose(",
        "return score >= constant or not math.isclose(",
    ),
    mutant(
        "the loss says which run of fine-tuning failed",
        FINE_TUNING,
        "return cell.failed if above is None else not above",
        "return cell.failed",
    ),
    mutant(
        "a run without a score is the best of a median",
        FINE_TUNING,
        'worst = -math.inf if measure.mode == "max" else math.inf',
        'worst = math.inf if measure.mode == "max" else -math.inf',
    ),
    mutant(
        "one class is only the most frequent one",
        FINE_TUNING,
        "shares = (majority, 1.0 - majority) if task.classes == 2 else (majority,)",
        "shares = (majority,)",
    ),
    mutant(
        "tasks are judged by the loss",
        FINE_TUNING,
        "if cell.scores and self.metric == cell.monitored.metric and not self.asked:",
        "if False:",
    ),
    mutant(
        "the setting of the mean is the best one",
        FINE_TUNING,
        'if kind == "best_median":\n        alike',
        "if kind:\n        alike",
    ),
    mutant(
        "stalls of other rates count",
        SENSITIVITY,
        'failed = sum(cell.state == "diverged" for cell in runs)\n    low, high = wilson',
        "failed = len(runs)\n    low, high = wilson",
        "estimate=failed / len(runs)",
        "estimate=failed / max(1, planned)",
    ),
    # Scores of fine-tuned models.
    mutant(
        "scores: counts are predictions by labels",
        SCORES,
        "np.asarray(labels) * classes + np.asarray(predictions)",
        "np.asarray(predictions) * classes + np.asarray(labels)",
    ),
    mutant(
        "scores: the majority is that of the predictions",
        SCORES,
        "Counter(labels).most_common",
        "Counter(answers).most_common",
    ),
    mutant(
        "scores: RealFormer's average has MNLI once",
        SCORES,
        '(*(item for name, item in _PAIRS.items() if name != "MNLI"), *_MNLI_TWICE)',
        "tuple(_PAIRS.values())",
    ),
    mutant(
        "scores: articles go before punctuation",
        SCORES,
        "bare = text.lower().translate(_NO_PUNCTUATION)\n"
        '    return " ".join(_ARTICLES.sub(" ", bare).split())',
        'bare = _ARTICLES.sub(" ", text.lower())\n'
        '    return " ".join(bare.translate(_NO_PUNCTUATION).split())',
    ),
    mutant(
        "scores: equal differences change one by one",
        SCORES,
        "groupby(finite, key=lambda pair: pair[0])",
        "groupby(finite)",
    ),
    mutant(
        "scores: the stride is the overlap",
        SCORES,
        "start += min(length, stride)",
        "start += max(1, length - stride)",
    ),
    mutant(
        "scores: a window with half of the answer has a label",
        SCORES,
        "if first < window.start or last >= window.stop:",
        "if first < window.start or first >= window.stop:",
    ),
    mutant(
        "scores: a start counts in every window",
        SCORES,
        "valid &= owner[inside_first] == index",
        "valid &= owner[inside_first] >= 0",
    ),
    mutant(
        "scores: the null score is the highest of the windows",
        SCORES,
        "null_score = min(null_score, float(starts[0] + ends[0]))",
        "null_score = max(null_score if index else -math.inf, float(starts[0] + ends[0]))",
    ),
    mutant(
        "scores: an answer may have 31 tokens",
        SCORES,
        "valid &= last - first < max_answer",
        "valid &= last - first <= max_answer",
    ),
    mutant(
        "scores: the last piece is one too far",
        SCORES,
        'np.searchsorted(self.begins, end, side="left")',
        'np.searchsorted(self.begins, end, side="right")',
    ),
    mutant(
        "squad: paragraphs of an evaluated article train",
        SQUAD_FILES,
        '_taken(dev, [(title in training) is kept for title in dev["article"]])',
        '_taken(dev, [(title in training) or not kept for title in dev["article"]])',
    ),
    mutant(
        "squad: an answer may begin elsewhere",
        SQUAD_FILES,
        "if start < 0 or context[start : start + len(text)] != text:",
        "if start < 0 or text not in context:",
    ),
    mutant(
        "squad: a file of version 2.0 is read as 1.1",
        SQUAD_FILES,
        'elif "is_impossible" in question:',
        'elif "is_impossible" in question and not question["answers"]:',
    ),
    mutant(
        "squad: windows of a question in several batches of an evaluation",
        SQUAD_ROWS,
        "        if self._seed is not None:\n            return super().sampler(",
        "        if self._seed != -1:\n            return super().sampler(",
    ),
    mutant(
        "squad: a window reads the start of its context",
        SQUAD_ROWS,
        "contexts.starts[self.holders][question] + places[:, 0]",
        "contexts.starts[self.holders][question]",
    ),
    mutant(
        "squad: padding is in the softmax",
        SQUAD_MODEL,
        "return logits.masked_fill(~real[:, None], -math.inf)",
        "return logits",
    ),
    mutant(
        "squad: the loss is the sum of start and end",
        SQUAD_MODEL,
        "gather(2, labels[:, :, None]).squeeze(2).mean(dim=1)",
        "gather(2, labels[:, :, None]).squeeze(2).sum(dim=1)",
    ),
    mutant(
        "squad: a row is right with one of two places",
        SQUAD_MODEL,
        "(logits.argmax(dim=2) == labels).all(dim=1)",
        "(logits.argmax(dim=2) == labels).any(dim=1)",
    ),
    mutant(
        "squad: a rank scores its own windows",
        SQUAD_RUNS,
        "texts, answers = self._answers(rows, SPLITS[stage], datamodule)",
        "texts, answers = self._answers(self.scored, SPLITS[stage], datamodule)",
    ),
    mutant(
        "squad: a diverged run has a score",
        SQUAD_RUNS,
        "scored = dict.fromkeys(scored, math.nan)",
        "pass",
    ),
    mutant(
        "squad: the best threshold is the result",
        SQUAD_RUNS,
        'scored = {"exact_match": found.every.exact, "f1": found.every.f1}',
        'scored = {"exact_match": best_threshold(golds, texts, differences, "exact").score, '
        '"f1": best_threshold(golds, texts, differences, "f1").score}',
    ),
    # The interface from Python.
    mutant(
        "a block from Python ignores its padding",
        API_BLOCKS,
        "return Mask(x.shape[1], x.device, seen=present[:, None, None, :], causal=causal)",
        "return Mask(x.shape[1], x.device, causal=causal)",
    ),
    mutant(
        "a block from Python always sees later tokens",
        API_BLOCKS,
        '_mask("x", x, self.dim, present, causal=causal)',
        '_mask("x", x, self.dim, present)',
    ),
    mutant(
        "a chain of blocks loses its scores",
        API_BLOCKS,
        "Carries() if state is None else state.carries",
        "Carries()",
    ),
    mutant(
        "a chain of blocks loses its second stream",
        API_BLOCKS,
        "self._start(x) if state is None else Stream(x, state.parts),",
        "self._start(x),",
    ),
    mutant(
        "a score leaves the end mark out",
        at("api/test_load_run.py"),
        "rows = [self._row(line) for line in targets]",
        "rows = [self.tokenizer.encode(line) for line in targets]",
    ),
    mutant(
        "losses of two tokenizers are compared by themselves",
        at("report/test_comparison.py", "test_rulers.py"),
        '*("data.tokenizer", "data.tokenizer_file", "data.vocab_size", "data.splits.train"),',
        '"data.splits.train",',
    ),
    mutant(
        "runs that became non-finite count as a smaller budget",
        at("report/test_comparison.py"),
        'if c.outcome != "non_finite"] for cells in (own, other))',
        "if c.outcome] for cells in (own, other))",
    ),
    mutant(
        "failed runs are compared without the error of added seeds",
        at("report/test_fine_tuning.py"),
        "p=widened_p(row.p, grid.alpha)) for",
        "p=row.p) for",
    ),
    mutant(
        "a difference of BLEU has the interval of seeds that were planned",
        at("report/test_comparison.py"),
        "replace(widened(row, grid.alpha), values=())",
        "replace(row, values=())",
    ),
    # Tokens and rows.
    mutant(
        "the loaders of a split share the epoch",
        BATCHES,
        "sampler = copy(self._batches[key])",
        "sampler = self._batches[key]",
    ),
    mutant(
        "the preset of a plug-in is what it was at first",
        at("blocks/test_checked.py"),
        "return _checked(self, stack)",
        "return _known(self, stack)",
    ),
    mutant(
        "unknown text across two parts of a long line is two tokens",
        at("data/test_tokenizer.py"),
        "            if ids and found and ids[-1] == found[0] == UNK:",
        "            if False:",
    ),
    mutant(
        "windows that cross two parts of train are not found",
        at("data/test_tokenizer.py"),
        "begin + _PLACES + window - 1",
        "begin + _PLACES",
    ),
    mutant(
        "the best run of a seed may be a failed one",
        MEASURES,
        "key=lambda n: (runs[n].failed, runs[n].loss)",
        "key=lambda n: (not runs[n].failed, runs[n].loss)",
    ),
    mutant(
        "T of the rates of the reference alone",
        MEASURES,
        "        return {seed: bare[seed] - warm[seed] for seed in bare}",
        "        return {seed: warm[seed] - bare[seed] for seed in bare}",
    ),
    mutant(
        "M over rates that one warm-up lacks",
        MEASURES,
        "for w in own.counts for s in seeds))",
        "for w in (0,) for s in seeds))",
    ),
    mutant(
        "the shift of the best rate the other way round",
        MEASURES,
        "values[seed] = math.log2(warm / bare)",
        "values[seed] = math.log2(bare / warm)",
    ),
    mutant(
        "averages over arms of seeds that one lacks",
        MEASURES,
        "if all(s in of for of in each)]",
        "if any(s in of for of in each)]",
    ),
    mutant(
        "a seed with a best rate at an end is inner",
        MEASURES,
        "0 < n < last and _gap(self.rates(warmup, seed), n) <= OCTAVE",
        "n >= 0",
    ),
    mutant(
        "the deciding interval is that of one comparison",
        at("report/test_statistics.py"),
        "level = 1 - alpha / (steps[n] if p < ALPHA else left)",
        "level = LEVEL",
    ),
    mutant(
        "no need by the interval of the step",
        VERDICTS,
        "t_interval(values, 1 - row.alpha / row.family)",
        "t_interval(values, row.level)",
    ),
    mutant(
        "no need where runs fail more often without",
        VERDICTS,
        "within(score, matters) and share <= 0 and score.inner",
        "within(score, matters) and score.inner",
    ),
    mutant(
        "no need with a best rate at an end",
        VERDICTS,
        "within(score, matters) and share <= 0 and score.inner",
        "within(score, matters) and share <= 0",
    ),
    mutant(
        "gains without regard to what matters",
        VERDICTS,
        "return GAINS if low > matters else SLIGHTLY",
        "return GAINS if low > 0 else SLIGHTLY",
    ),
    mutant(
        "an answer of any length",
        at("report/test_messages.py"),
        "if len(sentence.split()) <= WORDS:",
        "if sentence:",
    ),
    mutant(
        "the forest draws the plain interval as the one that decides",
        at("report/figures/test_need.py"),
        "((found.holm_low, found.holm_high), 1.0)",
        "((found.low, found.high), 1.0)",
    ),
    mutant(
        "all seeds have the same trials",
        at("report/test_per_seed.py"),
        "count, share = search.trials or 1, GOLDEN * seed % 1.0",
        "count, share = search.trials or 1, 0.5",
    ),
    mutant(
        "a study of all seeds where each should have its own",
        at("report/test_per_seed.py"),
        "own = {axis: value for axis, value in axes.items() if axis != SEED or of_seed}",
        "own = {axis: value for axis, value in axes.items() if axis != SEED}",
    ),
    mutant(
        "the best of the trials so far",
        at("report/test_per_seed.py"),
        "return cell.finished, value is None, sign * (value or 0.0)",
        "return not cell.finished, value is None, sign * (value or 0.0)",
    ),
    mutant(
        "a number of seeds begins at zero",
        at("report/test_per_seed.py"),
        "lists[SEED] = list(range(1, seeds + 1))",
        "lists[SEED] = list(range(seeds))",
    ),
    mutant(
        "more trials than there is time for",
        at("commands/test_ask.py"),
        "return seeds, runs // seeds",
        "return seeds, MOST[1]",
    ),
    mutant(
        "two failed runs save steps",
        at("report/test_recompute.py"),
        "    if bare.failed and ref.failed:\n        return 0.0, False\n",
        "",
    ),
    mutant(
        "ablate report reads results before its turn",
        at("report/test_report_command.py"),
        "with _writing(GridFolder(folder)) if writes else nullcontext():",
        "with nullcontext():",
    ),
    mutant(
        "a refinement looks beyond the edge of a flat range",
        at("grids/test_search.py"),
        "    best = inner[len(inner) // 2]",
        "    best = equal[0]",
    ),
    mutant(
        "an own metric that is to be large counts 0 for a failed run",
        at("grids/test_plan.py"),
        "        return 0.0 if name in known_metrics() else -math.inf",
        "        return 0.0",
    ),
    mutant(
        "the line of pure noise is that of late steps",
        at("training/test_update_probe.py"),
        "math.sqrt((1.0 - beta) / (1.0 + beta) * (1.0 + beta**count) / (1.0 - beta**count))",
        "math.sqrt((1.0 - beta) / (1.0 + beta))",
    ),
    mutant(
        "gains of several modules share a name",
        at("probes/test_probe.py"),
        "            if counts[quantity] > 1:",
        "            if counts[quantity] > 99:",
    ),
    mutant(
        "a figure at one rate takes one that few arms have",
        at("report/figures/test_rates.py"),
        "        found = -arms, mean([cell.loss for cell in cells]), lr",
        "        found = 0, mean([cell.loss for cell in cells]), lr",
    ),
    mutant(
        "rates that all fail count as best rates",
        at("report/figures/test_rates.py"),
        'if not all(pairs.failed((warmup, best["lr"]))):',
        "if True:",
    ),
    mutant(
        "BLEU of zh-CN is split at spaces",
        at("tasks/test_translation.py"),
        "    code = language_code(language)",
        "    code = language",
    ),
    mutant(
        "text without spaces may have any language",
        at("tasks/test_translation.py"),
        "    if share > 0.5:",
        "    if share > 1.5:",
    ),
    mutant(
        "a part of a validation decodes rows that are not in it",
        at("tasks/test_translation.py"),
        "        if self.evaluated is None or not count:",
        "        if True:",
    ),
    mutant(
        "rounding errors of float32 have a correlation",
        at("scores/test_glue.py"),
        "    return max(8.0 * torch.finfo(torch.float32).eps, torch.finfo(dtype).eps)",
        "    return ROUNDING",
    ),
    mutant(
        "a batch below one window is one window",
        at("data/test_config.py"),
        "        if task.in_windows(self.next_sentence) and self.tokens_per_batch < self.window:",
        "        if False:",
    ),
    mutant(
        "a pruner of another metric has ended a run",
        at("test_run_state.py"),
        '    return pruner in ("", by) and metric in (None, of)',
        '    return pruner in ("", by)',
    ),
    mutant(
        "a report of another grid file is current",
        at("report/test_report_command.py"),
        '    digest.update(f"{grid.source}\\n".encode())',
        "    pass",
    ),
    mutant(
        "unread output of a grid is success",
        at("test_cli.py"),
        "    return interrupted() if _command(words) in _OF_WORK else 0",
        "    return 0",
    ),
    mutant(
        "any probes.csv serves",
        at("grids/test_store.py"),
        "                if any(probe not in there for probe in probes):",
        "                if not folder.probes.is_file():",
    ),
    mutant(
        "a grid of points leaves its range",
        at("grids/test_search.py"),
        "log(values.last)\n    places = [low + (high - low) * part",
        "log(values.high)\n    places = [low + (high - low) * part",
    ),
    mutant(
        "a search with a damaged result is not repaired",
        at("grids/test_search.py"),
        "                    if held_plan is not None:  # its",
        "                    if False:  # its",
    ),
    mutant(
        "many damaged runs are moved unasked",
        at("grids/test_damaged.py"),
        "if not retry and (len(found)",
        "if False and (len(found)",
    ),
    mutant(
        "a run of a newer version counts as damaged",
        at("grids/test_damaged.py"),
        "OtherVersion | Unreadable | LacksMetric)",
        "Unreadable | LacksMetric)",
    ),
    mutant(
        "a study is published over another",
        at("report/test_packed_grid.py"),
        "(other := packed_name(out / PACKED)) != grid.name:",
        "(other := packed_name(out / PACKED)) == b'':",
    ),
    mutant(
        "the hub's rows lose empty texts",
        at("data/test_glue.py"),
        "            write_lines(folder / name, self._lines(rows), strips=False)",
        "            write_lines(folder / name, self._lines(rows))",
    ),
)


def found(root: Path, change: tuple[str, str]) -> Path | None:
    """Return the one file of the package that has the text exactly once, None otherwise."""
    counts = {}
    for path in sorted((root / "lightning_app").rglob("*.py")):
        count = path.read_text(encoding="utf-8").count(change[0])
        if count:
            counts[path] = count
    return next(iter(counts)) if list(counts.values()) == [1] else None


def place(root: Path, each: Mutant) -> tuple[Path, str, str] | None:
    """Return file, text and replacement of the first alternative that applies."""
    for change in each.changes:
        if path := found(root, change):
            return path, *change
    return None


def selection(root: Path, each: Mutant) -> list[str]:
    return [path for path in dict.fromkeys(each.tests.split()) if (root / path).exists()]


def run(each: Mutant, root: Path) -> tuple[str, str]:
    """Try a mutant in `root`, a copy of the repository; return the outcome and a detail."""
    where = place(root, each)
    tests = selection(root, each)
    if where is None or not tests:
        return "no longer applies", "the text" if where is None else "its tests"
    path, old, new = where
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(old, new), encoding="utf-8")
    output = root / "output.txt"
    try:
        code = _in_a_fork(root, tests, output)
    finally:
        path.write_text(text, encoding="utf-8")
    if code is None:
        return "caught", "in time over"
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if code == 0:
        return "survived", ""
    if not failed:
        return "cannot be run", lines[-1] if lines else f"exit code {code}"
    test = failed[0].split(" - ")[0].partition(" ")[2]
    # A test that also fails on the unchanged package has not caught the mutant.
    if _in_a_fork(root, [test], output) != 0:
        return "fails anyway", test
    return "caught", test


def _in_a_fork(root: Path, tests: list[str], output: Path) -> int | None:
    """Run pytest in a child of a process that has the libraries; None if it takes too long."""
    process = CONTEXT.Process(target=_pytest, args=(root, tests, output))
    process.start()
    process.join(LONGEST)
    if process.exitcode is None and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return None
    return process.exitcode


def _pytest(root: Path, tests: list[str], output: Path) -> None:
    os.setsid()
    os.chdir(root)
    os.environ |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root))
    sys.argv = ["pytest"]  # a test may read what the program is
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(file, standard)
    import pytest

    # The libraries that are loaded before have imported what a plugin of pytest would rewrite.
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    cases = ["-m", "not gpu and not slow"]
    code = pytest.main(
        ["-x", "-q", "-p", "no:cacheprovider", "--no-header", *cases, *quiet, *tests]
    )
    sys.stdout.flush()
    os._exit(int(code))


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation test of the package.")
    parser.add_argument("words", nargs="*", help="parts of names; all mutants without any")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository to test")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="only look for the texts")
    options = parser.parse_args()
    chosen = [
        each for each in MUTANTS if not options.words or any(w in each.name for w in options.words)
    ]
    if options.check:
        gone = [each.name for each in chosen if place(options.root, each) is None]
        print("\n".join(gone) or f"all {len(chosen)} apply")
        return bool(gone)
    results: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copies: Queue[Path] = Queue()
        for number in range(options.workers):
            copies.put(copy(options.root, Path(folder) / str(number)))

        def attempt(each: Mutant) -> None:
            root, start = copies.get(), time.monotonic()
            try:
                results[each.name] = run(each, root)
            finally:
                copies.put(root)
            how, detail = results[each.name]
            print(f"{how:18} {time.monotonic() - start:4.0f} s  {each.name}  {detail}", flush=True)

        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(attempt, chosen))
    print("\n| mutant | result |\n| --- | --- |")
    for each in chosen:
        print(f"| {each.name} | {results[each.name][0]} |")
    missed = [name for name, (how, _) in results.items() if how != "caught"]
    print(f"\n{len(chosen) - len(missed)} of {len(chosen)} caught")
    return bool(missed)


def copy(root: Path, target: Path) -> Path:
    """Copy the files that the tests read, without caches."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    target.mkdir()
    for name in PARTS:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignore)
        elif source.exists():
            shutil.copy2(source, target / name)
    return target


if __name__ == "__main__":
    sys.exit(main())
