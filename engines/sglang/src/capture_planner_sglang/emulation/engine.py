"""SGLang 0.5.23: what it captures and how it dispatches, from its own flags.

Emulated are text decoders, also with latent and sparse attention, and Qwen's models with linear attention and with
images. Where ``--model-path`` is a folder or a known model, its ``config.json`` gives the architecture and the longest
sequence. The KV pool is assumed to hold what the flags allow.

    flags       the command line and its YAML file
    resolution  the values that the rules work on
    graph_rules settings of each phase's graphs
    rules       parallel sizes, attention, speculation, adapters
    families    images, linear and sparse attention
    capture     request pool, alignment, managers
    managers    which graph serves a batch
"""

from __future__ import annotations

from collections.abc import Sequence

from capture_planner.engines import checkpoints
from capture_planner.engines.checkpoints import ASSUMED
from capture_planner.engines.emulation import BY_MODEL, Emulation, Setting
from capture_planner.engines.engine import DYNAMO, OTHER_DEVICE, Engine
from capture_planner.engines.parsing import refusal
from capture_planner.engines.yaml_files import in_its_file
from capture_planner.errors import FlagError
from capture_planner.records.batch_space import DecodeFamily, Domain
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Limits, Lora, Parallel
from capture_planner_sglang.emulation import capture, families, graph_rules, latent, rules
from capture_planner_sglang.emulation.export import BACKENDS, export_sglang
from capture_planner_sglang.emulation.fixes import SglangFixes
from capture_planner_sglang.emulation.flags import FLAGS, HISTORY, UNEMULATED_VARIABLES, name_of, parse
from capture_planner_sglang.emulation.launch import launch
from capture_planner_sglang.emulation.logs import LOGS
from capture_planner_sglang.emulation.releases import RELEASES
from capture_planner_sglang.emulation.resolution import COUNTS_AS, DECODE, DISABLED, PREFILL, Startup, read_model
from capture_planner_sglang.emulation.rules import EAGLE_FAMILY

_SHOWN = """
    max_running_requests max_total_tokens chunked_prefill_size max_prefill_tokens page_size tp_size pp_size
    dp_size attn_dp_size moe_dense_tp_size attention_backend disable_cuda_graph_padding speculative_algorithm
    speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens enable_lora max_loras_per_batch
    lora_backend disaggregation_mode speculative_draft_attention_backend moe_a2a_backend enable_two_batch_overlap
"""


def resolve(command: Sequence[str], environment: Environment) -> Startup:
    """Run SGLang's rules over a command line, in its order; raises ``FlagError`` where it would stop."""
    args, sources = parse(command)
    if environment.device.kind is not DeviceKind.CUDA:
        says = f"{environment.name} has no CUDA device, and SGLang's others are not emulated"
        raise refusal("--device", says, "name a GPU's environment")
    r = Startup(args, sources, environment, read_model(args.model_path, replaced=rules.replaced_lengths(args)))
    rules.check_followed(r)
    rules.read_attention_dp(r)
    graph_rules.read_settings(r)
    graph_rules.default_backends(r)
    rules.check_parallel(r)
    graph_rules.fill_sizes(r)
    families.choose_defaults(r)
    rules.choose_attention(r)
    latent.limit_prefills(r)
    families.check_prefills(r)
    graph_rules.lower_for_attention_dp(r)
    if args.moe_a2a_backend == "deepep" and args.deepep_mode == "normal":
        r.disable_all("deepep-normal", "DeepEP's normal mode runs without graphs")
    rules.resolve_speculation(r)
    if args.debug_tensor_dump_output_folder is not None:
        r.disable_all("tensor-dump", "tensors are dumped, which runs without graphs")
    rules.check_launch(r)
    return r


def emulate(command: Sequence[str], environment: Environment) -> Emulation:
    """Return what SGLang makes of its flags on a machine; raises ``FlagError``."""
    try:
        r = resolve(command, environment)
        pool = capture.request_pool(r)
        managers = capture.managers(r, pool)
    except FlagError as error:
        raise in_its_file(error, command, name_of) from None
    args = r.args
    chunk = args.chunked_prefill_size
    width = (args.speculative_num_draft_tokens if args.speculative_algorithm else None) or 1
    # Without chunks, prompts end at --max-prefill-tokens; a verification of all
    # requests may have more tokens than either.
    tokens = max(chunk if chunk > 0 else args.max_prefill_tokens, pool * width)
    decodes = managers[0].decodes
    return Emulation(
        engine="sglang",
        version=RELEASES.followed(),
        command=tuple(command),
        settings=_settings(r, pool),
        sizes=decodes.sizes if decodes else (),
        asked_sizes=() if r.sources["cuda_graph_config.decode.bs"] == "default" else tuple(r.decode.bs),
        managers=managers,
        decisions=tuple(r.decisions),
        limits=Limits(max_num_reqs=pool, max_num_tokens=tokens),
        whole_prompts=chunk <= 0,
        speculative=_speculative(r),
        drafts=_drafts(r, pool),
        # SGLang counts the bare model among its adapters; ours come with one more for such rows.
        lora=Lora(max_active=max(args.max_loras_per_batch - 1, 1)) if args.enable_lora else None,
        parallel=Parallel(data=args.dp_size * args.attn_dp_size, tensor=args.tp_size),
        by_flags=r.by_flags,
        assumptions=(
            *RELEASES.assumptions(_unused(r)),
            *_assumptions(r),
            *families.assumptions(r, decodes.sizes[-1] if decodes else 0),
        ),
    )


def _assumptions(r: Startup) -> tuple[str, ...]:
    """What is assumed of the model, where its facts are not here."""
    if r.by_flags:
        fetch = r.model.source == ASSUMED and not r.other_device
        remedy = checkpoints.remedy(r.named) if fetch else rules.OBSERVE
        return (checkpoints.by_flags(r.by_flags, remedy),)
    results = "attention_backend" if r.args.context_length else "context_length, attention_backend"
    results += " and which graphs there are"
    found = checkpoints.assumed(r.model.source, r.named, r.model.like, COUNTS_AS, results)
    if r.draft is not r.model and r.args.speculative_algorithm in EAGLE_FAMILY:
        path, results = r.args.speculative_draft_model_path, "the graphs of the drafter's prompts"
        found += checkpoints.assumed(r.draft.source, path, r.draft.like, "a decoder's head", results)
    return found


def _speculative(r: Startup) -> Speculative | None:
    """What a verification has of each request; STANDALONE is stated as EAGLE, whose graphs it has, NGRAM too."""
    drafted = (r.args.speculative_num_draft_tokens or 0) - 1
    # A plan's K is at most 255.
    if r.args.speculative_algorithm is None or not 1 <= drafted <= 255:
        return None
    eagle3 = r.args.speculative_algorithm == "EAGLE3"
    return Speculative(method=Method.EAGLE3 if eagle3 else Method.EAGLE, num_tokens=drafted)


def _drafts(r: Startup, pool: int) -> tuple[DecodeFamily, ...] | None:
    """Return a drafter's chain: a token for each branch, in all steps but the first."""
    args = r.args
    # N-gram drafts take no passes, and of an unknown model its rules decide.
    if args.speculative_algorithm not in EAGLE_FAMILY or r.by_flags:
        return None
    steps = args.speculative_num_steps - 1
    requests = Domain.upto(pool if steps > 0 else 0)
    return (DecodeFamily(query_len=args.speculative_eagle_topk, draft_steps=steps, requests=requests),)


def _settings(r: Startup, pool: int) -> tuple[Setting, ...]:
    def setting(name: str, value: object, source: str = "default") -> Setting:
        return Setting(name=name, value=value, source=r.sources.get(name, source))

    def by_model(name: str) -> bool:
        return bool(r.by_flags) and name == "attention_backend" and r.args.attention_backend is None

    return (
        setting("model_path", r.args.model_path, ASSUMED),
        setting(
            "model_facts",
            checkpoints.says(r.model.source, "none" if r.by_flags else "an ordinary text decoder", r.model.like),
            r.model.source,
        ),
        setting("context_length", capture.context(r), r.model.source),
        *(setting(name, BY_MODEL if by_model(name) else getattr(r.args, name)) for name in _SHOWN.split()),
        *(
            setting(f"cuda_graph_config.{phase}.{key}", getattr(r.phase(phase), key))
            for phase in (DECODE, PREFILL)
            for key in ("backend", "max_bs", "bs")
        ),
        setting("request_pool", pool),
    )


def _unused(r: Startup) -> set[str]:
    """Return the parts of SGLang's code, as the table of releases names them, that decide nothing of the answer."""
    used = {
        "which batch a prefill graph serves": r.prefill.backend != DISABLED,
        "which batch a decode graph serves": r.decode.backend != DISABLED,
        "speculation": r.args.speculative_algorithm is not None,
        "drafters' graphs": r.args.speculative_algorithm in EAGLE_FAMILY,
    }
    return {part for part, present in used.items() if not present}


_NEWEST = Engine(
    name="sglang",
    version=RELEASES.newest,
    emulate=emulate,
    export=export_sglang,
    launch=launch,
    flags={**FLAGS, OTHER_DEVICE: "what says that the device is not NVIDIA's, as an image's name: flags alone answer"},
    logs=LOGS,
    programs=("sglang serve", "python -m sglang.launch_server", "python -m dynamo.sglang", "serve"),
    wrappers={"python -m dynamo.sglang": {**DYNAMO, "--use-sglang-tokenizer": 0, "--embedding-worker": 0}},
    limits=("--max-running-requests", "--max-prefill-tokens", "--speculative-num-draft-tokens"),
    backends=tuple(BACKENDS.items()),
    unemulated_variables=UNEMULATED_VARIABLES,
    history=HISTORY,
    fixes=SglangFixes(),
    skips_wide_padding=True,
)
ENGINE = RELEASES.engine(_NEWEST)
