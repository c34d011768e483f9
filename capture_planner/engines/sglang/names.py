"""Names of SGLang 0.5.23's flags that this emulation does not read, as its parser declares them.

``INERT`` change nothing about graphs and are accepted by name; their values are not judged beyond their
type. ``NOT_FOLLOWED`` can change graphs in ways that are not emulated, and are refused. Both say how many
values a flag takes: a switch takes none, a list any number, all others one.
"""

from __future__ import annotations

INERT: dict[str, tuple[str, ...]] = {
    "switch": tuple(
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
        """.split()
    ),
    "int": tuple(
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
        """.split()
    ),
    "float": tuple(
        """
        --mem-fraction-static --schedule-conservativeness --swa-full-tokens-ratio --watchdog-timeout
        --soft-watchdog-timeout --gc-warning-threshold-secs --speculative-accept-threshold-single
        --speculative-accept-threshold-acc --eplb-min-rebalancing-utilization-threshold
        --elastic-ep-scale-timeout --mamba-full-memory-ratio --hicache-ratio --lora-drain-wait-threshold
        --tbo-token-distribution-threshold --prefill-delayer-token-usage-low-watermark
        --prefill-delayer-queue-min-ratio --prefill-delayer-max-delay-ms
        --dynamic-batch-tokenizer-batch-timeout --hicache-host-memory-fraction
        """.split()
    ),
    "text": tuple(
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
        """.split()
    ),
    "list": tuple(
        """
        --numa-node --gc-threshold --log-requests-target --uvicorn-access-log-exclude-prefixes
        --tokenizer-metrics-allowed-custom-labels --bucket-time-to-first-token --bucket-inter-token-latency
        --bucket-e2e-request-latency --prompt-tokens-buckets --generation-tokens-buckets
        --flashinfer-autotune-skip-ops --allowed-media-domains --encoder-urls --encoder-register-urls
        --custom-weight-loader --prefill-delayer-forward-passes-buckets
        --prefill-delayer-wait-seconds-buckets --debug-tensor-dump-layers
        """.split()
    ),
    "json": tuple(
        """
        --radix-eviction-policy-config --sidecar-args --default-chat-template-kwargs
        --preferred-sampling-params --extra-metric-labels --mm-process-config --limit-mm-data-per-request
        --remote-instance-weight-loader-send-weights-group-ports --forward-hooks
        --unified-cache-external-linker-config
        """.split()
    ),
}

NOT_FOLLOWED: dict[str, tuple[str, ...]] = {
    "switch": tuple(
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
        """.split()
    ),
    "int": tuple(
        """
        --dcp-size --decode-context-parallel-size --attn-cp-size --attention-context-parallel-size
        --moe-dp-size --moe-data-parallel-size --dwdp-size --shared-experts-tp-size
        --speculative-dflash-block-size --speculative-dspark-block-size --speculative-draft-window-size
        --decoupled-spec-rank --elastic-ep-join-rank-offset --elastic-ep-initial-size --max-ep-size
        --min-free-slots-delay --kv-canary-sweep-interval --speculative-draft-sink-size
        """.split()
    ),
    "count": tuple(
        """
        --cuda-graph-prefill-max-context --context-bucket
        """.split()
    ),
    "float": tuple(
        """
        --disaggregation-decode-host-receive-threshold
        """.split()
    ),
    "text": tuple(
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
        """.split()
    ),
    "list": tuple(
        """
        --return-aux-hidden-state-layer-ids
        """.split()
    ),
    "json": tuple(
        """
        --decoupled-spec-connect-endpoints
        """.split()
    ),
}
