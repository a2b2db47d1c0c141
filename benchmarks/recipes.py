"""Train public recipes beside the code of their authors, on the same batches from the same values.

    git clone https://github.com/karpathy/nanoGPT PUBLIC/nanoGPT
    git clone https://github.com/EleutherAI/nanoGPT-mup PUBLIC/nanoGPT-mup
    git clone https://github.com/facebookresearch/fairseq PUBLIC/fairseq
    pip install transformers hydra-core omegaconf bitarray sacremoses cffi
    python -m benchmarks.recipes PUBLIC
    python -m benchmarks.recipes PUBLIC --whole

The base configs of `ablations/base` run for 20 steps in float64, without dropout. At each step the
model of the authors takes the same batch, with their optimizer, rate and clipping. A line has the
largest difference of two losses; the program ends with code 1 where one is above 1e-9. `--whole`
trains nanoGPT's recipe to its end in float32, and prints the loss of both over all of valid.
"""

import argparse
import dataclasses
import math
import sys
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from benchmarks.public_code import largest, published
from lightning_app import fit
from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD, UNK

BOUND, STEPS = 1e-9, 20


class Beside(pl.Callback):
    """A model by others that is trained on the batches of a run.

    Attributes:
        differences: That of the two losses at each step.
        validated: Their loss over the whole validation split after training.
    """

    differences: ClassVar[list[float]] = []
    validated = math.nan
    theirs: nn.Module
    optimizer: torch.optim.Optimizer
    rate: Callable[[int], float]

    def __init__(self, folder: str = "") -> None:
        self.folder = Path(folder)
        type(self).differences = []

    @abstractmethod
    def start(self, module: Any, steps: int) -> tuple[nn.Module, dict[str, str]]:
        """Build their model, and return it with the names of its parameters: theirs, then ours.

        Sets `optimizer` and `rate`, a function of the steps done.
        """

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """Return their loss of one of our batches."""

    @torch.no_grad()
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        ours = pl_module.model
        self.theirs, names = self.start(pl_module, trainer.max_steps)
        for theirs, source in names.items():
            parts = [ours.get_parameter(name) for name in source.split(" + ")]
            self.theirs.get_parameter(theirs).copy_(torch.cat(parts))
        trained = [p for p in self.theirs.parameters() if p.requires_grad]
        sizes = [sum(p.numel() for p in model) for model in (ours.parameters(), trained)]
        assert sizes[0] == sizes[1], f"{sizes[0]:,} parameters, theirs {sizes[1]:,}"

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(trainer.global_step - 1) * group.get("lr_scale", 1.0)
        loss = self.loss(batch)
        loss.backward()
        if trainer.gradient_clip_val:
            nn.utils.clip_grad_norm_(self.theirs.parameters(), trainer.gradient_clip_val)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.differences.append(largest(outputs["loss"], loss))

    @torch.no_grad()
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.theirs.eval()
        rows = trainer.datamodule.val_dataloader()
        losses = [(self.loss(batch), float(batch.predicted_tokens)) for batch in rows]
        total = sum(count for _, count in losses)
        type(self).validated = sum(float(loss) * count for loss, count in losses) / total


class NanoGPT(Beside):
    """`model.py`, `configure_optimizers` and `get_lr` of karpathy/nanoGPT, commit 3adf61e.

    With the parametrization mup, the model and the optimizer of EleutherAI/nanoGPT-mup, b2a5e60.
    """

    def start(self, module: Any, steps: int) -> tuple[nn.Module, dict[str, str]]:
        sizes, adamw, schedule = module.architecture, module.optimizer, module.schedule
        place, more = self.folder, {}
        if sizes.base_width is not None:
            place = self.folder.with_name("nanoGPT-mup")
            more = {"mup_enabled": True, "mup_width_multiplier": sizes.width_factor}
        space = published(place / "model.py", {})
        config = space["GPTConfig"](
            **more,
            block_size=sizes.max_positions,
            vocab_size=module.vocab_size,
            n_layer=sizes.decoder_depth,
            n_head=sizes.num_heads,
            n_embd=sizes.model_dim,
            dropout=0.0,
            bias=False,
        )
        theirs = space["GPT"](config)
        rate = (adamw.lr, adamw.betas)
        self.optimizer = theirs.configure_optimizers(adamw.weight_decay, *rate, "cpu")
        text = (self.folder / "train.py").read_text(encoding="utf-8")
        names = {"math": math, "learning_rate": adamw.lr, "min_lr": schedule.floor * adamw.lr}
        names |= {"warmup_iters": schedule.warmup_steps - 1, "lr_decay_iters": steps}
        exec(text[text.index("def get_lr") : text.index("# logging\n")], names)
        self.rate = names["get_lr"]
        top = {"wte": "embedding.tokens", "wpe": "embedding.position_table"}
        top["ln_f"] = "decoder.final_norm"
        layer = {
            "ln_1": "around_self.norm_input",
            "ln_2": "around_ff.norm_input",
            "attn.c_proj": "self_attention.output",
            "mlp.c_fc": "feed_forward.inner",
            "mlp.c_proj": "feed_forward.outer",
        }
        found = {f"{a}.weight": f"{b}.weight" for a, b in top.items()}
        for n in range(sizes.decoder_depth):
            ours = f"decoder.blocks.{n}"
            found |= {f"h.{n}.{a}.weight": f"{ours}.{b}.weight" for a, b in layer.items()}
            maps = (f"{ours}.self_attention.{name}.weight" for name in ("query", "key", "value"))
            found[f"h.{n}.attn.c_attn.weight"] = " + ".join(maps)
        return theirs, {f"transformer.{a}": b for a, b in found.items()}

    def loss(self, batch: Any) -> Tensor:
        labels = batch.labels.masked_fill(batch.labels == PAD, -1)  # what they ignore
        return self.theirs(batch.tokens, labels)[1]


class Bert(Beside):
    """`BertForMaskedLM` of transformers with the optimizer and the rate of its Trainer."""

    def start(self, module: Any, steps: int) -> tuple[nn.Module, dict[str, str]]:
        from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

        sizes, adamw = module.architecture, module.optimizer
        config = BertConfig(
            vocab_size=module.vocab_size,
            hidden_size=sizes.model_dim,
            num_hidden_layers=sizes.encoder_depth,
            num_attention_heads=sizes.num_heads,
            intermediate_size=sizes.ff_dim,
            max_position_embeddings=sizes.max_positions,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        theirs = BertForMaskedLM(config)
        # All text is their first segment, whose vector is learned beside that of each position.
        theirs.bert.embeddings.token_type_embeddings.weight.zero_().requires_grad_(False)
        rates = {"lr": adamw.lr, "betas": adamw.betas, "eps": adamw.eps, "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW(theirs.parameters(), **rates)
        other = torch.optim.SGD(theirs.parameters(), lr=adamw.lr)
        (factor,) = get_linear_schedule_with_warmup(other, 0, steps).lr_lambdas
        self.rate = lambda done: adamw.lr * factor(done)
        embeddings = {
            "word_embeddings.weight": "tokens.weight",
            "position_embeddings.weight": "position_table.weight",
            "LayerNorm.weight": "norm.weight",
            "LayerNorm.bias": "norm.bias",
        }
        found = {f"bert.embeddings.{a}": f"embedding.{b}" for a, b in embeddings.items()}
        layer = {
            **{f"attention.self.{m}": f"self_attention.{m}" for m in ("query", "key", "value")},
            "attention.output.dense": "self_attention.output",
            "attention.output.LayerNorm": "around_self.norm_sum",
            "intermediate.dense": "feed_forward.inner",
            "output.dense": "feed_forward.outer",
            "output.LayerNorm": "around_ff.norm_sum",
        }
        for n in range(sizes.encoder_depth):
            for a, b in layer.items():
                for kind in ("weight", "bias"):
                    theirs_ = f"bert.encoder.layer.{n}.{a}.{kind}"
                    found[theirs_] = f"encoder.blocks.{n}.{b}.{kind}"
        head = {"transform.dense": "transform", "transform.LayerNorm": "norm"}
        for a, b in head.items():
            found |= {f"cls.predictions.{a}.{k}": f"{b}.{k}" for k in ("weight", "bias")}
        return theirs, found | {"cls.predictions.bias": "output_bias"}

    def loss(self, batch: Any) -> Tensor:
        logits = self.theirs(input_ids=batch.tokens).logits.flatten(0, 1)
        return nn.functional.cross_entropy(logits[batch.positions], batch.labels)


def _hashable(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let fairseq's configs be defaults of a field, as Python allowed before 3.11."""

    def dataclass(of: Any = None, **how: Any) -> Any:
        def made(each: type) -> type:
            theirs = each.__module__.startswith("fairseq")
            return make(each, **{**how, **({"unsafe_hash": True} if theirs else {})})

        return made if of is None else made(of)

    return dataclass


def _in_float64(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, dim, onnx_trace=False: function(x, dim=dim)


class Fairseq(Beside):
    """`TransformerModel`, Adam, loss and rate of facebookresearch/fairseq, commit 3d262bb2.

    Their rate is that of the next update, since the first has rate 0. Norms and biases do not
    decay, and their sinusoids and softmax maps are computed in float64. Their smoothing, which the
    other tokens share, is e (V - 1) / V where ours is e. Both start with the same spreads.
    """

    theirs: Any

    def start(self, module: Any, steps: int) -> tuple[nn.Module, dict[str, str]]:
        sys.path.insert(0, str(self.folder))
        with patch.object(dataclasses, "dataclass", _hashable(dataclasses.dataclass)):
            transformer: Any = import_module("fairseq.models.transformer")
        criterion: Any = import_module("fairseq.criterions.label_smoothed_cross_entropy")
        schedules: Any = import_module("fairseq.optim.lr_scheduler.inverse_square_root_schedule")
        adam: Any = import_module("fairseq.optim.adam")
        dictionary: Any = import_module("fairseq.data").Dictionary
        utils: Any = import_module("fairseq.utils")
        for name in ("softmax", "log_softmax"):
            setattr(utils, name, _in_float64(getattr(nn.functional, name)))
        sizes, adamw, schedule = module.architecture, module.optimizer, module.schedule
        sides = []
        for count in (module.source_vocab, module.vocab_size):
            sides.append(dictionary())
            for number in range(len(sides[-1]), count):
                sides[-1].add_symbol(f"piece {number}")
        args = Namespace(
            encoder_layers=sizes.encoder_depth,
            decoder_layers=sizes.decoder_depth,
            encoder_embed_dim=sizes.model_dim,
            encoder_ffn_embed_dim=sizes.ff_dim,
            encoder_attention_heads=sizes.num_heads,
            decoder_attention_heads=sizes.num_heads,
            share_decoder_input_output_embed=True,
            dropout=0.0,
        )
        transformer.base_architecture(args)
        task = Namespace(source_dictionary=sides[0], target_dictionary=sides[1])
        theirs = transformer.TransformerModel.build_model(args, task)
        file = self.folder / "fairseq" / "modules" / "sinusoidal_positional_embedding.py"
        exact = published(file, {"dtype=torch.float)": "dtype=torch.double)"})
        rows = exact["SinusoidalPositionalEmbedding"].get_embedding(1026, sizes.model_dim, 1)
        for stack in (theirs.encoder, theirs.decoder):
            stack.embed_positions.weights = rows
        groups: list[dict[str, Any]] = [
            {"params": [p for p in theirs.parameters() if (p.dim() > 1) == matrix]}
            for matrix in (True, False)
        ]
        groups[1]["weight_decay"] = 0.0
        rates: dict[str, Any] = {"lr": adamw.lr, "betas": adamw.betas, "eps": adamw.eps}
        self.optimizer = adam.Adam(groups, weight_decay=adamw.weight_decay, **rates)
        optim: Any = import_module("fairseq.optim")
        held = optim.FairseqOptimizer(None)
        held.set_lr = lambda lr: None
        own = Namespace(warmup_updates=schedule.warmup_steps, warmup_init_lr=-1, lr=[adamw.lr])
        rate = schedules.InverseSquareRootSchedule(own, held)
        self.rate = lambda done: rate.step_update(done + 1)
        self.smoothed = criterion.label_smoothed_nll_loss
        self.smoothing = module.objective.config.smoothing
        names = self.names(sizes)
        for a, b in names.items():  # their own initial values, before ours are copied
            one, two = theirs.get_parameter(a), module.model.get_parameter(b)
            spread = float(one.std() / two.std()) if one.dim() > 1 else 1.0
            assert 0.8 < spread < 1.25, f"{a} starts {spread:.2f} times as wide as {b}"
            assert bool(one.any()) == bool(two.any()), f"only one of {a} and {b} starts at 0"
        return theirs, names

    def names(self, sizes: Any) -> dict[str, str]:
        found = {"encoder.embed_tokens.weight": "source_embedding.tokens.weight"}
        found["decoder.embed_tokens.weight"] = "embedding.tokens.weight"
        maps = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
        layer = {f"self_attn.{a}": f"self_attention.{b}" for a, b in maps.items()}
        layer |= {"self_attn_layer_norm": "around_self.norm_sum", "fc1": "feed_forward.inner"}
        layer |= {"fc2": "feed_forward.outer", "final_layer_norm": "around_ff.norm_sum"}
        cross = {f"encoder_attn.{a}": f"cross_attention.{b}" for a, b in maps.items()}
        cross |= {"encoder_attn_layer_norm": "around_cross.norm_sum"}
        stacks = {
            "encoder": (sizes.encoder_depth, layer),
            "decoder": (sizes.decoder_depth, layer | cross),
        }
        for stack, (depth, parts) in stacks.items():
            for n in range(depth):
                for a, b in parts.items():
                    for kind in ("weight", "bias"):
                        found[f"{stack}.layers.{n}.{a}.{kind}"] = f"{stack}.blocks.{n}.{b}.{kind}"
        return found

    @torch.no_grad()
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Order the rows of their special tokens, which have other ids than ours."""
        super().on_train_start(trainer, pl_module)
        for table in (self.theirs.encoder.embed_tokens, self.theirs.decoder.embed_tokens):
            table.weight[: len(OURS)] = table.weight[OURS].clone()

    def loss(self, batch: Any) -> Tensor:
        source, target = (
            torch.where(x < len(OURS), THEIRS[x.clamp(max=4)], x)
            for x in (batch.source, batch.target)
        )
        lengths = (batch.source != PAD).sum(1)
        logits, _ = self.theirs(source, lengths, target[:, :-1])
        vocab = logits.shape[-1]
        smoothed, _ = self.smoothed(
            self.theirs.get_normalized_probs((logits, None), log_probs=True).flatten(0, 1),
            target[:, 1:].flatten(),
            self.smoothing * (vocab - 1) / vocab,
            ignore_index=1,
        )
        return smoothed / batch.predicted_tokens


OURS = torch.tensor([BOS, PAD, EOS, UNK, MASK])
"""The ids of fairseq's special tokens here: begin, padding, end, unknown, and our mask."""
THEIRS = OURS.argsort()
SMALL = {"encoder_depth": 2, "model_dim": 32, "ff_dim": 64, "num_heads": 4, "max_positions": 32}
SMALL |= {"dropout": 0.0, "attention_dropout": 0.0}
CORPUS = {"name": "synthetic", "tokenizer": "word", "vocab_size": None, "window": 32}
MUP = {"schedule.reference_steps": 6, "architecture.initial": "normal"}
MUP |= {"architecture.parametrization": "mup", "architecture.base_width": 32}
MUP |= {"optimizer.eps": 4e-8}  # divided by 4; that commit leaves 1e-8 as it is, 3904404 divides
SHORT = {"schedule.warmup_steps": 6, "schedule.reference_steps": 6}
PAIRS = {"encoder_depth": 2, "decoder_depth": 2, "model_dim": 32, "ff_dim": 64, "dropout": 0.0}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "nanogpt_shakespeare": ("NanoGPT", {"schedule.warmup_steps": 6, "schedule.reference_steps": 6}),
    "nanogpt_shakespeare mup": ("NanoGPT", {"schedule.warmup_steps": 6, **MUP}),
    "hf_mlm": ("Bert", {f"architecture.{name}": value for name, value in SMALL.items()}),
    "fairseq_iwslt14": (
        "Fairseq",
        # They add eps before the second moment is corrected; at 1e-8 losses differ by 3e-6.
        {
            **SHORT,
            "optimizer.eps": 1e-18,
            **{f"architecture.{name}": value for name, value in PAIRS.items()},
        },
    ),
}
CORPORA = {"hf_mlm": CORPUS, "fairseq_iwslt14": {"name": "synthetic", "vocab_size": 800}}


def whole(folder: Path) -> None:
    """Print the losses at the end of nanoGPT's recipe; the models drift apart by rounding."""
    beside = {"class_path": "benchmarks.recipes.NanoGPT", "init_args": {"folder": str(folder)}}
    with TemporaryDirectory() as place:
        over = {"trainer.callbacks": [beside], "trainer.default_root_dir": place}
        ours = fit("ablations/base/nanogpt_shakespeare.yaml", over).metrics["val/nll"]
    theirs = import_module("benchmarks.recipes").NanoGPT.validated
    print(f"nanogpt_shakespeare, nats per character: {ours:.4f}, theirs {theirs:.4f}")


def compare(recipe: str, folder: Path) -> float:
    """Return the largest difference of two losses of a recipe."""
    name, fields = RECIPES[recipe]
    beside = {"class_path": f"benchmarks.recipes.{name}", "init_args": {"folder": str(folder)}}
    over = {f"model.{field}": value for field, value in fields.items()}
    over |= {f"data.{field}": value for field, value in CORPORA.get(recipe, {}).items()}
    trainer = {"max_steps": STEPS, "val_check_interval": STEPS, "limit_val_batches": 1}
    trainer |= {"precision": "64-true", "callbacks": [beside]}
    with TemporaryDirectory() as place:
        trainer["default_root_dir"] = place
        over |= {f"trainer.{field}": value for field, value in trainer.items()}
        fit(f"ablations/base/{recipe.split()[0]}.yaml", over)
    differences = getattr(import_module("benchmarks.recipes"), name).differences
    assert len(differences) == STEPS, f"{recipe}: {len(differences)} steps were compared"
    return max(differences)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", type=Path, help="the folder of the clones")
    parser.add_argument("--whole", action="store_true", help="train nanoGPT's recipe to its end")
    args = parser.parse_args()
    folder = args.checkouts
    if args.whole:
        whole(folder / "nanoGPT")
        return 0
    torch.set_default_dtype(torch.float64)
    found = {
        recipe: compare(recipe, folder / ("fairseq" if "fairseq" in recipe else "nanoGPT"))
        for recipe in RECIPES
    }
    for recipe, worst in found.items():
        print(f"{worst:.1e} {'within' if worst <= BOUND else 'above'} {BOUND:.0e}  {recipe}")
    return int(not all(worst <= BOUND for worst in found.values()))


if __name__ == "__main__":
    sys.exit(main())
