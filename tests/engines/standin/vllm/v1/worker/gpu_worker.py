"""The worker: warms kernels up by requests of its own, and has the model runner capture."""

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class Worker:
    """Has one model runner."""

    def __init__(self, vllm_config, fused=False):
        self.vllm_config = vllm_config
        self.model_runner = GPUModelRunner(vllm_config, fused)

    def compile_or_warm_up_model(self):
        if self.vllm_config.kernel_config.enable_jit_warmup:
            self._warm_up_kernels()
        if not self.vllm_config.model_config.enforce_eager:
            self.vllm_config.graph_bytes = self.model_runner.capture_model()
        return "seconds"

    def _warm_up_kernels(self):
        runner = self.model_runner
        runner.kv_connector.set_disabled(True)
        for query_len in (1, runner.decode_query_len):
            output = SchedulerOutput(
                num_scheduled_tokens={"warm-up": query_len},
                total_num_scheduled_tokens=query_len,
                scheduled_spec_decode_tokens={},
                uniform=query_len,
                drafts=runner.num_speculative_steps,
            )
            runner.execute_model(output)
            assert runner.kv_connector.disabled, "no metadata of a connector"
            runner.sample_tokens(None)
        runner.kv_connector.set_disabled(False)
        runner.answers.clear()


class OtherWorker(Worker):
    """One of another platform, with a start of its own."""

    def compile_or_warm_up_model(self):
        if not self.vllm_config.model_config.enforce_eager:
            self.model_runner.capture_model()
        return "seconds"
