"""Names of SGLang 0.5.23's flags that this emulation does not read, as its parser declares them.

``INERT`` change nothing about graphs and are accepted by name; their values are not judged beyond their
type. ``NOT_FOLLOWED`` can change graphs in ways that are not emulated, and are refused. Both say how many
values a flag takes: a switch takes none, a list any number, all others one. ``CHOICES`` are the values that a
flag of ``INERT`` can have, where its parser lists them.
"""

from __future__ import annotations

from capture_planner.engines.parsing import names

INERT: dict[str, tuple[str, ...]] = {
    "switch": names(
        """
        --skip-tokenizer-init --trust-remote-code --enable-fp32-lm-head --enable-tf32-matmul
        --no-enable-tf32-matmul --enable-priority-scheduling --disable-priority-preemption
        --abort-on-priority-when-disabled --schedule-low-priority-values-first --disable-hybrid-swa-memory
        --disable-radix-cache --disable-overlap-schedule --enable-dp-attention-local-control-broadcast
        --enable-p2p-check --mlx-enable-sampling --sleep-on-idle --use-ray --grpc-mode --skip-server-warmup
        --enable-http2 --enable-ssl-refresh --trust-request-chat-template --enable-cache-report
        --return-input-ids --return-output-ids --strip-thinking-cache --enable-strict-thinking
        --allow-auto-truncate --stream-response-default-include-usage --incremental-streaming-output
        --enable-streaming-session --enable-session-radix-cache --log-requests --show-time-cost
        --enable-metrics --enable-mfu-metrics --enable-metrics-for-all-schedulers
        --enable-request-time-stats-logging --enable-forward-pass-metrics --enable-trace
        --export-metrics-to-file --constrained-json-disable-any-whitespace --enable-lean-attention
        --disable-flashinfer-autotune --enable-profile-cuda-graph --enable-cudagraph-gc
        --enable-layerwise-nvtx-marker --enable-nccl-nvls --enable-symm-mem
        --triton-attention-reduce-in-fp32 --flashinfer-mla-disable-ragged --enable-fused-qk-norm-rope
        --no-enable-fused-qk-norm-rope --enable-precise-embedding-interpolation
        --enable-fused-moe-sum-all-reduce --disable-custom-all-reduce --enable-mscclpp
        --enable-torch-symm-mem --enable-scattered-sconv --pre-warm-nccl
        --enforce-disable-flashinfer-allreduce-fusion --enable-aiter-allreduce-fusion
        --enable-torch-compile-debug-mode --speculative-dspark-align-verify-tokens-to-graph-tier
        --speculative-enable-w4a4-mxfp4-megamoe --no-speculative-enable-w4a4-mxfp4-megamoe
        --enable-w4a4-mxfp4-megamoe --enable-eplb --disable-flashinfer-cutlass-moe-fp4-allgather
        --disable-shared-experts-fusion --enforce-shared-experts-fusion --enable-int8-mamba-checkpoint
        --enable-linear-replayssm --enable-linear-replayssm-spec --enable-hierarchical-cache
        --enable-hicache --enable-broadcast-mm-inputs-process --mm-enable-dp-encoder
        --no-mm-enable-dp-encoder --trust-mm-content-hashes --enable-mm-global-cache
        --disable-fast-image-processor --enable-lora-overlap-loading --experts-shared-outer-loras
        --no-experts-shared-outer-loras --lora-use-virtual-experts --lora-strict-loading
        --no-lora-strict-loading --dllm-fdfo --no-dllm-fdfo --disaggregation-decode-enable-radix-cache
        --enable-adaptive-dispatch-to-encoder --weight-loader-disable-mmap
        --weight-loader-prefetch-checkpoints --weight-loader-drop-cache-after-load
        --remote-instance-weight-loader-start-seed-via-transfer-engine --delete-ckpt-after-loading
        --checkpoint-engine-wait-weights-before-ready --enable-prefill-delayer
        --enable-dynamic-batch-tokenizer --enable-tokenizer-batch-encode --disable-tokenizer-batch-decode
        --enable-weights-cpu-backup --enable-draft-weights-cpu-backup --enable-custom-logit-processor
        --enable-return-hidden-states --enable-return-routed-experts --enable-return-indexer-topk
        --disable-outlines-disk-cache --ple-offload-embedding --no-ple-offload-embedding
        --disaggregation-enable-kv-checksum --enable-pd-role-switch --enable-decoder-swa-bounded-replay
        --no-enable-decoder-swa-bounded-replay --enable-response-store
        --disable-aiter-allreduce-fusion-in-prefill --disable-aiter-allreduce-fusion-in-decode
        --enable-dsa-fused-indexer --no-enable-dsa-fused-indexer --enable-watermark
        --enable-http-worker-reuseport --enable-flashinfer-allreduce-fusion
        """
    ),
    "int": names(
        """
        --tokenizer-worker-num --detokenizer-worker-num --max-queued-requests --prefill-decode-interval
        --prefill-max-requests --default-priority-value --priority-scheduling-preemption-threshold
        --c128-page-size --num-continuous-decode-steps --scheduler-recv-interval --nccl-port --dist-timeout
        --gated-launch-port --node-rank --pp-max-micro-batch-size --pp-async-batch-depth --base-gpu-id
        --gpu-id-step --random-seed --port --grpc-port --http2-max-concurrent-streams
        --http2-initial-connection-window-size --asr-max-buffer-seconds --asr-max-concurrent-sessions
        --stream-interval --batch-notify-size --log-requests-level --smg-http-sidecar-port
        --grpc-http-sidecar-port --load-snapshot-publish-interval --decode-log-interval
        --constrained-json-max-whitespace-cnt --triton-attention-num-kv-splits
        --triton-attention-split-tile-size --torch-compile-max-bs --speculative-ngram-min-bfs-breadth
        --speculative-ngram-max-trie-depth --speculative-ngram-capacity
        --speculative-ngram-external-sam-budget --speculative-ngram-external-corpus-max-tokens --ep-size
        --expert-parallel-size --ep --fuseep-mode --ep-num-redundant-experts --eplb-rebalance-num-iterations
        --eplb-rebalance-layers-per-chunk --expert-distribution-recorder-buffer-size --max-mamba-cache-size
        --mamba-max-states-per-path --mamba-cache-philox-rounds --mamba-track-interval
        --int8-mamba-ckpt-size --linear-replayssm-cache-len --hicache-size
        --hicache-storage-prefetch-retry-poll-interval --hicache-storage-prefetch-retry-max-attempts
        --mm-processor-worker-num --mm-io-worker-num --media-url-max-file-size-mb
        --mm-preprocess-cache-size-mb --cpu-offload-gb --offload-group-size --offload-num-in-group
        --offload-prefetch-step --kt-cpuinfer --kt-threadpool-count --kt-num-gpu-experts
        --kt-max-deferred-experts-per-token --disaggregation-bootstrap-port --num-reserved-decode-tokens
        --disaggregation-decode-extra-slots --disaggregation-decode-polling-interval
        --optimistic-prefill-attempts --encoder-bootstrap-port --sm-group-num
        --weight-loader-prefetch-num-threads --remote-instance-weight-loader-seed-instance-service-port
        --engine-info-bootstrap-port --prefill-delayer-max-delay-passes --dynamic-batch-tokenizer-batch-size
        --sampling-mask-max-tokens --weight-cache-timeout --speculative-domino-candidate-pool-size
        --swa-prefix-tails --dsa-triton-union --grpc-response-timeout-secs --paged-experts-num-resident
        --prefill-decode-interval-min-bs
        """
    ),
    "float": names(
        """
        --mem-fraction-static --schedule-conservativeness --swa-full-tokens-ratio --watchdog-timeout
        --soft-watchdog-timeout --gc-warning-threshold-secs --speculative-accept-threshold-single
        --speculative-accept-threshold-acc --eplb-min-rebalancing-utilization-threshold
        --elastic-ep-scale-timeout --mamba-full-memory-ratio --hicache-ratio --lora-drain-wait-threshold
        --tbo-token-distribution-threshold --prefill-delayer-token-usage-low-watermark
        --prefill-delayer-queue-min-ratio --prefill-delayer-max-delay-ms
        --dynamic-batch-tokenizer-batch-timeout --hicache-host-memory-fraction
        """
    ),
    "text": names(
        """
        --tokenizer-path --tokenizer-mode --tokenizer-backend --model-loader-extra-config --revision
        --model-config-parser --dtype --quantization --quantization-param-path --modelopt-quant
        --modelopt-checkpoint-restore-path --modelopt-checkpoint-save-path --modelopt-export-path
        --rl-quant-profile --schedule-policy --retraction-policy --radix-eviction-policy --dist-init-addr
        --nccl-init-addr --load-balance-method --host --fastapi-root-path --sidecar --warmups --ssl-keyfile
        --ssl-certfile --ssl-ca-certs --ssl-keyfile-password --api-key --admin-api-key --served-model-name
        --weight-version --chat-template --hf-chat-template-name --completion-template --file-storage-path
        --tool-server --sampling-defaults --log-level --log-level-http --log-requests-format
        --crash-dump-folder --tokenizer-metrics-custom-labels-header --kv-events-config
        --load-publish-endpoint --forward-pass-metrics-worker-id --forward-pass-metrics-ipc-name
        --trace-modules --otlp-traces-endpoint --export-metrics-to-file-dir
        --constrained-json-whitespace-pattern --grammar-backend --radix-cache-backend --mm-attention-backend
        --fp8-gemm-backend --fp4-gemm-backend --bf16-gemm-backend --dsa-prefill-backend
        --dsv4-prefill-backend --dsa-decode-backend --dsa-paged-mqa-logits-backend --dsa-topk-backend
        --mamba-backend --boundary-reduction --flashinfer-allreduce-fusion-backend
        --speculative-draft-model-revision --speculative-draft-load-format
        --speculative-dspark-sps-table-path --speculative-dspark-confidence-sts-path --speculative-token-map
        --speculative-attention-mode --speculative-dsa-topk-backend --speculative-draft-kv-cache-dtype
        --speculative-draft-model-quantization --spec-trace-dir --speculative-ngram-match-type
        --deepep-v2-mode --flashinfer-mxfp4-moe-precision --deepep-mode --deepep-dispatcher-output-dtype
        --init-expert-location --eplb-algorithm --expert-distribution-recorder-mode
        --expert-balancedness-report-mode --deepep-config --mooncake-ib-device --mamba-ssm-dtype
        --linear-attn-backend --linear-attn-prefill-backend --linear-attn-verify-backend
        --hicache-host-memory-mode --hicache-write-policy --hicache-io-backend --hicache-mem-layout
        --hicache-storage-backend --hicache-storage-prefetch-policy --hicache-storage-backend-extra-config
        --unified-cache-external-linker-backend --hisparse-config
        --hierarchical-sparse-attention-extra-config --image-processor-backend --mm-global-cache-backend
        --mm-feature-transport --lora-eviction-policy --offload-mode --lmcache-config-file
        --flexkv-config-file --kt-method --disaggregation-transfer-backend --disaggregation-ib-device
        --encoder-transfer-backend --startup-weight-load-mode
        --remote-instance-weight-loader-seed-instance-ip --remote-instance-weight-loader-backend
        --modelexpress-config --download-dir --model-checksum --debug-tensor-dump-input-file
        --return-hidden-states-mode --weight-cache-mode --weight-cache-socket --ple-offload-backend
        --ple-offload-dir --dsv4-attn-backend --otlp-service-name --qsa-indexer-dtype --watermark-config
        --sampling-backend --reasoning-parser --tool-call-parser --kv-canary-real-data
        """
    ),
    "list": names(
        """
        --numa-node --gc-threshold --log-requests-target --uvicorn-access-log-exclude-prefixes
        --tokenizer-metrics-allowed-custom-labels --bucket-time-to-first-token --bucket-inter-token-latency
        --bucket-e2e-request-latency --prompt-tokens-buckets --generation-tokens-buckets
        --flashinfer-autotune-skip-ops --allowed-media-domains --encoder-urls --encoder-register-urls
        --custom-weight-loader --prefill-delayer-forward-passes-buckets
        --prefill-delayer-wait-seconds-buckets --debug-tensor-dump-layers
        """
    ),
    "json": names(
        """
        --radix-eviction-policy-config --sidecar-args --default-chat-template-kwargs
        --preferred-sampling-params --extra-metric-labels --mm-process-config --limit-mm-data-per-request
        --remote-instance-weight-loader-send-weights-group-ports --forward-hooks
        --unified-cache-external-linker-config
        """
    ),
}

NOT_FOLLOWED: dict[str, tuple[str, ...]] = {
    "switch": names(
        """
        --is-embedding --enable-multimodal --quantize-and-serve --enable-dynamic-chunking
        --prefill-only-disable-kv-cache --enable-page-major-kv-layout --enable-unified-memory
        --disable-chunked-prefix-cache --dcp-replicate-q-proj --no-dcp-replicate-q-proj --enable-prefill-cp
        --enable-dsa-cache-layer-split --enable-cp-decode-attn-tp --enable-kv-cache-sharding
        --enable-attn-tp-input-scattered --enable-shared-experts-attn-tp --enable-dense-mlp-attn-tp
        --enable-layernorm-sp --smg-grpc-mode --debug-cuda-graph --enable-deepseek-v4-fp4-indexer
        --enable-quant-communications --speculative-use-rejection-sampling --enable-multi-layer-eagle
        --speculative-adaptive --enable-elastic-expert-backup --enable-waterfill
        --enable-mamba-cache-stochastic-rounding --enable-unified-cache-external-linker --enable-hisparse
        --enable-prefix-mm-cache --enable-two-batch-overlap --enable-single-batch-overlap --enable-lmcache
        --enable-flexkv --disaggregation-decode-enable-offload-kvcache --encoder-only --language-only
        --language-model-only --enable-pdmux --enable-deterministic-inference --enable-memory-saver
        --enable-mis --enable-linker-mla-dedup --enable-encoder-swa-bounded-replay
        --speculative-use-block-verification --enable-amd-monokernel --enable-paged-experts
        --enable-nvidia-megakernel --enable-megamoe-for-layernorm-sp --enable-return-aux-hidden-states
        """
    ),
    "int": names(
        """
        --dcp-size --decode-context-parallel-size --attn-cp-size --attention-context-parallel-size
        --moe-dp-size --moe-data-parallel-size --dwdp-size --shared-experts-tp-size
        --speculative-dflash-block-size --speculative-dspark-block-size --speculative-draft-window-size
        --decoupled-spec-rank --elastic-ep-join-rank-offset --elastic-ep-initial-size --max-ep-size
        --min-free-slots-delay --kv-canary-sweep-interval --speculative-draft-sink-size
        """
    ),
    "count": names(
        """
        --cuda-graph-prefill-max-context --context-bucket
        """
    ),
    "float": names(
        """
        --disaggregation-decode-host-receive-threshold
        """
    ),
    "text": names(
        """
        --model-impl --json-model-override-args --dcp-comm-backend --cp-strategy --uno-lora-path
        --speculative-draft-attention-backend --speculative-moe-runner-backend --speculative-moe-a2a-backend
        --speculative-adaptive-config --decoupled-spec-bind-endpoint --decoupled-spec-role
        --speculative-ngram-external-corpus-path --moe-runner-backend --ep-dispatch-algorithm
        --elastic-ep-backend --elastic-ep-join-mode --mamba-radix-cache-strategy
        --linear-attn-decode-backend --kt-weight-path --dllm-algorithm --dllm-algorithm-config
        --disaggregation-decode-retraction-backup --pdmux-config-path --decrypted-config-file
        --decrypted-draft-config-file --rl-on-policy-target --kv-canary --msprobe-dump-config
        --flashinfer-a2a-dispatch-type --prefill-kv-cache-dequant-dtype
        --disaggregation-decode-allocation-policy --monokernel-backend
        """
    ),
    "list": names(
        """
        --return-aux-hidden-state-layer-ids
        """
    ),
    "json": names(
        """
        --decoupled-spec-connect-endpoints
        """
    ),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "--tokenizer-mode": names("auto slow"),
    "--tokenizer-backend": names("huggingface fastokens"),
    "--dtype": names("auto half float16 bfloat16 float float32"),
    "--quantization": names(
        """
        awq fp8 mxfp8 gptq gptq_marlin awq_marlin bitsandbytes gguf modelopt modelopt_fp8 modelopt_fp4
        nvfp4_online modelopt_mixed petit_nvfp4 w8a8_int8 w8a8_fp8 moe_wna16 w4afp8 mxfp4 auto-round
        auto-round-int8 compressed-tensors modelslim mxfp_w4a8 quark quark_int4fp8_moe quark_mxfp4
        mlx_q4 mlx_q8 unquant humming
        """
    ),
    "--schedule-policy": names(
        """
        lpm random fcfs dfs-weight lof priority routing-key hrrn shortest-prefill-first
        """
    ),
    "--retraction-policy": names("length priority"),
    "--radix-eviction-policy": names("lru lfu slru priority tlru"),
    "--load-balance-method": names(
        """
        auto round_robin follow_bootstrap_room total_requests total_tokens
        """
    ),
    "--sampling-defaults": names("openai model"),
    "--log-requests-level": names("0 1 2 3"),
    "--log-requests-format": names("text json"),
    "--grammar-backend": names("xgrammar outlines llguidance none"),
    "--mm-attention-backend": names(
        """
        sdpa fa3 fa4 triton_attn ascend_attn aiter_attn flashinfer_cudnn amx_attn xpu_attn
        """
    ),
    "--fp8-gemm-backend": names(
        """
        auto deep_gemm flashinfer_trtllm flashinfer_cutlass flashinfer_deepgemm flashinfer_cutedsl
        cutlass triton aiter
        """
    ),
    "--fp4-gemm-backend": names(
        """
        auto flashinfer_cudnn flashinfer_cutedsl flashinfer_cutlass flashinfer_trtllm marlin
        """
    ),
    "--bf16-gemm-backend": names("auto cutedsl gemv torch"),
    "--dsa-prefill-backend": names(
        """
        flashmla_sparse flashmla_sparse_q8 flashmla_kv flashmla_auto flashinfer_sparse_mla
        triton_sparse_mla fa3 tilelang triton aiter trtllm intel_xpu
        """
    ),
    "--dsv4-prefill-backend": names("auto flashmla_sparse flashmla_sparse_q8"),
    "--dsa-decode-backend": names(
        """
        flashmla_sparse flashmla_sparse_q8 flashmla_kv flashmla_auto flashinfer_sparse_mla fa3 tilelang
        triton aiter trtllm intel_xpu
        """
    ),
    "--dsa-paged-mqa-logits-backend": names("auto deepgemm cutedsl aiter"),
    "--dsa-topk-backend": names("sgl-kernel torch flashinfer"),
    "--mamba-backend": names("triton flashinfer"),
    "--boundary-reduction": names("auto ar rs rsv rs+rsv"),
    "--flashinfer-allreduce-fusion-backend": names("auto trtllm mnnvl cutedsl"),
    "--speculative-draft-load-format": names(
        """
        auto pt safetensors instanttensor npcache dummy sharded_state presharded gguf expert_pack
        bitsandbytes mistral layered flash_rl remote remote_instance fastsafetensors private
        runai_streamer
        """
    ),
    "--speculative-attention-mode": names("prefill decode"),
    "--speculative-dsa-topk-backend": names("sgl-kernel torch flashinfer"),
    "--speculative-draft-kv-cache-dtype": names("auto fp8_e5m2 fp8_e4m3 bf16 bfloat16"),
    "--speculative-draft-model-quantization": names(
        """
        awq fp8 mxfp8 gptq gptq_marlin awq_marlin bitsandbytes gguf modelopt modelopt_fp8 modelopt_fp4
        nvfp4_online modelopt_mixed petit_nvfp4 w8a8_int8 w8a8_fp8 moe_wna16 w4afp8 mxfp4 auto-round
        auto-round-int8 compressed-tensors modelslim mxfp_w4a8 quark quark_int4fp8_moe quark_mxfp4
        mlx_q4 mlx_q8 unquant humming
        """
    ),
    "--speculative-ngram-match-type": names("BFS PROB"),
    "--deepep-v2-mode": names("direct hybrid"),
    "--flashinfer-mxfp4-moe-precision": names("default bf16 fp8"),
    "--deepep-mode": names("auto normal low_latency"),
    "--fuseep-mode": names("1 2"),
    "--deepep-dispatcher-output-dtype": names("auto bf16 fp8 int8 nvfp4"),
    "--expert-distribution-recorder-mode": names("stat stat_approx per_pass per_token"),
    "--expert-balancedness-report-mode": names("off server_log prometheus both"),
    "--mamba-ssm-dtype": names("float32 bfloat16 float16"),
    "--linear-attn-backend": names(
        """
        triton cutedsl flashinfer flashkda nvidia_kda ptx_kda helion intel_xpu
        """
    ),
    "--linear-attn-prefill-backend": names(
        """
        triton cutedsl flashinfer flashkda nvidia_kda ptx_kda helion intel_xpu
        """
    ),
    "--linear-attn-verify-backend": names(
        """
        triton cutedsl flashinfer flashkda nvidia_kda ptx_kda helion intel_xpu nv_cutedsl
        """
    ),
    "--hicache-host-memory-mode": names("cache buffer_only"),
    "--hicache-write-policy": names("write_back write_through write_through_selective"),
    "--hicache-io-backend": names("direct kernel kernel_ascend"),
    "--hicache-mem-layout": names(
        """
        layer_first page_first page_first_direct page_first_kv_split page_head
        """
    ),
    "--hicache-storage-backend": names(
        """
        file sim mooncake npu_memcache hf3fs nixl aibrix dynamic eic simm mori shm tensorcast seaweedfs
        """
    ),
    "--hicache-storage-prefetch-policy": names("best_effort wait_complete timeout"),
    "--unified-cache-external-linker-backend": names("mooncake mori dynamic"),
    "--image-processor-backend": names("auto torchvision pil"),
    "--mm-global-cache-backend": names("mooncake"),
    "--mm-feature-transport": names("cpu cuda_ipc cuda_vmm"),
    "--lora-eviction-policy": names("lru fifo"),
    "--disaggregation-transfer-backend": names("mooncake nixl ascend fake mori mooncake_tcp"),
    "--encoder-transfer-backend": names("auto zmq_to_scheduler zmq_to_tokenizer mooncake"),
    "--startup-weight-load-mode": names("serial overlap"),
    "--remote-instance-weight-loader-backend": names("transfer_engine nccl modelexpress"),
    "--return-hidden-states-mode": names("last full"),
    "--weight-cache-mode": names("off daemon client"),
    "--ple-offload-backend": names("pinned file"),
    "--dsv4-attn-backend": names("auto flashmla flashmla_mega trtllm"),
    "--qsa-indexer-dtype": names("auto bfloat16 fp8_e4m3"),
    "--dsa-triton-union": names("0 2 4"),
    "--sampling-backend": names("flashinfer intel_xpu ascend pytorch"),
    "--reasoning-parser": names(
        """
        auto apertus2509 beam deepseek-r1 deepseek-v3 deepseek-v4 deepseek-v41 dots glm45 ling3 hunyuan
        gpt-oss k2_horizon kimi kimi_k2 kimi_k3 mimo muse poolside_v1 qwen3 qwen3-thinking minimax
        minimax-append-think minimax-m3 nanbeige step3 step3p5 mistral nemotron_3
        granite_thinking_parser interns1 gemma4 inkling iquest_q1 cohere_command4 gigachat35
        response_template
        """
    ),
    "--tool-call-parser": names(
        """
        auto apertus2509 beam cohere_command4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 deepseekv41
        dots glm glm45 glm47 gpt-oss k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3 mimo minicpm5 mistral
        muse poolside_v1 pythonic qwen qwen25 qwen3_coder spark25 step3 step3p5 minimax-m2 minimax-m3
        nanbeige trinity interns1 hermes hunyuan gigachat3 gigachat35 gemma4 inkling iquest_q1
        response_template
        """
    ),
}
