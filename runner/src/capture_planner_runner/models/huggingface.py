"""Any Hugging Face causal language model as a target, through the attention interface.

Whether a model can be executed is seen when it is loaded: a probe of two tokens goes through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3VLConfig,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from capture_planner.errors import RunError, class_and_message
from capture_planner.plugins.backend import Scoring
from capture_planner.records.model import DataType, Model
from capture_planner_runner.models.fp8 import FP8, DequantizedExperts, Fp8Weight
from capture_planner_runner.models.fp8_folders import Fp8Format, fp8_format
from capture_planner_runner.models.host_reads import reads_host
from capture_planner_runner.models.interface import INTERFACE, SUPPORTED, Call
from capture_planner_runner.models.loading import (
    Source,
    StoredTensor,
    contradictions,
    held_back,
    library_errors,
    locate,
    read_tensors,
    seeded,
    weights_of,
)
from capture_planner_runner.models.mamba import has_mixers, mixers_of
from capture_planner_runner.models.protocols import Attend, Weight
from capture_planner_runner.models.spread import Vocabulary, spread
from capture_planner_runner.ranks.collectives import WHOLE, Collectives


class RefuseHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that read device values on the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if reads_host(func, args):
            raise RunError(f"its forward reads a device value on the host ({func}), which no graph can hold")
        return func(*args, **(kwargs or {}))


class Probe:
    """An ``attend`` that notes what each layer brings, and answers zeros."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int]] = {}
        self.sinks = False

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        if layer in self.seen:
            raise RunError(f"layer {layer} attends twice in one forward; {SUPPORTED}")
        self.seen[layer] = (query.shape[1], key.shape[1], query.shape[2])
        self.sinks = self.sinks or scoring.sinks is not None
        return torch.zeros_like(query)

    def recur(self, number: int, inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
        """Return the states after its two tokens."""
        return torch.stack((inputs[0], decays[1].exp() * inputs[0] + inputs[1]))

    @property
    def real(self) -> torch.Tensor:
        """Refuse: layers of transformers do not know which rows are padding."""
        raise RunError(f"an operator asks which rows are padding; {SUPPORTED}")


def configuration_of(shape: Model) -> PreTrainedConfig:
    """Return that of a Llama, or of a Qwen3-VL for multimodal rope. Raises ``RunError`` for numbers of neither."""
    if shape.latent or shape.sinks or shape.recurrent or not shape.causal or shape.head_dim % 2:
        raise RunError(
            f"model {shape.name}: no random model is made with latent attention, sinks, recurrent layers, attention "
            "that is not causal, or an odd head_dim; give a folder, or a configuration"
        )
    hidden = shape.hidden_size or shape.num_heads * shape.head_dim
    numbers: dict[str, Any] = {
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "vocab_size": shape.vocab_size or 256,
        "max_position_embeddings": shape.max_model_len,
        "tie_word_embeddings": False,
    }
    if not shape.mrope:
        return LlamaConfig(**numbers)
    # Sections are of rotary frequencies: one for every two elements of a head.
    half = shape.head_dim // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    # Qwen3-VL has a vision tower in any case; this is a small one, since only the decoder runs.
    seeing = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": hidden, "deepstack_visual_indexes": []}
    return Qwen3VLConfig(text_config=numbers | {"rope_parameters": rope}, vision_config=seeing)


def read_configuration(found: Source) -> PreTrainedConfig:
    """Read a configuration; code next to it is not run, and no question about it is put on the terminal."""
    stated = found.read_config()
    if stated.get("auto_map") and stated.get("model_type") not in CONFIG_MAPPING:
        raise RunError(f"{found.config}: its model is code next to it, which is not run; {SUPPORTED}")
    config: PreTrainedConfig = AutoConfig.from_pretrained(found.config, trust_remote_code=False)
    return config


def taken_quantization(config: PreTrainedConfig) -> object:
    """Take ``quantization_config`` out of a configuration, and return it; None where it states nothing.

    The library would choose a quantizer by it, which needs kernels that are downloaded.
    """
    stated = [vars(each).pop("quantization_config", None) for each in (config, config.get_text_config(decoder=True))]
    return next((each for each in stated if each is not None), None)


def pretrained(
    factory: Any, found: Source, config: PreTrainedConfig, options: dict[str, Any], fp8: Fp8Format | None
) -> PreTrainedModel:
    """Load weights; the library would make up those that are missing.

    It is given tensors, not the folder: there it would follow the index, an adapter's configuration or a file name in
    config.json to other folders and to pickled weights.
    """
    folder = found.config.parent
    stored = read_tensors(found.files)
    tensors = _plain(stored) if fp8 is None else fp8.tensors(stored)
    # Without memory: only its class and its completed configuration are needed.
    with torch.device("meta"):
        alike = factory.from_config(config, **options)
    kind: Any = type(alike) if fp8 is None else fp8.kind(type(alike))
    with _no_progress_bars():
        model, loading = kind.from_pretrained(
            None,
            config=alike.config,
            state_dict=tensors,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused here, by name
            **options,
        )
    if loading["mismatched_keys"]:
        name, given, expected = min(loading["mismatched_keys"])
        more = f" (and {len(loading['mismatched_keys']) - 1} more)" if len(loading["mismatched_keys"]) > 1 else ""
        raise RunError(
            f"{folder}: {name} has shape {list(given)}, and by config.json {list(expected)}{more}; they do not belong "
            "together"
        )
    # First, since the lists below would name the scales and not say what is wrong.
    if fp8 is not None:
        fp8.refuse_others(folder, model, loading["missing_keys"], loading["unexpected_keys"])
    missing = sorted(loading["missing_keys"])
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise RunError(f"{folder}: its safetensors lack {listed}; they do not belong to config.json")
    loaded: PreTrainedModel = model
    return loaded


def _plain(stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    """Return the tensors by name. Raises ``RunError`` for one in FP8, whose scales the library would leave out."""
    for name, item in stored.items():
        if item.tensor.dtype is FP8:
            raise RunError(
                f"{item.file}: {name} is FP8, and config.json has no quantization_config; take both from one folder"
            )
    return {name: item.tensor for name, item in stored.items()}


@contextmanager
def _errors_alone() -> Iterator[None]:
    """Let transformers log errors alone: of kernels that are not installed for what runs here without them."""
    before = transformers_logging.get_verbosity()  # type: ignore[no-untyped-call, unused-ignore]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)  # type: ignore[no-untyped-call, unused-ignore]


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Leave standard error to our own progress bars; transformers has a switch for the whole process."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of the number of experts in configurations."""

_FLOATS = {DataType.BFLOAT16: torch.bfloat16, DataType.FLOAT16: torch.float16, DataType.FLOAT32: torch.float32}

_MOST_LAYERS = 1024
"""Far above any model: a slip in a configuration would take hours to build."""

_MOVING_ROPE = {
    "dynamic": "dynamic rope reads the longest position on the host, which no graph can hold",
    "longrope": "longrope chooses the frequencies of all requests, and of padding, by the longest in the batch",
}


class HuggingFaceModel:
    """A ``TargetModel``: the decoder of a Hugging Face model, and its output embeddings.

    Made by ``load_target``. Raises ``RunError`` where the model cannot be executed in a graph, or
    its attention is not what the contract has. ``sinks`` says whether a layer has learned sinks. Heads are counted
    over all ranks ``among`` which the model is spread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        max_model_len: int,
        among: Collectives = WHOLE,
        windows: Mapping[int, int | None] | None = None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        self.name = name
        self.windows = _windows(config) if windows is None else windows
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        stated = getattr(config, "max_position_embeddings", None)
        self.max_model_len: int = max_model_len if stated is None else stated
        self.mrope = "mrope_section" in (getattr(config, "rope_parameters", None) or {})
        self.dtype: torch.dtype = model.dtype
        untyped: Any = model
        self._decoder = untyped.get_decoder()
        self._mixers = tuple(mixers_of(self._decoder))
        self.state_widths = tuple(width for mixer in self._mixers for width in mixer.widths)
        self._head = untyped.get_output_embeddings()
        self._embedding = self._decoder.get_input_embeddings()
        self.among = among
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies its logits by `logit_scale`, Granite divides them by `logits_scaling`.
        self._logit_scale = float(getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0))
        # Models name the list of their layers differently: it is the one of their number.
        lists = [child for child in self._decoder.children() if isinstance(child, nn.ModuleList)]
        layers = next((child for child in lists if len(child) == self.num_layers), None)
        if self._head is None or layers is None:
            raise RunError(f"{name} has no output embeddings, or no list of its layers; {SUPPORTED}")
        self._layers = layers
        self._vocabulary = Vocabulary(self.vocab_size, among)
        self._vocabulary.keep(self._head)
        kept = {*self._decoder.modules(), self._head}
        self._parts = [(part, module) for part, module in model.named_modules() if module in kept]
        heads, of_rank, self.head_dim, self.sinks = self._probe(model)
        self.num_heads, self.num_kv_heads = heads, of_rank
        if among.size > 1:
            # The probe sees this rank's heads; a plan counts them over all ranks.
            self.num_heads, self.num_kv_heads = config.num_attention_heads, _kv_heads(config)
            planned = (self.num_heads // among.size, max(self.num_kv_heads // among.size, 1))
            if (heads, of_rank) != planned:
                raise RunError(
                    f"{name}: each of {among.size} ranks has {heads} query and {of_rank} key/value heads, expected "
                    f"{planned[0]} and {planned[1]}: its tp_plan in transformers does not spread its attention; plan "
                    "it with parallel.tensor 1"
                )

    def forward(
        self,
        *,
        input_ids: torch.Tensor | None,
        embeddings: torch.Tensor | None,
        positions: torch.Tensor,
        attend: Attend,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return hidden states ``[T, hidden_size]`` and auxiliary ones, as ``TargetModel`` says.

        Raises ``RunError`` for a layer in ``aux_layers`` that the model does not have.
        """
        if any(not 0 <= layer < self.num_layers for layer in aux_layers):
            raise RunError(
                f"auxiliary states of layers {list(aux_layers)}: {self.name} has layers 0 to {self.num_layers - 1}"
            )
        entered: dict[int, torch.Tensor] = {}
        # Hooks, because transformers' output_hidden_states would keep the states of all layers.
        with ExitStack() as hooks, torch.no_grad():
            for layer in set(aux_layers):
                hook = self._layers[layer].register_forward_pre_hook(partial(_keep, entered, layer), with_kwargs=True)
                hooks.callback(hook.remove)
            output = self._decoder(
                input_ids=None if input_ids is None else input_ids.unsqueeze(0),
                inputs_embeds=None if embeddings is None else embeddings.unsqueeze(0),
                **self._arguments(positions, attend),
            )
        hidden: torch.Tensor = output.last_hidden_state[0]
        if not aux_layers:
            return hidden, None
        return hidden, torch.cat([entered[layer][0] for layer in aux_layers], dim=-1)

    @torch.no_grad()
    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = self._embedding(input_ids)
        return embeddings

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[N, vocab_size]`` for hidden states ``[N, hidden_size]``, scaled and softcapped."""
        return self._vocabulary.whole(self._logits(hidden))

    @torch.no_grad()
    def likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._vocabulary.likeliest(self._logits(hidden))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens that this rank has."""
        logits: torch.Tensor = self._head(hidden)
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def linears(self) -> dict[str, nn.Linear]:
        """The linear layers of the decoder, which LoRA adapters can add to, by their name in the model's weights.

        Raises ``RunError`` for a model with FP8 weights, to which none are added.
        """
        decoder = set(self._layers.modules())
        if any(isinstance(module, Fp8Weight) for module in decoder):
            raise RunError(f"{self.name} has FP8 weights, which adapters are not added to; run it without adapters")
        return {part: module for part, module in self._parts if module in decoder and isinstance(module, nn.Linear)}

    @contextmanager
    def scaled(self, layer: int, factor: float) -> Iterator[None]:
        """Multiply what a layer adds to the residual stream by ``factor``, until the context is left."""
        hook = self._layers[layer].register_forward_hook(partial(_scale, factor), with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def weights(self) -> Iterator[Weight]:
        """Every parameter and buffer that a forward reads, by its name in the model's weights."""
        return weights_of(self._parts)

    def _arguments(self, positions: torch.Tensor, attend: Attend) -> dict[str, Any]:
        call = Call(attend, self.windows, positions)
        # As a batch of one: [1, T], or [3, 1, T] with multimodal rope.
        return {"position_ids": positions.unsqueeze(-2), "use_cache": False, INTERFACE: call}

    @torch.no_grad()
    def _probe(self, model: PreTrainedModel) -> tuple[int, int, int, bool]:
        """Run two tokens through the whole model; return heads, KV heads, head width and sinks."""
        # Two different tokens: one may be the padding token, whose embedding is zero.
        tokens = torch.arange(2, device=model.device) % self.vocab_size
        positions = tokens.expand(3, -1) if self.mrope else tokens
        whole, part = Probe(), Probe()
        try:
            with RefuseHostReads():  # type: ignore[no-untyped-call]
                with _errors_alone():
                    expected = model(input_ids=tokens[None], **self._arguments(positions, whole)).logits[0]
                # Only now: the expected logits above are those of the library's own mixers.
                for mixer in self._mixers:
                    mixer.mixer.forward = mixer.forward
                hidden, _ = self.forward(input_ids=tokens, embeddings=None, positions=positions, attend=part)
                logits = self._logits(hidden)
        except RunError as error:
            raise RunError(f"{self.name}: {error}") from error
        except Exception as error:  # of a configuration with impossible numbers, anything
            raise RunError(f"{self.name}: its forward fails: {class_and_message(error)}; {SUPPORTED}") from error
        silent = sorted(set(self.windows) - set(part.seen))
        if silent:
            raise RunError(
                f"{self.name}: layers {silent} do not attend through the attention interface, as linear "
                f"attention and state-space layers do not; {SUPPORTED}"
            )
        if len(set(part.seen.values())) != 1:
            raise RunError(
                f"{self.name}: its layers have different heads (query heads, KV heads, width): "
                f"{sorted(set(part.seen.values()))}; supported: the same in all layers"
            )
        # Compared with the whole model, which may scale or cap its logits in a way that is not known here.
        far = logits.shape != expected.shape or (logits - expected).abs().max() > 0.02 * expected.abs().max()
        if far:
            raise RunError(
                f"{self.name}: its logits do not come from its output embeddings; supported: with "
                "final_logit_softcapping, times logit_scale, or divided by logits_scaling"
            )
        return *next(iter(part.seen.values())), part.sinks


@held_back()
def load_target(
    source: Path | None,
    shape: Model,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    among: Collectives = WHOLE,
    windows: Mapping[int, int | None] | None = None,
) -> HuggingFaceModel:
    """Return the model at ``source``, or one of the plan's numbers with random weights.

    ``source`` is a local folder (config.json, and safetensors where there are weights) or a configuration file; None: a
    Llama of the numbers in ``shape``, or with multimodal rope the decoder of a Qwen3-VL, whose layers have ``windows``.
    Nothing is read from a network. Weights that are not there are random, the same for the same ``seed`` and device
    type; the global generators are left as they were. ``dtype`` of the weights; None: the configuration's, or else the
    one in ``shape``.

    Spread over the ranks ``among``, it is made or read whole first, and then each rank keeps its part: so that the
    numbers are the same for any number of ranks.

    Raises ``RunError`` where there is no model, where weights are missing, and where the model is of a kind that is not
    executed.
    """
    found = Source(Path()) if source is None else locate(source)
    subject = f"model {shape.name}" if source is None else str(source)
    kind = "no random model has its numbers" if source is None else "not a configuration that transformers reads"
    with library_errors(f"{subject}: {kind}"):
        config = configuration_of(shape) if source is None else read_configuration(found)
        text = config.get_text_config(decoder=True)
        _refuse(config, text, source)
        is_mixture = any(getattr(text, name, None) for name in _EXPERTS)
        quantization = taken_quantization(config)
        where = f"{source} ({config.model_type})"
        fp8 = None if quantization is None else fp8_format(quantization, where)
        stated = text.dtype or config.dtype or _FLOATS.get(shape.dtype)
        chosen = dtype or (getattr(torch, stated) if isinstance(stated, str) else stated)
    if chosen is None:
        raise RunError(f"model.dtype: {shape.dtype.value} cannot be computed in; choose a dtype")
    is_causal_lm = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    # The configuration of a multimodal model belongs to no causal language model.
    factory: Any = AutoModelForCausalLM if is_causal_lm else AutoModelForImageTextToText
    options = {"dtype": chosen, "attn_implementation": INTERFACE}
    if is_mixture:  # transformers 5.17 refuses it for other models
        options["experts_implementation"] = _experts(device, chosen) if fp8 is None else INTERFACE
    model: Any
    with library_errors(f"{subject}: cannot be loaded"):
        if found.files:
            model = pretrained(factory, found, config, options, fp8)
        else:
            with seeded(seed, device):
                model = factory.from_config(config, **options)
                if fp8 is not None:
                    fp8.place(model)
    origin = "the plan's numbers" if source is None else found.label
    name = f"{type(model).__name__} of {origin}" + ("" if found.files else f", random weights (seed {seed})")
    # Without the interface its layers would call attention kernels of their own, which no plan describes. Not all
    # hybrids declare it; where they have none, the probe sees it.
    if not (model._supports_attention_backend or has_mixers(text)):
        raise RunError(f"{name} does not have the attention interface; {SUPPORTED}")
    with library_errors(f"{name} cannot be executed"):
        model.eval().requires_grad_(False)
        # Before `to(device)`, so that of weights from files only this rank's part takes memory there.
        spread(model, model.tp_plan, kv_heads=_kv_heads(text), among=among, within=model.get_decoder())
        return HuggingFaceModel(model.to(device), name, shape.max_model_len, among, windows)


def differences(model: HuggingFaceModel, shape: Model) -> tuple[str, ...]:
    """Return a sentence for each number of the plan's model that the real one contradicts."""
    names = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size", "sinks", "mrope")
    pairs = [(name, getattr(shape, name), getattr(model, name)) for name in names]
    planned = 0 if shape.recurrent is None else shape.recurrent.layers
    pairs.append(("recurrent.layers", planned, model.num_layers - len(model.windows)))
    sentences = contradictions("model", pairs, model.name)
    if shape.max_model_len > model.max_model_len:
        sentences.append(
            f"model.max_model_len: the plan says {shape.max_model_len}, {model.name} has at most {model.max_model_len}"
        )
    if shape.latent is not None:
        sentences.append(f"model.latent: the plan says latent attention, {model.name} has ordinary heads")
    if not shape.causal:
        sentences.append(f"model.causal: the plan says that it is not, {model.name} is")
    return tuple(sentences)


def _experts(device: torch.device, dtype: torch.dtype) -> str:
    """Return how transformers computes experts: without reading on the host how many tokens each one has.

    Batched products copy an expert's weights for every token. Grouped ones do not; torch has kernels for
    them that a CUDA graph holds, for bfloat16 on compute capability 8.0 and later.
    """
    if device.type == "cuda" and dtype is torch.bfloat16 and hasattr(torch.nn.functional, "grouped_mm"):
        return "grouped_mm" if torch.cuda.get_device_capability(device) >= (8, 0) else "batched_mm"
    return "batched_mm"


def _fp8_experts(experts: nn.Module, hidden_states: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
    """Compute experts that may have FP8 weights, as the library does with those that they stand for."""
    dtype = hidden_states.dtype
    function = ALL_EXPERTS_FUNCTIONS[_experts(hidden_states.device, dtype)]
    found: torch.Tensor = function(DequantizedExperts(experts, dtype), hidden_states, *args)
    return found


ALL_EXPERTS_FUNCTIONS.register(INTERFACE, _fp8_experts)


def refuse_moving_rope(config: PreTrainedConfig, where: str) -> None:
    """Raise ``RunError`` where rotary frequencies change with the positions of the batch."""
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = parameters.get("rope_type", "default")
        if kind in _MOVING_ROPE:
            raise RunError(f"{where}: {_MOVING_ROPE[kind]}; supported: frequencies that do not depend on the batch")


def _keep(entered: dict[int, torch.Tensor], layer: int, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Keep what enters a layer: the hook of a forward."""
    entered[layer] = args[0] if args else kwargs["hidden_states"]


def _scale(factor: float, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Scale what a layer adds to its input: the hook of a forward."""
    before = args[0] if args else kwargs["hidden_states"]
    after, *rest = output if isinstance(output, tuple) else (output,)
    after = before + factor * (after - before)
    return (after, *rest) if isinstance(output, tuple) else after


def _kv_heads(config: PreTrainedConfig) -> int:
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads


def _refuse(config: PreTrainedConfig, text: PreTrainedConfig, source: Path | None) -> None:
    """Raise ``RunError`` for what the configuration shows, before any weights are read."""
    where = f"{source} ({config.model_type})"
    # A multimodal model has a separate configuration for its text part.
    has_decoder = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or text is not config
    if not has_decoder or config.is_encoder_decoder:
        raise RunError(f"{where} is not a causal language model; {SUPPORTED}")
    if not 1 <= text.num_hidden_layers <= _MOST_LAYERS:
        raise RunError(f"{where} has num_hidden_layers {text.num_hidden_layers}; supported: 1 to {_MOST_LAYERS}")
    taken = {"full_attention", "sliding_attention", *(("linear_attention",) if has_mixers(text) else ())}
    other = sorted(set(getattr(text, "layer_types", None) or ()) - taken)
    if other:
        state = "whose state transformers keeps in a cache of its own, " if "linear_attention" in other else ""
        raise RunError(f"{where} has layers of type {', '.join(other)}, {state}which no graph holds; {SUPPORTED}")
    # A plan has one KV cache per layer.
    if getattr(text, "num_kv_shared_layers", 0):
        raise RunError(f"{where} has layers that read the KV cache of another layer; {SUPPORTED}")
    refuse_moving_rope(text, where)


def _windows(config: PreTrainedConfig) -> dict[int, int | None]:
    """Return the window of each layer that attends."""
    window = getattr(config, "sliding_window", None)
    # Qwen configurations state a window that is not used.
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    # Without types of layers, a window that is stated is that of all layers.
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return {
        layer: window if kind == "sliding_attention" else None
        for layer, kind in enumerate(types)
        if kind != "linear_attention"
    }
