"""Models of other libraries, to compare speed with.

Each peer gets the weights of our model if the mathematics is the same, so that a comparison can
first assert equal outputs. It runs with its fastest setting.

The peers are torch's Transformer, x-transformers and Hugging Face's BERT and GPT-2.
"""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import Missing, Work
from lightning_app.blocks.attention import Attention
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.feed_forward import Activation
from lightning_app.blocks.kernels.choose import Form, attention_form
from lightning_app.blocks.masks import full_mask
from lightning_app.blocks.norm import after_steps
from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD, SPECIALS
from lightning_app.models.encoder_heads import SpanPredictor, TextClassifier
from lightning_app.models.heads import (
    ArchitectureConfig,
    CausalLanguageModel,
    EncoderDecoder,
    MaskedLanguageModel,
)
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.models.stack import BlockStack
from lightning_app.scores.task_facts import DEFAULT_TASK, TASKS
from lightning_app.tasks.base import Task, build_task, to_device
from lightning_app.tasks.causal_lm import CausalBatch
from lightning_app.tasks.masked_lm import MaskedBatch
from lightning_app.tasks.translation import TranslationBatch

Precision = Literal["32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The sizes shared by all contenders.

    `tokens` is the size of a batch, `length` that of its longest row; both count target tokens if
    there is a target.
    """

    task: str = DEFAULT_TASK
    depth: int = 6
    width: int = 512
    ff_dim: int = 1024
    heads: int = 4
    vocabulary: int = 10_000
    length: int = 128
    tokens: int = 4096
    label_smoothing: float = 0.1
    positions: str = "sinusoidal"
    activation: Activation = "relu"
    device: str = "cpu"
    precision: Precision = "32"
    step: bool = True
    """Whether an optimizer step follows the forward and backward pass."""

    @property
    def rows(self) -> int:
        return max(1, self.tokens // self.length)

    def architecture(self) -> ArchitectureConfig:
        """Return the sizes of our model, without dropout, whose positions differ between peers."""
        return ArchitectureConfig(
            kind=TASKS[self.task].architecture,  # pyright: ignore[reportArgumentType]
            encoder_depth=self.depth,
            decoder_depth=self.depth,
            model_dim=self.width,
            ff_dim=self.ff_dim,
            num_heads=self.heads,
            dropout=0.0,
            positions=self.positions,
            activation=self.activation,
            max_positions=max(self.length, 128),
        )


def masked(setting: Setting) -> Setting:
    """Return the setting of masked language modelling with BERT's positions and activation."""
    return replace(
        setting, task="masked_lm", label_smoothing=0.0, positions="learned", activation="gelu"
    )


def causal(setting: Setting) -> Setting:
    """Return the setting of causal language modelling with GPT-2's positions and activation."""
    return replace(
        setting, task="causal_lm", label_smoothing=0.0, positions="learned", activation="gelu"
    )


class Learner(NamedTuple):
    """A model, and its mean loss on a fixed batch."""

    model: nn.Module
    loss: Callable[[], Tensor]


def task_of(setting: Setting) -> Task:
    """Return the task of a setting."""
    return build_task(ObjectiveConfig(kind=setting.task, label_smoothing=setting.label_smoothing))


def batch_of(setting: Setting) -> Any:
    """Return a random batch of the task; it depends on the seed of torch."""
    batch = BATCHES[setting.task](setting.rows, setting.length, setting.vocabulary)
    return to_device(batch, torch.device(setting.device))


def _windows(rows: int, length: int, vocabulary: int) -> CausalBatch:
    """Windows of random tokens, all of which are predicted."""
    tokens = torch.randint(SPECIALS, vocabulary, (rows, length + 1))
    count = torch.tensor(rows * length)
    return CausalBatch(tokens[:, :-1], tokens[:, 1:], torch.arange(rows), count)


def _masked_rows(rows: int, length: int, vocabulary: int) -> MaskedBatch:
    """Rows of random tokens without padding, 15 % of them masked and predicted."""
    tokens = torch.randint(SPECIALS, vocabulary, (rows, length))
    count = max(1, round(0.15 * tokens.numel()))
    positions = torch.randperm(tokens.numel())[:count].sort().values
    labels = tokens.flatten()[positions]
    tokens.view(-1)[positions] = MASK
    return MaskedBatch(tokens, positions, labels, torch.arange(rows), torch.tensor(count))


def _pairs(rows: int, length: int, vocabulary: int) -> TranslationBatch:
    """Pairs of random tokens; the shortest is 1/14 shorter, as in a batch of similar lengths."""
    lengths = torch.linspace(length, max(2, round(length * 13 / 14)), rows).round().long()[:, None]
    place = torch.arange(length + 1)
    sizes = ((rows, length), (rows, length + 1))
    source, target = (torch.randint(SPECIALS, vocabulary, size) for size in sizes)
    target[:, 0] = BOS
    # The target has one more position: its last token is predicted but never read.
    for text, end in ((source, lengths - 1), (target, lengths)):
        here = place[: text.shape[1]]
        text[here == end] = EOS
        text[here > end] = PAD
    return TranslationBatch(source, target, torch.arange(rows), lengths.sum())


BATCHES = {"causal_lm": _windows, "masked_lm": _masked_rows, "translation": _pairs}


def learner(setting: Setting, block: BlockConfig, batch: Any) -> Learner:
    """Return our model with `block`, and its training loss."""
    task = task_of(setting)
    model = task.build_model(setting.architecture(), block, setting.vocabulary).to(setting.device)
    return Learner(model, lambda: task.sums(model, batch).loss / batch.predicted_tokens)


def work(learner: Learner, setting: Setting) -> Work:
    """Return one training step with fused Adam, or only one forward and backward pass."""
    parameters = list(learner.model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=True) if setting.step else None
    project = after_steps(learner.model)

    def run() -> None:
        with torch.autocast(setting.device, torch.bfloat16, enabled=setting.precision == "bf16"):
            loss = learner.loss()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            project()
        for parameter in parameters:
            parameter.grad = None

    return Work(run, sum(parameter.numel() for parameter in parameters))


def preset_work(setting: Setting, preset: str, form: Form | None = None) -> Work:
    """Return the work of our model with `preset`, with attention in `form` unless None."""
    torch.manual_seed(1)
    batch = batch_of(setting)
    free = work(learner(setting, BlockConfig(preset=preset), batch), setting)
    if form is None:
        return free

    def run() -> None:
        with attention_form(form):
            free.run()

    return free._replace(run=run)


def needed(module: str, package: str) -> ModuleType:
    """Import `module`, or raise `Missing` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Missing(
            f"{package} is not installed; run pip install 'transformer-ablations[bench]'"
        ) from error


class Projections(NamedTuple):
    """Weights and biases of one of our attentions."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear

    @classmethod
    def of(cls, attention: Attention) -> "Projections":
        parts = (attention.query, attention.key, attention.value, attention.output)
        assert all(isinstance(part, nn.Linear) for part in parts)
        return cls(*parts)  # pyright: ignore[reportArgumentType]


def translation_loss(logits: Tensor, batch: TranslationBatch, label_smoothing: float) -> Tensor:
    """Return the mean loss of the target tokens, ignoring padding."""
    labels = batch.target[:, 1:].flatten()
    return F.cross_entropy(
        logits.flatten(0, 1), labels, ignore_index=PAD, label_smoothing=label_smoothing
    )


@final
class TorchTranslator(nn.Module):
    """`torch.nn.Transformer` with embeddings like ours.

    With post-norm and without its norms after each stack, it equals our `post_ln`. With the hint
    `is_causal` attention needs no mask, and then the targets need no padding mask.
    """

    def __init__(self, ours: EncoderDecoder, setting: Setting) -> None:
        super().__init__()
        self.embedding = ours.embedding
        with warnings.catch_warnings():
            # An odd number of heads avoids nested tensors, which training never uses.
            warnings.filterwarnings("ignore", message="enable_nested_tensor")
            self.transformer = nn.Transformer(
                setting.width,
                setting.heads,
                setting.depth,
                setting.depth,
                setting.ff_dim,
                dropout=0.0,
                activation="relu",
                batch_first=True,
            )
        self.transformer.encoder.norm = None
        self.transformer.decoder.norm = None
        self._copy(ours)

    @torch.no_grad()
    def _copy(self, ours: EncoderDecoder) -> None:
        for side in ("encoder", "decoder"):
            blocks: Any = getattr(ours, side).blocks
            layers: Any = getattr(self.transformer, side).layers
            for block, layer in zip(blocks, layers, strict=True):
                _copy_attention(block.self_attention, layer.self_attn)
                norms = [layer.norm1, layer.norm2]
                sources = [block.around_self, block.around_ff]
                if side == "decoder":
                    _copy_attention(block.cross_attention, layer.multihead_attn)
                    norms.append(layer.norm3)
                    sources.insert(1, block.around_cross)
                first, second = linears(block.feed_forward)
                layer.linear1.load_state_dict(first.state_dict())
                layer.linear2.load_state_dict(second.state_dict())
                for norm, source in zip(norms, sources, strict=True):
                    norm.load_state_dict(source.norm_sum.state_dict())

    def forward(
        self, source: Int[Tensor, "batch source"], target: Int[Tensor, "batch target"]
    ) -> Float[Tensor, "batch target vocabulary"]:
        padding = source == PAD
        mask = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], target.device, self.embedding.tokens.weight.dtype
        )
        states = self.transformer(
            self.embedding(source),
            self.embedding(target),
            tgt_mask=mask,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.embedding.logits(states)


@final
class XTranslator(nn.Module):
    """x-transformers with embeddings like ours and flash attention.

    With post-norm it equals our `post_ln` while the biases that it lacks are zero, as initially.
    """

    def __init__(self, ours: EncoderDecoder, setting: Setting) -> None:
        super().__init__()
        package = needed("x_transformers", "x-transformers")
        self.embedding = ours.embedding
        common: dict[str, Any] = {
            "dim": setting.width,
            "depth": setting.depth,
            "heads": setting.heads,
            "attn_dim_head": setting.width // setting.heads,
            "attn_flash": True,
            "ff_mult": setting.ff_dim / setting.width,
            "ff_custom_activation": nn.ReLU(),
            "pre_norm": False,
        }
        self.encoder = package.Encoder(**common)
        self.decoder = package.Decoder(cross_attend=True, **common)
        _copy_layers(self.encoder, ours.encoder.blocks)
        _copy_layers(self.decoder, ours.decoder.blocks)

    def forward(
        self, source: Int[Tensor, "batch source"], target: Int[Tensor, "batch target"]
    ) -> Float[Tensor, "batch target vocabulary"]:
        present = source != PAD
        memory = self.encoder(self.embedding(source), mask=present)
        states = self.decoder(self.embedding(target), context=memory, context_mask=present)
        return self.embedding.logits(states)


def x_encoder(ours: BlockStack, setting: Setting) -> nn.Module:
    """Return x-transformers' encoder with residual attention, which equals our `realformer`."""
    package = needed("x_transformers", "x-transformers")
    encoder = package.Encoder(
        dim=setting.width,
        depth=setting.depth,
        heads=setting.heads,
        attn_dim_head=setting.width // setting.heads,
        ff_mult=setting.ff_dim / setting.width,
        ff_custom_activation={"gelu": nn.GELU, "relu": nn.ReLU}[setting.activation](),
        pre_norm=False,
        residual_attn=True,
    )
    _copy_layers(encoder, ours.blocks)
    return encoder


@torch.no_grad()
def _copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    parts = Projections.of(ours)
    joined = parts[:3]
    assert theirs.in_proj_weight is not None
    theirs.in_proj_weight.copy_(torch.cat([part.weight for part in joined]))
    theirs.in_proj_bias.copy_(torch.cat([part.bias for part in joined]))
    theirs.out_proj.load_state_dict(parts.output.state_dict())


@torch.no_grad()
def _copy_layers(theirs: Any, ours: nn.ModuleList) -> None:
    """Set the weights of the layers of x-transformers, one layer per sub-layer."""
    layers = iter(zip(theirs.layer_types, theirs.layers, strict=True))
    for block in ours:
        part: Any = block
        kinds = [("a", "self_attention", "around_self"), ("f", None, "around_ff")]
        if part.cross_attention is not None:
            kinds.insert(1, ("c", "cross_attention", "around_cross"))
        for kind, attention, around in kinds:
            letter, (norms, layer, _) = next(layers)
            assert letter == kind
            if attention is None:
                first, second = linears(part.feed_forward)
                maps = [m for m in layer.modules() if isinstance(m, nn.Linear)]
                maps[0].load_state_dict(first.state_dict())
                maps[1].load_state_dict(second.state_dict())
            else:
                parts = Projections.of(getattr(part, attention))
                for name, source in zip(("q", "k", "v", "out"), parts, strict=True):
                    getattr(layer, f"to_{name}").weight.copy_(source.weight)
            norm = norms[2]  # after the sum
            norm.gamma.copy_(getattr(part, around).norm_sum.weight - float(norm.unit_offset))


def linears(feed_forward: nn.Module) -> tuple[nn.Linear, nn.Linear]:
    """Return the two linear maps of one of our feed-forwards."""
    first, second = (m for m in feed_forward.modules() if isinstance(m, nn.Linear))
    return first, second


def translation_learner(model: nn.Module, batch: TranslationBatch, setting: Setting) -> Learner:
    """Return a peer with the usual loss."""
    model = model.to(setting.device)

    def loss() -> Tensor:
        logits = model(batch.source, batch.target[:, :-1])
        return translation_loss(logits, batch, setting.label_smoothing)

    return Learner(model, loss)


def same_loss(ours: Learner, theirs: Learner) -> None:
    """Check that a peer and our model compute the same loss."""
    with torch.no_grad():
        pair = torch.stack([ours.loss(), theirs.loss()]).tolist()
    assert abs(pair[0] - pair[1]) < 1e-3 * pair[0], f"losses {pair}: not the same model"


def translation_peer(setting: Setting, peer: type[TorchTranslator] | type[XTranslator]) -> Work:
    """Return the work of a peer with the weights of our `post_ln`."""
    torch.manual_seed(1)
    batch = batch_of(setting)
    ours = learner(setting, BlockConfig(preset="post_ln"), batch)
    assert isinstance(ours.model, EncoderDecoder)
    theirs = translation_learner(peer(ours.model, setting), batch, setting)
    same_loss(ours, theirs)
    return work(theirs, setting)


def residual_encoder(setting: Setting, *, ours: bool) -> Work:
    """Return the work of an encoder with residual attention: our `realformer`, or x-transformers'.

    There is no padding.
    """
    torch.manual_seed(1)
    block = BlockConfig(preset="realformer")
    model = learner(setting, block, batch_of(setting)).model
    assert isinstance(model, MaskedLanguageModel)
    encoder = model.encoder
    mask = full_mask(setting.length, torch.device(setting.device))
    x = torch.randn(setting.rows, setting.length, setting.width, device=setting.device)
    own = Learner(encoder, lambda: encoder(x, mask).pow(4).mean())
    if ours:
        return work(own, setting)
    theirs = x_encoder(encoder, setting).to(setting.device)
    peer = Learner(theirs, lambda: theirs(x).pow(4).mean())
    same_loss(own, peer)
    return work(peer, setting)


def bert(
    ours: MaskedLanguageModel, setting: Setting, batch: MaskedBatch, *, predicted_only: bool
) -> Learner:
    """Return Hugging Face's BERT of the same sizes, with SDPA.

    Its own loss computes the logits of every position; with `predicted_only` its body and its head
    are combined to avoid this. It equals our `post_ln` except for the norm of its embedding,
    which our model gets for the comparison: see `with_embedding_norm`.
    """
    package = needed("transformers", "Hugging Face transformers")
    config = package.BertConfig(
        vocab_size=setting.vocabulary,
        hidden_size=setting.width,
        num_hidden_layers=setting.depth,
        num_attention_heads=setting.heads,
        intermediate_size=setting.ff_dim,
        hidden_act="gelu",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=setting.architecture().max_positions,
        pad_token_id=PAD,
        layer_norm_eps=1e-5,
        attn_implementation="sdpa",
    )
    model = package.BertForMaskedLM(config).to(setting.device)
    model.train()
    _copy_bert(ours, model)
    labels = torch.full_like(batch.tokens, -100)
    labels.view(-1)[batch.positions] = batch.labels

    def loss() -> Tensor:
        if not predicted_only:
            return model(input_ids=batch.tokens, labels=labels).loss
        states = model.bert(input_ids=batch.tokens).last_hidden_state.flatten(0, 1)
        logits = model.cls(states.index_select(0, batch.positions))
        return F.cross_entropy(logits, batch.labels)

    return Learner(model, loss)


@torch.no_grad()
def _copy_bert(ours: MaskedLanguageModel, theirs: Any) -> None:
    copy_bert_body(ours, theirs.bert)
    head = theirs.cls.predictions
    head.transform.dense.load_state_dict(ours.transform.state_dict())
    head.transform.LayerNorm.load_state_dict(ours.norm.state_dict())
    head.transform.LayerNorm.eps = ours.norm.eps
    head.bias.copy_(ours.output_bias)


def with_embedding_norm(ours: MaskedLanguageModel) -> MaskedLanguageModel:
    """Insert BERT's norm of the embedding before our first block."""
    weight = ours.embedding.tokens.weight
    ours.encoder.input_norm = nn.LayerNorm(weight.shape[1]).to(weight.device, weight.dtype)
    return ours


@torch.no_grad()
def copy_bert_body(ours: MaskedLanguageModel | TextClassifier | SpanPredictor, theirs: Any) -> None:
    """Copy the weights of our embedding and blocks to `theirs`, a `BertModel`.

    The norm of BERT's embedding cancels our factor sqrt(width).
    """
    embeddings, width, own = theirs.embeddings, ours.embedding.model_dim, ours.embedding
    embeddings.word_embeddings.weight.copy_(own.tokens.weight)
    assert own.position_table is not None
    embeddings.position_embeddings.weight.copy_(own.position_table.weight / width**0.5)
    embeddings.token_type_embeddings.weight.zero_()
    if own.segments is not None:
        embeddings.token_type_embeddings.weight.copy_(own.segments.weight / width**0.5)
    if isinstance(own.norm, nn.LayerNorm):
        embeddings.LayerNorm.load_state_dict(own.norm.state_dict())
    embeddings.LayerNorm.eps = embeddings.LayerNorm.eps / width
    for block, layer in zip(ours.encoder.blocks, theirs.encoder.layer, strict=True):
        part: Any = block
        parts = Projections.of(part.self_attention)
        attention = layer.attention
        targets = [getattr(attention.self, name) for name in ("query", "key", "value")]
        for target, source in zip([*targets, attention.output.dense], parts, strict=True):
            target.load_state_dict(source.state_dict())
        attention.output.LayerNorm.load_state_dict(part.around_self.norm_sum.state_dict())
        first, second = linears(part.feed_forward)
        layer.intermediate.dense.load_state_dict(first.state_dict())
        layer.output.dense.load_state_dict(second.state_dict())
        layer.output.LayerNorm.load_state_dict(part.around_ff.norm_sum.state_dict())


def bert_peer(setting: Setting, *, predicted_only: bool) -> Work:
    """Return the work of BERT; with `predicted_only` its head has the same inputs as ours."""
    torch.manual_seed(1)
    batch = batch_of(setting)
    ours = learner(setting, BlockConfig(preset="post_ln"), batch)
    assert isinstance(ours.model, MaskedLanguageModel)
    with_embedding_norm(ours.model)
    theirs = bert(ours.model, setting, batch, predicted_only=predicted_only)
    same_loss(ours, theirs)
    return work(theirs, setting)


def bert_like(ours: TextClassifier | SpanPredictor, kind: str, **fields: Any) -> Any:
    """Return a Hugging Face model with our model's embedding and encoder.

    It equals our `post_ln` with learned positions, GELU and the norm of the embedding.

    Args:
        ours: Our model, on the CPU.
        kind: Its class, such as `BertForQuestionAnswering`, with as many outputs as ours.
        fields: Additional fields of `BertConfig`; by default attention is SDPA without dropout.
    """
    package = needed("transformers", "Hugging Face transformers")
    block: Any = ours.encoder.blocks[0]
    first, _ = linears(block.feed_forward)
    outputs, width = ours.output.weight.shape
    positions: Any = ours.embedding.position_table
    own = {
        "vocab_size": len(ours.embedding.tokens.weight),
        "hidden_size": width,
        "num_hidden_layers": len(ours.encoder.blocks),
        "num_attention_heads": block.self_attention.num_heads,
        "intermediate_size": first.out_features,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": len(positions.weight),
        "pad_token_id": ours.pad,
        "layer_norm_eps": 1e-5,
        "attn_implementation": "sdpa",
        "num_labels": outputs,
    }
    theirs = getattr(package, kind)(package.BertConfig(**{**own, **fields}))
    theirs = theirs.to(ours.output.weight.dtype).train()
    copy_bert_body(ours, theirs.bert)
    return theirs


def bert_classifier(ours: TextClassifier, **fields: Any) -> Any:
    """Return `bert_like` as `BertForSequenceClassification`, with our pooler and output layer.

    One output is a score, with the mean squared error as its loss.
    """
    theirs = bert_like(ours, "BertForSequenceClassification", **fields)
    theirs.bert.pooler.dense.load_state_dict(ours.pooler.state_dict())
    theirs.classifier.load_state_dict(ours.output.state_dict())
    return theirs


def gpt2(ours: CausalLanguageModel, setting: Setting) -> Any:
    """Return Hugging Face's GPT-2 of the same sizes, with SDPA, which equals our `pre_ln`.

    GPT-2 has no factor sqrt(width) on its embedding, which is also the output layer: its table is
    sqrt(width) times ours, and the final norm makes the states smaller by the same factor.
    """
    package = needed("transformers", "Hugging Face transformers")
    config = package.GPT2Config(
        vocab_size=setting.vocabulary,
        n_positions=setting.architecture().max_positions,
        n_embd=setting.width,
        n_layer=setting.depth,
        n_head=setting.heads,
        n_inner=setting.ff_dim,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )
    model = package.GPT2LMHeadModel(config).to(setting.device)
    model.train()
    _copy_gpt2(ours, model)
    return model


@torch.no_grad()
def _copy_gpt2(ours: CausalLanguageModel, theirs: Any) -> None:
    body, root = theirs.transformer, ours.embedding.model_dim**0.5
    body.wte.weight.copy_(ours.embedding.tokens.weight * root)
    assert ours.embedding.position_table is not None
    body.wpe.weight.copy_(ours.embedding.position_table.weight)
    for block, layer in zip(ours.decoder.blocks, body.h, strict=True):
        part: Any = block
        parts = Projections.of(part.self_attention)
        # Its matrices are transposed.
        layer.attn.c_attn.weight.copy_(torch.cat([each.weight for each in parts[:3]]).t())
        layer.attn.c_attn.bias.copy_(torch.cat([each.bias for each in parts[:3]]))
        targets = (layer.attn.c_proj, layer.mlp.c_fc, layer.mlp.c_proj)
        for target, source in zip(
            targets, (parts.output, *linears(part.feed_forward)), strict=True
        ):
            target.weight.copy_(source.weight.t())
            target.bias.copy_(source.bias)
        layer.ln_1.load_state_dict(part.around_self.norm_input.state_dict())
        layer.ln_2.load_state_dict(part.around_ff.norm_input.state_dict())
    last: Any = ours.decoder.final_norm
    body.ln_f.weight.copy_(last.weight / root)
    body.ln_f.bias.copy_(last.bias / root)


@final
class XCausal(nn.Module):
    """x-transformers' decoder with an embedding like ours and flash attention.

    It equals our `pre_ln` while the biases that it lacks are zero, as initially.
    """

    def __init__(self, ours: CausalLanguageModel, setting: Setting) -> None:
        super().__init__()
        package = needed("x_transformers", "x-transformers")
        self.embedding = ours.embedding
        self.decoder = package.Decoder(
            dim=setting.width,
            depth=setting.depth,
            heads=setting.heads,
            attn_dim_head=setting.width // setting.heads,
            attn_flash=True,
            ff_mult=setting.ff_dim / setting.width,
            ff_custom_activation=nn.GELU(),
        )
        self._copy(ours)

    @torch.no_grad()
    def _copy(self, ours: CausalLanguageModel) -> None:
        layers = iter(self.decoder.layers)
        for block in ours.decoder.blocks:
            part: Any = block
            norms, attention, _ = next(layers)
            self._norm(norms[0], part.around_self.norm_input)
            for name, source in zip(
                ("q", "k", "v", "out"), Projections.of(part.self_attention), strict=True
            ):
                getattr(attention, f"to_{name}").weight.copy_(source.weight)
            norms, feed_forward, _ = next(layers)
            self._norm(norms[0], part.around_ff.norm_input)
            theirs = [each for each in feed_forward.modules() if isinstance(each, nn.Linear)]
            for target, source in zip(theirs, linears(part.feed_forward), strict=True):
                target.load_state_dict(source.state_dict())
        self._norm(self.decoder.final_norm, ours.decoder.final_norm)

    @staticmethod
    def _norm(theirs: Any, ours: Any) -> None:
        theirs.gamma.copy_(ours.weight - float(theirs.unit_offset))

    def forward(
        self, tokens: Int[Tensor, "batch token"]
    ) -> Float[Tensor, "batch token vocabulary"]:
        return self.embedding.logits(self.decoder(self.embedding(tokens)))


def causal_loss(logits: Tensor, batch: CausalBatch) -> Tensor:
    """Return the mean loss of full windows."""
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())


def causal_peer(setting: Setting, *, hugging_face: bool) -> Work:
    """Return the work of GPT-2, or of x-transformers' decoder, with the weights of our `pre_ln`."""
    torch.manual_seed(1)
    batch = batch_of(setting)
    ours = learner(setting, BlockConfig(preset="pre_ln"), batch)
    assert isinstance(ours.model, CausalLanguageModel)
    if hugging_face:
        model: Any = gpt2(ours.model, setting)
        theirs = Learner(model, lambda: causal_loss(model(input_ids=batch.tokens).logits, batch))
    else:
        decoder = XCausal(ours.model, setting).to(setting.device)
        theirs = Learner(decoder, lambda: causal_loss(decoder(batch.tokens), batch))
    same_loss(ours, theirs)
    return work(theirs, setting)
