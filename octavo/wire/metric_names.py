"""Names and buckets of the metrics at /metrics: vLLM's, so that its dashboards work, and a few of our own."""

from __future__ import annotations

NUM_RUNNING = "vllm:num_requests_running"
NUM_WAITING = "vllm:num_requests_waiting"
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions"
ADMISSION_REJECTIONS = "vllm:admission_rejections"
PROMPT_TOKENS = "vllm:prompt_tokens"
PROMPT_TOKENS_CACHED = "vllm:prompt_tokens_cached"
PROMPT_TOKENS_BY_SOURCE = "vllm:prompt_tokens_by_source"
PROMPT_TOKENS_CACHED_BY_SOURCE = "vllm:prompt_tokens_cached_by_source"
PREFIX_CACHE_QUERIES = "vllm:prefix_cache_queries"
PREFIX_CACHE_HITS = "vllm:prefix_cache_hits"
GENERATION_TOKENS = "vllm:generation_tokens"
REQUEST_SUCCESS = "vllm:request_success"
SPEC_DECODE_DRAFTS = "vllm:spec_decode_num_drafts"
SPEC_DECODE_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
SPEC_DECODE_ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens"
SPEC_DECODE_ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
EXTERNAL_PREFIX_CACHE_QUERIES = "vllm:external_prefix_cache_queries"
EXTERNAL_PREFIX_CACHE_HITS = "vllm:external_prefix_cache_hits"
KV_OFFLOAD_HOST_USAGE = "vllm:kv_offload_cpu_cache_usage_perc"
KV_OFFLOAD_STORE_BYTES = "vllm:kv_offload_store_bytes"
KV_OFFLOAD_STORE_TIME = "vllm:kv_offload_store_time"
KV_OFFLOAD_LOAD_BYTES = "vllm:kv_offload_load_bytes"
KV_OFFLOAD_LOAD_TIME = "vllm:kv_offload_load_time"
KV_OFFLOAD_STORES_SKIPPED = "vllm:kv_offload_stores_skipped"
KV_TIERING_WRITE_BYTES = "vllm:kv_offload_tiering_write_bytes"
KV_TIERING_WRITE_TIME = "vllm:kv_offload_tiering_write_time"
KV_TIERING_READ_BYTES = "vllm:kv_offload_tiering_read_bytes"
KV_TIERING_READ_TIME = "vllm:kv_offload_tiering_read_time"
KV_TIERING_BLOCKS_DROPPED = "vllm:kv_offload_tiering_backpressure_blocks_dropped"
KV_TIERING_READ_FAILURES = "vllm:kv_offload_tiering_promotion_job_failures"
CACHE_CONFIG_INFO = "vllm:cache_config_info"
LORA_REQUESTS_INFO = "vllm:lora_requests_info"
ITERATION_TOKENS = "vllm:iteration_tokens_total"
TIME_TO_FIRST_TOKEN = "vllm:time_to_first_token_seconds"
INTER_TOKEN_LATENCY = "vllm:inter_token_latency_seconds"
TIME_PER_OUTPUT_TOKEN = "vllm:request_time_per_output_token_seconds"
E2E_LATENCY = "vllm:e2e_request_latency_seconds"
QUEUE_TIME = "vllm:request_queue_time_seconds"
INFERENCE_TIME = "vllm:request_inference_time_seconds"
PREFILL_TIME = "vllm:request_prefill_time_seconds"
DECODE_TIME = "vllm:request_decode_time_seconds"
REQUEST_PROMPT_TOKENS = "vllm:request_prompt_tokens"
REQUEST_GENERATION_TOKENS = "vllm:request_generation_tokens"
REQUEST_MAX_GENERATION_TOKENS = "vllm:request_max_num_generation_tokens"
REQUEST_PARAMS_N = "vllm:request_params_n"
REQUEST_PARAMS_MAX_TOKENS = "vllm:request_params_max_tokens"

ENGINE_STEPS = "octavo:engine_steps"
KV_BLOCKS_USED = "octavo:kv_blocks_used"
KV_BLOCKS_TOTAL = "octavo:kv_blocks_total"
KV_HOST_BLOCKS_USED = "octavo:kv_host_blocks_used"
KV_HOST_BLOCKS_TOTAL = "octavo:kv_host_blocks_total"
KV_DISK_BYTES_USED = "octavo:kv_disk_bytes_used"
PREEMPTIONS_SWAPPED = "octavo:preemptions_swapped"
UNKNOWN_FIELDS = "octavo:unknown_request_fields"

HTTP_REQUESTS = "http_requests"
HTTP_DURATION = "http_request_duration_seconds"

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)


def length_buckets(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to `longest` tokens."""
    sizes = (digit * 10**power for power in range(len(str(longest))) for digit in (1, 2, 5))
    return tuple(size for size in sizes if size <= longest)
