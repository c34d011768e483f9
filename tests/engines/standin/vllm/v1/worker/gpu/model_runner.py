"""The model runner: makes the managers, captures, and runs steps without a model."""

from types import SimpleNamespace

import torch

from vllm import envs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput, StepTimingCollector
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager, make_dummy, rows_of
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator


class KVConnector:
    """Of requests only."""

    disabled = False

    def set_disabled(self, disabled):
        self.disabled = disabled


class GPUModelRunner:
    """Keeps in ``answers`` what each real step dispatched to, by role."""

    def __init__(self, vllm_config, fused=False):
        self.vllm_config = vllm_config
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.num_speculative_steps = vllm_config.num_speculative_tokens
        self.decode_query_len = self.num_speculative_steps + 1
        self.model_state = SimpleNamespace(num_new_sampled_tokens_per_step=1)
        self.kv_cache_config = SimpleNamespace(num_blocks=1000)
        self.attn_groups = [[SimpleNamespace(backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"))]]
        self.kv_connector = KVConnector()
        self.step_timing = StepTimingCollector()
        self.speculator = TargetDependentARSpeculator(vllm_config, fused) if self.num_speculative_steps else None
        self.cudagraph_manager = None
        self.adaptive_verification = vllm_config.adaptive
        self.answers, self.dummies = [], []
        self.vocab_size = 100
        self.input_buffers = SimpleNamespace(
            input_ids=torch.zeros(self.max_num_tokens, dtype=torch.int32),
            is_padding=torch.zeros(self.max_num_tokens, dtype=torch.bool),
        )

    def initialize_kv_cache(self):
        mode = self.vllm_config.compilation_config.cudagraph_mode
        self.cudagraph_manager = ModelCudaGraphManager(self.vllm_config, None, mode, self.decode_query_len)
        if self.speculator is not None:
            self.speculator.init_cudagraph_manager(mode)

    def capture_model(self, *, profile_only=False):
        self.cudagraph_manager.capture(None, self.input_buffers)
        if self.speculator is not None:
            self.speculator.capture()
        return 3 << 20

    def _dummy_run(
        self,
        num_tokens,
        *args,
        skip_attn=False,
        uniform_decode=False,
        context_len=0,
        skip_eplb=False,
        is_profile=False,
        valid_dummy_state_slots=False,
        randomize_inputs=False,
        **kwargs,
    ):
        width = self.decode_query_len if uniform_decode else 0
        num_reqs = num_tokens // width if uniform_decode else min(num_tokens, self.max_num_reqs)
        output = SchedulerOutput(
            num_scheduled_tokens={str(i): 0 for i in range(num_reqs)},
            total_num_scheduled_tokens=num_tokens,
            scheduled_spec_decode_tokens={},
            uniform=width or None,
            drafts=self.num_speculative_steps,
        )
        self.kv_connector.set_disabled(True)
        self.execute_model(output, dummy_run=True)
        self.kv_connector.set_disabled(False)
        if self.speculator is not None:
            drafts = self.num_speculative_steps
            self.speculator.propose(num_reqs, num_tokens, width or None, drafts, self.state[3])
        self.dummies.append((num_tokens, uniform_decode))

    def execute_model(
        self,
        scheduler_output,
        intermediate_tensors=None,
        dummy_run=False,
        skip_attn_for_dummy_run=False,
        is_profile=False,
        context_len=0,
        valid_dummy_state_slots=False,
        randomize_inputs=False,
    ):
        uniform = scheduler_output.uniform
        desc, ranks = dispatch_cg_and_sync_dp(
            self.cudagraph_manager,
            len(scheduler_output.num_scheduled_tokens),
            scheduler_output.total_num_scheduled_tokens,
            uniform,
            self.vllm_config.parallel_config.data_parallel_size,
            0,
            max_query_len=uniform,
            need_eager=is_profile,
            num_active_loras=0,
        )
        if dummy_run:
            make_dummy(self.input_buffers)
        elif envs.VLLM_MOE_SKIP_PADDING:
            tokens = scheduler_output.total_num_scheduled_tokens
            self.input_buffers.is_padding[:tokens].fill_(False)
            self.input_buffers.is_padding[tokens : desc.num_tokens].fill_(True)
        self.step_timing.forward_start()
        if dummy_run:
            self.cudagraph_manager.seen.append(rows_of(self.input_buffers, desc.num_tokens))
        self.state = (scheduler_output, desc, dummy_run, ranks)

    def sample_tokens(self, grammar_output):
        output, desc, dummy_run, ranks = self.state
        num_reqs = len(output.num_scheduled_tokens)
        answers = {"target": desc}
        if self.speculator is not None:
            answers |= self.speculator.propose(num_reqs, desc.num_tokens, output.uniform, output.drafts, ranks)
        if not dummy_run:
            self.answers.append((output, answers))
        return AsyncOutput(ModelRunnerOutput(list(output.num_scheduled_tokens), output.sampled))

    def shutdown(self):
        self.cudagraph_manager = self.speculator = None
